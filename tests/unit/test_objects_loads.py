"""Loads: event in, actions out."""

from dataclasses import replace

import pytest

from kvpool.core.object_events import (
    ClientJoined,
    CloseFile,
    LoadWanted,
    ObjectId,
    OpenFile,
    ReadFile,
    ReturnSegment,
    SegmentRecalled,
    SendLoadFailed,
    SendReady,
    SetAside,
    SlotsReleased,
    TableSettings,
    TellKey,
    TimePassed,
)
from kvpool.errors import Code, InvariantError, ProtocolError
from kvpool.wire.messages import STORED
from tests.property.object_world import CORRUPT, SETTINGS, Rank, World, key_of

WIDE = replace(SETTINGS, iodepth=16, open_lookahead=16)


def world_with(
    slots: int = 8, files: int = 20, engine: str = "c", settings: TableSettings = WIDE
) -> tuple[World, Rank]:
    """Return a world with one rank of a one-rank engine, with its files."""
    world = World(settings)
    world.add_segment(8192, slots)
    rank = world.join(engine, 0)
    for number in range(files):
        object_id = ObjectId(rank.namespace, key_of(number), 0)
        world.files[object_id] = object_id
    return world, rank


def run_io(world: World) -> None:
    """Let the device end what it was asked for, until it is asked for nothing more."""
    while world.opening or world.reading:
        for op in list(world.opening):
            world.end_open(op)
        for op in list(world.reading):
            world.end_read(op)


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def test_a_load_opens_reads_and_is_answered_with_its_slot() -> None:
    world, rank = world_with()
    object_id = ObjectId(2, key_of(3), 0)
    assert [OpenFile(op=1, object=object_id)] == world.do_load(rank, keys(3))
    slot = world.table.pools[8192].free[-1].ref
    told = TellKey(namespace=2, key=key_of(3), flags=STORED)
    assert [told, ReadFile(op=1, object=object_id, slot=slot)] == world.end_open(1)
    assert [SendReady(client=rank.client, job=1, index=0, slot=slot)] == world.end_read(1)
    assert [] == world.release(rank, 1, [0])
    assert 8 == world.table.statistics()["slots_free"]


def test_a_transient_load_is_never_told_to_be_resident() -> None:
    world, rank = world_with()
    world.load(rank, keys(1, 2))
    run_io(world)
    assert {STORED} == set(world.flags.values())


def test_opens_run_ahead_of_reads_within_their_own_bound() -> None:
    world, rank = world_with(slots=2, settings=replace(SETTINGS, iodepth=2, open_lookahead=5))
    world.load(rank, keys(*range(10)))
    for op in list(world.opening):
        world.end_open(op)
    assert (2, 3, 2) == (len(world.reading), len(world.opened), len(world.opening))


@pytest.mark.parametrize(("files", "queued"), [(1, False), (3, False), (4, True), (9, True)])
def test_reads_queue_when_as_many_as_may_be_are_in_flight(files: int, queued: bool) -> None:
    world, rank = world_with(slots=8, settings=replace(SETTINGS, iodepth=4, open_lookahead=16))
    world.load(rank, keys(*range(files)))
    seen = set()
    while world.opening:
        seen.add(world.table.reads_queued)
        world.end_open(next(iter(world.opening)))
    assert {False} == seen - ({True} if queued else set())
    assert queued is world.table.reads_queued


def test_reads_queue_when_an_open_file_waits_for_a_slot() -> None:
    world, rank = world_with(slots=2, settings=replace(SETTINGS, iodepth=4, open_lookahead=16))
    world.load(rank, keys(1, 2, 3))
    for op in list(world.opening):
        assert not world.table.reads_queued
        world.end_open(op)
    assert world.table.reads_queued


def test_a_load_larger_than_staging_streams_through() -> None:
    world, rank = world_with(slots=4, files=20)
    world.load(rank, keys(*range(20)))
    run_io(world)
    assert 4 == len(rank.pinned)
    world.quiesce()
    assert 20 == world.answers["SendReady"]


def test_ranks_that_load_different_objects_at_once_share_too_little_staging() -> None:
    world = World(WIDE)
    world.add_segment(8192, 4)
    ranks = [world.join("a", 0), world.join("a", 1)]
    for rank in ranks:
        for number in range(10):
            object_id = ObjectId(1, key_of(number), rank.rank)
            world.files[object_id] = object_id
        world.load(rank, keys(*range(10)))
    run_io(world)
    assert 4 == sum(len(rank.pinned) for rank in ranks)
    world.quiesce()
    assert 20 == world.answers["SendReady"]


