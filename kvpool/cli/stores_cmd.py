"""
`kvpool stores off` and `kvpool stores on`: let a running pool store nothing for a while.

For a tier that is written to and never serves, or a drive that is needed for something else. Covers: asking a running
pool, the exit code. Does not cover: how stores are refused (`core/stores.py`).
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvpool.client import admin
from kvpool.config import load_settings

ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The pool's configuration; its run_dir is asked.")
]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Directory of the pool's socket.")]


class Switch(StrEnum):
    """What stores are to be."""

    ON = "on"
    OFF = "off"


def stores(
    switch: Annotated[Switch, typer.Argument(help="off: nothing new is written; on: as usual.", show_default=False)],
    config: ConfigOption = None,
    run_dir: RunDirOption = None,
) -> None:
    """
    Let a running pool store nothing, or store again; loads go on either way.

    What engines have handed over before is still written. A pool that starts anew stores. Exit code: 0 done, 2 no
    pool there, or wrong use.
    """
    if (config is None) == (run_dir is None):
        raise typer.BadParameter("give one of --config FILE and --run-dir DIR")
    where = str(run_dir) if run_dir is not None else load_settings(str(config)).pool.run_dir
    admin.switch_stores(where, on=switch is Switch.ON)
    print(f"stores are {switch.value}; loads go on")
