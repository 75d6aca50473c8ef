"""Preloads in the object table: whole admissions, reads in the pauses of loads, and who may take what."""

from dataclasses import replace

import pytest

from kvpool.core.object_events import (
    Action,
    CloseFile,
    DeviceChanged,
    ObjectId,
    OpenFile,
    PreloadAsked,
    ReadFile,
    SendLoadFailed,
    SendPreloadAnswer,
    SendPreloadLanded,
    SendPreloadRevoked,
    SendReady,
    TableSettings,
    TellKey,
)
from kvpool.core.slots import FLOOR_SLOTS
from kvpool.errors import Code, InvariantError
from kvpool.wire.messages import RESIDENT, STORED
from tests.property.object_world import CORRUPT, SETTINGS, Admission, Rank, World, key_of

AHEAD = replace(SETTINGS, iodepth=2, open_lookahead=4)
FLOOR = 2 + FLOOR_SLOTS


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def world_with(
    above_floor: int, engine: str = "c", settings: TableSettings = AHEAD, files: int = 60
) -> tuple[World, list[Rank]]:
    """Return a world with so many slots above the floor, with all ranks of an engine and their files."""
    world = World(settings)
    world.add_segment(8192, FLOOR + above_floor)
    ranks = [world.join(engine, rank) for rank in range(2 if engine != "c" else 1)]
    for rank in ranks:
        for number in range(files):
            object_id = ObjectId(rank.namespace, key_of(number), rank.rank)
            world.files[object_id] = object_id
            world.find_files([object_id])
    return world, ranks


def run_io(world: World) -> None:
    """Let the device end what it was asked for, until it is asked for nothing more."""
    while world.opening or world.reading:
        for op in list(world.opening):
            world.end_open(op)
        for op in list(world.reading):
            world.end_read(op)


def admitted(world: World, *numbers: int, namespace: int = 2, priority: int = 0, read: bool = True) -> Admission:
    """Return a committed admission, landed if *read*."""
    admission = world.admit(namespace, keys(*numbers), priority)
    assert "reserved" == admission.state
    world.commit(admission)
    if read:
        run_io(world)
        assert "landed" == admission.state
    return admission


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def counted(world: World, *names: str) -> list[int]:
    statistics = world.table.statistics()
    return [statistics[name] for name in names]


# ---------------------------------------------------------------- asked, committed, landed


def test_nothing_is_read_before_the_commit_and_landing_is_told_once() -> None:
    world, _ = world_with(4)
    admission = world.admit(2, keys(1, 2))
    assert [[SendPreloadAnswer(admission=admission.admission, reserved=True)]] == world.log[-1:]
    assert [2, 2] == counted(world, "slots_reserved", "slots_admitted")
    assert [OpenFile, OpenFile] == kinds(world.commit(admission))
    assert [ReadFile] == kinds(world.end_open(next(iter(world.opening))))
    assert [ReadFile] == kinds(world.end_open(next(iter(world.opening))))
    first, second = list(world.reading)
    assert [TellKey(namespace=2, key=key_of(1), flags=STORED | RESIDENT)] == world.end_read(first)
    assert [
        TellKey(namespace=2, key=key_of(2), flags=STORED | RESIDENT), SendPreloadLanded(admission=admission.admission)
    ] == world.end_read(second)  # fmt: skip
    assert [] == world.commit(admission)
    assert [0, 2, 2] == counted(world, "slots_reserved", "slots_admitted", "preload_reads")


def test_an_admission_gets_all_or_nothing_and_only_above_the_floor() -> None:
    world, _ = world_with(4)
    assert "refused" == world.admit(2, keys(*range(5))).state
    assert [0, 0, FLOOR + 4] == counted(world, "slots_reserved", "admissions", "slots_free")
    assert "reserved" == world.admit(2, keys(*range(4))).state
    assert "refused" == world.admit(2, keys(9)).state


def test_a_pool_within_its_floor_preloads_nothing() -> None:
    world, _ = world_with(0)
    assert "refused" == world.admit(2, keys(1)).state


