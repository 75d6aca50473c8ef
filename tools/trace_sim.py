"""
Replay request traces through the real planner on a simulated machine, and compare it with simpler policies.

    python tools/trace_sim.py generate trace.jsonl --requests 300 --seed 1
    python tools/trace_sim.py convert mooncake.jsonl trace.jsonl --block-tokens 512
    python tools/trace_sim.py replay trace.jsonl --gpu h200 --drive 6 [--break-even FILE] [--rate 2.0]
    python tools/trace_sim.py cells --seeds 20 --out docs/results/planner-simulation

Policies: `off` loads every hit, `never` none, `gate` those longer than the break-even, `planner` decides by cost with
estimates, `oracle` is the planner that is told the true state of the drive.

`cells` is the standing comparison: three drives beside two GPUs, and in each a load under which the GPU of the better
fixed policy is 80 % busy.

Does not cover: the simulated machine (`trace_world.py`), what a trace is (`traces.py`).
"""

import argparse
import json
import math
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.core.curves import Curve, parse_break_even
from kvpool.core.planner import Planner
from tools.trace_world import POLICIES, Machine, Outcome, World
from tools.traces import CHUNK_TOKENS, Request, at_rate, convert_block_hashes, read_trace, synthetic, write_trace

#: Measured on one H200 with an 8B-shaped model: prompt tokens, seconds.
H200 = ((1024, 0.050), (4096, 0.105), (16384, 0.536), (32768, 1.309), (65536, 3.624), (90000, 6.034))
#: Its first two points, continued to 0 tokens.
H200_FLOOR_S = 0.032
#: GPU -> (how many times slower, tokens of KV it holds).
GPUS = {"h200": (1.0, 700_000), "six times slower": (6.0, 180_000)}
DRIVES_GB_PER_S = (2, 6, 12)
BUSY = 0.8


def machine_of(gpu: str, drive_gb_per_s: float) -> Machine:
    """Return one cell's machine."""
    slower, blocks_tokens = GPUS[gpu]
    f = Curve(H200_FLOOR_S * slower, [(tokens, seconds * slower) for tokens, seconds in H200])
    return Machine(f=f, drive_bytes_per_s=drive_gb_per_s * 1e9, blocks_tokens=blocks_tokens)


def gpu_seconds(machine: Machine, trace: Sequence[Request], *, load: bool) -> float:
    """Return GPU seconds per request when all hits are loaded, or none."""
    stored: set[int] = set()
    total = 0.0
    for request in trace:
        hit = 0
        while load and hit < len(request.chunks) and request.chunks[hit] in stored:
            hit += 1
        stored.update(request.chunks)
        f = machine.f
        total += f.floor + f.at(request.tokens) - f.at(min(hit * CHUNK_TOKENS, request.tokens - 1))
    return total / len(trace)


def run(machine: Machine, trace: Sequence[Request], policy: str, seed: int) -> Outcome:
    """Serve a trace under one policy."""
    return World(machine, trace, policy, seed, Planner()).run()


def mean(outcome: Outcome) -> float:
    """Return the mean time to first token."""
    return statistics.fmean(outcome.first_s)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that *share* of them do not exceed."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def busy_trace(machine: Machine, requests: int, seed: int) -> tuple[list[Request], str]:
    """
    Return a trace under which the GPU of the better fixed policy is 80 % busy, and that policy.

    The rate is taken for "off" first; where "never" is better even there, for "never".
    """
    base = synthetic(requests, seed)
    for better in ("off", "never"):
        trace = at_rate(base, BUSY / gpu_seconds(machine, base, load=better == "off"))
        if better == "never" or mean(run(machine, trace, "off", seed)) <= mean(run(machine, trace, "never", seed)):
            break
    return trace, better


