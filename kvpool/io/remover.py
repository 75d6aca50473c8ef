"""
Removes files and renews their times, in one thread behind the loop that asks for it.

Theory. Requests are taken in the order in which they were made, so a time that was renewed is seen by a removal asked
for later. A removal is of a whole key: it happens only if none of its files was modified after *used_s*, the moment up
to which the caller knows of its use. Empty folders go with their last file. An eventfd polls readable when there is
something to reap.

Does not cover: which keys (`core/eviction.py`, `core/objects.py`).
"""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple

#: Longest wait for the thread at the end.
CLOSE_S = 5.0
#: File times are stored in nanoseconds and told as floats.
_ROUNDING_S = 1e-3
BLOCK_BYTES = 512


class Condemned(NamedTuple):
    """One key to remove: its files' paths, in rank order, and until when its use is known."""

    token: int
    paths: tuple[str, ...]
    used_s: float


class Removed(NamedTuple):
    """
    The end of one removal.

    Attributes:
        stored_bytes: What went, as the filesystem counts.
        left: Indices of the paths that are still there.
        error: Why they are: an errno's name; empty where the key was used meanwhile.
    """

    token: int
    stored_bytes: int
    left: tuple[int, ...] = ()
    error: str = ""


class Remover:
    """
    See the module.

    Attributes:
        fd: Polls readable when something is to be reaped.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wanted: SimpleQueue[Sequence[Condemned] | Sequence[str] | None] = SimpleQueue()
        self._ended: deque[Removed] = deque()
        self._thread = threading.Thread(target=self._serve, name="remover", daemon=True)
        self._thread.start()

    def remove(self, batch: Sequence[Condemned]) -> None:
        """Remove these keys; each ends in :meth:`reap`."""
        self._wanted.put(list(batch))

    def renew(self, paths: Sequence[str]) -> None:
        """Set these files' times to now. Has no end; a file that is gone stays gone."""
        self._wanted.put(list(paths))

    def reap(self) -> list[Removed]:
        """Return the removals that have ended."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def close(self) -> None:
        """End the thread once what it was asked is done; one that a device holds is left behind."""
        self._wanted.put(None)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            os.close(self.fd)

    def _serve(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            for item in wanted:
                if isinstance(item, str):
                    with contextlib.suppress(OSError):
                        os.utime(item)
                else:
                    self._ended.append(remove_key(item))
            os.eventfd_write(self.fd, 1)


def remove_key(condemned: Condemned) -> Removed:
    """Remove one key's files, here and now."""
    there: list[tuple[int, int]] = []
    for index, path in enumerate(condemned.paths):
        with contextlib.suppress(OSError):
            facts = os.stat(path, follow_symlinks=False)
            there.append((index, facts.st_blocks * BLOCK_BYTES))
            if facts.st_mtime > condemned.used_s + _ROUNDING_S:
                left = [number for number, other in enumerate(condemned.paths) if os.path.lexists(other)]
                return Removed(condemned.token, 0, tuple(left))
    gone_bytes, kept, error = 0, [], ""
    for index, size in there:
        try:
            os.unlink(condemned.paths[index])
        except FileNotFoundError:
            continue
        except OSError as failed:
            kept.append(index)
            error = errno.errorcode.get(failed.errno or 0, str(failed.errno))
            continue
        gone_bytes += size + _remove_folder(os.path.dirname(condemned.paths[index]))
    return Removed(condemned.token, gone_bytes, tuple(kept), error)


def _remove_folder(folder: str) -> int:
    """Remove *folder* if it is empty; return the bytes that it took. Publishing makes it again where it is needed."""
    with contextlib.suppress(OSError):
        size = os.stat(folder).st_blocks * BLOCK_BYTES
        os.rmdir(folder)
        return size
    return 0