def test_one_read_serves_every_job_and_engine_that_wants_the_object() -> None:
    world = World(WIDE)
    world.add_segment(8192, 8)
    first, second = world.join("a", 0), world.join("b", 0)
    object_id = ObjectId(1, key_of(1), 0)
    world.files[object_id] = object_id
    world.load(first, keys(1))
    world.load(first, keys(1, 1))
    world.end_open(1)
    world.load(second, keys(1))
    assert 4 == len([a for a in world.end_read(1) if isinstance(a, SendReady)])
    assert (1, 1) == (world.answers["OpenFile"], world.answers["ReadFile"])
    world.load(second, keys(1))
    assert 5 == world.answers["SendReady"]
    assert 1 == world.table.statistics()["slots_resident"]


@pytest.mark.parametrize("stage", ["open", "read"])
def test_a_missing_file_fails_its_waiters_and_is_no_longer_told_as_stored(stage: str) -> None:
    world, rank = world_with()
    object_id = ObjectId(2, key_of(1), 0)
    world.find_files([object_id])
    assert STORED == world.flags[2, key_of(1)]
    world.load(rank, keys(1))
    if stage == "open":
        actions = world.end_open(1, Code.MISSING)
    else:
        world.end_open(1)
        actions = world.end_read(1, Code.MISSING)
    assert [
        TellKey(namespace=2, key=key_of(1), flags=0),
        SendLoadFailed(client=rank.client, job=1, index=0, code=Code.MISSING),
    ] == actions


def test_corrupt_bytes_are_set_aside_and_never_served() -> None:
    world, rank = world_with()
    object_id = ObjectId(2, key_of(1), 0)
    world.files[object_id] = CORRUPT
    world.load(rank, keys(1))
    world.end_open(1)
    assert [
        SetAside(object=object_id),
        TellKey(namespace=2, key=key_of(1), flags=0),
        SendLoadFailed(client=rank.client, job=1, index=0, code=Code.CORRUPT),
    ] == world.end_read(1)


def test_a_read_error_fails_the_load_and_keeps_the_key() -> None:
    world, rank = world_with()
    world.load(rank, keys(1))
    world.end_open(1)
    actions = world.end_read(1, Code.READ_ERROR)
    assert [SendLoadFailed(client=rank.client, job=1, index=0, code=Code.READ_ERROR)] == actions
    assert STORED == world.flags[2, key_of(1)]


def test_a_load_past_its_deadline_fails_and_its_open_file_is_given_back() -> None:
    world, rank = world_with(slots=1, settings=replace(WIDE, load_deadline_ns=200))
    world.load(rank, keys(1))
    run_io(world)
    world.load(rank, keys(2))
    world.end_open(2)
    assert 201 == world.table.next_deadline_ns()
    world.now_ns = 201
    assert [
        CloseFile(op=2),
        SendLoadFailed(client=rank.client, job=2, index=0, code=Code.DEADLINE),
    ] == world.do(TimePassed())


def test_a_read_past_its_deadline_fails_its_waiters_and_keeps_its_slot_until_it_ends() -> None:
    world, rank = world_with(slots=2)
    world.load(rank, keys(1))
    world.end_open(1)
    world.now_ns += WIDE.op_deadline_ns
    failed = SendLoadFailed(client=rank.client, job=1, index=0, code=Code.DEADLINE)
    assert [failed] == world.do(TimePassed())
    assert 1 == world.table.statistics()["slots_filling"]
    world.load(rank, keys(1))
    world.end_open(2)
    world.end_read(2)
    assert [] == world.end_read(1)
    assert (1, 0) == (world.answers["SendReady"], world.table.statistics()["slots_filling"])


def test_an_open_past_its_deadline_is_closed_when_it_ends() -> None:
    world, rank = world_with()
    world.load(rank, keys(1))
    world.pass_time(WIDE.op_deadline_ns)
    assert [CloseFile(op=1)] == [a for a in world.end_open(1) if not isinstance(a, TellKey)]


def test_a_cancelled_load_is_not_answered_and_what_is_ready_is_still_released() -> None:
    world, rank = world_with()
    job = world.load(rank, keys(1))
    run_io(world)
    world.load(rank, keys(2, 3), job=job)
    world.end_open(2)
    world.end_read(2)
    world.end_open(3)
    world.cancel_load(rank, job)
    assert [] == [a for a in world.end_read(3) if isinstance(a, (SendReady, SendLoadFailed))]
    world.release(rank, job, [0, 1])
    assert 8 == world.table.statistics()["slots_free"]


def test_a_cancelled_load_gives_its_open_file_back_and_frees_the_queue() -> None:
    world, rank = world_with(slots=1)
    world.load(rank, keys(1))
    run_io(world)
    job = world.load(rank, keys(2, 3))
    world.end_open(2)
    world.cancel_load(rank, job)
    assert ([], [3]) == (list(world.opened), list(world.opening))
    world.end_open(3)
    assert ({}, {}, {}) == (world.opened, world.opening, world.table._loads.reads)


def test_clients_take_turns() -> None:
    world, first = world_with(settings=replace(WIDE, open_lookahead=1))
    second = world.join("c", 0)
    world.load(first, keys(*range(10)))
    world.load(second, keys(15))
    order = []
    while world.opening:
        (op,) = world.opening
        order.append(world.opening[op].key)
        world.end_open(op)
    assert keys(0, 1, 15, 2) == order[:4]


