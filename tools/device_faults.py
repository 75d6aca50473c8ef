#!/usr/bin/env python3
"""
Measure what one of four devices costs the others when it fails, stalls, or slows to a tenth.

    python tools/device_faults.py [--seconds 8] [--mib-per-s 16] [--out docs/results/device-faults]

Theory. A pool of real processes has four devices in shared memory, each limited to a speed that is known
(`kvpool/io/faults.py`). First the pool stores objects over all four. Then two streams load, each some jobs at a time:
one from three devices, one from the fourth. The first stream's throughput is measured, the fourth device then gets its
fault, and the first stream is measured again. Objects of the fourth device that are misses then are what was lost for
the time. Last, prefixes of eight chunks are stored as an engine's scheduler places them, beside the streams; each is
offered in order, and is complete if all of its chunks were kept, and are hits.

Covers: the figures, NAME.json, NAME.md. Does not cover: that the bytes are right: every load here is checked, and a
wrong byte ends the run.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.client.rank import RankClient, StoreObject
from kvpool.client.scheduler import Hit, Later, SchedulerClient
from kvpool.io.faults import FaultSettings
from kvpool.procs.io_worker import FAULTS_VARIABLE
from tests.process.real_pool import OBJECT_BYTES, RealPool, key_of, payload_of, pump_until

DEVICES = ("d0", "d1", "d2", "d3")
VICTIM = len(DEVICES) - 1
#: Objects of each device, objects of a job, jobs of a stream at a time.
OBJECTS, PER_JOB, AT_ONCE = 48, 6, 6
PREFIXES, CHUNKS = 40, 8
MIB = 1 << 20
#: Wait for what was given up, or not, before prefixes are stored.
SETTLED_S = 3.0
#: Goal: the others' throughput with the fault over that without.
KEPT_MIN = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one fault did."""

    fault: str
    others_before_mib_s: float
    others_mib_s: float
    lost: float
    prefixes: int
    complete: int
    placed_on_it: int

    @property
    def kept(self) -> float:
        """The others' throughput with the fault over that without."""
        return self.others_mib_s / self.others_before_mib_s


