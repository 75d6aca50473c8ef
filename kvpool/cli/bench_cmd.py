"""
`kvpool bench`: how fast a pool stores and loads on given directories, and what CPU it takes.

Theory. A round is: a new pool on a new folder, all objects stored; that pool ended, caches dropped; another new
pool, all objects loaded, their bytes checked. Files are removed at the end of all rounds, where there is room: ext4
makes a new file slowly (up to a third of a store's CPU) while many were deleted within the last minutes. A client
process drives the pool as a rank of an engine would (`bench_rank`), with marks instead of copies: the pool is
measured, not a GPU.

What is timed. Store: from the first object's Filled (its slot granted, its marks written) until the pool's index tells
that the last object has its final name. Load: from the first Load until the last object is Ready for the client. Start
and end of processes, filling staging, and whole-object comparison are outside. CPU is that of the coordinator, the I/O
workers, their children and the client process, over the same time and up to 50 ms after it.

Does not cover: other systems on the same work (`tools/compare.py`).
"""

import contextlib
import datetime
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

import kvpool
from kvpool.cli import bench_figures
from kvpool.cli.bench_figures import Phase
from kvpool.cli.bench_pool import DrivenPool, Plan, Timed, staging_for
from kvpool.cli.bench_work import MARKS, Work
from kvpool.core.layout import object_name
from kvpool.errors import DeviceError, HostError, IntegrityError
from kvpool.health import facts
from kvpool.health.facts import Facts

MIB, GIB = 1 << 20, 1 << 30
#: Objects of each round that are compared as a whole.
SAMPLE = 16

PathOption = Annotated[
    list[Path], typer.Option("--path", metavar="DIR", help="Directory of one device; repeat for several.")
]
ObjectOption = Annotated[float, typer.Option("--object-mib", min=0.01, help="Size of one object.")]
TotalOption = Annotated[float, typer.Option("--total-gib", min=0.001, help="Bytes per round and direction.")]
DepthOption = Annotated[int, typer.Option("--queue-depth", min=2, help="Reads and writes in flight per device.")]
RoundsOption = Annotated[int, typer.Option("--rounds", min=1, help="Rounds; figures are medians.")]
StagingOption = Annotated[
    float | None, typer.Option("--staging-gib", help="Staging memory; without it enough for twice the queue depth.")
]
VerifyOption = Annotated[bool, typer.Option("--verify/--no-verify", help="Verify payload checksums of loaded objects.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as JSON (keys below).")]


