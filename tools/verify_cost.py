#!/usr/bin/env python3
"""
Measure what verifying payload checksums costs: throughput and CPU time, beside one plain pass over the same memory.

    python tools/verify_cost.py --path DIR [--object-mib 4 32] [--total-gib 1] [--rounds 7] [--out NAME]

Theory. A checksum must read every byte once more, so it costs at least what the processor needs to read the payload
from memory. Each round runs `kvpool bench`'s store and load twice, with verification and without, in turns that swap
from round to round, and then passes once over cold buffers of the object's size: with the checksum, and with the
cheapest thing that reads all of them (a sum of words). Compared are figures of the same round; reported are medians.
Without verification a store writes no checksum and a load checks none.

Covers: the figures, NAME.json with every round, NAME.md for people. Does not cover: whether wrong bytes are found.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.cli import bench_cmd
from kvpool.cli.bench_work import Work
from kvpool.io.checksum import payload_checksum
from tools.compare import output_of

MIB, GIB, GB = 1 << 20, 1 << 30, 1e9
#: Cold for every processor cache.
PASS_BYTES = GIB
#: What is to be reached: load throughput with verification over that without, and CPU seconds per GB on top.
RATIO_MIN, CPU_MAX = 0.97, 0.06
FIGURES = ("load_gbps", "store_gbps", "load_cpu_s_per_gb", "store_cpu_s_per_gb")

Round = dict[str, Any]


def passes(object_bytes: int) -> dict[str, float]:
    """Return CPU seconds per GB to read cold memory once: with the checksum, and with a sum of words."""
    memory = np.arange(PASS_BYTES // 8, dtype=np.uint64)
    parts = [memory[at : at + object_bytes // 8] for at in range(0, memory.size, object_bytes // 8)]

    def seconds(act: Callable[[np.ndarray[Any, Any]], object]) -> float:
        start = time.thread_time()
        for part in parts:
            act(part)
        return (time.thread_time() - start) / (PASS_BYTES / GB)

    return {
        "checksum_pass": seconds(lambda part: payload_checksum(memoryview(part).cast("B"))),
        "sum_pass": seconds(np.sum),
    }


def measure(path: Path, work: Work, number: int) -> Round:
    """Run one round."""
    found: Round = {}
    for verify in (True, False) if number % 2 else (False, True):
        depth = 16
        result = bench_cmd.run(
            [path], work, depth, bench_cmd.staging_for(work, depth), rounds=1, verify=verify, progress=lambda *_: None
        )
        found["with" if verify else "without"] = {name: result[name] for name in FIGURES}
        found["mode"], found["host"] = result["io_mode"], result["host"]
    return found | passes(work.object_bytes)


def medians(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the medians over the rounds of figures, of their ratios and of their differences within a round."""
    found = {}
    for name in FIGURES:
        for way in ("with", "without"):
            found[f"{name}_{way}"] = statistics.median(one[way][name] for one in rounds)
        if name.endswith("gbps"):
            found[f"{name}_ratio"] = statistics.median(one["with"][name] / one["without"][name] for one in rounds)
        else:
            found[f"{name}_more"] = statistics.median(one["with"][name] - one["without"][name] for one in rounds)
    for name in ("checksum_pass", "sum_pass"):
        found[name] = statistics.median(one[name] for one in rounds)
    return found


def verdict(ok: bool) -> str:
    """Say it in a word."""
    return "met" if ok else "**missed**"


def page(result: dict[str, Any]) -> str:
    """Return the text for people."""
    lines = [
        "# What verifying checksums costs",
        "",
        f"`{result['command']}`, {result['date']}; {result['machine']}; {result['versions']}; I/O: {result['mode']}.",
        f"Medians of {result['rounds']} rounds, {result['total_gib']:g} GiB each way, with and without in turns.",
        "",
        "| object | direction | GB/s without | with | ratio | CPU s/GB without | with | more |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for size, found in result["sizes"].items():
        lines += [
            f"| {size} MiB | {way} | {found[f'{way}_gbps_without']:.2f} | {found[f'{way}_gbps_with']:.2f} "
            f"| {found[f'{way}_gbps_ratio']:.2f} | {found[f'{way}_cpu_s_per_gb_without']:.3f} "
            f"| {found[f'{way}_cpu_s_per_gb_with']:.3f} | {found[f'{way}_cpu_s_per_gb_more']:.3f} |"
            for way in ("load", "store")
        ]
    lines += ["", "One pass over cold memory, CPU s/GB, with nothing else in it:", ""]
    for size, found in result["sizes"].items():
        lines.append(f"- {size} MiB: checksum {found['checksum_pass']:.3f}, sum of words {found['sum_pass']:.3f}")
    ratio = min(found["load_gbps_ratio"] for found in result["sizes"].values())
    more = max(found[f"{way}_cpu_s_per_gb_more"] for found in result["sizes"].values() for way in ("load", "store"))
    lines += [
        "",
        f"- Load throughput at least {RATIO_MIN} of that without: {ratio:.2f}, {verdict(ratio >= RATIO_MIN)}.",
        f"- At most {CPU_MAX} CPU s/GB more: {more:.3f}, {verdict(more <= CPU_MAX)}. The sum of words is the floor:",
        "  what this machine's memory takes to be read once by one processor.",
    ]
    return "\n".join(lines) + "\n"


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"


def main(arguments: Sequence[str]) -> int:
    """Run it all and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="a directory on the drive to measure")
    parser.add_argument("--object-mib", type=float, nargs="+", default=[4.0, 32.0])
    parser.add_argument("--total-gib", type=float, default=1.0, help="per round and direction")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("docs/results/verify-cost"), help="without ending")
    options = parser.parse_args(arguments)
    sizes: dict[str, dict[str, float]] = {}
    raw: dict[str, list[Round]] = {}
    for mib in options.object_mib:
        count = max(1, int(options.total_gib * GIB / (mib * MIB)))
        work = Work(seed=0, object_bytes=int(mib * MIB), object_count=count, devices=1, batch=16)
        rounds = []
        for number in range(options.rounds):
            rounds.append(measure(options.path, work, number))
            print(f"{mib:g} MiB, round {number + 1} of {options.rounds}", file=sys.stderr)
        raw[f"{mib:g}"], sizes[f"{mib:g}"] = rounds, medians(rounds)
    host = rounds[-1]["host"]
    shown = " ".join("DIR" if word == str(options.path) else word for word in arguments)
    result = {
        "command": f"python tools/verify_cost.py {shown}",
        "date": host["date"][:10],
        "machine": f"{host['processors']} x {processor()}, Linux {host['kernel']}",
        "versions": f"kvpool {output_of('git', 'rev-parse', '--short', 'HEAD')}, Python {host['python']}, "
        f"xxhash {version('xxhash')}, liburing {version('liburing')}",
        "mode": rounds[-1]["mode"],
        "rounds": options.rounds,
        "total_gib": options.total_gib,
        "sizes": sizes,
        "raw": raw,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(result))
    print(page(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
