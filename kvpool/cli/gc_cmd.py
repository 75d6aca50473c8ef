"""
`kvpool gc`: removes the keys that were not used for longest.

Safe beside a running pool: a removed file is a miss, and a key that was used since the walk stays. The pool of the
given configuration is told what went, so that its index and usage stay right. It makes room by itself when `capacity`
is set; this is for making more, or for devices without a pool.
"""

import json
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from kvpool.cli.devices import (
    ConfigOption,
    Device,
    JsonOption,
    PathOption,
    devices_of,
    progress,
    run_dir_of,
    seconds_of,
)
from kvpool.client.admin import RemovalTeller
from kvpool.config import parse_size
from kvpool.core import layout
from kvpool.core.eviction import Aged, OldestKeys
from kvpool.errors import ConfigError, Exit
from kvpool.health.render import size_text
from kvpool.io import snapshot_file
from kvpool.io.inventory import Walk, find_spaces
from kvpool.io.remover import Condemned, remove_key

OlderOption = Annotated[
    str | None,
    typer.Option("--older-than", metavar="TIME", help='Remove what was not used for that long: "12h", "7d".'),
]
ToOption = Annotated[
    str | None, typer.Option("--to", metavar="SIZE", help='Remove until so much is left on each device: "200GiB".')
]
DryOption = Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")]


@dataclass(slots=True)
class Collected:
    """What went, or would go, from one device."""

    device: str
    before_bytes: int
    keys: int = 0
    freed_bytes: int = 0
    spared: int = 0
    failed: int = 0
    error: str = ""


def gc(
    *,
    config: ConfigOption = None,
    path: PathOption = None,
    older_than: OlderOption = None,
    to: ToOption = None,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """
    Remove the keys that were not used for longest, over all ranks and namespaces of each device.

    Without --older-than and --to: down to the low watermark of the configured capacity. A pool may be running.

    Exit code: 0 done, 1 some files could not be removed, 2 wrong use.
    """
    if older_than is not None and to is not None:
        raise typer.BadParameter("give one of --older-than and --to")
    teller = RemovalTeller(run_dir_of(config))
    try:
        collected = [
            _collect(device, older_than, to, dry_run=dry_run, hidden=as_json, teller=teller)
            for device in devices_of(config, path)
        ]
    finally:
        teller.close()
    if as_json:
        print(json.dumps({"dry_run": dry_run, "devices": [asdict(one) for one in collected]}, indent=2))
    for one in collected if not as_json else ():
        would = "would go" if dry_run else "removed"
        print(f"{one.device}: {one.keys} keys {would}, {size_text(one.freed_bytes)} of {size_text(one.before_bytes)}")
        if one.failed:
            print(f"{one.device}: {one.failed} keys could not be removed: {one.error}")
    raise typer.Exit(Exit.DEGRADED if any(one.failed for one in collected) else Exit.OK)


def _collect(
    device: Device, older_than: str | None, to: str | None, *, dry_run: bool, hidden: bool, teller: RemovalTeller
) -> Collected:
    until_s = time.time() - seconds_of(older_than) if older_than is not None else None
    left_bytes = _left_bytes(device, to) if until_s is None else 0
    spaces, walk = find_spaces(device.path), Walk()
    with progress(None, hidden=hidden) as advance:
        for space in spaces:
            for _ in walk.keys_of(space):
                advance(f"{device.name}: counting, {walk.objects} objects", 0)
        walk.count_rest(device.path, spaces)
    total = walk.total_bytes
    oldest = OldestKeys(max(0, total - left_bytes))
    if total > left_bytes:
        again = Walk()
        for number, space in enumerate(spaces):
            for found in again.keys_of(space):
                if until_s is None or found.used_s < until_s:
                    oldest.offer(Aged(found.used_s, found.stored_bytes, number, found.key))
    made = Collected(device.name, total)
    keys, changed = oldest.in_order(), set[str]()
    with progress(sum(key.stored_bytes for key in keys), hidden=hidden) as advance:
        for key in keys:
            if until_s is None and made.freed_bytes >= total - left_bytes:
                break  # folders went too
            freed_bytes = _remove(made, key, spaces[key.space].paths_of(key.key), dry_run=dry_run)
            if freed_bytes:
                teller.removed(device.path, spaces[key.space].first, key.key, freed_bytes)
                changed.add(spaces[key.space].fingerprint)
            advance(f"{device.name}: removing, {made.keys} keys", made.freed_bytes)
    for fingerprint in changed:  # it names what is gone: better none, until a pool writes another
        snapshot_file.remove(f"{device.path}/{layout.PRIVATE_NAME}", fingerprint)
    return made


def _left_bytes(device: Device, to: str | None) -> int:
    if to is not None:
        size = parse_size(to)
        if size is None:
            raise ConfigError("not a size", value=to, allowed='a number and a unit: "200GiB"')
        return size
    if device.settings is None or not device.settings.capacity_bytes:
        raise typer.BadParameter(f"{device.name} has no capacity: give --older-than TIME or --to SIZE")
    return int(device.settings.capacity_bytes * device.settings.low_watermark)


def _remove(made: Collected, key: Aged, paths: tuple[str, ...], *, dry_run: bool) -> int:
    """Remove a key; return what that won."""
    if dry_run:
        made.keys += 1
        made.freed_bytes += key.stored_bytes
        return 0
    removed = remove_key(Condemned(0, paths, key.used_s))
    made.freed_bytes += removed.stored_bytes
    if removed.error:
        made.failed += 1
        made.error = removed.error
    elif removed.left:
        made.spared += 1
    else:
        made.keys += 1
    return removed.stored_bytes
