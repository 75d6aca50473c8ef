"""Long runs of the object table's world from a seed: deeper than hypothesis goes, a failure is its seed."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvpool.errors import Code
from tests.property.object_world import ENGINES, LIVE, SETTINGS, World
from tests.property.test_objects import ObjectTableMachine

STEPS = 250
DAMAGES = ["write", "write", "write", "corrupt", "remove"]


def run_seed(seed: int) -> World:
    """Run one world for STEPS random steps, then end it."""
    rng = random.Random(seed)
    machine = ObjectTableMachine(
        replace(
            SETTINGS,
            iodepth=rng.randint(1, 4),
            open_lookahead=rng.randint(1, 4),
            writes_inflight_beside_loads=rng.randint(1, 2),
            client_share=rng.choice([0.2, 0.5, 1.0]),
            staging_cache=rng.choice(["off", "lru", "arc"]),
        ),
        slots=rng.choice([6, 15, 20]),
    )
    world = machine.world

    def pick() -> int:
        return rng.randrange(2**16)

    keys, segments_max = rng.choice([8, 40]), rng.randint(2, 4)
    slow, greedy = rng.choice([0.3, 1.0, 4.0]), rng.choice([2, 15])
    for number in range(0, keys, 2):
        for group_written in (0, 1):
            machine.change_files(chosen=[number], group=group_written, damage="write")

    def chosen() -> list[int]:
        return [rng.randrange(keys) for _ in range(rng.randint(1, 6))]

    def group() -> int:
        return rng.choice([0, 0, 0, 1])

    def ended(*errors: Code) -> Code | None:
        return rng.choice([None] * 6 + list(errors))

    def any_of(attribute: str) -> bool:
        return any(getattr(rank, attribute) for rank in world.live())

    steps: list[tuple[float, Callable[[], object]]] = [
        (3, lambda: machine.join(engine=rng.choice(sorted(ENGINES)), rank=rng.randrange(2))),
        (1, lambda: world.live() and machine.leave(pick=pick())),
        (2, lambda: any(rank.left for rank in world.ranks.values()) and machine.prove(pick=pick())),
        (1, lambda: world.live() and machine.prove_before_leaving(pick=pick())),
        (2, lambda: len(world.segments) < segments_max and add_segment()),
        (0.4, lambda: len(world.segments) > len(world.recalled) and machine.recall(pick=pick())),
        (8, lambda: world.live() and machine.load(pick(), chosen(), group(), rng.random() < 0.3)),
        (2, lambda: any_of("jobs") and machine.cancel_load(pick=pick())),
        (greedy, lambda: any_of("pinned") and machine.release(pick=pick(), all_of_job=rng.random() < 0.5)),
        (6, lambda: machine.offer(rng.choice(sorted(ENGINES)), chosen(), group())),
        (8, lambda: world.offers and world.live() and machine.ask_store(pick=pick())),
        (15, lambda: any_of("granted") and machine.fill(pick=pick(), all_of_job=rng.random() < 0.5)),
        (4, lambda: any_of("jobs") and cancel_store()),
        (20, lambda: world.opening and machine.end_open(pick=pick(), error=ended(Code.READ_ERROR))),
        (20, lambda: world.reading and machine.end_read(pick=pick(), error=ended(Code.READ_ERROR))),
        (20, lambda: world.publishing and machine.end_publish(pick(), ended(Code.WRITE_ERROR, Code.DEVICE_FULL))),
        (3, lambda: machine.change_files(chosen(), group(), rng.choice(DAMAGES))),
        (2, lambda: machine.find_files(chosen=chosen(), group=group())),
        (2, lambda: machine.condemn(chosen=chosen(), group=group())),
        (4, lambda: world.removing and machine.end_removal(pick=pick(), removed=rng.random() < 0.8)),
        (0.5, lambda: machine.change_device(healthy=rng.random() < 0.8, storing=rng.random() < 0.8)),
        (3, lambda: machine.change_device(healthy=True, storing=True)),
        (slow, lambda: machine.pass_time(nanoseconds=rng.choice([1, 10, 60, 150, 400]))),
        (0.1, lambda: machine.pass_much_time(rare=0)),
        (1, lambda: world.live() and world.table.healthy and machine.nonsense(pick=pick())),
        (5, lambda: machine.admit(rng.choice(["a", "a", "c"]), chosen(), group(), rng.choice([0, 0, 1]))),
        (10, lambda: states("reserved") and machine.commit(pick=pick())),
        (3, lambda: states(*LIVE) and machine.withdraw(pick=pick())),
        (3, lambda: states(*LIVE) and world.live() and machine.load_admitted(pick=pick())),
    ]

    def states(*names: str) -> bool:
        return any(admission.state in names for admission in world.admissions.values())

    def add_segment() -> None:
        machine.add_segment(size=rng.choice([8192, 4096]), count=rng.randint(4, 6))

    def cancel_store() -> None:
        if any("store" in rank.jobs.values() for rank in world.live()):
            machine.cancel_store(pick=pick(), indices=[rng.randrange(6) for _ in range(3)])

    weights = [weight for weight, _ in steps]
    for _ in range(STEPS):
        rng.choices(steps, weights)[0][1]()
    world.settle()
    return world


@pytest.mark.parametrize("first", [0, 12, 24])
def test_long_runs_keep_every_promise_and_reach_every_outcome(first: int) -> None:
    answers: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for seed in range(first, first + 12):
        world = run_seed(seed)
        answers.update(world.answers)
        counts.update(world.table.statistics())
    silent = {
        "OpenFile", "ReadFile", "CloseFile", "PublishObject", "SetAside", "SendReady", "SendLoadFailed", "SendGranted",
        "SendExists", "SendDropped", "TellKey", "TellStoreEnded", "ReturnSegment", "RemoveKey", "SendPreloadAnswer",
        "SendPreloadLanded", "SendPreloadRevoked",
    } - set(answers)  # fmt: skip
    assert set() == silent
    rare = (
        "ops_late", "fills_late", "loads_parked", "corrupt", "writes_no_space", "keys_lost", "keys_stored",
        "cache_hits", "cache_evictions", "preloads_reserved", "preloads_given_up", "preload_reads", "preload_hits",
        "evicted_before_use",
    )  # fmt: skip
    assert [] == [name for name in rare if not counts[name]]
