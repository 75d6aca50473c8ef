"""The cache in the object table: what stays, what goes for whom, and what is told of keys."""

from dataclasses import replace

import pytest

from kvpool.core.object_events import (
    ObjectId,
    OpenFile,
    ReturnSegment,
    SegmentRecalled,
    SendReady,
    TableSettings,
    TellKey,
)
from kvpool.core.slots import FLOOR_SLOTS
from kvpool.errors import Code, InvariantError
from kvpool.wire.messages import RESIDENT, STORED
from tests.property.object_world import SETTINGS, Rank, World, key_of

WITH_LRU = replace(SETTINGS, iodepth=2, open_lookahead=16, staging_cache="lru")
FLOOR = 2 + FLOOR_SLOTS


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def world_with(cached: int, engine: str = "c", settings: TableSettings = WITH_LRU) -> tuple[World, list[Rank]]:
    """Return a world whose cache may hold *cached* objects, with all ranks of an engine and their files."""
    world = World(settings)
    world.add_segment(8192, FLOOR + cached)
    ranks = [world.join(engine, rank) for rank in range(2 if engine != "c" else 1)]
    for rank in ranks:
        for number in range(40):
            object_id = ObjectId(rank.namespace, key_of(number), rank.rank)
            world.files[object_id] = object_id
            world.find_files([object_id])
    return world, ranks


def use(world: World, rank: Rank, *numbers: int) -> None:
    """Load these one after the other."""
    for number in numbers:
        job = world.load(rank, keys(number))
        while world.opening or world.reading:
            for op in list(world.opening):
                world.end_open(op)
            for op in list(world.reading):
                world.end_read(op)
        world.release(rank, job, [0])


def resident(world: World) -> list[int]:
    return [number for number in range(40) if world.flags.get((2, key_of(number)), 0) & RESIDENT]


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_was_loaded_stays_and_a_hit_costs_no_io(policy: str) -> None:
    world, [rank] = world_with(3, settings=replace(WITH_LRU, staging_cache=policy))
    use(world, rank, 1)
    assert STORED | RESIDENT == world.flags[2, key_of(1)]
    world.files.clear()
    actions = world.do_load(rank, keys(1))
    assert [SendReady] == [type(action) for action in actions]
    assert 1 == world.table.statistics()["cache_hits"]


def test_what_was_stored_stays_when_it_is_written() -> None:
    world, [rank] = world_with(3)
    job = world.ask_store(rank, world.offer("c", keys(50)))
    world.fill(rank, job, [0])
    for op in list(world.publishing):
        world.end_publish(op)
    assert STORED | RESIDENT == world.flags[2, key_of(50)]
    assert [SendReady] == [type(action) for action in world.do_load(rank, keys(50))]


def test_what_could_not_be_written_does_not_stay() -> None:
    world, [rank] = world_with(3)
    job = world.ask_store(rank, world.offer("c", keys(50)))
    world.fill(rank, job, [0])
    for op in list(world.publishing):
        world.end_publish(op, Code.WRITE_ERROR)
    assert 0 == world.flags[2, key_of(50)]
    assert 0 == world.table.statistics()["slots_cached"]


def test_what_could_not_be_written_does_not_stay_after_its_last_reader_either() -> None:
    world, [rank] = world_with(3)
    job = world.ask_store(rank, world.offer("c", keys(50)))
    world.fill(rank, job, [0])
    load = world.load(rank, keys(50))
    for op in list(world.publishing):
        world.end_publish(op, Code.WRITE_ERROR)
    assert 0 == world.flags[2, key_of(50)]
    world.release(rank, load, [0])
    assert 0 == world.table.statistics()["slots_resident"]


def test_the_least_recently_used_goes_and_the_floor_is_never_cached() -> None:
    world, [rank] = world_with(3)
    use(world, rank, 1, 2, 3, 1, 4)
    assert [1, 3, 4] == resident(world)
    assert FLOOR == world.table.statistics()["slots_free"]


def test_a_pool_within_its_floor_caches_nothing() -> None:
    world, [rank] = world_with(0)
    use(world, rank, 1)
    assert [] == resident(world)
    assert FLOOR == world.table.statistics()["slots_free"]


def test_a_pinned_object_is_never_a_victim() -> None:
    world, [rank] = world_with(2)
    use(world, rank, 1, 2)
    job = world.load(rank, keys(1))
    use(world, rank, 3, 4, 5)
    assert world.flags[2, key_of(1)] & RESIDENT
    world.release(rank, job, [0])
    assert [1, 5] == resident(world)


