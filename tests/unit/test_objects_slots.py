"""States of a slot, pools of one slot size, and the queues beside them."""

from itertools import product

import pytest

from kvpool.core.deadlines import Deadlines
from kvpool.core.fair_queue import FairQueue
from kvpool.core.object_events import ObjectId, SlotRef
from kvpool.core.slots import (
    TRANSITIONS,
    Segment,
    Slot,
    SlotPool,
    SlotState,
    SlotStep,
    transitions_dot,
    transitions_text,
)
from kvpool.errors import InvariantError

OBJECT = ObjectId(1, b"key\0\0\0\0", 0)


def pool_of(total: int, iodepth: int = 16) -> SlotPool:
    pool = SlotPool(8192, iodepth, [])
    pool.add_segment(1, total)
    return pool


@pytest.mark.parametrize(("state", "step"), sorted(set(product(SlotState, SlotStep)) - set(TRANSITIONS), key=str))
def test_a_step_that_is_not_in_the_table_is_a_bug(state: SlotState, step: SlotStep) -> None:
    slot = Slot(SlotRef(1, 0), Segment(1, pool_of(1)), state=state)
    with pytest.raises(InvariantError, match="no such slot transition"):
        slot.step(step)


def test_only_proof_leads_out_of_filling_and_quarantined() -> None:
    out = {step for (state, step) in TRANSITIONS if state in (SlotState.FILLING, SlotState.QUARANTINED)}
    assert {SlotStep.FILL, SlotStep.SPOIL, SlotStep.ABANDON, SlotStep.PROVE} == out
    assert SlotState.QUARANTINED is TRANSITIONS[SlotState.FILLING, SlotStep.ABANDON]


def test_the_printed_tables_name_every_transition() -> None:
    assert len(TRANSITIONS) == len(transitions_text().splitlines())
    assert len(TRANSITIONS) == transitions_dot().count("->")
    assert "quarantined  --departed users proven gone" in transitions_text()


@pytest.mark.parametrize("users", ["pins", "ghosts", "held"])
def test_a_slot_with_a_user_never_becomes_free(users: str) -> None:
    slot = pool_of(1).take(OBJECT, by_store=False)
    slot.step(SlotStep.FILL)
    setattr(slot, users, 1)
    with pytest.raises(InvariantError, match="became free"):
        slot.step(SlotStep.DROP)


@pytest.mark.parametrize(
    ("total", "ranks", "capacity"),
    [(64, 1, 48), (64, 8, 48), (16, 1, 8), (16, 8, 8), (10, 8, 8), (8, 8, 8), (4, 8, 4), (1, 1, 1), (0, 1, 0)],
)
def test_stores_leave_a_reserve_but_never_less_than_one_key(total: int, ranks: int, capacity: int) -> None:
    assert capacity == pool_of(total).store_capacity(ranks)


def test_a_recalled_segment_gives_nothing_and_is_returned_with_its_last_slot() -> None:
    pool = pool_of(2)
    pool.add_segment(2, 1)
    home = pool.segments[1]
    taken = [pool.take(OBJECT, by_store=False) for _ in range(3)]
    pool.recall_segment(home)
    pool.validate()
    assert 1 == pool.total
    for slot in taken:
        assert [] == pool.emptied
        slot.step(SlotStep.SPOIL)
    assert [home] == pool.emptied
    assert [SlotRef(2, 0)] == [slot.ref for slot in pool.free]


def test_owners_of_a_fair_queue_take_turns() -> None:
    queue: FairQueue[str] = FairQueue()
    for owner, item in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1")]:
        queue.push(owner, item)
    queue.push_first("a", "a0")
    assert queue.discard("a", "a2")
    assert not queue.discard("a", "a2")
    assert ["a0", "b1", "a1", "a3"] == [queue.pop() for _ in range(len(queue))]
    assert not queue


def test_a_deadline_that_was_met_is_forgotten() -> None:
    due: dict[str, int] = {}
    deadlines: Deadlines[str] = Deadlines(10, lambda item, at: due.get(item) == at)
    due["a"], due["b"], due["c"] = (deadlines.start(item, now) for item, now in (("a", 1), ("b", 2), ("c", 3)))
    assert 11 == deadlines.next_ns()
    del due["a"]
    assert 12 == deadlines.next_ns()
    assert [] == deadlines.expired(11)
    assert ["b"] == deadlines.expired(12)
    del due["c"]
    assert deadlines.next_ns() is None
    assert 0 == len(deadlines)
