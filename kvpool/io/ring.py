"""
One io_uring, through the PyPI binding `liburing`: the only file that imports it.

Theory. A request is prepared with a token, submitted with others, and comes back from :meth:`UringRing.reap` as
(token, result), result being what the system call would return, a negative errno for a failure. The ring belongs to
the thread that made it (SINGLE_ISSUER). Nothing here waits: `fd` polls readable when there is something to reap; the
binding's own waiting calls hold the interpreter lock for the whole wait. `fd` is an eventfd that the kernel signals:
a poll of the ring's own descriptor is not woken for all that ends with DEFER_TASKRUN (seen on Linux 6.18: of 200
rounds of 64 reads most were missed by epoll, and by poll), and one call runs at most 20 pieces of its deferred work.

The binding's traps met here (2026.3.30):
- nothing keeps a path or an Iovec alive until submit: `_kept`, and one Iovec per slot made once by the caller;
- an Iovec keeps its memoryviews for ever: the mapping below can never be closed;
- `.res` of a failed request raises; only `cqe[0]` under CqeIter is right across the wrap of the queue;
- a call before init or after exit crashes the process: `_open` guards both ends.
On a CPU without AVX-512 its wheel dies of SIGILL, and a seccomp profile may kill too, so `why_not` tries it in a child.

A ring outlives its killed process, and its reads still land. The write end of a pipe in the ring's registered files
hangs up only when the ring is really gone: that is the proof that the memory is quiet.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import liburing as uring

from kvpool.errors import invariant

_FLAGS = uring.IORING_SETUP_SINGLE_ISSUER | uring.IORING_SETUP_DEFER_TASKRUN
_TRY_OUT_S = 20.0
_AT_SYMLINK_FOLLOW = 0x400
_RENAME_NOREPLACE = 1
#: readv_fixed and writev_fixed came with Linux 6.15.
_FIXED_VECTORS_SINCE = (6, 15)
#: The kernel's bounds: bytes of one registered buffer, buffers of one registration by this binding.
BUFFER_BYTES_MAX = 1 << 30
BUFFER_COUNT_MAX = 1024
#: Submission has to be tried again later; nothing is lost.
_NOT_NOW = (errno.EAGAIN, errno.EBUSY, errno.EINTR)


def why_not() -> str | None:
    """
    Try the binding in a child process; return None if it works, else the reason, for people.

    A child, since a CPU or a seccomp profile that the binding does not suit kills the process that tries.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-m", "kvpool.io.ring"], capture_output=True, text=True, timeout=_TRY_OUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"io_uring could not be tried: {error}"
    if child.returncode == 0:
        return None
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        hint = " (its wheel needs a CPU with AVX-512)" if name == "SIGILL" else ""
        return f"the liburing binding is killed by {name} here{hint}"
    return (child.stdout.strip().splitlines() or ["the try-out of io_uring failed"])[-1]


def _try_out() -> int:
    try:
        ring = UringRing(entries=8, pipe_fd=None)
        ring.stat(1, "/")
        ring.submit()
        for _ in range(2):
            ring.open(2, "/", os.O_RDONLY | os.O_DIRECTORY, 0)
        ring.submit()
        ring.close()
    except OSError as error:
        print(f"io_uring: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})")
        return 1
    return 0


def _fixed_vectors() -> bool:
    release = os.uname().release.split("-")[0].split(".")
    return (int(release[0]), int(release[1])) >= _FIXED_VECTORS_SINCE


