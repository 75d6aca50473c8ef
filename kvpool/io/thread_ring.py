"""
The ring's interface over plain system calls in threads, for hosts where io_uring cannot be had.

Theory. As with io_uring, a request is prepared with a token and comes back as (token, result). A fixed number of
threads take requests from one queue; each call frees the interpreter lock while the kernel works. An eventfd polls
readable when something is to be reaped. A killed process keeps its descriptors until its last thread has left the
kernel, so the pipe that the engine keeps open is the same proof as with a ring.
"""

import contextlib
import ctypes
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

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


class ThreadRing:
    """
    System calls in threads.

    Attributes:
        fd: Polls readable when something is to be reaped.
        in_flight: Requests prepared and not yet reaped.
        registered: Always False; there are no registered buffers.
    """

    kind = "threads"

    def __init__(self, *, threads: int) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.in_flight = 0
        self.registered = False
        # linkat() with AT_SYMLINK_FOLLOW is only called by os.link if a directory is given; the path is absolute.
        self._root_fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
        self._wanted: SimpleQueue[tuple[int, Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._ended: deque[tuple[int, int]] = deque()
        self._threads = [threading.Thread(target=self._serve, name=f"io-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

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
        self._want(token, os.open, path, flags | os.O_CLOEXEC, mode)

    def close_file(self, token: int, fd: int) -> None:
        """Close *fd*."""
        self._want(token, os.close, fd)

    def read(self, token: int, fd: int, vector: memoryview, buffer: int, offset: int) -> None:
        """Read at *offset* into *vector*."""
        self._want(token, os.preadv, fd, [vector], offset)

    def write(self, token: int, fd: int, vector: memoryview, buffer: int, offset: int) -> None:
        """Write *vector* at *offset*."""
        self._want(token, os.pwritev, fd, [vector], offset)

    def fsync(self, token: int, fd: int) -> None:
        """Bring data and metadata of *fd* to the drive."""
        self._want(token, os.fsync, fd)

    def link_fd(self, token: int, fd: int, path: str) -> None:
        """Give the unnamed file *fd* the name *path*."""
        self._want(token, self._link_fd, fd, path)

    def link(self, token: int, source: str, path: str) -> None:
        """Give the file *source* the second name *path*."""
        self._want(token, os.link, source, path)

    def rename(self, token: int, source: str, path: str) -> None:
        """Rename; a file of that name is replaced."""
        self._want(token, os.rename, source, path)

    def rename_noreplace(self, token: int, source: str, path: str) -> None:
        """Rename; a taken name is EEXIST."""
        self._want(token, rename_noreplace, source, path)

    def unlink(self, token: int, path: str) -> None:
        """Remove the name *path* of a file."""
        self._want(token, os.unlink, path)

    def mkdir(self, token: int, path: str, mode: int) -> None:
        """Make the folder *path*."""
        self._want(token, os.mkdir, path, mode)

    def stat(self, token: int, path: str) -> None:
        """Look whether *path* exists."""
        self._want(token, os.stat, path)

    def _want(self, token: int, call: Callable[..., Any], *arguments: Any) -> None:
        self.in_flight += 1
        self._wanted.put((token, call, arguments))

    def _link_fd(self, fd: int, path: str) -> None:
        os.link(f"/proc/self/fd/{fd}", path, dst_dir_fd=self._root_fd, follow_symlinks=True)

    def _serve(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            token, call, arguments = wanted
            try:
                result = call(*arguments)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            self._ended.append((token, result if isinstance(result, int) else 0))
            os.eventfd_write(self.fd, 1)

    # ------------------------------------------------------------ queues

    def submit(self) -> None:
        """Nothing: a thread takes a request as soon as it is prepared."""

    def ready(self) -> bool:
        """Return False: a thread always tells through `fd`."""
        return False

    def reap(self) -> list[tuple[int, int]]:
        """Return (token, result) of every request that has ended."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)  # first: a thread adds its result before it counts it here
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        self.in_flight -= len(ended)
        return ended

    def close(self) -> None:
        """End the threads once their calls have ended."""
        for _ in self._threads:
            self._wanted.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._root_fd)
        os.close(self.fd)