def test_the_objects_of_all_ranks_are_reserved_and_the_key_is_resident_with_the_last() -> None:
    world, _ = world_with(3, engine="a")
    assert "refused" == world.admit(1, keys(1, 2)).state
    admission = world.admit(1, keys(1))
    world.commit(admission)
    for op in list(world.opening):
        world.end_open(op)
    first, second = list(world.reading)
    world.end_read(first)
    assert STORED == world.flags[1, key_of(1)]
    world.end_read(second)
    assert STORED | RESIDENT == world.flags[1, key_of(1)]


def test_objects_in_staging_are_protected_and_need_no_slot_of_their_own() -> None:
    world, [rank] = world_with(2)
    job = world.load(rank, keys(1))
    run_io(world)
    admission = world.admit(2, keys(1, 2))
    assert [1] == counted(world, "slots_reserved")
    world.commit(admission)
    run_io(world)
    assert "landed" == admission.state
    world.release(rank, job, [0])
    assert STORED | RESIDENT == world.flags[2, key_of(1)]
    assert [2, 2] == counted(world, "slots_resident", "reads")


def test_an_admission_of_what_is_resident_has_landed_with_its_commit() -> None:
    world, _ = world_with(2)
    admitted(world, 1)
    again = world.admit(2, keys(1))
    assert [SendPreloadLanded(admission=again.admission)] == world.commit(again)


def test_an_admission_of_nothing_has_landed_with_its_commit() -> None:
    world, _ = world_with(2)
    empty = world.admit(2, [key_of(1, group=9)])
    assert [SendPreloadLanded(admission=empty.admission)] == world.commit(empty)


@pytest.mark.parametrize(("damage", "flags"), [("remove", 0), ("corrupt", 0)])
def test_a_file_that_is_not_there_is_given_up_and_remembered_until_stored(damage: str, flags: int) -> None:
    world, [rank] = world_with(4)
    object_id = ObjectId(2, key_of(1), 0)
    if damage == "remove":
        del world.files[object_id]
    else:
        world.files[object_id] = CORRUPT
    admission = admitted(world, 1, 2)
    assert flags == world.flags[2, key_of(1)]
    assert [1, 1, 0] == counted(world, "preloads_given_up", "slots_admitted", "slots_reserved")
    world.withdraw(admission)
    again = world.admit(2, keys(1))
    assert [SendPreloadLanded] == kinds(world.commit(again))
    job = world.ask_store(rank, world.offer("c", keys(1)))
    world.fill(rank, job, [0])
    for op in list(world.publishing):
        world.end_publish(op)
    assert [OpenFile] == kinds(world.commit(world.admit(2, keys(1))))


def test_a_read_that_fails_or_is_late_is_given_up_and_the_rest_lands() -> None:
    world, _ = world_with(4)
    admission = admitted(world, 1, 2, 3, read=False)
    world.end_open(next(iter(world.opening)), Code.READ_ERROR)
    world.end_open(next(iter(world.opening)))
    world.pass_time(SETTINGS.op_deadline_ns + 1)
    assert "landed" == admission.state
    assert [3, 0, 0] == counted(world, "preloads_given_up", "slots_admitted", "slots_reserved")
    run_io(world)
    assert [0] == counted(world, "slots_filling")


@pytest.mark.parametrize("opened", [False, True])
def test_a_late_read_that_lands_serves_the_admission_that_reads_again(opened: bool) -> None:
    world, _ = world_with(6, settings=replace(AHEAD, staging_cache="lru"))
    first = admitted(world, 1, read=False)
    world.end_open(next(iter(world.opening)))
    (late,) = world.reading
    world.pass_time(AHEAD.op_deadline_ns + 1)
    world.withdraw(first)
    second = admitted(world, 1, read=False)
    if opened:
        world.end_open(next(iter(world.opening)))
    world.end_read(late)
    assert "landed" == second.state
    run_io(world)
    assert [1, 1] == counted(world, "slots_resident", "slots_admitted")