class UringRing:
    """
    One ring.

    Attributes:
        fd: Polls readable when something is to be reaped.
        in_flight: Requests prepared and not yet reaped.
        registered: Buffers of this ring are registered; reads and writes name them.
    """

    kind = "io_uring"

    def __init__(self, *, entries: int, pipe_fd: int | None) -> None:
        """
        Make a ring of *entries* submissions; *pipe_fd* is held in its registered files for as long as it lives.

        Raises:
            OSError: The kernel does not make one: ENOSYS, EPERM, EINVAL (before Linux 6.1), ENOMEM.
        """
        self._ring = uring.Ring()
        self._cqe = uring.Cqe()
        uring.io_uring_queue_init(entries, self._ring, _FLAGS)
        self._open = True
        self._kept: list[Any] = []  # paths and vectors, until the kernel has read the submission
        self._statx = uring.Statx()  # one for all: only the result of a stat is of interest
        self._files = None
        if pipe_fd is not None:
            self._files = uring.FileIndex([pipe_fd])
            uring.io_uring_register_files(self._ring, self._files)
        self._buffers: Any = None
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        uring.io_uring_register_eventfd(self._ring, self.fd)
        self.in_flight = 0
        self.registered = False

    # ------------------------------------------------------------ memory

    def register(self, views: Sequence[memoryview]) -> bool:
        """Register *views* as buffers 0, 1, ...; False where kernel or locked memory do not allow."""
        invariant(not self.registered, "buffers are registered once at a time")
        if not _fixed_vectors() or len(views) > BUFFER_COUNT_MAX or max(map(len, views)) > BUFFER_BYTES_MAX:
            return False
        self._buffers = uring.Iovec(list(views))
        try:
            uring.io_uring_register_buffers(self._ring, self._buffers)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.EPERM, errno.EOPNOTSUPP, errno.EFAULT):
                raise
            return False
        self.registered = True
        return True

    def unregister(self) -> bool:
        """
        Register no buffers any more; False: not now, as prepared requests name them.

        Requests that the kernel has keep their buffers until they end (Linux 6.13; earlier ones wait for them here).
        """
        if uring.io_uring_sq_ready(self._ring):
            return False
        if self.registered:
            uring.io_uring_unregister_buffers(self._ring)
            self.registered, self._buffers = False, None
        return True

    def vector(self, view: memoryview) -> Any:
        """Return what :meth:`read` and :meth:`write` take for *view*. Never freed: make one a slot, and keep it."""
        return uring.Iovec([view])

    # ------------------------------------------------------------ requests

    def open(self, token: int, path: str, flags: int, mode: int) -> None:
        """Open *path*; the result is a descriptor."""
        sqe = self._sqe(token)
        self._kept.append(path)
        uring.io_uring_prep_open(sqe, path, flags | os.O_CLOEXEC, mode)

    def close_file(self, token: int, fd: int) -> None:
        """Close *fd*."""
        uring.io_uring_prep_close(self._sqe(token), fd)

    def read(self, token: int, fd: int, vector: Any, buffer: int, offset: int) -> None:
        """Read at *offset* into *vector*, which lies in registered buffer *buffer*."""
        sqe = self._sqe(token)
        if self.registered:
            uring.io_uring_prep_readv_fixed(sqe, fd, vector, buffer, offset)
        else:
            uring.io_uring_prep_readv(sqe, fd, vector, offset)

    def write(self, token: int, fd: int, vector: Any, buffer: int, offset: int) -> None:
        """Write *vector*, which lies in registered buffer *buffer*, at *offset*."""
        sqe = self._sqe(token)
        if self.registered:
            uring.io_uring_prep_writev_fixed(sqe, fd, vector, buffer, offset)
        else:
            uring.io_uring_prep_writev(sqe, fd, vector, offset)

    def fsync(self, token: int, fd: int) -> None:
        """Bring data and metadata of *fd* to the drive."""
        uring.io_uring_prep_fsync(self._sqe(token), fd)

    def link_fd(self, token: int, fd: int, path: str) -> None:
        """Give the unnamed file *fd* the name *path*."""
        source = f"/proc/self/fd/{fd}"
        sqe = self._sqe(token)
        self._kept += (source, path)
        uring.io_uring_prep_link(sqe, source, path, _AT_SYMLINK_FOLLOW)

    def link(self, token: int, source: str, path: str) -> None:
        """Give the file *source* the second name *path*."""
        sqe = self._sqe(token)
        self._kept += (source, path)
        uring.io_uring_prep_link(sqe, source, path, 0)

    def rename(self, token: int, source: str, path: str) -> None:
        """Rename; a file of that name is replaced."""
        sqe = self._sqe(token)
        self._kept += (source, path)
        uring.io_uring_prep_rename(sqe, source, path)

    def rename_noreplace(self, token: int, source: str, path: str) -> None:
        """Rename; a taken name is EEXIST."""
        sqe = self._sqe(token)
        self._kept += (source, path)
        uring.io_uring_prep_rename(sqe, source, path, _RENAME_NOREPLACE)

    def unlink(self, token: int, path: str) -> None:
        """Remove the name *path* of a file."""
        sqe = self._sqe(token)
        self._kept.append(path)
        uring.io_uring_prep_unlink(sqe, path)

    def mkdir(self, token: int, path: str, mode: int) -> None:
        """Make the folder *path*."""
        sqe = self._sqe(token)
        self._kept.append(path)
        uring.io_uring_prep_mkdir(sqe, path, mode)

    def stat(self, token: int, path: str) -> None:
        """Look whether *path* exists."""
        sqe = self._sqe(token)
        self._kept.append(path)
        uring.io_uring_prep_statx(sqe, self._statx, path)

    def _sqe(self, token: int) -> Any:
        sqe = uring.io_uring_get_sqe(self._ring)
        if sqe is None:  # the queue is full
            self.submit()
            sqe = uring.io_uring_get_sqe(self._ring)
            invariant(sqe is not None, "submission queue stays full", in_flight=self.in_flight)
        self.in_flight += 1
        sqe.user_data = token
        return sqe

    # ------------------------------------------------------------ queues

    def submit(self) -> None:
        """Give what is prepared to the kernel."""
        if not uring.io_uring_sq_ready(self._ring):
            return
        try:
            uring.io_uring_submit(self._ring)
        except OSError as error:
            if error.errno not in _NOT_NOW:
                raise
        if not uring.io_uring_sq_ready(self._ring):
            self._kept.clear()

    def ready(self) -> bool:
        """Tell whether something ended inside submit."""
        return bool(uring.io_uring_cq_ready(self._ring))

    def reap(self) -> list[tuple[int, int]]:
        """Return (token, result) of every request that has ended."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        ended: list[tuple[int, int]] = []
        while self.in_flight:
            uring.io_uring_get_events(self._ring)
            got = self._take(ended)
            if not got:
                break
            self.in_flight -= got
        return ended

    def _take(self, ended: list[tuple[int, int]]) -> int:
        cqe, got = self._cqe, 0
        for _ in uring.CqeIter(self._ring, cqe):
            entry = cqe[0]
            try:
                result = entry.res
            except OSError as error:
                result = -(error.errno or errno.EIO)
            ended.append((entry.user_data, result))
            got += 1
        uring.io_uring_cq_advance(self._ring, got)
        return got

    def close(self) -> None:
        """End the ring; what is in flight is cancelled. The memory is quiet when the pipe has hung up."""
        if self._open:
            self._open = False
            uring.io_uring_queue_exit(self._ring)
            os.close(self.fd)


if __name__ == "__main__":
    sys.exit(_try_out())
