"""
A helper process that puts an index snapshot in place: `python -m kvpool.procs.snapshot_writer PATH < SNAPSHOT`.

Runs at low priority, beside loads. Its input is a pipe from the I/O worker, which fills it between its other work; an
end of input before the snapshot's own end means that there is none.
"""

import logging
import sys

from kvpool.errors import IntegrityError
from kvpool.io import snapshot_file
from kvpool.io.process import lower_priority

NICENESS = 15
PIECE_BYTES = 1 << 20


def command(path: str) -> list[str]:
    """Return the command line."""
    return [sys.executable, "-m", "kvpool.procs.snapshot_writer", path]


def main(arguments: list[str]) -> int:
    """Write the snapshot; the exit code says whether that worked."""
    lower_priority(NICENESS)
    try:
        snapshot_file.write(arguments[0], iter(lambda: sys.stdin.buffer.read(PIECE_BYTES), b""))
    except (OSError, IntegrityError) as error:
        logging.getLogger("kvpool.worker").warning("index snapshot not written: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
