"""
`kvpool reset`: start a new epoch of a namespace, so that nothing stored before is served again.

Covers: asking a running pool. Does not cover: what an epoch is (`kvpool/core/epochs.py`).
"""

from typing import Annotated

import typer

from kvpool.cli.running import ConfigOption, RunDirOption, run_dir_named
from kvpool.client import admin

NameArgument = Annotated[
    str,
    typer.Argument(metavar="NAMESPACE", help="A model's name as its folder has it, or 8 or more fingerprint digits."),
]


def reset(name: NameArgument, config: ConfigOption = None, run_dir: RunDirOption = None) -> None:
    """
    Never serve again what is stored of a model; its files are removed in the background.

    Engines that are attached hold KV from before in their GPUs: they neither load nor store until their own prefix
    cache is reset, connector included, or until they are started again.

    Exit code: 0 done, durably; 2 no pool there; 10 no such namespace; 11 no device could keep it.
    """
    where = run_dir_named(config, run_dir)
    done = admin.reset(where, name)
    for namespace in done.namespaces:
        print(f"reset: {namespace}")
    for engine in done.engines:
        print(f"engine {engine} neither loads nor stores until it resets its prefix cache, or is started again")
