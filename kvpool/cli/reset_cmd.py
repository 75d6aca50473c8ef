"""
`kvpool reset`: start a new epoch of a namespace, so that nothing stored before is served again.

Covers: asking a running pool. Does not cover: what an epoch is (`kvpool/core/epochs.py`).
"""

from pathlib import Path
from typing import Annotated

import typer

from kvpool.client import admin
from kvpool.config import load_settings

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAMESPACE", help="A model's name as its folder has it, or 8 or more fingerprint digits."),
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The pool's configuration; its run_dir is asked.")
]
RunDirOption = Annotated[Path | None, typer.Option("--run-dir", metavar="DIR", help="Directory of the pool's socket.")]


def reset(name: NameArgument, config: ConfigOption = None, run_dir: RunDirOption = None) -> None:
    """
    Never serve again what is stored of a model; its files are removed in the background.

    Engines that are attached hold KV from before in their GPUs: they neither load nor store until their own prefix
    cache is reset, connector included, or until they are started again.

    Exit code: 0 done, durably; 2 no pool there; 10 no such namespace; 11 no device could keep it.
    """
    if (config is None) == (run_dir is None):
        raise typer.BadParameter("give one of --config FILE and --run-dir DIR")
    where = str(run_dir) if run_dir is not None else load_settings(str(config)).pool.run_dir
    done = admin.reset(where, name)
    for namespace in done.namespaces:
        print(f"reset: {namespace}")
    for engine in done.engines:
        print(f"engine {engine} neither loads nor stores until it resets its prefix cache, or is started again")
