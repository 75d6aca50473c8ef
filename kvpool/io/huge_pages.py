"""
Huge pages for shared memory, after the fact: MADV_COLLAPSE.

Theory. A drive's request is cut where memory is not physically contiguous, and each cut costs CPU, on some drives
also throughput. Shared memory gets single pages of 4 KiB by default (`shmem_enabled` is "never" on most machines),
which on a machine that has run for a while lie anywhere: 1,025 runs in a slot of 4 MiB. MADV_COLLAPSE (Linux 6.1)
makes 2 MiB of it one physical page whatever that setting is, unless it is "deny"; a slot then has 3 runs. The kernel
compacts memory for it if need be. Measured on ext4 over a virtual disk, 4 MiB objects: loads 0.8 to 1.8 GB/s, 0.25 to
0.08 CPU seconds per GB; cost 1.6 s per GiB with free huge pages, up to 10 s where memory has to be compacted.

Only an aligned mapping can be collapsed, and Python's mmap does not choose addresses: hence ctypes.
Does not cover: making or filling segments (`shm`).
"""

import ctypes
import mmap
import os

HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
#: So many failures in a row mean that the kernel has no huge pages to give now, or never gives them.
_FAILURES_MAX = 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def gather(fd: int, offset: int, length: int) -> int:
    """
    Put a range of shared memory into huge pages, as far as the kernel gives them; what it holds stays as it is.

    Slow where memory has to be compacted; releases the interpreter lock. Never fails: what cannot be gathered is
    left in single pages, or without pages where it had none.

    Args:
        fd: A shared-memory file.
        offset: A multiple of HUGE_BYTES.
        length: Bytes; what is beyond the last whole HUGE_BYTES is left alone.

    Returns:
        Bytes that are in huge pages now.
    """
    whole = length // HUGE_BYTES * HUGE_BYTES
    if not whole:
        return 0
    reserved = _libc.mmap(
        None, whole + HUGE_BYTES, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0
    )
    if reserved == _MAP_FAILED:
        return 0
    try:
        start = -(-reserved // HUGE_BYTES) * HUGE_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc.mmap(start, whole, access, mmap.MAP_SHARED | _MAP_FIXED, fd, offset) == _MAP_FAILED:
            return 0
        return _collapse(fd, offset, start, whole)
    finally:
        _libc.munmap(reserved, whole + HUGE_BYTES)


def _collapse(fd: int, offset: int, start: int, whole: int) -> int:
    gathered = failures = 0
    for at in range(0, whole, HUGE_BYTES):
        try:
            os.posix_fallocate(fd, offset + at, mmap.PAGESIZE)  # a range without any page cannot be collapsed
        except OSError:
            break  # whoever fills the segment meets the same error, and says it
        if _libc.madvise(start + at, HUGE_BYTES, _MADV_COLLAPSE) == 0:
            gathered += HUGE_BYTES
            failures = 0
        elif (failures := failures + 1) == _FAILURES_MAX:
            break
    return gathered
