"""
`kvpool health`: is the pool as it should be, and what do its processes do.

Covers: asking a running pool, the output, the exit code. Does not cover: what the facts mean
(`health.checks`) and how they look (`health.render`). Never starts a pool.
"""

import json
from typing import Annotated

import typer
from rich.console import Console

from kvpool.cli.running import ConfigOption, RunDirOption, run_dir_named
from kvpool.client import admin
from kvpool.errors import Exit, PoolUnavailable
from kvpool.health import gather, process_facts, render

#: Width of the tables where the output is no terminal.
PIPE_COLUMNS = 200

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON: healthy, pool, rows, findings.")]
IntervalOption = Annotated[
    float, typer.Option("--interval", min=0.05, help="Seconds over which CPU use is measured.", show_default=True)
]


def health(
    config: ConfigOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
    interval: IntervalOption = 0.5,
) -> None:
    """
    Show the state of a pool: one row per process and attached client, and what to do about what is wrong.

    Exit code: 0 healthy, 1 degraded, 2 no pool answers there.
    """
    where = run_dir_named(config, run_dir)
    try:
        told = admin.health(where)
    except PoolUnavailable as error:
        if not as_json:
            raise
        print(json.dumps({"healthy": False, "error": error.to_wire()}, indent=2))
        raise typer.Exit(Exit.NOT_THERE) from None
    report = gather.report_of(told, process_facts.sample(gather.pids_of(told), interval_s=interval))
    if as_json:
        print(render.to_json(report))
    else:
        console = Console() if Console().is_terminal else Console(width=PIPE_COLUMNS)
        console.print(render.to_tables(report))
    raise typer.Exit(Exit.OK if report.healthy else Exit.DEGRADED)
