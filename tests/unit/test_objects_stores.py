"""Stores: event in, actions out."""

from dataclasses import replace

import pytest

from kvpool.core.object_events import (
    Action,
    DeviceChanged,
    DrainStarted,
    Dropped,
    Event,
    ObjectId,
    PublishObject,
    SendDropped,
    SendExists,
    SendGranted,
    SendLoadFailed,
    SendReady,
    StoreCancelled,
    StoreWanted,
    TableSettings,
    TellKey,
    TellStoreEnded,
    TimePassed,
)
from kvpool.errors import Code, ProtocolError
from kvpool.wire.messages import RESIDENT, STORED
from tests.property.object_world import SETTINGS, Offer, Rank, World, key_of
from tests.unit.test_objects_loads import run_io

DEEP = replace(SETTINGS, iodepth=8, open_lookahead=8)


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def two_ranks(slots: int = 16, settings: TableSettings = DEEP) -> tuple[World, Rank, Rank]:
    world = World(settings)
    world.add_segment(8192, slots)
    return world, world.join("a", 0), world.join("a", 1)


def one_rank(slots: int = 16, settings: TableSettings = DEEP) -> tuple[World, Rank]:
    world = World(settings)
    world.add_segment(8192, slots)
    return world, world.join("c", 0)


def ask(world: World, rank: Rank, offer: Offer) -> list[Action]:
    """A rank asks for the whole offer; returns the actions."""
    before = len(world.log)
    world.ask_store(rank, offer)
    return [action for actions in world.log[before:] for action in actions]


def answers(actions: list[Action], kind: type[Action]) -> list[int]:
    """Return the indices answered with *kind*."""
    return [action.index for action in actions if isinstance(action, kind)]


def fill_all(world: World, *ranks: Rank) -> list[Action]:
    actions: list[Action] = []
    for rank in ranks:
        for job, index in list(rank.granted):
            actions += world.fill(rank, job, [index])
    return actions


def store(world: World, engine: str, ranks: list[Rank], *numbers: int) -> None:
    """Store these keys, published."""
    offer = world.offer(engine, keys(*numbers))
    for rank in ranks:
        world.ask_store(rank, offer)
    fill_all(world, *ranks)
    while world.publishing:
        for op in list(world.publishing):
            world.end_publish(op)


def test_the_first_ranks_ask_reserves_slots_for_all_ranks() -> None:
    world, first, second = two_ranks()
    offer = world.offer("a", keys(0, 1))
    assert [0, 1] == answers(ask(world, first, offer), SendGranted)
    assert 4 == world.table.statistics()["slots_filling"]
    assert [0, 1] == answers(ask(world, second, offer), SendGranted)
    assert 4 == world.table.statistics()["slots_filling"]


def test_a_filled_key_is_resident_then_stored_and_a_hit_all_the_time() -> None:
    world, first, second = two_ranks()
    offer = world.offer("a", keys(0))
    ask(world, first, offer)
    ask(world, second, offer)
    assert [] == world.fill(first, 1, [0])
    actions = world.fill(second, 1, [0])
    assert TellKey(namespace=1, key=key_of(0), flags=RESIDENT) == actions[0]
    assert TellStoreEnded(engine="a", key=key_of(0), kept=True) == actions[1]
    assert [0, 1] == [action.object.rank for action in actions if isinstance(action, PublishObject)]
    assert [] == world.end_publish(1)
    told = [action.flags for action in world.end_publish(2) if isinstance(action, TellKey)]
    assert [STORED | RESIDENT, STORED] == told
    assert (16, True) == (world.table.statistics()["slots_free"], world.table.drained())


def test_loads_of_what_this_process_stored_are_told_from_loads_of_what_it_found() -> None:
    world, rank = one_rank()
    found = ObjectId(rank.namespace, key_of(7), 0)
    world.files[found] = found
    store(world, "c", [rank], 0)
    for numbers, older in (((0,), 0), ((0, 7), 1), ((7,), 2)):
        world.do_load(rank, keys(*numbers))
        run_io(world)
        assert older == world.table.statistics()["loads_older"]


