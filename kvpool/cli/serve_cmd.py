"""`kvpool serve`: become a pool's coordinator, in the foreground, until it is told to end."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvpool.config import load_settings, to_json


def serve(
    config: Annotated[Path, typer.Option("--config", metavar="FILE", help="The pool's TOML file.", show_default=False)],
) -> None:
    """
    Run a pool in the foreground: one coordinator, and one I/O process for each device.

    It runs until SIGTERM or SIGINT, then writes what is still to be written. Engines use it that have
    "kvpool_config": "FILE" in their kv_connector_extra_config.
    """
    settings = load_settings(config)
    # The coordinator reads its settings from a file; this one has no name that could be left behind.
    file = os.memfd_create("kvpool-settings", 0)
    os.write(file, to_json(settings).encode())
    program = [sys.executable, "-m", "kvpool.procs.coordinator", "--config-json", f"/proc/self/fd/{file}"]
    sys.stdout.flush()
    os.execv(sys.executable, program)
