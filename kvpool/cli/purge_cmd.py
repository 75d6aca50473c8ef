"""
`kvpool purge`: removes all that one namespace, or one model, has stored.

Beside a running pool it is safe: what is gone is a miss, and the pool of the given configuration is told of it.
A namespace's folder and manifest go too if no pool of that configuration answers, so that nothing is left behind;
otherwise they stay, since a worker may have them open.
"""

import contextlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.devices import (
    ConfigOption,
    Device,
    JsonOption,
    PathOption,
    YesOption,
    devices_of,
    progress,
    run_dir_of,
)
from kvpool.client import admin
from kvpool.client.admin import RemovalTeller
from kvpool.config import load_settings
from kvpool.core import layout
from kvpool.errors import Exit, PoolUnavailable
from kvpool.health.render import size_text
from kvpool.io import snapshot_file
from kvpool.io.inventory import Space, Walk, find_spaces
from kvpool.io.remover import Condemned, remove_key

#: Digits of a fingerprint that are enough to name a namespace.
FINGERPRINT_DIGITS_MIN = 8

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", metavar="HEX", help="Fingerprint, or its first 8 or more digits (see du).")
]
ModelOption = Annotated[str | None, typer.Option("--model", metavar="NAME", help="All namespaces of that model.")]


@dataclass(slots=True)
class Purged:
    """One namespace on one device, and what went of it."""

    device: str
    model: str
    fingerprint: str
    keys: int = 0
    stored_bytes: int = 0
    failed: int = 0


def purge(
    *,
    config: ConfigOption = None,
    path: PathOption = None,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """
    Remove everything that a namespace, or a model, has stored on the given devices. Asks first.

    Exit code: 0 removed, 1 nothing matches, some files could not be removed, or not confirmed, 2 wrong use.
    """
    if (namespace is None) == (model is None):
        raise typer.BadParameter("give one of --namespace HEX and --model NAME")
    if namespace is not None and len(namespace) < FINGERPRINT_DIGITS_MIN:
        raise typer.BadParameter(f"--namespace needs at least {FINGERPRINT_DIGITS_MIN} digits")
    found = [
        (device, space)
        for device in devices_of(config, path)
        for space in find_spaces(device.path)
        if (space.model == model if model is not None else space.fingerprint.startswith(namespace or ""))
    ]
    if not found:
        typer.echo("kvpool: nothing matches; see `kvpool du`", err=True)
        raise typer.Exit(Exit.DEGRADED)
    for device, space in found:
        typer.echo(f"{device.name}: {space.model} {space.fingerprint[:8]} in {space.first}", err=True)
    if not yes:
        typer.confirm("Remove all of it?", abort=True, err=True)
    emptied = config is not None and not _answers(config)
    teller = RemovalTeller(run_dir_of(config))
    try:
        purged = [_purge(device, space, emptied=emptied, hidden=as_json, teller=teller) for device, space in found]
    finally:
        teller.close()
    if as_json:
        print(json.dumps([asdict(one) for one in purged], indent=2))
    for one in purged if not as_json else ():
        print(
            f"{one.device}: {one.model} {one.fingerprint[:8]}: {one.keys} keys, {size_text(one.stored_bytes)} removed"
        )
    raise typer.Exit(Exit.DEGRADED if any(one.failed for one in purged) else Exit.OK)


def _answers(config: Path) -> bool:
    """Whether a pool of that configuration runs."""
    try:
        admin.health(load_settings(config).pool.run_dir)
    except PoolUnavailable:
        return False
    return True


def _purge(device: Device, space: Space, *, emptied: bool, hidden: bool, teller: RemovalTeller) -> Purged:
    purged = Purged(device.name, space.model, space.fingerprint)
    with progress(None, hidden=hidden) as advance:
        for found in Walk().keys_of(space):
            paths = tuple(path for path, _ in found.files.values())
            removed = remove_key(Condemned(0, paths, math.inf))
            purged.stored_bytes += removed.stored_bytes
            if removed.stored_bytes:
                teller.removed(device.path, space.first, found.key, removed.stored_bytes)
            purged.failed += bool(removed.error)
            purged.keys += not removed.left
            advance(f"{device.name}: removing, {purged.keys} keys", 0)
    snapshot_file.remove(f"{device.path}/{layout.PRIVATE_NAME}", space.fingerprint)
    if emptied and not purged.failed:
        _remove_folders(space, device.path)
    return purged


def _remove_folders(space: Space, root: str) -> None:
    """Remove the manifests and the folders above, as far as they are empty."""
    for directory in space.directories.values():
        with contextlib.suppress(OSError):
            for upper in Path(directory).iterdir():
                if upper.is_dir():
                    with contextlib.suppress(OSError):
                        upper.rmdir()
            os.unlink(f"{directory}/{layout.MANIFEST_NAME}")
        with contextlib.suppress(OSError):
            for folder in (Path(directory), *Path(directory).parents):
                if folder == Path(root):
                    break
                folder.rmdir()
