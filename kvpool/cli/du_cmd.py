"""`kvpool du`: what lies on the devices, by namespace and age, as the filesystem counts. Reads names and sizes only."""

import json
import time
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

from kvpool.cli.devices import ConfigOption, Device, JsonOption, PathOption, devices_of, progress
from kvpool.health.render import size_text
from kvpool.io.inventory import Space, Walk, find_spaces

#: Ages that are told apart: last used within so many seconds.
AGES = (("1h", 3600), ("1d", 86400), ("7d", 7 * 86400), ("30d", 30 * 86400))
OLDER = "older"
PIPE_COLUMNS = 160


@dataclass(slots=True)
class Usage:
    """One namespace on one device; *age_bytes*: bytes by last use."""

    device: str
    model: str
    fingerprint: str
    ranks: int
    keys: int = 0
    objects: int = 0
    stored_bytes: int = 0
    age_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys([*(name for name, _ in AGES), OLDER], 0))


def du(config: ConfigOption = None, path: PathOption = None, as_json: JsonOption = False) -> None:
    """
    Show what the given devices hold: one line for each namespace, with its bytes by the time of last use.

    Sizes are what the filesystem counts. A pool may be running.
    """
    rows: list[Usage] = []
    totals: dict[str, int] = {}
    for device in devices_of(config, path):
        with progress(None, hidden=as_json) as advance:
            walk, spaces = Walk(), find_spaces(device.path)
            for space in spaces:
                rows.append(_usage(device, space, walk))
                advance(f"{device.name}: {walk.objects} objects", 0)
            walk.count_rest(device.path, spaces)
        totals[device.name] = walk.total_bytes
    if as_json:
        print(json.dumps({"namespaces": [asdict(row) for row in rows], "total_bytes": totals}, indent=2))
        return
    console = Console() if Console().is_terminal else Console(width=PIPE_COLUMNS)
    console.print(_table(rows))
    for name, total in totals.items():
        console.print(f"{name}: {size_text(total)} in all, folders and everything else included", highlight=False)


def _usage(device: Device, space: Space, walk: Walk) -> Usage:
    usage = Usage(device.name, space.model, space.fingerprint[:8], space.rank_count)
    now_s = time.time()
    for found in walk.keys_of(space):
        usage.keys += 1
        usage.objects += len(found.files)
        usage.stored_bytes += found.stored_bytes
        age = next((name for name, seconds in AGES if now_s - found.used_s <= seconds), OLDER)
        usage.age_bytes[age] += found.stored_bytes
    return usage


def _table(rows: list[Usage]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="dim", caption="last used within ... (bytes)")
    for heading in ("device", "model", "namespace"):
        made.add_column(heading, overflow="fold")
    ages = [*(f"<{name}" for name, _ in AGES), OLDER]
    for heading in ("ranks", "keys", "objects", "bytes", *ages):
        made.add_column(heading, justify="right")
    for row in sorted(rows, key=lambda row: -row.stored_bytes):
        counts = [str(row.ranks), str(row.keys), str(row.objects), size_text(row.stored_bytes)]
        ages_text = [size_text(count) if count else "" for count in row.age_bytes.values()]
        made.add_row(row.device, row.model, row.fingerprint, *counts, *ages_text)
    return made