def test_keys_without_slots_for_all_ranks_wait_in_prefix_order_and_stream() -> None:
    world, first, second = two_ranks(slots=6)
    offer = world.offer("a", keys(0, 1, 2, 3))
    assert [0] == answers(ask(world, first, offer), SendGranted)
    assert [0] == answers(ask(world, second, offer), SendGranted)
    world.quiesce()
    assert (8, 0) == (world.answers["SendGranted"], world.answers["SendDropped"])


def test_a_key_that_gets_no_slots_in_time_is_dropped_and_all_behind_it() -> None:
    world, first, second = two_ranks(slots=6)
    offer = world.offer("a", keys(0, 1, 2))
    ask(world, first, offer)
    assert 1 + DEEP.store_deadline_ns == world.table.next_deadline_ns()
    world.now_ns += DEEP.store_deadline_ns
    actions = world.do(TimePassed())
    assert [1, 2] == answers(actions, SendDropped)
    ended = [TellStoreEnded(engine="a", key=key, kept=False) for key in keys(1, 2)]
    assert ended == [action for action in actions if isinstance(action, TellStoreEnded)]
    actions = ask(world, second, offer)
    assert ([0], [1, 2]) == (answers(actions, SendGranted), answers(actions, SendDropped))


def test_later_parts_of_a_cut_offer_are_dropped() -> None:
    world, first, second = two_ranks(slots=6)
    offer = world.offer("a", keys(0, 1))
    ask(world, first, offer)
    ask(world, second, offer)
    world.pass_time(DEEP.store_deadline_ns)
    world.quiesce()
    more = Offer("a", offer.store, keys(2))
    assert [0] == answers(ask(world, first, more), SendDropped)


def test_a_key_that_could_never_get_slots_is_dropped_at_once() -> None:
    world, first, _ = two_ranks(slots=1)
    assert [0] == answers(ask(world, first, world.offer("a", keys(0))), SendDropped)


def dropped(world: World) -> dict[Dropped, int]:
    """Return how many keys were dropped for which reasons."""
    counts = world.table.statistics()
    return {why: counts[f"keys_dropped_{why}"] for why in Dropped if counts[f"keys_dropped_{why}"]}


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (DeviceChanged(healthy=True, refusing=Dropped.OFF), Dropped.OFF),
        (DeviceChanged(healthy=True, refusing=Dropped.ROOM), Dropped.ROOM),
        (DeviceChanged(healthy=False, refusing=Dropped.OFF), Dropped.DEVICE),
        (DrainStarted(), Dropped.DRAINING),
    ],
)
def test_keys_are_dropped_for_what_their_device_or_pool_says(event: Event, why: Dropped) -> None:
    world, rank = one_rank()
    world.do(event)
    ask(world, rank, world.offer("c", keys(0, 1)))
    assert {why: 2} == dropped(world)


def test_keys_are_dropped_for_what_happens_to_them_and_those_behind_them_for_that() -> None:
    world, rank = one_rank(slots=4)
    ask(world, rank, world.offer("c", keys(0, 1, 2, 3, 4, 5)))
    world.do(StoreCancelled(client=rank.client, job=1, indices=[0]))
    assert {Dropped.CANCELLED: 1, Dropped.PREFIX: 4} == dropped(world)
    world.pass_time(DEEP.fill_deadline_ns)
    assert {Dropped.CANCELLED: 1, Dropped.PREFIX: 4, Dropped.LATE: 1} == dropped(world)


def test_keys_are_dropped_where_staging_has_too_few_slots_for_all_ranks() -> None:
    world, first, _ = two_ranks(slots=1)
    ask(world, first, world.offer("a", keys(0)))
    assert {Dropped.STAGING: 1} == dropped(world)


def test_an_engines_later_offer_takes_no_slots_that_an_earlier_one_waits_for() -> None:
    world, rank = one_rank(slots=4)
    ask(world, rank, world.offer("c", keys(0, 1, 2)))
    assert [] == answers(ask(world, rank, world.offer("c", keys(3))), SendGranted)
    granted = []
    while rank.granted:
        (job, index), *_ = rank.granted
        world.fill(rank, job, [index])
        for op in list(world.publishing):
            granted += [(a.job, a.index) for a in world.end_publish(op) if isinstance(a, SendGranted)]
    assert [(1, 2), (2, 0)] == granted


