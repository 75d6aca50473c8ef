"""
Long runs of the simulator, and what users of one pool would wait.

    python tools/simulate.py schedules FIRST COUNT      random schedules with faults; the first broken one ends it
    python tools/simulate.py users [--seeds 1-20]       300 users over one pool, with and without arbitration

Theory of `users`. Users send requests, turns of their conversations: who, by Zipf; when, by Poisson, so that reads and
writes take a share of the drives' bandwidth; what, all earlier chunks of the conversation (on the drives already) and
one new one. The pool is the real one in the simulator (`tests/sim`). A request's *wait* is from its arrival to its
loaded bytes. Beside it stands a user alone: the same requests of each user, one after the other, on a drive with his
part of the bandwidth, whose staging holds nothing from turn to turn; no engine stands in his way.

Covers: figures and their page in `docs/results/`. Does not cover: what must never happen (the tests of `tests/sim`).
"""

import argparse
import json
import math
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kvpool import __version__  # noqa: E402 - found from the line above
from kvpool.core.budget import slot_bytes_of  # noqa: E402 - the same
from kvpool.core.placement import device_of  # noqa: E402 - the same
from tests.sim.engines import Request  # noqa: E402 - the same
from tests.sim.kernel import MS, S  # noqa: E402 - the same
from tests.sim.world import Plan, World, chunk_name, run_seed  # noqa: E402 - the same

#: Conversations start with so many chunks and end at so many.
CHUNKS_MIN, CHUNKS_MAX = 3, 10
#: Time for the pool to come up before the first request.
WARM_UP_NS = 300 * MS
#: What is wanted of the figures.
EVICTED_BY_LOADS_MAX = 0.02
WAIT_RATIO_MAX = 2.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all runs of the experiment have in common."""

    users: int = 300
    zipf: float = 0.9
    load: float = 0.7
    prefixes: int = 20
    requests: int = 600
    devices: int = 2
    bytes_per_s: float = 1e9
    object_bytes: int = 2 << 20
    iodepth: int = 8
    running_max: int = 10
    compute_ms: int = 200
    lookahead: int = 16
    cache: str = "arc"


@dataclass(frozen=True)
class Turn:
    """One request: whose, when (seconds), which conversation, how many chunks of it are on the drives."""

    user: int
    at_s: float
    conversation: int
    stored: int


def traffic(setting: Setting, rng: random.Random) -> tuple[list[Turn], dict[int, int]]:
    """Return the requests in order of time, and the chunks that each conversation has on the drives before."""
    weights = list(accumulate((user + 1) ** -setting.zipf for user in range(setting.users)))
    length = {user: rng.randint(CHUNKS_MIN, CHUNKS_MAX - 1) for user in range(setting.users)}
    conversation = dict.fromkeys(range(setting.users), 0)
    conversation |= {user: user for user in range(setting.users)}
    before = dict(length)
    following = setting.users
    drawn: list[tuple[int, int, int]] = []
    for _ in range(setting.requests):
        user = rng.choices(range(setting.users), cum_weights=weights)[0]
        if length[user] >= CHUNKS_MAX:
            conversation[user], length[user] = following, CHUNKS_MIN
            before[following] = CHUNKS_MIN
            following += 1
        drawn.append((user, conversation[user], length[user]))
        length[user] += 1
    bytes_mean = sum(stored + 1 for _, _, stored in drawn) / len(drawn) * slot_bytes_of(setting.object_bytes)
    rate = setting.load * setting.devices * setting.bytes_per_s / bytes_mean
    at_s, turns = 0.0, []
    for user, number, stored in drawn:
        at_s += rng.expovariate(rate)
        turns.append(Turn(user, at_s, number, stored))
    return turns, before


class UsersWorld(World):
    """The pool under users' traffic."""

    def __init__(self, plan: Plan, setting: Setting, turns: list[Turn], before: dict[int, int]) -> None:
        super().__init__(plan)
        self._setting, self._turns, self._before = setting, turns, before
        self.validates = False
        for drive in self.drives:
            drive.bytes_per_s, drive.mixed_penalty = setting.bytes_per_s, 1.5

    def draw(self) -> None:
        """Put the conversations on the drives, and let the requests come."""
        engine = self.engines["engine-0"]
        weights, healthy = [1] * len(self.drives), [True] * len(self.drives)
        for conversation, stored in self._before.items():
            first = engine.keys([chunk_name(conversation, 0)])[0]
            for position in range(stored):
                device = device_of(weights, healthy, first, position) or 0
                self.put(engine, chunk_name(conversation, position), self.drives[device])
        start_ns = self.kernel.now_ns + WARM_UP_NS
        for number, turn in enumerate(self._turns):
            chunks = [chunk_name(turn.conversation, position) for position in range(turn.stored + 1)]
            self.expect(start_ns + int(turn.at_s * S), "engine-0", Request(str(number), chunks))