def test_a_later_priority_and_arrival_is_read_later() -> None:
    world, _ = world_with(8, settings=replace(AHEAD, open_lookahead=1))
    admissions = [world.admit(2, keys(number), priority) for number, priority in ((1, 1), (2, 0), (3, 0))]
    for admission in admissions:
        world.commit(admission)
    read = []
    while world.opening:
        read.append(next(iter(world.opening.values())).key)
        run_io_once(world)
    assert keys(1, 2, 3) == read


def run_io_once(world: World) -> None:
    for op in list(world.opening):
        world.end_open(op)
    for op in list(world.reading):
        world.end_read(op)


# ---------------------------------------------------------------- shared


def test_two_admissions_share_slots_and_reads_and_either_protects() -> None:
    world, _ = world_with(3)
    first, second = admitted(world, 1, 2, read=False), admitted(world, 2, 3, read=False)
    assert [3] == counted(world, "slots_reserved")
    run_io(world)
    assert ["landed", "landed"] == [first.state, second.state]
    assert [3] == counted(world, "reads")
    world.withdraw(first)
    assert [0, STORED | RESIDENT] == [world.flags[2, key_of(1)] & RESIDENT, world.flags[2, key_of(2)]]
    assert [2, FLOOR + 1] == counted(world, "slots_admitted", "slots_free")


def test_a_load_claims_what_has_landed_without_a_read() -> None:
    world, [rank] = world_with(2)
    admission = admitted(world, 1)
    actions = world.do_load(rank, keys(1))
    assert [SendReady] == kinds(actions)
    world.release(rank, 1, [0])
    assert [1, 1] == counted(world, "preload_hits", "slots_resident")
    world.withdraw(admission)
    assert [0, 0] == counted(world, "slots_resident", "evicted_before_use")


@pytest.mark.parametrize("stage", ["opening", "reading"])
def test_a_load_claims_a_preload_in_flight_without_another_read(stage: str) -> None:
    world, [rank] = world_with(2)
    admission = admitted(world, 1, read=False)
    if stage == "reading":
        world.end_open(1)
    assert [] == world.do_load(rank, keys(1))
    run_io(world)
    assert (1, 1, 1) == (world.answers["OpenFile"], world.answers["ReadFile"], world.answers["SendReady"])
    assert "landed" == admission.state


def test_a_load_that_gives_up_leaves_its_read_to_the_preload() -> None:
    world, [rank] = world_with(2)
    admission = world.admit(2, keys(1, 2))
    job = world.load(rank, keys(1))
    world.commit(admission)
    assert 1 == len(world.opening)
    world.cancel_load(rank, job)
    assert keys(1, 2) == [object_id.key for object_id in world.opening.values()]
    run_io(world)
    assert ("landed", 2) == (admission.state, world.answers["OpenFile"])


def test_an_admission_joins_the_read_of_a_load() -> None:
    world, [rank] = world_with(1)
    job = world.load(rank, keys(1))
    world.end_open(1)
    admission = world.admit(2, keys(1))
    assert [0, 1] == counted(world, "slots_reserved", "slots_admitted")
    world.commit(admission)
    world.end_read(1)
    assert ("landed", 1) == (admission.state, world.answers["ReadFile"])
    world.release(rank, job, [0])
    assert [1] == counted(world, "slots_resident")


def test_an_admission_waits_for_a_store_and_takes_its_slot() -> None:
    world, [rank] = world_with(2)
    job = world.ask_store(rank, world.offer("c", keys(70)))
    admission = world.admit(2, keys(70))
    assert [] == world.commit(admission)
    world.fill(rank, job, [0])
    assert ("landed", 0) == (admission.state, world.answers["OpenFile"])
    for op in list(world.publishing):
        world.end_publish(op)
    assert STORED | RESIDENT == world.flags[2, key_of(70)]


def test_an_admission_gives_up_what_a_store_did_not_bring_but_no_file_holds() -> None:
    world, [rank] = world_with(2)
    job = world.ask_store(rank, world.offer("c", keys(70)))
    admission = world.admit(2, keys(70))
    world.commit(admission)
    world.cancel_store(rank, job, [0])
    run_io(world)
    assert "landed" == admission.state
    assert [1, 0] == counted(world, "preloads_given_up", "slots_admitted")