def test_a_stored_or_resident_key_exists_and_its_store_is_told_as_kept() -> None:
    world, rank = one_rank()
    store(world, "c", [rank], 0)
    ask(world, rank, world.offer("c", keys(1)))
    world.fill(rank, 2, [0])
    actions = ask(world, rank, world.offer("c", keys(0, 1)))
    assert [0, 1] == answers(actions, SendExists)
    assert [True, True] == [action.kept for action in actions if isinstance(action, TellStoreEnded)]


@pytest.mark.parametrize("kept", [True, False])
def test_a_key_that_another_engine_stores_exists_and_its_end_is_told_to_both(kept: bool) -> None:
    world, first, second = two_ranks()
    other = world.join("b", 0)
    offer = world.offer("a", keys(0))
    ask(world, first, offer)
    ask(world, second, offer)
    actions = ask(world, other, world.offer("b", keys(0)))
    assert ([0], []) == (answers(actions, SendExists), [a for a in actions if isinstance(a, TellStoreEnded)])
    ended = fill_all(world, first, second) if kept else world.cancel_store(first, 1, [0])
    told = {(action.engine, action.kept) for action in ended if isinstance(action, TellStoreEnded)}
    assert {("a", kept), ("b", kept)} == told


def test_an_object_of_one_rank_alone_does_not_make_a_key_exist() -> None:
    world, first, _ = two_ranks()
    object_id = ObjectId(1, key_of(0), 0)
    world.files[object_id] = object_id
    world.find_files([object_id])
    assert {} == world.flags
    assert [0] == answers(ask(world, first, world.offer("a", keys(0))), SendGranted)


def test_a_rank_that_does_not_fill_in_time_loses_the_key_for_all_and_keeps_its_slot_until_it_says_so() -> None:
    world, first, second = two_ranks()
    offer = world.offer("a", keys(0))
    ask(world, first, offer)
    ask(world, second, offer)
    world.fill(first, 1, [0])
    world.now_ns += DEEP.fill_deadline_ns
    assert [TellStoreEnded(engine="a", key=key_of(0), kept=False)] == world.do(TimePassed())
    assert 1 == world.table.statistics()["slots_filling"]
    assert [] == world.fill(second, 1, [0])
    assert 0 == world.table.statistics()["slots_filling"]


def test_one_ranks_cancel_drops_the_key_for_all() -> None:
    world, first, second = two_ranks()
    offer = world.offer("a", keys(0))
    ask(world, first, offer)
    assert [TellStoreEnded(engine="a", key=key_of(0), kept=False)] == world.cancel_store(first, 1, [0])
    assert 16 == world.table.statistics()["slots_free"]
    assert [0] == answers(ask(world, second, offer), SendDropped)


def test_a_cancel_of_a_waiting_key_is_not_answered_but_answers_the_other_rank() -> None:
    world, first, second = two_ranks(slots=6)
    offer = world.offer("a", keys(0, 1, 2))
    ask(world, first, offer)
    ask(world, second, offer)
    actions = world.cancel_store(first, 1, [1])
    dropped = [(a.client, a.index) for a in actions if isinstance(a, SendDropped)]
    assert [(second.client, 1), (first.client, 2), (second.client, 2)] == dropped


def test_a_cancel_that_crosses_its_answer_changes_nothing() -> None:
    world, rank = one_rank()
    store(world, "c", [rank], 0)
    ask(world, rank, world.offer("c", keys(0)))
    assert [] == world.cancel_store(rank, 2, [0])
    assert [] == world.cancel_store(rank, 77, [0, 1])


def test_a_departed_ranks_fills_are_dropped_and_quarantined_until_proof() -> None:
    world, first, second = two_ranks()
    offer = world.offer("a", keys(0))
    ask(world, first, offer)
    ask(world, second, offer)
    world.fill(second, 1, [0])
    assert [TellStoreEnded(engine="a", key=key_of(0), kept=False)] == world.leave(first)
    statistics = world.table.statistics()
    assert (1, 15) == (statistics["slots_quarantined"], statistics["slots_free"])
    world.prove(first)
    assert 16 == world.table.statistics()["slots_free"]