def bench(
    *,
    path: PathOption,
    object_mib: ObjectOption = 4,
    total_gib: TotalOption = 2,
    queue_depth: DepthOption = 16,
    rounds: RoundsOption = 3,
    staging_gib: StagingOption = None,
    verify: VerifyOption = True,
    as_json: JsonOption = False,
) -> None:
    """Measure store and load of a pool of its own on the given directories; leaves nothing behind."""
    work = Work(
        seed=0,
        object_bytes=max(8 * MARKS, int(object_mib * MIB) // 8 * 8),
        object_count=max(1, int(total_gib * GIB) // max(1, int(object_mib * MIB))),
        devices=len(path),
        batch=queue_depth * len(path),
    )
    staging_bytes = int(staging_gib * GIB) if staging_gib else staging_for(work, queue_depth)
    with _progress(2 * rounds * work.total_bytes, hidden=as_json) as advance:
        result = run(path, work, queue_depth, staging_bytes, rounds=rounds, verify=verify, progress=advance)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        Console().print(table(result))


bench.__doc__ = f"{bench.__doc__}\n\nKeys of the JSON:\n\n{bench_figures.help_text()}"


def run(
    paths: Sequence[Path],
    work: Work,
    queue_depth: int,
    staging_bytes: int,
    *,
    rounds: int,
    verify: bool,
    progress: Callable[[str, int], None],
) -> dict[str, Any]:
    """
    Run all rounds and return the JSON that `bench_figures.MEANING` describes.

    Args:
        progress: Called with what is done now and the bytes done so far, over all rounds.

    Raises:
        KvpoolError: No pool could be had, objects failed, or bytes were wrong.
    """
    by_round: list[dict[str, Any]] = []
    mode, dropped = "", True
    with contextlib.ExitStack() as kept:
        for number in range(rounds):
            this = _with_seed(work, number)
            base = 2 * number * work.total_bytes
            if not _has_room(paths, 2 * work.total_bytes):
                kept.close()
            folders = kept.enter_context(_folders(paths))
            plan = Plan(paths=folders, queue_depth=queue_depth, staging_bytes=staging_bytes, verify=verify)
            stored, _ = _store_round(plan, this, _part(progress, "storing", base))
            dropped = drop_caches() and dropped
            loaded, mode = _load_round(plan, this, _part(progress, "loading", base + work.total_bytes))
            by_round.append(bench_figures.round_figures(stored, loaded))
    return {
        "object_bytes": work.object_bytes,
        "objects": work.object_count,
        "total_bytes": work.total_bytes,
        "paths": [str(one) for one in paths],
        "queue_depth": queue_depth,
        "staging_bytes": staging_bytes,
        "verify": verify,
        "io_mode": mode,
        "caches_dropped": dropped,
        "bytes_checked": True,
        **bench_figures.over_rounds(by_round),
        "by_round": by_round,
        "host": host(),
    }


def _part(progress: Callable[[str, int], None], what: str, base: int) -> Callable[[int], None]:
    """Return the progress of one phase, whose bytes come after *base*."""
    return lambda done: progress(what, base + done)


def _with_seed(work: Work, seed: int) -> Work:
    return Work(
        seed=seed,
        object_bytes=work.object_bytes,
        object_count=work.object_count,
        devices=work.devices,
        batch=work.batch,
    )


def _store_round(plan: Plan, work: Work, progress: Callable[[int], None]) -> tuple[Phase, str]:
    """Store all objects in a new pool; return the phase and the I/O mode."""
    with DrivenPool(plan, work, fill=True) as pool:
        keys = [work.key(index) for index in range(work.object_count)]
        pool.watch.announce(keys)
        os.sync()
        timed = pool.timed("store", stored=work.object_count, progress=progress)
        rows = pool.worker_rows()
    _raise_if_failed(timed)
    filled_ns = timed.answer["at_ns"]
    files_ns = _files_ns(plan.paths)
    names_ns = [
        bench_figures.named_ns(filled, files_ns.get(object_name(key)), timed.stored_ns[key])
        for key, filled in zip(keys, filled_ns, strict=True)
    ]
    phase = Phase(
        payload_bytes=work.total_bytes,
        seconds=(max(timed.stored_ns.values()) - timed.answer["first_ns"]) / 1e9,
        cpu_s=timed.cpu_s,
        latencies_s=[(named - filled) / 1e9 for named, filled in zip(names_ns, filled_ns, strict=True)],
        depth=_depth(rows),
    )
    return phase, _mode(rows)


def _load_round(plan: Plan, work: Work, progress: Callable[[int], None]) -> tuple[Phase, str]:
    """Load all objects in a new pool and check their bytes; return the phase and the I/O mode."""
    with DrivenPool(plan, work, fill=False) as pool:
        timed = pool.timed("load", stored=0, progress=progress)
        rows = pool.worker_rows()
        sample = random.Random(work.seed).sample(range(work.object_count), min(SAMPLE, work.object_count))
        checked = pool.rank.ask("check", indices=sample)
    _raise_if_failed(timed)
    wrong = sorted({*timed.answer["wrong"], *checked["wrong"]})
    if wrong or checked["failed"]:
        raise IntegrityError("loaded bytes are not those that were stored", objects=len(wrong), first=str(wrong[:8]))
    asked_ns, ready_ns = timed.answer["from_ns"], timed.answer["at_ns"]
    phase = Phase(
        payload_bytes=work.total_bytes,
        seconds=(max(ready_ns) - timed.answer["first_ns"]) / 1e9,
        cpu_s=timed.cpu_s,
        latencies_s=[(ready - asked) / 1e9 for ready, asked in zip(ready_ns, asked_ns, strict=True)],
        depth=_depth(rows),
    )
    return phase, _mode(rows)


def _raise_if_failed(timed: Timed) -> None:
    failed = timed.answer["failed"]
    if failed:
        codes = sorted(set(failed.values()))
        raise DeviceError("objects were not stored or loaded", objects=len(failed), codes=", ".join(codes))


def _files_ns(paths: Sequence[str]) -> dict[str, int]:
    """Return for every file when it got its name: its change time, which link and rename set."""
    return {
        name: os.stat(os.path.join(folder, name)).st_ctime_ns
        for path in paths
        for folder, _, names in os.walk(path)
        for name in names
    }


def _depth(rows: Sequence[Facts]) -> float | None:
    depths = [float(depth) for row in rows if isinstance(depth := row.get(facts.DEPTH_ACHIEVED), int | float)]
    return statistics.fmean(depths) if depths else None


def _mode(rows: Sequence[Facts]) -> str:
    return "; ".join(dict.fromkeys(str(row.get(facts.IO_MODE, "")) for row in rows))


# ---------------------------------------------------------------- the machine


def drop_caches() -> bool:
    """Write everything out and drop the page cache; False where that is not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def host() -> dict[str, Any]:
    """Return what the figures were taken on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "kvpool": kvpool.__version__,
    }


def _has_room(paths: Sequence[Path], needed_bytes: int) -> bool:
    """Tell whether every path has that much space; one that cannot be asked is taken to have it."""
    free = []
    for path in paths:
        with contextlib.suppress(OSError):
            free.append(shutil.disk_usage(path).free)
    return all(free_bytes >= needed_bytes for free_bytes in free)


@contextlib.contextmanager
def _folders(paths: Sequence[Path]) -> Iterator[list[str]]:
    """Make a fresh folder below each path; remove them afterwards."""
    made: list[str] = []
    try:
        for path in paths:
            try:
                path.mkdir(parents=True, exist_ok=True)
                made.append(tempfile.mkdtemp(prefix="kvpool-bench-", dir=path))
            except OSError as error:
                raise HostError("cannot make a folder to measure in", path=str(path), reason=str(error)) from error
        yield made
    finally:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _progress(total_bytes: int, *, hidden: bool) -> Iterator[Callable[[str, int], None]]:
    """Show a bar with the time that remains, on a terminal; nothing otherwise."""
    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield lambda _what, _done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total_bytes)
        yield lambda what, done: bar.update(task, description=what, completed=done)