def test_a_client_keeps_within_its_share_only_while_another_engine_uses_the_size() -> None:
    world, stopped = world_with(slots=8)
    other = world.join("a", 0)
    object_id = ObjectId(1, key_of(1), 0)
    world.files[object_id] = object_id
    world.load(stopped, keys(*range(12)))
    run_io(world)
    assert 4 == len(stopped.pinned)
    world.load(other, keys(1))
    run_io(world)
    assert 1 == len(other.pinned)
    world.leave(other)
    world.prove(other)
    run_io(world)
    assert 8 == len(stopped.pinned)


def test_what_a_client_at_its_share_waits_for_comes_when_it_releases() -> None:
    world, rank = world_with(slots=8)
    world.join("a", 0)
    world.load(rank, keys(*range(12)))
    run_io(world)
    world.quiesce()
    assert 12 == world.answers["SendReady"]


def test_a_size_without_free_slots_does_not_keep_another_from_opening() -> None:
    world = World(replace(SETTINGS, open_lookahead=4))
    world.add_segment(8192, 4)
    world.add_segment(4096, 4)
    rank = world.join("a", 0)
    for number in range(12):
        for group in (0, 1):
            object_id = ObjectId(1, key_of(number, group), 0)
            world.files[object_id] = object_id
    world.load(rank, keys(*range(8)))
    for _ in range(3):
        for op in list(world.opening):
            world.end_open(op)
        for op in list(world.reading):
            world.end_read(op)
    assert 4 == len(rank.pinned)
    world.load(rank, [key_of(1, 1)])
    run_io(world)
    assert 5 == len(rank.pinned)


def test_a_departed_clients_slot_is_quarantined_until_it_is_proven_gone() -> None:
    world, rank = world_with(slots=1)
    world.load(rank, keys(1))
    run_io(world)
    other = world.join("c", 0)
    world.leave(rank)
    assert 1 == world.table.statistics()["slots_quarantined"]
    world.load(other, keys(2))
    run_io(world)
    assert {} == other.pinned
    world.prove(rank)
    run_io(world)
    assert 1 == len(other.pinned)


def test_bytes_that_a_departed_client_reads_still_serve_others() -> None:
    world, rank = world_with(slots=2)
    other = world.join("c", 0)
    world.load(rank, keys(1))
    world.load(other, keys(1))
    run_io(world)
    world.leave(rank)
    world.load(other, keys(1))
    assert 3 == world.answers["SendReady"]
    world.prove(rank)
    world.quiesce()
    assert 2 == world.table.statistics()["slots_free"]


def test_a_proof_that_comes_before_the_leave_is_both() -> None:
    world, rank = world_with(slots=1)
    world.load(rank, keys(1))
    run_io(world)
    world.prove(rank)
    assert 1 == world.table.statistics()["slots_free"]
    world.leave(rank)
    assert 0 == world.table.statistics()["clients_unproven"]


def test_a_recalled_segment_is_returned_with_its_last_release() -> None:
    world, rank = world_with(slots=4)
    (segment,) = world.segments
    job = world.load(rank, keys(1))
    run_io(world)
    world.recall(segment)
    world.load(rank, keys(2))
    run_io(world)
    assert 1 == len(rank.pinned)
    assert [ReturnSegment(segment=segment)] == world.release(rank, job, [0])


def test_an_empty_segment_is_returned_at_once() -> None:
    world, _ = world_with(slots=4)
    (segment,) = world.segments
    world.recalled.add(segment)
    assert [ReturnSegment(segment=segment)] == world.do(SegmentRecalled(segment=segment))


def test_nonsense_of_a_client_is_refused_before_anything_changes() -> None:
    world, rank = world_with()
    job = world.load(rank, keys(1))
    run_io(world)
    before = world.table.statistics()
    for event in (
        LoadWanted(client=rank.client, job=job, first=0, keys=keys(1)),
        LoadWanted(client=rank.client, job=9, first=0, keys=[key_of(1), key_of(1, group=3)]),
        LoadWanted(client=99, job=9, first=0, keys=keys(1)),
        SlotsReleased(client=rank.client, job=job, indices=[0, 0]),
        SlotsReleased(client=rank.client, job=job, indices=[0, 1]),
    ):
        with pytest.raises(ProtocolError):
            world.table.handle(event, now_ns=world.now_ns)
        world.table.validate()
    assert before == world.table.statistics()


def test_an_event_that_cannot_be_is_a_bug() -> None:
    world, rank = world_with()
    with pytest.raises(InvariantError):
        world.do(ClientJoined(client=rank.client, engine="c", namespace=2, rank=0))
    with pytest.raises(InvariantError):
        world.do(ClientJoined(client=77, engine="c", namespace=3, rank=0))
    with pytest.raises(InvariantError):
        world.do(SegmentRecalled(segment=99))
