"""
A drive that the kernel slows: ext4 on a loop device over shared memory, throttled by cgroups v1's block controller.

Reads and writes of it are under way in the kernel for long, and go on when the process that began them is killed, as
on a drive that hangs. Needs root, a free loop device and `blkio.throttle`: see `why_not`.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

_BLKIO = Path("/sys/fs/cgroup/blkio")
_LIMITS = ("read_bps_device", "write_bps_device")
_IMAGE_BYTES = 256 << 20


def why_not() -> str:
    """Return what such a drive lacks here; empty: nothing."""
    if os.geteuid() != 0:
        return "needs root"
    if not all(os.access(_BLKIO / f"blkio.throttle.{limit}", os.W_OK) for limit in _LIMITS):
        return "needs blkio.throttle of cgroups v1"
    lacking = [tool for tool in ("losetup", "mkfs.ext4", "mount", "umount") if shutil.which(tool) is None]
    if lacking:
        return f"needs {', '.join(lacking)}"
    return (
        "" if subprocess.run(["losetup", "-f"], capture_output=True, check=False).returncode == 0 else "no loop device"
    )


class ThrottledDrive:
    """
    Mounted while the context lasts; slow between `on` and `off`.

    Attributes:
        root: Where it is mounted.
        environment: What its users' processes need: nothing.
    """

    def __init__(self, directory: Path, *, bytes_per_s: int = 2 << 20, writes: bool = True) -> None:
        self.root = directory / "drive"
        self.environment: dict[str, str] = {}
        self._bytes_per_s = bytes_per_s
        self._limits = _LIMITS if writes else _LIMITS[:1]
        self._undo = contextlib.ExitStack()
        self._number = ""

    def __enter__(self) -> Self:
        with self._undo as undo:
            folder = Path(tempfile.mkdtemp(prefix="throttled-", dir="/dev/shm"))
            undo.callback(shutil.rmtree, folder)
            image = folder / "image"
            with image.open("wb") as file:
                file.truncate(_IMAGE_BYTES)
            loop = _run("losetup", "-f", "--show", str(image))
            undo.callback(_run, "losetup", "-d", loop)
            _run("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", loop)
            self.root.mkdir()
            _run("mount", loop, str(self.root))
            undo.callback(_run, "umount", str(self.root))
            number = os.stat(loop).st_rdev
            self._number = f"{os.major(number)}:{os.minor(number)}"
            undo.callback(self.off)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def on(self) -> None:
        """Slow it."""
        self._limit(self._bytes_per_s)

    def off(self) -> None:
        """As fast as memory again; what is queued already keeps its time."""
        self._limit(0)

    def _limit(self, bytes_per_s: int) -> None:
        for limit in self._limits:
            (_BLKIO / f"blkio.throttle.{limit}").write_text(f"{self._number} {bytes_per_s}\n")


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
