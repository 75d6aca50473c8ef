"""
`kvpool doctor`: does this machine, as this user has it, suit a pool; if not, what to set.

Covers: the output and the exit code. Does not cover: what is looked at (`doctor_checks`).
"""

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvpool.cli import doctor_checks
from kvpool.cli.devices import JsonOption
from kvpool.cli.doctor_checks import Result, State
from kvpool.config import PoolSettings, Settings, default_run_dir, load_settings
from kvpool.errors import Exit

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The pool's configuration; without it, defaults and no device."),
]
_STYLES = {State.GOOD: "green", State.SLOWER: "yellow", State.BAD: "bold red"}


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """
    Check kernel, io_uring, shared and locked memory, each device's filesystem, and the engines' environment.

    Run it where the pool will run: in the container, as the user. Nothing is started and nothing stays behind.

    Exit code: 0 all is good, 1 it works but slower than it could, 2 a pool cannot run like this.
    """
    results = doctor_checks.run(_settings(config))
    worst = max((_rank(result) for result in results), default=0)
    if as_json:
        told = [
            {"check": one.check, "state": one.state.value, "what": one.what, "remedy": one.remedy} for one in results
        ]
        print(json.dumps({"state": list(State)[worst].value, "checks": told}, indent=2))
    else:
        console = Console(soft_wrap=True)
        for result in results:
            console.print(_line(result), highlight=False)
    raise typer.Exit((Exit.OK, Exit.DEGRADED, Exit.NOT_THERE)[worst])


def _settings(config: Path | None) -> Settings:
    if config is not None:
        return load_settings(config)
    bare = Settings(pool=PoolSettings(run_dir=""), device=[])
    return Settings(pool=PoolSettings(run_dir=default_run_dir(bare)), device=[])


def _rank(result: Result) -> int:
    return list(State).index(result.state)


def _line(result: Result) -> Text:
    text = Text.assemble(
        (f"{result.state.value:<7}", _STYLES[result.state]), (f"{result.check}: ", "bold"), result.what
    )
    if result.remedy:
        text.append(f"{os.linesep}       -> {result.remedy}", "dim")
    return text
