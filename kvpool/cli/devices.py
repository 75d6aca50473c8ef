"""
What the commands about files share: which devices are meant, how long something takes, what a duration is.

Covers: `--config FILE` and `--path DIR`, a progress bar with the remaining time on a terminal, "7d" as seconds.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from kvpool.config import DeviceSettings, load_settings
from kvpool.errors import ConfigError

ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The pool's configuration: all its devices.")
]
PathOption = Annotated[
    list[Path] | None, typer.Option("--path", metavar="DIR", help="A device's directory; repeat for several.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")


class Device(NamedTuple):
    """One device's directory; *settings* None where it was named by its path alone."""

    name: str
    path: str
    settings: DeviceSettings | None


def run_dir_of(config: Path | None) -> str | None:
    """Return where the pool of a configuration is; None without one."""
    return None if config is None else load_settings(config).pool.run_dir


def devices_of(config: Path | None, paths: list[Path] | None) -> list[Device]:
    """
    Return the devices that the options name.

    Raises:
        typer.BadParameter: Not exactly one of the options, or a directory that is not there.
        ConfigError: The configuration is wrong.
    """
    if (config is None) == (not paths):
        raise typer.BadParameter("give one of --config FILE and --path DIR")
    if config is not None:
        found = [Device(device.name, device.path, device) for device in load_settings(config).device]
    else:
        found = [Device(str(path), str(path.absolute()), None) for path in paths or ()]
    for device in found:
        if not Path(device.path).is_dir():
            raise typer.BadParameter(f"{device.path} is not a directory that is there")
    return found


def seconds_of(text: str) -> float:
    """
    Return the seconds of a duration such as "90s", "12h", "7d".

    Raises:
        ConfigError: It is none.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigError("not a duration", value=text, allowed='a number and one of s, m, h, d, w: "12h", "7d"')
    return float(found[1]) * _UNITS[found[2]]


Advance = Callable[[str, float], None]


@contextlib.contextmanager
def progress(total_bytes: int | None, *, hidden: bool) -> Iterator[Advance]:
    """Show what is done and, with *total_bytes*, the time that remains; on a terminal only, on standard error."""
    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield lambda _what, _done: None
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}")]
    if total_bytes is not None:
        columns += [BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda what, done: bar.update(task, description=what, completed=done)
