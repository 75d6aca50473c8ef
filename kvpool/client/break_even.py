"""
Read the user's break-even file when an engine starts, and name the drive that it should be of.

Does not cover: what it says (`core/curves.py`).
"""

from collections.abc import Sequence
from pathlib import Path

import psutil

from kvpool.core.curves import BreakEven, parse_break_even
from kvpool.errors import ConfigError

#: Longer files are none.
FILE_BYTES_MAX = 4 << 20


def load_break_even(path: str, model_names: Sequence[str]) -> BreakEven:
    """
    Read the file at *path*, measured with the model that has one of *model_names*.

    Raises:
        ConfigError: It cannot be read, was measured with another model, or says what cannot have been measured.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
        text = data.decode()
    except (OSError, ValueError) as error:
        raise ConfigError("cannot read the break-even file", file=path, reason=str(error)) from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError("break-even file too long", file=path, allowed=f"at most {FILE_BYTES_MAX} bytes")
    found = parse_break_even(text)
    if found.model_name not in model_names:
        found.check_model(model_names[0])
    return found


def drive_model(path: str) -> str:
    """Return the model of the drive below a directory, as the kernel tells it, or its file system."""
    place = Path(path).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    mount = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    if mount is None:
        return ""
    block = Path("/sys/class/block", Path(mount.device).name)
    for file in (block / "device" / "model", block.resolve().parent / "device" / "model"):
        if file.exists():
            return file.read_text(encoding="utf-8", errors="replace").strip()
    return f"{mount.fstype} on {Path(mount.device).name or mount.device}"
