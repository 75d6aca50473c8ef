"""
The `kvpool` command: names its subcommands, and turns what they raise into one line and an exit code.

A subcommand lives in a module of its own that is imported when it is called, so that the command starts fast
and a subcommand's trouble is its own. Does not cover: what they do.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import typer
import typer.main

from kvpool import __version__
from kvpool.errors import ConfigError, Exit, HostError, InvariantError, KvpoolError, PoolUnavailable

_HELP = """
KV cache of vLLM on local drives: a pool of I/O processes that engines share.

Exit codes: 0 good; 1 degraded; 2 no pool there, or wrong use; 10 wrong configuration; 11 the machine does not
allow it; 12 already running; 20 a bug.
"""


class _Command(NamedTuple):
    """Where a subcommand is: *attribute* of *module*, a function or a typer application."""

    module: str
    attribute: str
    help: str


_COMMANDS = {
    "serve": _Command("kvpool.cli.serve_cmd", "serve", "Run a pool in the foreground."),
    "health": _Command("kvpool.cli.health_cmd", "health", "Show a pool's processes and clients, and what is wrong."),
    "doctor": _Command("kvpool.cli.doctor_cmd", "doctor", "Check whether this machine suits a pool, and what to set."),
    "du": _Command("kvpool.cli.du_cmd", "du", "Show what devices hold, by namespace and age."),
    "gc": _Command("kvpool.cli.gc_cmd", "gc", "Remove the keys that were not used for longest."),
    "purge": _Command("kvpool.cli.purge_cmd", "purge", "Remove all of one namespace or model."),
    "fsck": _Command("kvpool.cli.fsck_cmd", "fsck", "Check every stored file, and repair what can be."),
    "resize": _Command("kvpool.cli.resize_cmd", "resize", "Give a running pool more staging memory, or less."),
    "stores": _Command("kvpool.cli.stores_cmd", "stores", "Let a running pool store nothing for now, or store again."),
    "reset": _Command("kvpool.cli.reset_cmd", "reset", "Never serve again what is stored of a model."),
    "bench": _Command("kvpool.cli.bench_cmd", "bench", "Measure store and load on given directories."),
    "config": _Command("kvpool.cli.config_cmd", "app", "Check a configuration, or print one to start from."),
}

#: Exit codes of errors that a subcommand lets through, the first that fits.
_EXITS = (
    (ConfigError, Exit.CONFIG),
    (HostError, Exit.HOST),
    (PoolUnavailable, Exit.NOT_THERE),
    (InvariantError, Exit.INVARIANT),
)

app = typer.Typer(help=_HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvpool {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    """Options of the command itself; the help text is the application's."""


def _run(name: str, command: _Command, arguments: list[str]) -> None:
    """Import a subcommand and run it on its arguments; ends with SystemExit."""
    target = getattr(importlib.import_module(command.module), command.attribute)
    if not isinstance(target, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name)(target)
        target = alone
    typer.main.get_command(target).main(args=arguments, prog_name=f"kvpool {name}")


def _register(name: str, command: _Command) -> None:
    """Let the application pass everything after *name* to that subcommand, its `--help` too."""

    def forward(context: typer.Context) -> None:
        _run(name, command, context.args)

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
    app.command(name, help=command.help, add_help_option=False, context_settings=settings)(forward)


for _name, _command in _COMMANDS.items():
    _register(_name, _command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; what went wrong is one line on standard error."""
    return _guarded(lambda: typer.main.get_command(app).main(args=_listed(arguments), prog_name="kvpool"))


def _listed(arguments: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if arguments is None else arguments)


def _guarded(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else Exit.OK if end.code is None else Exit.DEGRADED
    except (KvpoolError, InvariantError) as error:
        print(f"kvpool: {describe(error)}", file=sys.stderr)
        return next((code for kind, code in _EXITS if isinstance(error, kind)), Exit.DEGRADED)
    return Exit.OK


def describe(error: KvpoolError | InvariantError) -> str:
    """Return an error as one line for people."""
    if not isinstance(error, ConfigError):
        return " ".join(str(error).split())
    facts = dict(error.context)
    where = ": ".join(str(facts.pop(name)) for name in ("file", "key") if name in facts)
    value = f" {facts.pop('value')}" if "value" in facts else ""
    rest = "; ".join(str(fact) if name == "reason" else f"{name}: {fact}" for name, fact in facts.items())
    return " ".join(f"{where}: {error.message}{value}{'; ' if rest else ''}{rest}".split())


if __name__ == "__main__":
    sys.exit(main())
