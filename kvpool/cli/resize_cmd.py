"""
`kvpool resize`: give a running pool more staging, or less.

Covers: asking a running pool, progress, the exit code. Does not cover: how segments come and go.
"""

from typing import Annotated

import typer

from kvpool.cli.running import ConfigOption, RunDirOption, run_dir_named
from kvpool.client import admin
from kvpool.config import STAGING_BYTES_MIN, format_size, parse_size
from kvpool.errors import Exit
from kvpool.wire.messages import ResizeState

StagingOption = Annotated[
    str, typer.Option("--staging", metavar="SIZE", help='Staging memory in all, such as "8GiB".', show_default=False)
]


def resize(staging: StagingOption, config: ConfigOption = None, run_dir: RunDirOption = None) -> None:
    """
    Give a running pool more staging memory, or less, while engines use it.

    The configuration is not changed: a pool that starts anew has what stands there. Exit code: 0 done, 1 as much as
    the machine allows now, 2 no pool there, 11 refused, with the number needed.
    """
    staging_bytes = parse_size(staging)
    if staging_bytes is None or staging_bytes < STAGING_BYTES_MIN:
        raise typer.BadParameter(f'--staging is a size such as "8GiB", at least {format_size(STAGING_BYTES_MIN)}')
    where = run_dir_named(config, run_dir)
    state = admin.resize(where, staging_bytes, told=lambda told: print(progress(told), flush=True))
    raise typer.Exit(Exit.DEGRADED if state.advice else Exit.OK)


def progress(state: ResizeState) -> str:
    """Return one line about how far the change has come."""
    mib = 1 << 20
    line = f"staging: {state.ready_bytes / mib:.0f} of {state.staging_bytes / mib:.0f} MiB ready"
    if state.leaving_bytes:
        line += f", {state.leaving_bytes / mib:.0f} MiB being given back"
    if state.advice:
        line += f"; not more for now: {state.advice}"
    return f"{line}{'; done' if state.done else ''}"