def test_what_a_departed_rank_never_asked_for_is_dropped_at_once() -> None:
    world, first, second = two_ranks()
    ask(world, first, world.offer("a", keys(0)))
    assert [TellStoreEnded(engine="a", key=key_of(0), kept=False)] == world.leave(second)
    assert 1 == world.table.statistics()["slots_filling"]


def test_what_was_filled_is_written_after_all_its_ranks_left() -> None:
    world, rank = one_rank()
    ask(world, rank, world.offer("c", keys(0)))
    fill_all(world, rank)
    world.prove(rank)
    assert not world.table.drained()
    world.quiesce()
    assert world.table.drained()
    assert STORED == world.flags[2, key_of(0)]


def test_a_load_of_an_object_that_is_being_filled_waits_for_all_ranks() -> None:
    world, first, second = two_ranks()
    offer = world.offer("a", keys(0))
    ask(world, first, offer)
    ask(world, second, offer)
    assert [] == world.do_load(first, keys(0))
    assert [] == world.fill(first, 1, [0])
    assert [0] == answers(world.fill(second, 1, [0]), SendReady)
    assert 0 == world.answers["OpenFile"]


def test_a_load_that_waits_for_a_fill_that_is_dropped_looks_for_the_file() -> None:
    world, first, _ = two_ranks()
    ask(world, first, world.offer("a", keys(0)))
    world.load(first, keys(0))
    world.cancel_store(first, 1, [0])
    (op,) = world.opening
    assert [0] == answers(world.end_open(op), SendLoadFailed)


def test_a_read_that_waits_is_answered_by_a_store_that_overtakes_it() -> None:
    world, first, second = two_ranks()
    world.load(first, keys(0))
    offer = world.offer("a", keys(0))
    ask(world, first, offer)
    ask(world, second, offer)
    assert [0] == answers(fill_all(world, first, second), SendReady)
    (op,) = world.opening
    world.end_open(op)
    world.quiesce()
    assert 16 == world.table.statistics()["slots_free"]


def test_writes_beside_loads_are_few_and_without_loads_use_the_whole_depth() -> None:
    world, rank = one_rank(slots=32, settings=replace(DEEP, writes_inflight_beside_loads=2))
    object_id = ObjectId(2, key_of(99), 0)
    world.files[object_id] = object_id
    world.load(rank, keys(99))
    ask(world, rank, world.offer("c", keys(*range(12))))
    fill_all(world, rank)
    assert 2 == len(world.publishing)
    (op,) = world.opening
    world.end_open(op, Code.MISSING)
    assert 8 == len(world.publishing)


def test_reads_leave_one_place_of_the_depth_to_a_waiting_write() -> None:
    world, rank = one_rank(slots=32, settings=replace(DEEP, iodepth=4, open_lookahead=16))
    for number in range(16):
        object_id = ObjectId(2, key_of(number), 0)
        world.files[object_id] = object_id
    world.load(rank, keys(*range(16)))
    for op in list(world.opening):
        world.end_open(op)
    assert 4 == len(world.reading)
    ask(world, rank, world.offer("c", keys(50)))
    fill_all(world, rank)
    world.end_read(min(world.reading))
    assert (3, 1) == (len(world.reading), len(world.publishing))


def test_stores_leave_a_reserve_for_loads() -> None:
    world, rank = one_rank(slots=20)
    actions = ask(world, rank, world.offer("c", keys(*range(30))))
    assert list(range(12)) == answers(actions, SendGranted)


def test_a_store_gets_its_share_under_any_load() -> None:
    world, first, second = two_ranks(slots=4, settings=replace(DEEP, load_deadline_ns=10**9))
    for number in range(200):
        object_id = ObjectId(1, key_of(number), 0)
        world.files[object_id] = object_id
    world.load(first, keys(*range(200)))
    for _ in range(3):
        for op in list(world.opening):
            world.end_open(op)
        for op in list(world.reading):
            world.end_read(op)
    assert 4 == len(first.pinned)
    offer = world.offer("a", keys(900))
    assert [] == answers(ask(world, first, offer), SendGranted)
    ask(world, second, offer)
    (job, _), *_ = first.pinned
    for index in sorted(index for _, index in first.pinned)[:2]:
        world.release(first, job, [index])
    assert (2, 2) == (len(first.granted) + len(second.granted), len(first.pinned))


