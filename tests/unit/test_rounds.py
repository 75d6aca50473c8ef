"""The planner's work cut into steps."""

import math

from kvpool.core.planner import Ask, Kind, Load, Planner
from kvpool.core.rounds import EVERY_NS, Rounds
from tests.unit.planner_world import ask, prices

PRICES = prices()


class Queue:
    """Waiting requests, and which of them were looked at."""

    def __init__(self, count: int) -> None:
        self.asks = {f"r{number}": ask(f"r{number}", 1000, [0] * 8) for number in range(count)}
        self.seen: list[str] = []
        self.rounds = Rounds(Planner(), asks_per_step=2)

    def ask_of(self, name: str) -> Ask | None:
        self.seen.append(name)
        return self.asks.get(name)

    def step(self, now_ns: int) -> list[str]:
        self.seen = []
        self.rounds.step(lambda: list(self.asks), self.ask_of, lambda: Load(0.0, [0.0]), PRICES, now_ns=now_ns)
        return self.seen


def test_a_round_goes_on_over_steps_in_order() -> None:
    queue = Queue(5)
    assert [["r0", "r1"], ["r2", "r3"], ["r4"], []] == [queue.step(now_ns) for now_ns in range(4)]
    assert 5 == sum(queue.rounds.known(name) is not None for name in queue.asks)


def test_a_round_begins_only_after_a_change_and_not_too_soon() -> None:
    queue = Queue(1)
    queue.step(0)
    assert [] == queue.step(EVERY_NS)
    queue.rounds.changed()
    assert [] == queue.step(EVERY_NS - 1)
    assert ["r0"] == queue.step(EVERY_NS)


def test_who_left_meanwhile_is_passed_over() -> None:
    queue = Queue(4)
    queue.step(0)
    del queue.asks["r2"]
    assert ["r2", "r3"] == queue.step(1)
    assert queue.rounds.known("r2") is None


def test_an_unknown_request_is_decided_when_asked_about() -> None:
    queue = Queue(1)
    queue.step(0)
    queue.asks["new"] = ask("new", 1000, [0] * 8)
    found = queue.rounds.verdict(lambda: queue.asks["new"], "new", PRICES, now_ns=1)
    assert math.isclose(0.4 + 0.4 + 0.2, found.load_s)  # reads behind r0's
    assert math.isclose(0.2 + 1.0, found.recompute_s)  # computes behind r0


def test_a_deferral_past_its_end_is_decided_anew() -> None:
    queue = Queue(0)
    rounds, waits = queue.rounds, ask("a", 1000, [0] * 8, preloading=True)
    rounds.step(list, queue.ask_of, lambda: Load(3.0, [0.0]), PRICES, now_ns=0)
    found = rounds.verdict(lambda: waits, "a", PRICES, now_ns=0)
    assert Kind.DEFER is found.kind
    assert found is rounds.verdict(lambda: waits, "a", PRICES, now_ns=found.until_ns - 1)
    assert Kind.ADMIT is rounds.verdict(lambda: waits, "a", PRICES, now_ns=found.until_ns).kind


def test_a_forgotten_request_leaves_nothing_and_is_a_change() -> None:
    queue = Queue(1)
    queue.step(0)
    queue.rounds.forget("r0")
    assert queue.rounds.known("r0") is None
    assert ["r0"] == queue.step(EVERY_NS)
    assert {"planned_rounds": 2, "planned_admit": 1} == queue.rounds.statistics()