def faults_named(rate: int, flag: Path) -> dict[str, FaultSettings]:
    """Return what the fourth device does, by name of the fault."""
    common: dict[str, Any] = {"bytes_per_s": rate, "while_exists": str(flag)}
    return {
        "fails": FaultSettings(read_error=1.0, write_error=1.0, open_error=1.0, **common),
        "stalls": FaultSettings(delay=1.0, delay_s=3600.0, **common),
        "slows to a tenth": FaultSettings(read_bytes_per_s=rate // 10, write_bytes_per_s=rate // 10, **common),
    }


class Stream:
    """Loads the same objects again and again, some jobs at a time."""

    def __init__(self, pool: RealPool, rank: RankClient, numbers: Sequence[int]) -> None:
        self.pool, self.rank = pool, rank
        self.jobs: list[int] = []
        self.loaded = 0
        self._batches = [numbers[at : at + PER_JOB] for at in range(0, len(numbers), PER_JOB)]
        self._next = 0

    def go_on(self) -> None:
        """Take in the jobs that have ended, and begin others."""
        self.pool.take_ended(self.rank)
        for job in [job for job in self.jobs if self.pool.has_ended(job)]:
            self.jobs.remove(job)
            ended = self.pool.end_of(self.rank, job)
            self.loaded += ended.objects - len(ended.failed)
        while len(self.jobs) < AT_ONCE:
            self.jobs.append(self.pool.load(self.rank, self._batches[self._next % len(self._batches)]))
            self._next += 1


@contextmanager
def pool_of(folder: Path, rate: int, fault: FaultSettings) -> Iterator[RealPool]:
    """Give a pool whose fourth device has that fault."""
    faults = {name: msgspec.to_builtins(FaultSettings(bytes_per_s=rate)) for name in DEVICES}
    faults[DEVICES[VICTIM]] = msgspec.to_builtins(fault)
    pool = RealPool(
        folder, devices=DEVICES, staging_bytes=64 * MIB, operation_deadline_s=1.0, load_deadline_s=5.0,
        breaker_retry_s=1.0, answer_deadline_s=2.0, environment={FAULTS_VARIABLE: json.dumps(faults)},
    )  # fmt: skip
    try:
        yield pool
    finally:
        pool.close()


def run(streams: Sequence[Stream], seconds: float) -> float:
    """Let the streams go on; return the MiB/s of the first."""
    start, before = time.monotonic(), streams[0].loaded
    while time.monotonic() < start + seconds:
        for stream in streams:
            stream.go_on()
        time.sleep(0.001)
    return (streams[0].loaded - before) * OBJECT_BYTES / MIB / (time.monotonic() - start)


def hits(scheduler: SchedulerClient, request: str, numbers: Sequence[int]) -> int:
    """Announce these objects; return how many are hits."""
    keys = [key_of(number) for number in numbers]
    scheduler.announce(request, keys)
    pump_until(scheduler, lambda: not any(isinstance(scheduler.lookup(request, key), Later) for key in keys))
    found = sum(isinstance(scheduler.lookup(request, key), Hit) for key in keys)
    scheduler.withdraw(request)
    return found


def store_prefixes(
    pool: RealPool, rank: RankClient, scheduler: SchedulerClient, streams: Sequence[Stream]
) -> tuple[int, int]:
    """Store prefixes as they would be placed; return how many are complete, and objects on the fourth device."""
    complete = placed = 0
    for prefix in range(PREFIXES):
        numbers = range(10_000 + prefix * CHUNKS, 10_000 + (prefix + 1) * CHUNKS)
        scheduler.pump()
        places = [
            scheduler.place_store(f"p{prefix}", key_of(number), position, key_of(numbers[0]))
            for position, number in enumerate(numbers)
        ]
        placed += places.count(VICTIM)
        job = 1_000_000 + prefix
        objects = [
            StoreObject(key_of(number), place, memoryview(bytearray(payload_of(number))))
            for number, place in zip(numbers, places, strict=True)
        ]
        rank.submit_store(job, f"prefix-{prefix}", objects, None)
        while not pool.has_ended(job):
            run(streams, 0.01)
        kept = pool.end_of(rank, job).failed == ()
        run(streams, 0.2)
        complete += kept and hits(scheduler, f"h{prefix}", numbers) == CHUNKS
    return complete, placed


def measure(name: str, rate: int, seconds: float) -> Result:
    """Measure one fault."""
    with tempfile.TemporaryDirectory(prefix="kvpool-faults-", dir="/dev/shm") as scratch:
        folder, flag = Path(scratch), Path(scratch, "fault")
        with pool_of(folder, rate, faults_named(rate, flag)[name]) as pool:
            rank, scheduler = pool.start_rank(), pool.start_scheduler()
            everything = range(OBJECTS * len(DEVICES))
            for first in range(0, len(everything), 16):
                pool.stored(rank, everything[first : first + 16])
            mine = [number for number in everything if pool.device_of(number) == VICTIM]
            others = [number for number in everything if pool.device_of(number) != VICTIM]
            streams = [Stream(pool, rank, others), Stream(pool, rank, mine)]
            run(streams, 1.0)
            before = run(streams, seconds)
            flag.touch()
            with_fault = run(streams, seconds)
            run(streams, SETTLED_S)
            lost = 1 - hits(scheduler, "kept", everything) / len(everything)
            complete, placed = store_prefixes(pool, rank, scheduler, streams)
            flag.unlink()
            return Result(
                fault=name, others_before_mib_s=before, others_mib_s=with_fault, lost=lost, prefixes=PREFIXES,
                complete=complete, placed_on_it=placed,
            )  # fmt: skip


def verdict(ok: bool) -> str:
    """Say it in a word."""
    return "met" if ok else "**missed**"


def page(result: dict[str, Any]) -> str:
    """Return the text for people."""
    found = [Result(**one) for one in result["results"]]
    lines = [
        "# One of four devices fails, stalls, or slows to a tenth",
        "",
        f"`{result['command']}`, {result['date']};",
        f"{result['machine']}; {result['versions']}. What is measured, and how, is said in `tools/device_faults.py`.",
        f"Devices of {result['mib_per_s']:g} MiB/s in shared memory, objects of {OBJECT_BYTES} bytes, all checked.",
        "",
        "| the fourth | other three, MiB/s before | with the fault | kept | objects lost | new prefixes complete |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.fault} | {one.others_before_mib_s:.1f} | {one.others_mib_s:.1f} | {one.kept:.2f} "
        f"| {one.lost:.0%} | {one.complete} of {one.prefixes} ({one.placed_on_it} objects on it) |"
        for one in found
    ]
    kept, lost = min(one.kept for one in found), max(one.lost for one in found)
    whole = all(one.complete == one.prefixes for one in found)
    lines += [
        "",
        f"- Others' load throughput at least {KEPT_MIN} of before: {kept:.2f}, {verdict(kept >= KEPT_MIN)}.",
        f"- At most the fourth device's share of objects lost: {lost:.0%}, {verdict(lost <= 1 / len(DEVICES))}.",
        f"- Prefixes stored from then on complete: {verdict(whole)}.",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run it all and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="each way")
    parser.add_argument("--mib-per-s", type=float, default=16.0, help="of each device")
    parser.add_argument("--out", type=Path, default=Path("docs/results/device-faults"), help="without ending")
    options = parser.parse_args(arguments)
    rate = int(options.mib_per_s * MIB)
    results = []
    for name in faults_named(rate, Path("none")):
        results.append(measure(name, rate, options.seconds))
        print(results[-1], file=sys.stderr)
    names = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.split(":", 1)[1].strip() for line in names if line.startswith("model name")), "unknown")
    result = {
        "command": f"python tools/device_faults.py {' '.join(arguments)}".strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} x {processor}, Linux {platform.release()}",
        "versions": f"kvpool {version('kvpool')}, Python {platform.python_version()}",
        "mib_per_s": options.mib_per_s,
        "results": [asdict(one) for one in results],
    }
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(result))
    print(page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
