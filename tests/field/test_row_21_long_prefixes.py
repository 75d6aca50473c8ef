"""Row 21: prefixes longer than memory were never served; requests evicted what was read ahead for others."""

from kvpool.core.object_events import SendReady
from tests.unit import test_objects_preloads as ahead
from tests.unit.test_objects_loads import keys, run_io, world_with


def test_row_21_a_load_of_five_times_the_staging_streams_through_it() -> None:
    world, rank = world_with(slots=4, files=20)
    job = world.load(rank, keys(*range(20)))
    served = []
    while len(served) < 20:
        run_io(world)
        indices = [index for _, index in rank.pinned]
        assert indices, "the load waits for a slot that only itself could free"
        served += indices
        world.release(rank, job, indices)
    assert list(range(20)) == sorted(served)


def test_row_21_what_is_read_ahead_is_admitted_whole_or_not_at_all() -> None:
    world, _ = ahead.world_with(4)
    assert "refused" == world.admit(2, keys(*range(5))).state
    run_io(world)
    assert [0, 0] == ahead.counted(world, "slots_reserved", "preload_reads")
    assert "reserved" == world.admit(2, keys(*range(4))).state


def test_row_21_what_has_landed_stays_for_its_request_however_much_others_read_store_and_ask_for() -> None:
    world, [rank] = ahead.world_with(4)
    ahead.admitted(world, *range(4))
    assert "refused" == world.admit(2, keys(10, 11)).state
    for number in range(20, 50, 2):
        job = world.load(rank, keys(number, number + 1))
        run_io(world)
        world.release(rank, job, [index for known, index in rank.pinned if known == job])
    for number in range(100, 110):
        job = world.ask_store(rank, world.offer("c", keys(number)))
        world.fill(rank, job, [index for known, index in rank.granted if known == job])
        for op in list(world.publishing):
            world.end_publish(op)
    served = [action for action in world.do_load(rank, keys(*range(4))) if isinstance(action, SendReady)]
    assert 4 == len(served), "what had landed was lost before it was used"