def test_a_full_device_drops_stores_until_the_back_off_has_passed_while_loads_go_on() -> None:
    world, rank = one_rank()
    store(world, "c", [rank], 7)
    ask(world, rank, world.offer("c", keys(0)))
    fill_all(world, rank)
    (op,) = world.publishing
    assert [TellKey(namespace=2, key=key_of(0), flags=0)] == world.end_publish(op, Code.DEVICE_FULL)
    assert [0] == answers(ask(world, rank, world.offer("c", keys(1))), SendDropped)
    assert [0] == answers(ask(world, rank, world.offer("c", keys(7))), SendExists)
    world.load(rank, keys(7))
    world.quiesce()
    assert 1 == world.answers["SendReady"]
    world.pass_time(DEEP.device_full_backoff_ns)
    assert [0] == answers(ask(world, rank, world.offer("c", keys(2))), SendGranted)


def test_a_failed_write_makes_the_key_a_miss_for_all_ranks() -> None:
    world, first, second = two_ranks()
    offer = world.offer("a", keys(0))
    ask(world, first, offer)
    ask(world, second, offer)
    fill_all(world, first, second)
    world.end_publish(1)
    assert [TellKey(namespace=1, key=key_of(0), flags=0)] == world.end_publish(2, Code.WRITE_ERROR)
    assert 16 == world.table.statistics()["slots_free"]


def test_a_client_at_its_share_waits_with_its_stores_while_the_others_go_on() -> None:
    world, stopped = one_rank(slots=24)
    other = world.join("b", 0)
    world.join("b", 1)
    assert list(range(12)) == answers(ask(world, stopped, world.offer("c", keys(*range(16)))), SendGranted)
    assert [0, 1] == answers(ask(world, other, world.offer("b", keys(0, 1))), SendGranted)


def test_a_draining_table_takes_nothing_new_and_writes_what_is_filled() -> None:
    world, rank = one_rank()
    ask(world, rank, world.offer("c", keys(0)))
    world.drain()
    assert [0] == answers(ask(world, rank, world.offer("c", keys(1))), SendDropped)
    failed = SendLoadFailed(client=rank.client, job=3, index=0, code=Code.REFUSED)
    assert [failed] == world.do_load(rank, keys(0))
    assert not world.table.drained()
    world.quiesce()
    assert world.table.drained()
    assert STORED == world.flags[2, key_of(0)]


def test_a_late_write_keeps_its_slot_and_its_key() -> None:
    world, rank = one_rank()
    ask(world, rank, world.offer("c", keys(0)))
    fill_all(world, rank)
    world.pass_time(DEEP.op_deadline_ns)
    statistics = world.table.statistics()
    assert (1, 1) == (statistics["ops_late"], statistics["slots_resident"])
    assert RESIDENT == world.flags[2, key_of(0)]


def test_nonsense_in_stores_is_refused_before_anything_changes() -> None:
    world, rank = one_rank()
    offer = world.offer("c", keys(0))
    ask(world, rank, offer)
    before = world.table.statistics()
    for asked in (
        {"job": 1, "store": 5, "first": 0, "keys": keys(3)},
        {"job": 2, "store": 5, "first": 0, "keys": keys(3, 3)},
        {"job": 2, "store": offer.store, "first": 0, "keys": keys(0)},
        {"job": 2, "store": 5, "first": 0, "keys": [b"\0"]},
    ):
        with pytest.raises(ProtocolError):
            world.table.handle(StoreWanted(client=rank.client, **asked), now_ns=world.now_ns)
        world.table.validate()
    assert before == world.table.statistics()


def test_decisions_are_forgotten_once_every_rank_has_asked_or_cannot_any_more() -> None:
    world, first, second = two_ranks()
    store(world, "a", [first, second], *range(3))
    assert 0 == world.table.statistics()["offers"]
    ask(world, first, world.offer("a", keys(50)))
    world.pass_time(DEEP.fill_deadline_ns)
    assert 1 == world.table.statistics()["offers"]
    world.pass_time(DEEP.store_deadline_ns)
    assert 0 == world.table.statistics()["offers"]
