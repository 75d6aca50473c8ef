"""
Measure a pool on a device of a million objects: when it knows them, and what its loads feel of the walk behind.

    python tools/index_bench.py --device DIR [--objects 1000000] [--keep] [--out docs/results/index]

Theory. DIR is filled with sparse files, a few of them whole (`index_files`). Dropping caches takes root. Two
starts:

    first    no snapshot: the folders are walked, with what making them left in memory, and nothing else happens. At the
             end of the pool its index is written.
    second   caches dropped, from the snapshot. Time from the start of the pool's first process to: a request's answer
             from the scheduler client, an object loaded, every key known. Then objects are loaded, a job every
             PERIOD_S, in WINDOWS windows of WINDOW_S: in every other one the walking helper is stopped (SIGSTOP). So
             both kinds of latencies are of the same processes in the same minutes. Then loads go on until the walk has
             ended.

Memory is the sum of PSS of the coordinator, the I/O worker and their helpers, highest of samples every 0.25 s, without
pages of staging (which is as big as it is set to be). Whole objects are read with O_DIRECT, so caches of files do not
make them faster. Writes OUT.json, and OUT.md for people.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.client import admin
from kvpool.client.copier import Copy, NullCopier
from kvpool.client.launch import ClientConfig
from kvpool.client.rank import LoadObject, RankClient
from kvpool.client.scheduler import Hit, SchedulerClient
from kvpool.config import DeviceSettings, PoolSettings, Settings
from kvpool.errors import PoolUnavailable
from kvpool.health import facts
from kvpool.io import snapshot_file
from tools.index_files import OBJECT_BYTES, Bar, key_of, make_files, namespace_of, remove_files

WHOLE = 2000
STAGING_BYTES = 128 << 20
#: A job of this many objects is asked for this often.
JOB_OBJECTS, PERIOD_S = 4, 0.03
WINDOWS, WINDOW_S = 120, 1.0
#: Loads of a window's first moments still meet what the other window left.
SETTLE_S = 0.1
#: What is to be reached.
KNOWN_S_MAX, P99_MAX, MEMORY_MB_MAX = 5.0, 1.2, 300.0


class TimedCopier(NullCopier):
    """Copies nothing, and notes when each object was Ready."""

    def __init__(self) -> None:
        self.ready_s: dict[object, float] = {}
        self.moved = threading.Condition()

    def load(self, copies: Sequence[Copy]) -> object:
        """Note the time."""
        now = time.monotonic()
        with self.moved:
            self.ready_s.update((copy.place, now) for copy in copies)
            self.moved.notify_all()
        return None


class Pool:
    """A pool of one's own on the device, with a rank and a scheduler; use as a context manager."""

    def __init__(self, device: Path, run_dir: Path) -> None:
        self.started_s = time.monotonic()
        settings = Settings(
            pool=PoolSettings(run_dir=str(run_dir), staging_bytes=STAGING_BYTES),
            device=[DeviceSettings(name="bench", path=str(device))],
        )
        config = ClientConfig(run_dir=str(run_dir), settings=settings, autostart=True)
        self._run_dir = str(run_dir)
        self.copier = TimedCopier()
        self.rank = RankClient(config, namespace_of(), engine="index-bench", rank=0, copier=self.copier)
        self.scheduler = SchedulerClient(config, namespace_of(), engine="index-bench")
        self._jobs = 0
        self._chance = random.Random(1)
        if not self.rank.wait_connected(60.0) or not self.scheduler.wait_connected(60.0):
            raise PoolUnavailable("the pool does not start", log=(run_dir / "pool.log"))
        self.pids = [
            int(row[facts.PID]) for row in self._rows() if row.get(facts.ROLE) in (facts.COORDINATOR, facts.IO_WORKER)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rank.close()
        self.scheduler.close()
        self.ended_s = -time.monotonic()
        admin.stop(self._run_dir)
        while any(psutil.pid_exists(pid) for pid in self.pids):
            time.sleep(0.01)
        self.ended_s += time.monotonic()

    def since_start(self) -> float:
        """Return seconds since the start of the pool's first process."""
        return time.monotonic() - self.started_s

    def _rows(self) -> list[dict[str, Any]]:
        return admin.health(self._run_dir).rows

    def worker(self) -> dict[str, Any]:
        """Return what the I/O worker says."""
        while True:
            for row in self._rows():
                if row.get(facts.ROLE) == facts.IO_WORKER:
                    return row
            time.sleep(0.01)

    def load(self, numbers: Sequence[int]) -> tuple[int, float]:
        """Submit a load; return its number and when."""
        self._jobs += 1
        objects = [LoadObject(key_of(number), 0, (self._jobs, number)) for number in numbers]
        now = time.monotonic()
        self.rank.submit_load(self._jobs, objects)
        return self._jobs, now

    def first_load(self) -> None:
        """Load one object; again, if the pool was not ready to."""
        while True:
            job, _ = self.load([0])
            with self.copier.moved:
                if self.copier.moved.wait_for(lambda job=job: (job, 0) in self.copier.ready_s, 0.02):
                    return

    def ask(self, numbers: Sequence[int]) -> None:
        """Announce a request of these objects, and wait until all of them are hits."""
        keys = [key_of(number) for number in numbers]
        self.scheduler.announce("first", keys)
        while not all(isinstance(self.scheduler.lookup("first", key), Hit) for key in keys):
            self.scheduler.await_news(0.001)
            self.scheduler.pump()
        self.scheduler.withdraw("first")

    def some(self) -> list[int]:
        """Return a few objects that can be loaded."""
        return self._chance.sample(range(WHOLE), JOB_OBJECTS)

    def walker(self) -> psutil.Process | None:
        """Return the helper that walks, while there is one."""
        for pid in self.pids:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(pid).children():
                    if "kvpool.procs.scanner" in child.cmdline():
                        return child
        return None


class Memory:
    """Samples the memory of processes and their children until closed."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.highest: dict[str, float] = {}
        self.highest_mb = self.last_mb = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.25):
            found: dict[str, float] = {}
            for pid in self._pids:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    for one in (process, *process.children(recursive=True)):
                        name = next((part for part in one.cmdline() if part.startswith("kvpool.procs.")), one.name())
                        found[name] = _pss_mb(one.pid)
            self.last_mb = sum(found.values())
            if self.last_mb > self.highest_mb:
                self.highest_mb, self.highest = self.last_mb, found

    def close(self) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()


def _pss_mb(pid: int) -> float:
    """Return a process's share of the memory it uses, MB, without shared memory."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return (kib["Pss_Anon"] + kib["Pss_File"]) * 1024 / 1e6
    return 0.0


def drop_caches() -> None:
    """Let the next walk find nothing in memory."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


@contextlib.contextmanager
def started(device: Path) -> Iterator[Pool]:
    """A pool on *device*."""
    with tempfile.TemporaryDirectory(prefix="kvpool-index-") as run_dir, Pool(device, Path(run_dir)) as pool:
        yield pool


def first_start(device: Path, objects: int) -> dict[str, Any]:
    """Walk everything, and let the index be written."""
    with started(device) as pool:
        memory = Memory(pool.pids)
        bar = Bar("walking for the first time")
        while not (row := pool.worker())[facts.INDEX_COMPLETE]:
            bar(int(row[facts.INDEX_OBJECTS]), objects)
            time.sleep(1.0)
        walked_s = pool.since_start()
        bar(objects, objects)
        known = pool.worker()[facts.INDEX_OBJECTS]
        memory.close()
    snapshot = Path(snapshot_file.path_of(f"{device}/.kvpool", namespace_of().fingerprint))
    return {"walked_s": walked_s, "known": known, "memory_mb": memory.highest_mb, "memory": memory.highest,
            "ended_s": pool.ended_s, "snapshot_bytes": snapshot.stat().st_size}  # fmt: skip


def second_start(device: Path, objects: int) -> dict[str, Any]:
    """Start from the snapshot, with nothing in memory, and load beside the walk."""
    drop_caches()
    with started(device) as pool:
        memory = Memory(pool.pids)
        connected_s = pool.since_start()
        pool.ask([WHOLE - 1 - number for number in range(64)])
        answered_s = pool.since_start()
        pool.first_load()
        loaded_s = pool.since_start()
        while pool.worker()[facts.INDEX_OBJECTS] < objects:
            time.sleep(0.05)
        known_s = pool.since_start()
        known_mb = memory.highest_mb
        found = load_beside_walk(pool)
        row = pool.worker()
        memory.close()
    return {"connected_s": connected_s, "answered_s": answered_s, "loaded_s": loaded_s, "known_s": known_s,
            "known_memory_mb": known_mb, "memory_mb": memory.highest_mb, "memory": memory.highest,
            "memory_after_mb": memory.last_mb, "known_after": row[facts.INDEX_OBJECTS],
            "stored_bytes": row.get(facts.BYTES_STORED, 0), **found}  # fmt: skip


def load_beside_walk(pool: Pool) -> dict[str, Any]:
    """Load until the walk has ended; return latencies with and without it."""
    asked: dict[bool, list[tuple[tuple[int, int], float]]] = {True: [], False: []}
    walks, complete, windows = True, False, 0
    looked_s = next_s = time.monotonic()
    window_end = looked_s + WINDOW_S
    while not complete:
        now = time.monotonic()
        if now >= window_end:
            windows, window_end = windows + 1, now + WINDOW_S
            walks = windows > WINDOWS or not walks
            _let(pool.walker(), going=walks)
            print(f"\rloading beside the walk: {now - looked_s:.0f} s ", end="", flush=True)
            complete = walks and bool(pool.worker()[facts.INDEX_COMPLETE])
        numbers = pool.some()
        job, at_s = pool.load(numbers)
        if window_end - WINDOW_S + SETTLE_S <= now and windows < WINDOWS:
            asked[walks].extend(((job, number), at_s) for number in numbers)
        next_s = max(next_s + PERIOD_S, now)
        time.sleep(max(0.0, next_s - time.monotonic()))
    ended_s = pool.since_start()
    time.sleep(1.0)
    print()
    ready = pool.copier.ready_s
    took = {kind: [(ready[name] - at_s) * 1000 for name, at_s in sent if name in ready] for kind, sent in asked.items()}
    return {
        "walk_ended_s": ended_s,
        "windows": min(windows, WINDOWS),
        "failed": sum(len(ended.failed) for ended in pool.rank.take_ended()),
        "with_ms": quantiles(took[True]),
        "without_ms": quantiles(took[False]),
    }


def _let(walker: psutil.Process | None, *, going: bool) -> None:
    if walker is not None:
        with contextlib.suppress(psutil.Error):
            walker.send_signal(signal.SIGCONT if going else signal.SIGSTOP)


def quantiles(took: Sequence[float]) -> dict[str, float]:
    """Return count, median and p99."""
    if len(took) < 2:
        return {"count": len(took), "median": 0.0, "p90": 0.0, "p99": 0.0}
    cuts = statistics.quantiles(took, n=100)
    return {"count": len(took), "median": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Return where, when and how it was measured."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{cpu.split(':')[1].strip()}, {os.cpu_count()} processors, Linux {platform.release()}, "
        f"{_filesystem(args.device)}",
        "versions": f"Python {platform.python_version()}, kvpool {version('kvpool')}",
        "command": f"python tools/index_bench.py --device DIR --objects {args.objects}"
        + (f" --out {args.out}" if args.out else ""),
        "objects": args.objects,
    }


def _filesystem(path: Path) -> str:
    mounts = [entry for entry in psutil.disk_partitions(all=True) if str(path.resolve()).startswith(entry.mountpoint)]
    return max(mounts, key=lambda entry: len(entry.mountpoint)).fstype + " on a virtual disk"


def text(found: dict[str, Any]) -> str:
    """Return the figures as a page."""
    made, first, second = found["about"], found["first"], found["second"]
    with_ms, without_ms = second["with_ms"], second["without_ms"]
    ratio = with_ms["p99"] / without_ms["p99"]
    highest = max(first["memory_mb"], second["memory_mb"])
    goals = (
        ("every key known, from the snapshot", f"{second['known_s']:.1f} s", f"at most {KNOWN_S_MAX:.0f} s",
         second["known_s"] <= KNOWN_S_MAX),
        ("p99 of loads beside the walk against without", f"{ratio:.2f}", f"at most {P99_MAX}", ratio <= P99_MAX),
        ("memory of all processes, highest", f"{highest:.0f} MB", f"at most {MEMORY_MB_MAX:.0f} MB",
         highest <= MEMORY_MB_MAX),
    )  # fmt: skip
    rows = (("beside the walk", with_ms), ("while it stands still", without_ms))
    columns = ("count", "median", "p90", "p99")
    return f"""# A device of {made["objects"]:,} objects

`{made["command"]}`, {made["date"]};
{made["machine"]}; {made["versions"]}.
What is measured, and how, is said in `tools/index_bench.py`. Times count from the start of the pool's first process,
caches dropped before it.

| | measured | goal | reached |
|---|---|---|---|
{_lines(f"| {what} | {value} | {goal} | {'yes' if good else '**missed**'} |" for what, value, goal, good in goals)}

- Clients connected after {second["connected_s"]:.1f} s, a request of 64 keys answered after
  {second["answered_s"]:.1f} s, a first object loaded after {second["loaded_s"]:.1f} s.
- Walked completely after {second["walk_ended_s"]:.0f} s beside loads (of which the helper was stopped for
  {second["windows"] // 2 * WINDOW_S:.0f} s); after {first["walked_s"]:.0f} s without loads and folders in memory.
- Loads of {JOB_OBJECTS} objects of {OBJECT_BYTES >> 20} MiB every {PERIOD_S * 1000:.0f} ms, {second["failed"]} failed;
  {second["windows"]} windows of {WINDOW_S:.0f} s in turn:

| object Ready after, ms | objects | median | p90 | p99 |
|---|---|---|---|---|
{_lines(f"| {what} | {' | '.join(f'{row[name]:.4g}' for name in columns)} |" for what, row in rows)}

- Memory at its highest: {_parts(second["memory"])}; {second["memory_after_mb"]:.0f} MB after the walk.
- The snapshot has {first["snapshot_bytes"] / 1e6:.0f} MB; ending the pool, its writing included, took
  {first["ended_s"]:.1f} s.
"""


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _parts(memory: dict[str, float]) -> str:
    return ", ".join(f"{name.rpartition('.')[2]} {size:.0f} MB" for name, size in sorted(memory.items()))


def main() -> None:
    """Make, measure, write, remove."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=Path, required=True, help="folder to fill; removed afterwards")
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--keep", action="store_true", help="leave the files for another run")
    parser.add_argument("--out", type=Path, help="path without suffix; without it JSON is printed")
    args = parser.parse_args()
    make_files(args.device, args.objects, WHOLE, Bar("making files"))
    snapshot_file.remove(f"{args.device}/.kvpool", namespace_of().fingerprint)
    try:
        found = {"about": about(args)}
        found["first"] = first_start(args.device, args.objects)
        print(json.dumps(found["first"]))
        found["second"] = second_start(args.device, args.objects)
    finally:
        if not args.keep:
            remove_files(args.device, Bar("removing files"), args.objects)
    if args.out is None:
        print(json.dumps(found, indent=1))
        return
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(text(found))


if __name__ == "__main__":
    main()