@dataclass(slots=True)
class Cell:
    """All seeds of one machine: outcomes by policy, and which fixed policy the load was made for."""

    gpu: str
    drive_gb_per_s: float
    better: list[str] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def mean(self, policy: str) -> float:
        """Mean time to first token over all seeds."""
        return statistics.fmean(mean(outcome) for outcome in self.outcomes[policy])

    def percentile(self, policy: str, share: float) -> float:
        """Percentile over the requests of all seeds."""
        return percentile([value for outcome in self.outcomes[policy] for value in outcome.first_s], share)

    def row(self) -> dict[str, Any]:
        """Figures, ready for JSON."""
        better = min(("off", "never"), key=self.mean)
        return {
            "gpu": self.gpu,
            "drive_gb_per_s": self.drive_gb_per_s,
            "load_made_for": {policy: self.better.count(policy) for policy in ("off", "never")},
            "policies": {policy: self.figures(policy) for policy in self.outcomes},
            "better_fixed": better,
            "planner_mean_over_better": self.mean("planner") / self.mean(better),
            "planner_p99_over_better": self.percentile("planner", 0.99)
            / min(self.percentile(policy, 0.99) for policy in ("off", "never")),
            "planner_mean_over_oracle": self.mean("planner") / self.mean("oracle"),
        }

    def figures(self, policy: str) -> dict[str, float]:
        """What one policy reached."""
        outcomes = self.outcomes[policy]
        return {
            "mean_s": self.mean(policy),
            "p50_s": self.percentile(policy, 0.5),
            "p99_s": self.percentile(policy, 0.99),
            "read_gb": statistics.fmean(outcome.read_bytes for outcome in outcomes) / 1e9,
            "hit_ratio": sum(o.hit_tokens for o in outcomes) / sum(o.prompt_tokens for o in outcomes),
            "gpu_busy": statistics.fmean(outcome.gpu_s / outcome.end_s for outcome in outcomes),
        }


def cells(requests: int, seeds: Sequence[int]) -> list[Cell]:
    """Run everything; print a line a cell."""
    found = []
    for gpu in GPUS:
        for drive in DRIVES_GB_PER_S:
            machine, cell = machine_of(gpu, drive), Cell(gpu, drive)
            for seed in seeds:
                trace, better = busy_trace(machine, requests, seed)
                cell.better.append(better)
                for policy in POLICIES:
                    cell.outcomes.setdefault(policy, []).append(run(machine, trace, policy, seed))
            found.append(cell)
            print(f"{gpu}, {drive} GB/s: " + ", ".join(f"{p} {cell.mean(p):.2f} s" for p in POLICIES), flush=True)
    return found