def test_a_store_may_overtake_a_preload() -> None:
    world, [rank] = world_with(2)
    world.files.pop(ObjectId(2, key_of(70), 0), None)
    admission = admitted(world, 70, read=False)
    job = world.ask_store(rank, world.offer("c", keys(70)))
    world.fill(rank, job, [0])
    assert "landed" == admission.state
    run_io(world)
    assert [1, 0, 1] == counted(world, "slots_admitted", "slots_reserved", "slots_resident")


# ---------------------------------------------------------------- loads first


def test_a_preload_starts_only_when_no_load_waits_opens_or_reads() -> None:
    world, [rank] = world_with(4)
    world.load(rank, keys(9))
    admission = world.admit(2, keys(1))
    assert [] == world.commit(admission)
    assert [ReadFile] == kinds(world.end_open(1))
    assert [SendReady, OpenFile] == kinds(world.end_read(1))


def test_files_opened_ahead_are_given_back_to_a_load_and_opened_again_in_order() -> None:
    world, [rank] = world_with(6)
    admitted(world, 1, 2, 3, 4, read=False)
    for op in list(world.opening):
        world.end_open(op)
    assert (2, 2) == (len(world.reading), len(world.opened))
    assert [CloseFile, CloseFile, OpenFile] == sorted(kinds(world.do_load(rank, keys(9))), key=str)
    for op in list(world.reading):
        world.end_read(op)
    assert {} == world.reading
    world.end_open(next(iter(world.opening)))
    world.end_read(next(iter(world.reading)))
    assert keys(3, 4) == [object_id.key for object_id in world.opening.values()]


def test_opens_of_loads_and_preloads_share_the_look_ahead() -> None:
    world, [rank] = world_with(6)
    admitted(world, 1, 2, 3, 4, read=False)
    assert 4 == len(world.opening)
    assert [] == world.do_load(rank, keys(9))
    assert [CloseFile, OpenFile] == kinds(world.end_open(1))


def test_what_is_resident_is_served_while_preloads_read() -> None:
    world, [rank] = world_with(6)
    admitted(world, 1)
    admitted(world, 2, read=False)
    world.end_open(next(iter(world.opening)))
    assert [SendReady] == kinds(world.do_load(rank, keys(1)))


# ---------------------------------------------------------------- who takes from whom


def test_a_load_takes_the_last_admission_as_a_whole_and_no_other() -> None:
    world, [rank] = world_with(6)
    first, late, second = (
        admitted(world, *numbers, priority=priority) for numbers, priority in (((1, 2), 0), ((3, 4), 1), ((5, 6), 0))
    )
    world.load(rank, keys(*range(20, 20 + FLOOR)))
    run_io(world)
    assert FLOOR == len(rank.pinned)
    world.load(rank, keys(40))
    run_io(world)
    assert ["landed"] * 3 == [first.state, late.state, second.state]
    lose_patience(world)
    assert ["landed", "revoked", "landed"] == [first.state, late.state, second.state]
    assert [SendPreloadRevoked(admission=late.admission)] == [
        action for actions in world.log for action in actions if isinstance(action, SendPreloadRevoked)
    ]
    assert FLOOR + 1 == len(rank.pinned)
    assert [] == world.withdraw(late)


def lose_patience(world: World) -> None:
    """Let loads wait for slots for as long as they do."""
    world.pass_time(AHEAD.load_patience_ns)
    run_io(world)


