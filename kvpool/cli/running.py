"""
What the commands that ask a running pool share: how the pool is named.

Covers: `--config FILE` and `--run-dir DIR`. Does not cover: commands about files (`cli/devices.py`).
"""

from pathlib import Path
from typing import Annotated

import typer

from kvpool.config import load_settings

ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The pool's configuration; its run_dir is asked.")
]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Directory of the pool's socket.")]


def run_dir_named(config: Path | None, run_dir: Path | None) -> str:
    """
    Return the run directory of the pool that the options name.

    Raises:
        typer.BadParameter: Not exactly one of the options.
        ConfigError: The configuration is wrong.
    """
    if run_dir is not None and config is None:
        return str(run_dir)
    if config is not None and run_dir is None:
        return load_settings(config).pool.run_dir
    raise typer.BadParameter("give one of --config FILE and --run-dir DIR")