def summary(found: Sequence[Cell], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return everything that is kept of a comparison."""
    import numpy
    import scipy

    rows = [cell.row() for cell in found]
    over = {
        fixed: {
            "of_means": statistics.fmean(c.mean(fixed) for c in found)
            / statistics.fmean(c.mean("planner") for c in found),
            "geometric": statistics.geometric_mean(c.mean(fixed) / c.mean("planner") for c in found),
        }
        for fixed in ("off", "never", "gate")
    }
    return {
        "command": " ".join(["python", "tools/trace_sim.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__, "scipy": scipy.__version__},
        "arguments": arguments,
        "cells": rows,
        "times_better_over_all_cells": over,
        "worst": {
            name: max(row[name] for row in rows)
            for name in ("planner_mean_over_better", "planner_p99_over_better", "planner_mean_over_oracle")
        },
    }


def table(kept: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| GPU | drive GB/s | " + " | ".join(f"{policy}: mean / p50 / p99 s" for policy in POLICIES) + " | mean, p99 "
        "against the better fixed policy |",
        "|---|---|" + "---|" * (len(POLICIES) + 1),
    ]
    for row in kept["cells"]:
        figures = [
            f"{p['mean_s']:.2f} / {p['p50_s']:.2f} / {p['p99_s']:.1f}" for p in map(row["policies"].get, POLICIES)
        ]
        ratios = f"{row['planner_mean_over_better']:.3f}, {row['planner_p99_over_better']:.3f}"
        lines.append(f"| {row['gpu']} | {row['drive_gb_per_s']} | " + " | ".join(figures) + f" | {ratios} |")
    return "\n".join(lines)


def document(kept: dict[str, Any], name: str) -> str:
    """Return the page about a comparison."""
    worst, over = kept["worst"], kept["times_better_over_all_cells"]
    arguments, versions = kept["arguments"], kept["versions"]
    return f"""# The planner in simulated queues

`{kept["command"]}`, {arguments["date"]}, {", ".join(f"{n} {v}" for n, v in versions.items())}; {arguments["requests"]}
requests for each seed ({arguments["seeds"]}). What is simulated, and what not, is said in `tools/trace_world.py`; the
mix of requests in `tools/traces.py`. Means are over all seeds, percentiles over all requests of a cell.

Each cell's load is made so that the GPU of the better fixed policy is 80 % busy; the other one is then often far beyond
what it can serve, and its figures say only that.

{table(kept)}

![Mean time to first token by cell and policy]({name}.png)

| | reached | goal |
|---|---|---|
| mean against the better fixed policy, worst cell | {worst["planner_mean_over_better"]:.3f} | at most 1.02 |
| p99 against the better fixed policy, worst cell | {worst["planner_p99_over_better"]:.3f} | at most 1.10 |
| mean against the planner that is told the truth, worst cell | {worst["planner_mean_over_oracle"]:.3f} | at most 1.15 |
| times better than always loading, of the means over all cells | {over["off"]["of_means"]:.2f} | at least 1.3 |
| times better than never loading, the same | {over["never"]["of_means"]:.2f} | at least 1.3 |
"""


def plot(kept: dict[str, Any], out: Path) -> None:
    """Draw mean times to first token by cell and policy, as PNG and SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows, width = kept["cells"], 0.8 / len(POLICIES)
    figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
    for number, policy in enumerate(POLICIES):
        places = [index + (number - (len(POLICIES) - 1) / 2) * width for index in range(len(rows))]
        axes.bar(places, [row["policies"][policy]["mean_s"] for row in rows], width, label=policy)
    axes.set_yscale("log")
    axes.set_ylabel("mean time to first token, s")
    axes.set_xticks(range(len(rows)), [f"{row['gpu']}\n{row['drive_gb_per_s']} GB/s" for row in rows], fontsize=8)
    axes.legend(ncols=len(POLICIES), fontsize=8, frameon=False)
    for kind in ("png", "svg"):
        figure.savefig(out.with_suffix(f".{kind}"), dpi=90, metadata={"Date": None} if kind == "svg" else None)
    pyplot.close(figure)


def _cells(args: argparse.Namespace) -> None:
    found = cells(args.requests, range(1, args.seeds + 1))
    kept = summary(found, {"requests": args.requests, "seeds": f"1-{args.seeds}", "date": args.date})
    print(table(kept))
    print(json.dumps({"worst": kept["worst"], "times_better": kept["times_better_over_all_cells"]}, indent=1))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        args.out.with_suffix(".md").write_text(document(kept, args.out.name), encoding="utf-8")
        plot(kept, args.out)


def _replay(args: argparse.Namespace) -> None:
    machine = machine_of(args.gpu, args.drive)
    if args.break_even is not None:
        curves = parse_break_even(args.break_even.read_text(encoding="utf-8")).curves
        if curves is not None:
            machine = Machine(
                f=curves.f, drive_bytes_per_s=machine.drive_bytes_per_s, blocks_tokens=machine.blocks_tokens
            )
    trace = read_trace(args.trace)
    if args.rate is not None:
        stretched = len(trace) / max(trace[-1].arrival_s, 1e-9)
        trace = at_rate(trace, args.rate / stretched)
    cell = Cell(args.gpu, args.drive)
    for policy in POLICIES:
        cell.outcomes[policy] = [run(machine, trace, policy, args.seed)]
    kept = {"cells": [cell.row()]}
    print(table(kept))
    for policy in POLICIES:
        figures = cell.figures(policy)
        print(f"{policy}: read {figures['read_gb']:.1f} GB, hit ratio {figures['hit_ratio']:.2f}")
    if args.out is not None:
        plot(kept, args.out)


def _generate(args: argparse.Namespace) -> None:
    write_trace(args.trace, at_rate(synthetic(args.requests, args.seed), args.rate or 1.0))


def _convert(args: argparse.Namespace) -> None:
    with args.source.open(encoding="utf-8") as lines:
        write_trace(args.trace, convert_block_hashes(lines, block_tokens=args.block_tokens))


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    generate = kinds.add_parser("generate", help="write a synthetic trace")
    generate.set_defaults(do=_generate)
    convert = kinds.add_parser("convert", help="turn a block-hash trace into one of ours")
    convert.set_defaults(do=_convert)
    convert.add_argument("source", type=Path)
    convert.add_argument("--block-tokens", type=int, default=512)
    replay = kinds.add_parser("replay", help="serve a trace under every policy")
    replay.set_defaults(do=_replay)
    replay.add_argument("--gpu", choices=sorted(GPUS), default="h200")
    replay.add_argument("--drive", type=float, default=6.0, help="GB/s")
    replay.add_argument("--break-even", type=Path, help="take f from this file instead")
    compare = kinds.add_parser("cells", help="the standing comparison")
    compare.set_defaults(do=_cells)
    compare.add_argument("--seeds", type=int, default=20)
    compare.add_argument("--date", default="", help="noted beside the figures")
    for kind in (generate, convert, replay):
        kind.add_argument("trace", type=Path)
    for kind in (generate, compare):
        kind.add_argument("--requests", type=int, default=300)
    for kind in (generate, replay):
        kind.add_argument("--seed", type=int, default=1)
        kind.add_argument("--rate", type=float, help="requests a second; as in the trace where left out")
    for kind in (replay, compare):
        kind.add_argument("--out", type=Path, help="figures and plots, without suffix")
    args = parser.parse_args()
    args.do(args)


if __name__ == "__main__":
    main()
