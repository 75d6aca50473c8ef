"""`kvpool config`: check a file, or print an example. Touches no pool and no device."""

from pathlib import Path
from typing import Annotated

import typer

from kvpool.config import DeviceSettings, PoolSettings, fields_of, format_size, load_settings
from kvpool.config_example import example

app = typer.Typer(
    help="Check a configuration, or print one to start from.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The pool's TOML file.", show_default=False)],
) -> None:
    """
    Say whether FILE is right, and what every setting is.

    Exit code 0, or 10 with one line that names the file, the key, its value, and what is allowed.
    """
    settings = load_settings(file)
    print(f"{file}: good")
    for title, struct in [("pool", settings.pool), *((f"device {at.name}", at) for at in settings.device)]:
        print(f"\n{title}")
        for field in fields_of(DeviceSettings if title != "pool" else PoolSettings):
            value = getattr(struct, field.name)
            text = (
                format_size(value)
                if field.rule.unit == "bytes"
                else str(value).lower()
                if field.kind is bool
                else value
            )
            print(f"  {field.key:<22}{text}")
    for device in settings.device:
        if not Path(device.path).is_dir():
            print(f"\n{device.name}: {device.path} is not there; it will be made. Is the drive mounted?")


@app.command("example")
def print_example() -> None:
    """Print a configuration with every setting, its default and what it means."""
    print(example(), end="")
