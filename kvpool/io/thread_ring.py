"""
The ring's interface over plain system calls in threads, for hosts where io_uring cannot be had.

Theory. As with io_uring, a request is prepared with a token and comes back as (token, result); some threads make the
calls (`io/thread_calls.py`). A killed process keeps its descriptors until its last thread has left the kernel, so the
pipe that the engine keeps open is the same proof as with a ring.
"""

import ctypes
import os
from collections.abc import Sequence

from kvpool.io.thread_calls import ThreadCalls

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def rename_noreplace(source: str, path: str) -> None:
    """
    Rename *source* to *path* unless that name is taken.

    Raises:
        OSError: EEXIST where it is taken; EINVAL where the filesystem cannot do it; others as rename(2).
    """
    if _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


class ThreadRing(ThreadCalls):
    """
    System calls in threads.

    Attributes:
        registered: Always False; there are no registered buffers.
    """

    kind = "threads"

    def __init__(self, *, threads: int) -> None:
        super().__init__(threads=threads, name="io")
        self.registered = False
        # linkat() with AT_SYMLINK_FOLLOW is only called by os.link if a directory is given; the path is absolute.
        self._root_fd = os.open("/", os.O_PATH | os.O_CLOEXEC)

    def register(self, views: Sequence[memoryview]) -> bool:
        """Return False: there are no registered buffers."""
        return False

    def unregister(self) -> bool:
        """There is nothing to do."""
        return True

    def vector(self, view: memoryview) -> memoryview:
        """Return what :meth:`read` and :meth:`write` take for *view*."""
        return view

    # ------------------------------------------------------------ requests, as in UringRing

    def open(self, token: int, path: str, flags: int, mode: int) -> None:
        """Open *path*; the result is a descriptor."""
        self.want(token, os.open, path, flags | os.O_CLOEXEC, mode)

    def close_file(self, token: int, fd: int) -> None:
        """Close *fd*."""
        self.want(token, os.close, fd)

    def read(self, token: int, fd: int, vector: memoryview, buffer: int, offset: int) -> None:
        """Read at *offset* into *vector*."""
        self.want(token, os.preadv, fd, [vector], offset)

    def write(self, token: int, fd: int, vector: memoryview, buffer: int, offset: int) -> None:
        """Write *vector* at *offset*."""
        self.want(token, os.pwritev, fd, [vector], offset)

    def fsync(self, token: int, fd: int) -> None:
        """Bring data and metadata of *fd* to the drive."""
        self.want(token, os.fsync, fd)

    def link_fd(self, token: int, fd: int, path: str) -> None:
        """Give the unnamed file *fd* the name *path*."""
        self.want(token, self._link_fd, fd, path)

    def link(self, token: int, source: str, path: str) -> None:
        """Give the file *source* the second name *path*."""
        self.want(token, os.link, source, path)

    def rename(self, token: int, source: str, path: str) -> None:
        """Rename; a file of that name is replaced."""
        self.want(token, os.rename, source, path)

    def rename_noreplace(self, token: int, source: str, path: str) -> None:
        """Rename; a taken name is EEXIST."""
        self.want(token, rename_noreplace, source, path)

    def unlink(self, token: int, path: str) -> None:
        """Remove the name *path* of a file."""
        self.want(token, os.unlink, path)

    def mkdir(self, token: int, path: str, mode: int) -> None:
        """Make the folder *path*."""
        self.want(token, os.mkdir, path, mode)

    def stat(self, token: int, path: str) -> None:
        """Look whether *path* exists."""
        self.want(token, os.stat, path)

    def _link_fd(self, fd: int, path: str) -> None:
        os.link(f"/proc/self/fd/{fd}", path, dst_dir_fd=self._root_fd, follow_symlinks=True)

    # ------------------------------------------------------------ queues

    def submit(self) -> None:
        """Nothing: a thread takes a request as soon as it is prepared."""

    def ready(self) -> bool:
        """Return False: a thread always tells through `fd`."""
        return False

    def close(self) -> None:
        """End the threads once their calls have ended."""
        super().close()
        os.close(self._root_fd)
