"""
`kvpool stores off` and `kvpool stores on`: let a running pool store nothing for a while.

For a tier that is written to and never serves, or a drive that is needed for something else. Covers: asking a running
pool, the exit code. Does not cover: how stores are refused (`core/stores.py`).
"""

from enum import StrEnum
from typing import Annotated

import typer

from kvpool.cli.running import ConfigOption, RunDirOption, run_dir_named
from kvpool.client import admin


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
    where = run_dir_named(config, run_dir)
    admin.switch_stores(where, on=switch is Switch.ON)
    print(f"stores are {switch.value}; loads go on")
