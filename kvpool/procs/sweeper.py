"""
A helper process that removes what resets left behind: `python -m kvpool.procs.sweeper TRASH`.

Runs at low priority, beside loads, and ends when the folder is empty; what it could not remove stays for the next one.
"""

import contextlib
import os
import shutil
import sys

NICENESS = 15


def sweep(trash: str) -> None:
    """Remove everything below *trash*."""
    with contextlib.suppress(FileNotFoundError), os.scandir(trash) as entries:
        for entry in entries:
            shutil.rmtree(entry.path, ignore_errors=True)


def command(trash: str) -> list[str]:
    """Return the command line that sweeps *trash*."""
    return [sys.executable, "-m", "kvpool.procs.sweeper", trash]


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    sweep(sys.argv[1])
