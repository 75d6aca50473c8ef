"""
Shared memory for staging: made, filled with pages, mapped; and what the machine allows of it.

A segment has a name for the instant between its creation and its unlinking only, and no size until after
that: whatever kills a process leaves at most an empty name, which `remove_leftovers` clears. From then on the
memory lives by its descriptors and mappings and ends with the last of them.

Does not cover: how much staging there is and who gets it (`core/budget.py`), pinning for CUDA.
"""

import contextlib
import errno
import mmap
import os
import re
import resource
import secrets
from collections.abc import Callable

import posix_ipc

from kvpool.errors import HostError, ProtocolError
from kvpool.io import huge_pages

SHM_DIR = "/dev/shm"

#: Segments from this size on are rounded up to whole huge pages, at most 6 % more.
ROUNDED_SINCE_BYTES = 32 << 20
#: `prefault` asks for this much at a time: between two pieces it can report and other threads' signals run.
_PREFAULT_PIECE_BYTES = 64 << 20
_NAME = re.compile(r"kvpool-(\d+)-[0-9a-f]{16}")
_CAP_IPC_LOCK = 14


def create_segment(segment_bytes: int) -> int:
    """
    Return a descriptor of new, unnamed, unfilled shared memory of *segment_bytes*; the caller owns it.

    Raises:
        HostError: Shared memory cannot be made here; `reason` says why.
    """
    try:
        memory = _create_unlinked()
    except (OSError, posix_ipc.Error) as error:
        raise HostError("cannot create shared memory", directory=SHM_DIR, reason=str(error)) from error
    try:
        os.set_inheritable(memory, False)
        os.ftruncate(memory, backing_bytes(segment_bytes))
    except OSError as error:
        os.close(memory)
        raise HostError("cannot size shared memory", needed_bytes=segment_bytes, reason=str(error)) from error
    return memory


def backing_bytes(segment_bytes: int) -> int:
    """
    Return the size of the memory behind a segment: large ones are rounded up to whole huge pages.

    io_uring takes a registered buffer as few large pieces only if all its pages are of one size; with a rest in single
    pages it hands the drive 4 KiB pieces, of which a request holds some 254: 1 MiB instead of 4.
    """
    if segment_bytes < ROUNDED_SINCE_BYTES:
        return segment_bytes
    return -(-segment_bytes // huge_pages.HUGE_BYTES) * huge_pages.HUGE_BYTES


def _create_unlinked() -> int:
    name = f"/kvpool-{os.getpid()}-{secrets.token_hex(8)}"
    fd: int = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
    # A sweep of leftovers in another pid namespace may have been faster.
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
    return fd


def remove_leftovers() -> list[str]:
    """Remove names that processes killed within `create_segment` left behind; return them."""
    removed = []
    with contextlib.suppress(OSError):
        for name in os.listdir(SHM_DIR):
            found = _NAME.fullmatch(name)
            if found and not os.path.exists(f"/proc/{found[1]}"):
                with contextlib.suppress(posix_ipc.Error, OSError):
                    posix_ipc.unlink_shared_memory(f"/{name}")
                    removed.append(name)
    return removed


def prefault(fd: int, segment_bytes: int, progress: Callable[[int], None] | None = None) -> None:
    """
    Give every page of a segment its memory now, so that no later access can fail (SIGBUS).

    In huge pages as far as the kernel gives them. Slow (0.3 s per GiB, with huge pages 1.6 to 10 s); releases the
    interpreter lock. One thread per segment keeps its pages together.

    Args:
        progress: Called with the bytes done so far after each piece; what it raises ends the work.

    Raises:
        HostError: The shared-memory file system or the memory limit does not have that much.
    """
    done, whole = 0, backing_bytes(segment_bytes)
    while done < whole:
        piece = min(_PREFAULT_PIECE_BYTES, whole - done)
        huge_pages.gather(fd, done, piece)
        try:
            os.posix_fallocate(fd, done, piece)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise HostError(
                "shared memory is full",
                limit=f"size of {SHM_DIR}, or the memory limit of this container",
                free_bytes=shm_free_bytes(),
                needed_bytes=whole - done,
            ) from error
        done += piece
        if progress is not None:
            progress(done)


def punch_out(fd: int, segment_bytes: int) -> None:
    """Give the pages of a segment back to the machine, also where somebody still maps it (and would read zeros)."""
    with mmap.mmap(fd, backing_bytes(segment_bytes), mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        mapping.madvise(mmap.MADV_REMOVE)


def map_segment(fd: int, segment_bytes: int) -> mmap.mmap:
    """
    Map a segment for reading and writing; *fd* stays the caller's and may be closed.

    Raises:
        ProtocolError: *fd* is not a file of at least that size.
        HostError: The address space or the memory limit does not allow it.
    """
    try:
        size = os.fstat(fd).st_size
        if not 0 < segment_bytes <= size:
            raise ProtocolError("segment has another size", bytes=size, bytes_told=segment_bytes)
        return mmap.mmap(fd, segment_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise HostError("cannot map shared memory", needed_bytes=segment_bytes, reason=str(error)) from error


def shm_free_bytes(directory: str = SHM_DIR) -> int:
    """Return how much the shared-memory file system can still take; 0 where there is none."""
    try:
        facts = os.statvfs(directory)
    except OSError:
        return 0
    return facts.f_bavail * facts.f_frsize


def memory_available_bytes() -> int:
    """Return how much memory the machine and this container's limits still allow."""
    limits = [_meminfo_available_bytes(), *_cgroup_left_bytes()]
    return min(limits)


def check_staging(staging_bytes: int, directory: str = SHM_DIR) -> None:
    """
    Refuse staging that the machine cannot hold, before any of it is touched.

    Raises:
        HostError: names the limit, its value, and the value needed.
    """
    free = shm_free_bytes(directory)
    if staging_bytes > free:
        raise HostError(
            "staging does not fit the shared-memory file system",
            limit=f"size of {directory} (docker: --shm-size, Kubernetes: an emptyDir of medium Memory)",
            value_bytes=free,
            needed_bytes=staging_bytes,
        )
    available = memory_available_bytes()
    if staging_bytes > available:
        raise HostError(
            "staging does not fit the memory",
            limit="memory of the machine, or of its container",
            value_bytes=available,
            needed_bytes=staging_bytes,
        )


def memlock_bytes_max() -> int | None:
    """Return how much memory a process of ours may lock (io_uring's registered buffers count); None without limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY or _may_lock_any() else limit


def _may_lock_any() -> bool:
    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/self/status", encoding="ascii", errors="replace") as file,
    ):
        for line in file:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def _meminfo_available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_left_bytes() -> list[int]:
    """What the limits of this cgroup (version 2) and those above it leave; page cache counts as free."""
    left = []
    directory = _cgroup_directory()
    while directory.startswith("/sys/fs/cgroup"):
        with contextlib.suppress(OSError, ValueError):
            limit = _first_word(f"{directory}/memory.max")
            if limit != "max":
                used = int(_first_word(f"{directory}/memory.current")) - _inactive_file_bytes(directory)
                left.append(max(0, int(limit) - max(0, used)))
        directory = os.path.dirname(directory)
    return left


def _cgroup_directory() -> str:
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("0::"):
                return os.path.normpath(f"/sys/fs/cgroup{line[3:].strip()}")
    return "/sys/fs/cgroup"


def _inactive_file_bytes(directory: str) -> int:
    with open(f"{directory}/memory.stat", encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("inactive_file ")), 0)


def _first_word(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().split()[0]
