"""
One io_uring over the system calls themselves, for machines on which the liburing binding cannot run.

Theory. The binding's wheel (2026.3.30) is compiled for CPUs with AVX-512 and dies of SIGILL on others; this ring does
the same work with the three system calls and the two shared rings, in the same interface (`io/ring_interface.py`).
A submission entry is 64 bytes packed into the entries' mapping; a completion is 16 bytes read from the completion
ring. No barrier is needed: the kernel reads our submissions only inside `io_uring_enter`, and with DEFER_TASKRUN it
posts completions only inside calls of this thread. Reads and writes name memory by address, so registered buffers
work on every kernel that has DEFER_TASKRUN (Linux 6.1), and a mapping can be closed after its ring.
System calls are made without the interpreter lock.

Numbers and layouts: linux/io_uring.h.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from kvpool.errors import invariant

_SYS_SETUP, _SYS_ENTER, _SYS_REGISTER = 425, 426, 427
_SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 12, 1 << 13
_FEATURE_SINGLE_MAPPING = 1
_ENTER_GETEVENTS = 1
_UNREGISTER_BUFFERS = 1
_REGISTER_BUFFERS, _REGISTER_FILES, _REGISTER_EVENTFD = 0, 2, 4
_OFFSET_RINGS, _OFFSET_ENTRIES = 0, 0x10000000

_FSYNC, _READ_FIXED, _WRITE_FIXED, _OPENAT, _CLOSE, _STATX, _READ, _WRITE = 3, 4, 5, 18, 19, 21, 22, 23
_RENAMEAT, _UNLINKAT, _MKDIRAT, _LINKAT = 35, 36, 37, 39

_AT_FDCWD = -100
_AT_FDCWD_UNSIGNED = _AT_FDCWD & 0xFFFFFFFF
_AT_SYMLINK_FOLLOW = 0x400
_RENAME_NOREPLACE = 1
_STATX_TYPE = 1
_STATX_BYTES = 256

#: io_uring_params: entries, flags and features first, then where the fields of both rings are.
_PARAMS = struct.Struct("<10I 8IQ 8IQ".replace(" ", ""))
#: opcode flags ioprio fd offset address length op_flags user_data buffer personality file_index address3 pad
_ENTRY = struct.Struct("<BBHiQQIIQHHiQQ")
_COMPLETION = struct.Struct("<QiI")
_IOVEC = struct.Struct("<QQ")

#: The kernel's bounds: bytes of one registered buffer, buffers of one registration.
BUFFER_BYTES_MAX = 1 << 30
BUFFER_COUNT_MAX = 16384
#: Submission has to be tried again later; nothing is lost.
_NOT_NOW = (errno.EAGAIN, errno.EBUSY, errno.EINTR)
_REGISTRATION_REFUSED = (errno.ENOMEM, errno.EPERM, errno.EOPNOTSUPP, errno.EFAULT)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Memory(NamedTuple):
    """Where a read or write goes: address and length."""

    address: int
    length: int


def why_not() -> str | None:
    """Try a ring; return None if the kernel makes one, else the reason, for people."""
    try:
        ring = SyscallRing(entries=8, pipe_fd=None)
    except OSError as error:
        return f"io_uring: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"
    ring.close()
    return None


class SyscallRing:
    """
    One ring; it belongs to the thread that made it.

    Attributes:
        fd: Polls readable when something is to be reaped.
        in_flight: Requests made and not yet reaped.
        registered: Buffers of this ring are registered; reads and writes name them.
    """

    kind = "io_uring"

    def __init__(self, *, entries: int, pipe_fd: int | None) -> None:
        """
        Make a ring of *entries* submissions; *pipe_fd* is held in its registered files for as long as it lives.

        Raises:
            OSError: The kernel does not make one: ENOSYS, EPERM, EINVAL (before Linux 6.1), ENOMEM.
        """
        wanted = _PARAMS.pack(0, 0, _SINGLE_ISSUER | _DEFER_TASKRUN, *[0] * 25)
        params = ctypes.create_string_buffer(wanted, _PARAMS.size)
        self._ring_fd = _call(_SYS_SETUP, entries, params)
        self._open = True
        self.fd = -1
        try:
            self._map(_PARAMS.unpack(params.raw))
            if pipe_fd is not None:
                self._register(_REGISTER_FILES, struct.pack("<i", pipe_fd), 1)
            self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._register(_REGISTER_EVENTFD, struct.pack("<i", self.fd), 1)
        except BaseException:
            self.close()
            raise
        self._kept: list[bytes] = []  # paths, until the kernel has read the submission
        self._statx = ctypes.create_string_buffer(_STATX_BYTES)  # one for all: only the result of a stat is of interest
        self._unsubmitted = 0
        self.in_flight = 0
        self.registered = False

    def _map(self, params: tuple[int, ...]) -> None:
        """Map both rings and the entries; *params* as the kernel filled them in."""
        sq_entries, cq_entries, features = params[0], params[1], params[5]
        if not features & _FEATURE_SINGLE_MAPPING:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        sq, cq = params[10:19], params[19:28]
        ring_bytes = max(sq[6] + 4 * sq_entries, cq[5] + _COMPLETION.size * cq_entries)
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._rings = mmap.mmap(self._ring_fd, ring_bytes, flags, offset=_OFFSET_RINGS)
        self._entries = mmap.mmap(self._ring_fd, _ENTRY.size * sq_entries, flags, offset=_OFFSET_ENTRIES)
        self._words = memoryview(self._rings).cast("B")[: ring_bytes // 4 * 4].cast("I")
        self._sq_head, self._sq_tail = sq[0] // 4, sq[1] // 4
        self._sq_mask, self._sq_entries = sq_entries - 1, sq_entries
        self._cq_head, self._cq_tail = cq[0] // 4, cq[1] // 4
        self._cq_mask, self._completions = cq_entries - 1, cq[5]
        for index in range(sq_entries):  # entry i is always at place i
            self._words[sq[6] // 4 + index] = index

    def _register(self, what: int, argument: bytes | None, count: int) -> None:
        _call(_SYS_REGISTER, self._ring_fd, what, argument, count)

    # ------------------------------------------------------------ memory

    def register(self, views: Sequence[memoryview]) -> bool:
        """Register *views* as buffers 0, 1, ...; False where kernel or locked memory do not allow."""
        invariant(not self.registered, "buffers are registered once at a time")
        if len(views) > BUFFER_COUNT_MAX or max(map(len, views)) > BUFFER_BYTES_MAX:
            return False
        try:
            self._register(_REGISTER_BUFFERS, b"".join(_IOVEC.pack(*self.vector(view)) for view in views), len(views))
        except OSError as error:
            if error.errno not in _REGISTRATION_REFUSED:
                raise
            return False
        self.registered = True
        return True

    def unregister(self) -> bool:
        """
        Register no buffers any more; False: not now, as prepared requests name them.

        Requests that the kernel has keep their buffers until they end (Linux 6.13; earlier ones wait for them here).
        """
        if self._unsubmitted:
            return False
        if self.registered:
            self._register(_UNREGISTER_BUFFERS, None, 0)
            self.registered = False
        return True

    def vector(self, view: memoryview) -> Memory:
        """Return what :meth:`read` and :meth:`write` take for *view*, which must stay mapped while they run."""
        return Memory(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))

    # ------------------------------------------------------------ requests

    def open(self, token: int, path: str, flags: int, mode: int) -> None:
        """Open *path*; the result is a descriptor."""
        self._put(_OPENAT, token, address=self._keep(path), length=mode, op_flags=flags | os.O_CLOEXEC)

    def close_file(self, token: int, fd: int) -> None:
        """Close *fd*."""
        self._put(_CLOSE, token, fd=fd)

    def read(self, token: int, fd: int, vector: Memory, buffer: int, offset: int) -> None:
        """Read at *offset* into *vector*, which lies in registered buffer *buffer*."""
        opcode = _READ_FIXED if self.registered else _READ
        self._put(opcode, token, fd=fd, offset=offset, address=vector[0], length=vector[1], buffer=buffer)

    def write(self, token: int, fd: int, vector: Memory, buffer: int, offset: int) -> None:
        """Write *vector*, which lies in registered buffer *buffer*, at *offset*."""
        opcode = _WRITE_FIXED if self.registered else _WRITE
        self._put(opcode, token, fd=fd, offset=offset, address=vector[0], length=vector[1], buffer=buffer)

    def fsync(self, token: int, fd: int) -> None:
        """Bring data and metadata of *fd* to the drive."""
        self._put(_FSYNC, token, fd=fd)

    def link_fd(self, token: int, fd: int, path: str) -> None:
        """Give the unnamed file *fd* the name *path*."""
        self._two_paths(_LINKAT, token, f"/proc/self/fd/{fd}", path, _AT_SYMLINK_FOLLOW)

    def link(self, token: int, source: str, path: str) -> None:
        """Give the file *source* the second name *path*."""
        self._two_paths(_LINKAT, token, source, path, 0)

    def rename(self, token: int, source: str, path: str) -> None:
        """Rename; a file of that name is replaced."""
        self._two_paths(_RENAMEAT, token, source, path, 0)

    def rename_noreplace(self, token: int, source: str, path: str) -> None:
        """Rename; a taken name is EEXIST."""
        self._two_paths(_RENAMEAT, token, source, path, _RENAME_NOREPLACE)

    def unlink(self, token: int, path: str) -> None:
        """Remove the name *path* of a file."""
        self._put(_UNLINKAT, token, address=self._keep(path))

    def mkdir(self, token: int, path: str, mode: int) -> None:
        """Make the folder *path*."""
        self._put(_MKDIRAT, token, address=self._keep(path), length=mode)

    def stat(self, token: int, path: str) -> None:
        """Look whether *path* exists; the result is 0."""
        self._put(_STATX, token, offset=ctypes.addressof(self._statx), address=self._keep(path), length=_STATX_TYPE)

    def _two_paths(self, opcode: int, token: int, source: str, path: str, op_flags: int) -> None:
        source_address = self._keep(source)
        self._put(
            opcode, token, offset=self._keep(path), address=source_address, length=_AT_FDCWD_UNSIGNED, op_flags=op_flags
        )

    def _keep(self, path: str) -> int:
        """Return the address of *path* as the kernel reads it; it stays valid until the submission was read."""
        text = os.fsencode(path)
        self._kept.append(text)
        return ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p).value or 0

    def _put(
        self,
        opcode: int,
        token: int,
        *,
        fd: int = _AT_FDCWD,
        offset: int = 0,
        address: int = 0,
        length: int = 0,
        op_flags: int = 0,
        buffer: int = 0,
    ) -> None:
        if self._unsubmitted == self._sq_entries:  # the queue is full; what was kept for this entry stays kept
            kept = self._kept[-2:]
            self.submit()
            self._kept += kept
            invariant(self._unsubmitted < self._sq_entries, "submission queue stays full", in_flight=self.in_flight)
        tail = self._words[self._sq_tail]
        _ENTRY.pack_into(
            self._entries, (tail & self._sq_mask) * _ENTRY.size,
            opcode, 0, 0, fd, offset, address, length, op_flags, token, buffer, 0, 0, 0, 0,
        )  # fmt: skip
        self._words[self._sq_tail] = (tail + 1) & 0xFFFFFFFF
        self._unsubmitted += 1
        self.in_flight += 1

    # ------------------------------------------------------------ queues

    def submit(self) -> None:
        """Give what was made to the kernel."""
        while self._unsubmitted:
            try:
                taken = _call(_SYS_ENTER, self._ring_fd, self._unsubmitted, 0, 0, None, 0)
            except OSError as error:
                if error.errno not in _NOT_NOW:
                    raise
                return
            self._unsubmitted -= taken
            if not taken:
                return
        self._kept.clear()

    def ready(self) -> bool:
        """Tell whether something ended inside submit; `fd` need not poll readable for it."""
        return self._words[self._cq_head] != self._words[self._cq_tail]

    def reap(self) -> list[tuple[int, int]]:
        """Return (token, result) of every request that has ended."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        ended: list[tuple[int, int]] = []
        while self.in_flight:
            with contextlib.suppress(InterruptedError, BlockingIOError):
                _call(_SYS_ENTER, self._ring_fd, 0, 0, _ENTER_GETEVENTS, None, 0)
            head, tail = self._words[self._cq_head], self._words[self._cq_tail]
            if head == tail:
                break
            while head != tail:
                place = self._completions + (head & self._cq_mask) * _COMPLETION.size
                token, result, _ = _COMPLETION.unpack_from(self._rings, place)
                ended.append((token, result))
                head = (head + 1) & 0xFFFFFFFF
                self.in_flight -= 1
            self._words[self._cq_head] = head
        return ended

    def close(self) -> None:
        """End the ring; what is in flight is cancelled. The memory is quiet when the pipe has hung up."""
        if not self._open:
            return
        self._open = False
        if hasattr(self, "_words"):
            self._words.release()
            self._rings.close()
            self._entries.close()
        os.close(self._ring_fd)
        if self.fd >= 0:
            os.close(self.fd)


def _call(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call; raises OSError with its errno."""
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