def simulate(setting: Setting, seed: int, *, arbitrated: bool) -> dict[str, float]:
    """Run one seed; return its figures."""
    turns, before = traffic(setting, random.Random(seed))
    chunks_mean = sum(turn.stored for turn in turns) / len(turns)
    plan = Plan(
        seed=seed, devices=setting.devices, iodepth=setting.iodepth, object_bytes=[setting.object_bytes],
        slots=math.ceil(setting.prefixes * chunks_mean / setting.devices), cache=setting.cache, preload=arbitrated,
        lookahead=setting.lookahead, running_max=setting.running_max, compute_ms=setting.compute_ms,
        load_deadline_s=30.0, store_deadline_s=1.0, fill_deadline_s=30.0, operation_deadline_s=10.0,
    )  # fmt: skip
    world = UsersWorld(plan, setting, turns, before)
    world.run()
    waits_s = [0.0] * len(turns)
    for name, waited_ns in world.waits["request"]:
        waits_s[int(name)] = waited_ns / S
    tables = [worker.statistics() for worker in world.workers]
    counted = {name: sum(table.get(name, 0) for table in tables) for table in tables for name in table}
    reads = [count for drive in world.drives for count in drive.reads_of.values()]
    counts = world.counts
    alone_s = waits_alone(setting, turns)
    return {
        **{f"wait_{name}": value for name, value in _spread(waits_s).items()},
        "wait_worst_tenth_p99": worst_tenth_p99(turns, waits_s),
        "alone_worst_tenth_p99": worst_tenth_p99(turns, alone_s),
        **{f"{kind}_{name}": value for kind in ("load", "store", "preload")
           for name, value in _spread([ns / S for _, ns in world.waits.get(kind, [])]).items()},
        "hits_staging": counts.get("hits_resident", 0) / counts["keys_wanted"],
        "hits_drive": (counts.get("hits", 0) - counts.get("hits_resident", 0)) / counts["keys_wanted"],
        "preload_reads": counted.get("preload_reads", 0),
        "evicted_before_use": counted.get("evicted_before_use", 0) / max(1, counted.get("preload_reads", 0)),
        "admissions_taken_by_loads": counted.get("preloads_revoked", 0) / max(1, counted.get("preloads_reserved", 0)),
        "read_twice": sum(count - 1 for count in reads) / max(1, sum(reads)),
        "loads_failed": counts.get("loads_failed", 0),
        "objects_not_stored": counts.get("store_objects_failed", 0) / max(1, counts.get("store_objects", 0)),
        "drives_busy": sum(drive.busy_ns for drive in world.drives) / len(world.drives) / S / turns[-1].at_s,
    }  # fmt: skip