def test_a_load_that_streams_through_its_own_slots_takes_nobody_elses() -> None:
    world, [rank] = world_with(4)
    admission = admitted(world, 1, 2, 3, 4)
    world.load(rank, keys(*range(20, 50)))
    for _ in range(60):
        run_io(world)
        world.pass_time(AHEAD.load_patience_ns // 2)
        for job, index in list(rank.pinned)[:1]:
            world.release(rank, job, [index])
    assert ("landed", 30) == (admission.state, world.answers["SendReady"])


def test_loads_whose_slots_are_reserved_do_not_wait_behind_one_that_waits_for_a_slot() -> None:
    world, [rank] = world_with(2)
    admission = world.admit(2, keys(1, 2))
    world.load(rank, keys(*range(20, 20 + FLOOR)))
    run_io(world)
    world.load(rank, keys(40, 1, 2))
    run_io(world)
    assert ("reserved", FLOOR + 2) == (admission.state, len(rank.pinned))
    world.cancel_load(rank, 2)
    assert world.table.next_deadline_ns() is None


def test_a_load_takes_reserved_slots_too() -> None:
    world, [rank] = world_with(3)
    admission = world.admit(2, keys(1, 2, 3))
    world.load(rank, keys(*range(20, 20 + FLOOR + 1)))
    run_io(world)
    lose_patience(world)
    assert ("revoked", FLOOR + 1) == (admission.state, len(rank.pinned))
    assert [] == world.commit(admission)


def test_slots_being_read_into_are_drained_before_another_admission_is_taken() -> None:
    world, [rank] = world_with(4, settings=replace(AHEAD, iodepth=4))
    floor = 4 + FLOOR_SLOTS
    world.add_segment(8192, 4)
    first, second = admitted(world, 1, 2, 3, 4), admitted(world, 5, 6, read=False)
    for op in list(world.opening):
        world.end_open(op)
    draining = list(world.reading)
    world.load(rank, keys(*range(20, 20 + floor + 2)))
    while world.opening or set(world.reading) - set(draining):
        for op in list(world.opening):
            world.end_open(op)
        for op in set(world.reading) - set(draining):
            world.end_read(op)
    assert (floor, 2) == (len(rank.pinned), len(world.opened))
    assert ("landed", "committed") == (first.state, second.state)
    world.pass_time(AHEAD.load_patience_ns)
    assert ("landed", "revoked") == (first.state, second.state)
    assert [ReadFile] == kinds(world.end_read(draining[0]))
    assert [ReadFile] == kinds(world.end_read(draining[1]))
    assert "landed" == first.state


def test_the_objects_of_a_revoked_admission_become_cache() -> None:
    world, [rank] = world_with(3, settings=replace(AHEAD, staging_cache="lru"))
    admission = admitted(world, 1, 2, 3)
    world.load(rank, keys(*range(20, 20 + FLOOR + 1)))
    run_io(world)
    lose_patience(world)
    assert "revoked" == admission.state
    assert [2, 1] == counted(world, "slots_cached", "evicted_before_use")


def test_withdrawn_objects_become_cache_and_reads_under_way_finish() -> None:
    world, _ = world_with(4, settings=replace(AHEAD, staging_cache="lru"))
    admission = admitted(world, 1, 2, 3, read=False)
    world.end_open(1)
    world.end_open(2)
    world.end_read(1)
    actions = world.withdraw(admission)
    assert [] == actions
    assert [CloseFile] == kinds(world.end_open(3))
    run_io(world)
    assert [2, 0, 0] == counted(world, "slots_cached", "slots_reserved", "slots_admitted")


def test_without_a_cache_withdrawn_objects_are_gone() -> None:
    world, _ = world_with(4)
    admission = admitted(world, 1, 2)
    actions = world.withdraw(admission)
    assert [TellKey(namespace=2, key=key, flags=STORED) for key in keys(1, 2)] == actions
    assert [FLOOR + 4, 2] == counted(world, "slots_free", "evicted_before_use")


def test_cache_makes_way_for_an_admission_and_admissions_for_no_other() -> None:
    world, [rank] = world_with(4, settings=replace(AHEAD, staging_cache="lru"))
    for number in (1, 2, 3, 4):
        job = world.load(rank, keys(number))
        run_io(world)
        world.release(rank, job, [0])
    assert [4] == counted(world, "slots_cached")
    admitted(world, 4, 5, 6)
    assert [1, 3] == counted(world, "slots_cached", "slots_admitted")
    assert "refused" == world.admit(2, keys(7, 8)).state
    assert "reserved" == world.admit(2, keys(7)).state


def test_a_store_takes_neither_what_is_admitted_nor_what_loads_need_beside_it() -> None:
    world, [rank] = world_with(6)
    admission = admitted(world, 1, 2, 3, read=False)
    run_io(world)
    world.admit(2, keys(4, 5, 6))
    world.ask_store(rank, world.offer("c", keys(*range(70, 90))))
    assert FLOOR - AHEAD.iodepth == len(rank.granted)
    assert ("landed", FLOOR - 2) == (admission.state, world.table.statistics()["slots_by_store"])


def test_a_store_gets_its_small_share_beside_any_admission() -> None:
    world, ranks = world_with(6, engine="a", settings=replace(AHEAD, iodepth=8, client_share=1.0))
    assert "refused" == world.admit(1, keys(1)).state
    world.add_segment(8192, 20)
    admission = admitted(world, *range(10), namespace=1, read=False)
    assert [20] == counted(world, "slots_admitted")
    offer = world.offer("a", keys(70, 71, 72, 73))
    for rank in ranks:
        world.ask_store(rank, offer)
    assert 2 <= len(ranks[0].granted)
    assert "committed" == admission.state


def test_a_recall_that_leaves_too_little_takes_the_last_admissions() -> None:
    world, _ = world_with(2)
    other = world.add_segment(8192, 4)
    first, second = admitted(world, 1, 2, read=False), admitted(world, 3, 4, 5, 6, read=False)
    world.recall(other)
    assert ["committed", "revoked"] == [first.state, second.state]
    run_io(world)
    assert "landed" == first.state
    assert other not in world.segments


# ---------------------------------------------------------------- the ends


def test_a_draining_pool_and_a_device_that_is_given_up_admit_nothing() -> None:
    world, _ = world_with(4)
    world.do(DeviceChanged(healthy=False))
    assert "refused" == world.admit(2, keys(1)).state
    world.do(DeviceChanged(healthy=True))
    assert "reserved" == world.admit(2, keys(1)).state
    world.drain()
    assert "refused" == world.admit(2, keys(2)).state


def test_a_rank_that_departs_while_it_reads_what_is_admitted_loses_nobody_his_slot() -> None:
    world, [rank] = world_with(2)
    admission = admitted(world, 1)
    world.load(rank, keys(1))
    world.leave(rank)
    assert STORED | RESIDENT == world.flags[2, key_of(1)]
    other = world.join("c", 0)
    assert [SendReady] == kinds(world.do_load(other, keys(1)))
    world.release(other, 1, [0])
    world.withdraw(admission)
    assert [1] == counted(world, "slots_quarantined")
    world.prove(rank)
    assert [FLOOR + 2] == counted(world, "slots_free")


def test_a_failing_preload_fails_the_loads_that_joined_it() -> None:
    world, [rank] = world_with(2)
    admission = admitted(world, 1, read=False)
    world.load(rank, keys(1))
    actions = world.end_open(1, Code.MISSING)
    assert SendLoadFailed(client=rank.client, job=1, index=0, code=Code.MISSING) in actions
    assert SendPreloadLanded(admission=admission.admission) in actions


def test_an_admission_that_is_asked_for_twice_or_of_no_namespace_is_a_bug() -> None:
    world, _ = world_with(2)
    admission = world.admit(2, keys(1))
    asked = PreloadAsked(admission=admission.admission, namespace=2, keys=keys(1), priority=0, arrival=0)
    with pytest.raises(InvariantError, match="asked for twice"):
        world.table.handle(asked, now_ns=world.now_ns)
    with pytest.raises(InvariantError, match="unknown namespace"):
        world.table.handle(replace(asked, admission=99, namespace=9), now_ns=world.now_ns)


def test_a_withdrawal_of_nothing_changes_nothing() -> None:
    world, _ = world_with(2)
    refused = world.admit(2, keys(1, 2, 3))
    assert [[], []] == [world.withdraw(refused), world.commit(refused)]
