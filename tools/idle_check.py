#!/usr/bin/env python3
"""
Check that a pool with attached clients uses no CPU while nothing happens.

    python tools/idle_check.py [--seconds 60] [--path DIR ...]

Starts a pool of its own with a rank in a process of its own, and a scheduler's connection; lets it stand for the time
given, and measures the CPU clock of every process. Exit code 1 if any used 1 % of a core or more.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence

from kvpool.cli.bench_pool import DrivenPool, Plan, family
from kvpool.cli.bench_work import Work
from kvpool.health import facts, process_facts

LIMIT_PERCENT = 1.0
#: Time for start-up work (mapping, scanning) to end before the clock runs.
SETTLE_S = 1.0
STAGING_BYTES = 256 << 20


def measure(paths: Sequence[str], seconds: float) -> dict[str, float]:
    """Return for each process of an idle pool, and for its client, the percentage of a core that it used."""
    work = Work(seed=0, object_bytes=4 << 20, object_count=1, devices=len(paths), batch=1)
    plan = Plan(paths=paths, queue_depth=4, staging_bytes=STAGING_BYTES * len(paths), verify=True)
    with DrivenPool(plan, work, fill=False) as pool:
        time.sleep(SETTLE_S)
        names = {pid: f"{row.get(facts.ROLE)} {row.get(facts.DEVICE, '')}".strip() for pid, row in pool.rows().items()}
        names[pool.rank.pid] = "rank"
        sampled = process_facts.sample(family(list(names)), interval_s=seconds)
    return {
        f"{names.get(pid, 'child')} (pid {pid})": float(seen.get(facts.CPU_PERCENT, 0.0))
        for pid, seen in sampled.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--path", action="append", help="directory of a device; a scratch folder without it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kvpool-idle-") as scratch:
        percents = measure(options.path or [scratch], options.seconds)
    for name, percent in percents.items():
        print(f"{percent:6.2f} %  {name}")
    busy = [name for name, percent in percents.items() if percent >= LIMIT_PERCENT]
    print(f"not idle: {', '.join(busy)}" if busy else f"idle: every process below {LIMIT_PERCENT:g} %")
    return 1 if busy else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