def table(result: dict[str, Any]) -> Table:
    """Return the figures for a terminal."""
    size = f"{result['objects']} x {result['object_bytes'] / MIB:g} MiB, {result['rounds']} rounds"
    checked = "checksums verified" if result["verify"] else "checksums not verified"
    cold = "caches dropped" if result["caches_dropped"] else "caches not dropped (needs root)"
    made = Table(caption=f"{size}; {result['io_mode']}; {checked}; {cold}; median (min to max)", box=None)
    made.add_column("", style="bold")
    for heading in ("GB/s", "CPU s/GB", "p50 ms", "p99 ms", "depth"):
        made.add_column(heading, justify="right")
    for phase in ("store", "load"):
        keys = (("gbps", ".2f"), ("cpu_s_per_gb", ".3f"), ("p50_ms", ".1f"), ("p99_ms", ".1f"), ("depth", ".1f"))
        made.add_row(phase, *[_range_text(result, f"{phase}_{key}", form) for key, form in keys])
    return made


def _range_text(result: dict[str, Any], name: str, form: str) -> str:
    if result[name] is None:
        return "-"
    middle = f"{result[name]:{form}}"
    return (
        middle
        if result["rounds"] == 1
        else f"{middle} ({result[name + '_min']:{form}} to {result[name + '_max']:{form}})"
    )