def waits_alone(setting: Setting, turns: Sequence[Turn]) -> list[float]:
    """Return how long each request waits where every user has his part of the drives for himself."""
    share = setting.devices * setting.bytes_per_s / setting.users
    free_s: dict[int, float] = {}
    waits = []
    for turn in turns:
        done_s = max(turn.at_s, free_s.get(turn.user, 0.0)) + turn.stored * slot_bytes_of(setting.object_bytes) / share
        free_s[turn.user] = done_s
        waits.append(done_s - turn.at_s)
    return waits


def worst_tenth_p99(turns: Sequence[Turn], waits_s: Sequence[float]) -> float:
    """Return the p99 wait over the requests of that tenth of the users that wait longest on average."""
    of_user: dict[int, list[float]] = {}
    for turn, wait_s in zip(turns, waits_s, strict=True):
        of_user.setdefault(turn.user, []).append(wait_s)
    by_mean = sorted(of_user.values(), key=lambda waits: sum(waits) / len(waits))
    worst = by_mean[-max(1, len(by_mean) // 10) :]
    return _quantile([wait for waits in worst for wait in waits], 0.99)


def _quantile(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": _quantile(values, 0.5), "p99": _quantile(values, 0.99)}


def _one(job: tuple[Setting, int, bool]) -> dict[str, float]:
    setting, seed, arbitrated = job
    return simulate(setting, seed, arbitrated=arbitrated)


def users(setting: Setting, seeds: Sequence[int], processes: int, out: Path, command: str) -> None:
    """Run all seeds both ways; write the figures and their page."""
    began = time.monotonic()
    jobs = [(setting, seed, arbitrated) for seed in seeds for arbitrated in (True, False)]
    with ProcessPoolExecutor(processes) as pool:
        results = []
        for (_, seed, arbitrated), result in zip(jobs, pool.map(_one, jobs), strict=True):
            results.append(result)
            print(f"seed {seed} {'on' if arbitrated else 'off'}: p99 {result['wait_p99']:.3f} s", file=sys.stderr)
    runs = {"on": results[0::2], "off": results[1::2]}
    means = {way: {name: sum(run[name] for run in of) / len(of) for name in of[0]} for way, of in runs.items()}
    worst = {way: max(run["wait_worst_tenth_p99"] / run["alone_worst_tenth_p99"] for run in of)
             for way, of in runs.items()}  # fmt: skip
    story = {
        "command": command, "date": datetime.now(UTC).date().isoformat(), "kvpool": __version__,
        "commit": _commit(), "python": platform.python_version(), "seconds": round(time.monotonic() - began, 1),
        "setting": setting.__dict__, "seeds": list(seeds), "means": means, "wait_ratio_worst_seed": worst, "runs": runs,
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "simulation-users.json").write_text(json.dumps(story, indent=1) + "\n", encoding="utf-8")
    page = _page(setting, story, means, runs, worst)
    (out / "simulation-users.md").write_text(page, encoding="utf-8")
    print(page)


_ROWS = (
    ("wait of a request, p50, s", "wait_p50"), ("wait of a request, p99, s", "wait_p99"),
    ("wait of the worst tenth of users, p99, s", "wait_worst_tenth_p99"),
    ("the same for users alone, s", "alone_worst_tenth_p99"),
    ("load jobs, p50, s", "load_p50"), ("load jobs, p99, s", "load_p99"),
    ("store jobs, p50, s", "store_p50"), ("store jobs, p99, s", "store_p99"),
    ("preloads, asked to landed, p50, s", "preload_p50"), ("preloads, asked to landed, p99, s", "preload_p99"),
    ("keys found in staging", "hits_staging"), ("keys found on drives", "hits_drive"),
    ("objects read ahead", "preload_reads"), ("of these, evicted before use", "evicted_before_use"),
    ("admissions that loads took", "admissions_taken_by_loads"), ("reads of what was read before", "read_twice"),
    ("objects not stored", "objects_not_stored"), ("loads failed", "loads_failed"), ("drives busy", "drives_busy"),
)  # fmt: skip


def _page(
    setting: Setting, story: dict[str, object], means: dict[str, dict[str, float]],
    runs: dict[str, list[dict[str, float]]], worst: dict[str, float],
) -> str:  # fmt: skip
    evicted = max(run["evicted_before_use"] for run in runs["on"])
    taken = max(run["admissions_taken_by_loads"] for run in runs["on"])
    # Where loads took nothing, whatever was evicted was evicted by others.
    kept = _verdict(max(evicted, taken) <= EVICTED_BY_LOADS_MAX and (taken > 0 or evicted == 0))
    waited = _verdict(worst["on"] <= WAIT_RATIO_MAX)
    rows = "\n".join(f"| {label} | {means['on'][name]:.4g} | {means['off'][name]:.4g} |" for label, name in _ROWS)
    return f"""# {setting.users} users over one pool, simulated

Conversations grow by a chunk of {setting.object_bytes >> 20} MiB with each request, from {CHUNKS_MIN} to {CHUNKS_MAX}
chunks; users by Zipf {setting.zipf}, arrivals by Poisson at {setting.load:.0%} of {setting.devices} drives of
{setting.bytes_per_s / 1e9:g} GB/s; staging for {setting.prefixes} prefixes, `staging_cache = "{setting.cache}"`;
{setting.requests} requests a seed, seeds {_named(story["seeds"])}. The pool's real processes run in the simulator
(`tests/sim`). On: preload with admission; off: objects are read when requests start. Means over the seeds:

| | on | off |
|---|---|---|
{rows}

Targets, in the worst seed:

- Preloaded and evicted before use: {evicted:.2%} of the objects read ahead; admissions that loads took: {taken:.2%}
  (at most {EVICTED_BY_LOADS_MAX:.0%}, and by loads only): {kept}.
- p99 wait of the worst tenth of users over that of users alone: {worst["on"]:.3g}
  (at most {WAIT_RATIO_MAX:g}): {waited}; without arbitration {worst["off"]:.3g}.

Alone means: 1/{setting.users} of the drives and of the staging for each user, which holds no whole prefix, and no
engine in the way. An alone user reads {setting.users} times slower, so that bar is low; "on" against "off" tells more.

`{story["command"]}`, {story["date"]}, kvpool {story["kvpool"]} at {story["commit"]}, Python {story["python"]}.
"""


def _verdict(met: bool) -> str:
    return "met" if met else "**missed**"


def _named(seeds: object) -> str:
    listed = list(seeds) if isinstance(seeds, list) else []
    return f"{listed[0]} to {listed[-1]}" if len(listed) > 1 else str(listed[0])


def _commit() -> str:
    found = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True
    )
    return found.stdout.strip() or "an unknown commit"


def schedules(first: int, count: int) -> None:
    """Run random schedules; tell what happened in them all together."""
    totals: dict[str, int] = {}
    for seed in range(first, first + count):
        for name, value in run_seed(seed).counts.items():
            totals[name] = totals.get(name, 0) + value
    print(f"{count} schedules from seed {first}: nothing broken; {json.dumps(totals)}")


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    some = commands.add_parser("schedules")
    some.add_argument("first", type=int)
    some.add_argument("count", type=int)
    many = commands.add_parser("users")
    many.add_argument("--seeds", default="1-20")
    many.add_argument("--requests", type=int, default=Setting.requests)
    many.add_argument("--users", type=int, default=Setting.users)
    many.add_argument("--cache", default=Setting.cache)
    many.add_argument("--processes", type=int, default=2)
    many.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    arguments = parser.parse_args()
    if arguments.command == "schedules":
        schedules(arguments.first, arguments.count)
        return
    first, _, last = arguments.seeds.partition("-")
    seeds = list(range(int(first), int(last or first) + 1))
    setting = Setting(users=arguments.users, requests=arguments.requests, cache=arguments.cache)
    command = f"python tools/simulate.py {' '.join(sys.argv[1:])}"
    users(setting, seeds, arguments.processes, arguments.out, command)


if __name__ == "__main__":
    main()
