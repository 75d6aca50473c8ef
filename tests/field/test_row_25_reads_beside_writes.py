"""Row 25: reads halved while writing."""

from dataclasses import replace

from tests.property.object_world import SETTINGS, Rank, World
from tests.unit.test_objects_loads import keys, world_with

DEPTH = replace(SETTINGS, iodepth=8, open_lookahead=8, writes_inflight_beside_loads=2, client_share=1.0)


def store(world: World, rank: Rank, *numbers: int) -> None:
    """Let the rank fill new objects: their writes are to be done from now on."""
    job = world.ask_store(rank, world.offer(rank.engine, keys(*numbers)))
    world.fill(rank, job, [index for known, index in rank.granted if known == job])


def open_all(world: World) -> None:
    for op in list(world.opening):
        world.end_open(op)


def test_row_25_stores_have_the_whole_depth_only_while_no_load_waits_or_runs() -> None:
    world, rank = world_with(slots=64, settings=DEPTH)
    store(world, rank, *range(30, 46))
    assert (8, 0) == (len(world.publishing), len(world.reading))


def test_row_25_writes_beside_loads_get_a_few_places_and_reads_all_others() -> None:
    world, rank = world_with(slots=64, settings=DEPTH)
    world.load(rank, keys(*range(20)))
    store(world, rank, *range(30, 46))
    open_all(world)
    for _ in range(6):  # whatever ends first, loads keep their places
        assert 2 >= len(world.publishing) >= 1
        assert 8 == len(world.reading) + len(world.publishing)
        world.end_read(next(iter(world.reading)))
        world.end_publish(next(iter(world.publishing)))
        open_all(world)


def test_row_25_a_load_that_comes_while_stores_have_the_drive_gets_each_place_that_falls_free() -> None:
    unbounded = replace(DEPTH, writes_inflight_beside_loads=8)  # so that only the order decides
    world, rank = world_with(slots=64, settings=unbounded)
    store(world, rank, *range(30, 54))
    world.load(rank, keys(*range(6)))
    open_all(world)
    for reads in range(1, 7):
        world.end_publish(next(iter(world.publishing)))
        assert reads == len(world.reading), "a write took the place of a waiting read"