def test_a_load_takes_cached_slots_when_none_is_free() -> None:
    world, [rank] = world_with(2)
    use(world, rank, 1, 2)
    world.load(rank, keys(*range(10, 10 + FLOOR + 2)))
    while world.opening or world.reading:
        for op in list(world.opening):
            world.end_open(op)
        for op in list(world.reading):
            world.end_read(op)
    assert FLOOR + 2 == len(rank.pinned)
    assert [] == resident(world)
    assert 2 == world.table.statistics()["cache_evictions"]


def test_a_store_takes_cached_slots_when_none_is_free() -> None:
    world, [rank] = world_with(4)
    use(world, rank, 1, 2, 3, 4)
    job = world.ask_store(rank, world.offer("c", keys(*range(50, 58))))
    assert 8 == len([where for where in rank.granted if where[0] == job])
    assert 2 == world.table.statistics()["cache_evictions"]


def test_a_key_is_resident_only_with_the_objects_of_all_ranks() -> None:
    world, [first, second] = world_with(6, engine="a")
    use(world, first, 1)
    assert STORED == world.flags[1, key_of(1)]
    use(world, second, 1)
    assert STORED | RESIDENT == world.flags[1, key_of(1)]


def test_the_objects_of_a_key_go_together() -> None:
    world, [first, second] = world_with(4, engine="a")
    for number in (1, 2, 3):
        use(world, first, number)
        use(world, second, number)
    told = [number for number in (1, 2, 3) if world.flags[1, key_of(number)] & RESIDENT]
    assert [2, 3] == told
    assert 4 == world.table.statistics()["slots_cached"]


def test_a_rank_in_use_outlives_the_eviction_of_its_key() -> None:
    world, [first, second] = world_with(3, engine="a")
    use(world, first, 1)
    use(world, second, 1)
    job = world.load(second, keys(1))
    use(world, first, 2, 3, 4)
    assert STORED == world.flags[1, key_of(1)]
    world.release(second, job, [0])
    assert [SendReady] == [type(action) for action in world.do_load(second, keys(1))]
    assert [OpenFile] == [type(action) for action in world.do_load(first, keys(1))]


def test_a_store_that_overtakes_a_cached_object_leaves_one_slot_of_it() -> None:
    world, [first, second] = world_with(6, engine="a")
    use(world, first, 1)
    world.files.pop(ObjectId(1, key_of(1), 1))
    job = world.load(second, keys(1))
    world.end_open(next(iter(world.opening)))
    assert 0 == world.flags[1, key_of(1)]
    offer = world.offer("a", keys(1))
    jobs = [(rank, world.ask_store(rank, offer)) for rank in (first, second)]
    for rank, job in jobs:
        world.fill(rank, job, [0])
    assert RESIDENT == world.flags[1, key_of(1)]
    assert 0 == world.table.statistics()["slots_cached"]
    assert 2 == world.table.statistics()["slots_resident"]


def test_cache_leaves_a_recalled_segment_at_once() -> None:
    world, [rank] = world_with(3)
    use(world, rank, 1, 2, 3)
    [segment] = world.segments
    world.recalled.add(segment)
    actions = world.do(SegmentRecalled(segment=segment))
    assert [TellKey] * 3 + [ReturnSegment] == [type(action) for action in actions]
    assert [] == resident(world)


def test_cache_leaves_the_floor_of_a_pool_that_shrinks() -> None:
    world, [rank] = world_with(1)
    other = world.add_segment(8192, 3)
    use(world, rank, 1, 2, 3, 4)
    world.recall(other)
    assert 1 == world.table.statistics()["slots_cached"]
    assert other not in world.segments


def test_arc_in_the_table_keeps_what_is_used_again_through_a_scan() -> None:
    kept = {}
    for policy in ("lru", "arc"):
        world, [rank] = world_with(4, settings=replace(WITH_LRU, staging_cache=policy))
        use(world, rank, 1, 2, 1, 2, *range(10, 20))
        kept[policy] = [number for number in resident(world) if number < 10]
    assert {"lru": [], "arc": [1, 2]} == kept


def test_an_unknown_policy_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="no such cache policy"):
        World(replace(SETTINGS, staging_cache="mru"))
