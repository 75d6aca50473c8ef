"""The object table and its device: given up, used again, without room."""

from kvpool.core.object_events import DeviceChanged, Dropped, SendDropped, SendLoadFailed
from kvpool.errors import Code
from tests.property.object_world import Rank, World
from tests.unit.test_objects_loads import keys, run_io, world_with


def failures(actions: list[object]) -> dict[int, Code]:
    return {action.index: action.code for action in actions if isinstance(action, SendLoadFailed)}


def offer(world: World, rank: Rank) -> list[object]:
    """Offer a new key; return what came of it."""
    world.ask_store(rank, world.offer(rank.engine, keys(30)))
    return list(world.log[-1])


def test_what_waits_for_reads_fails_when_the_device_is_given_up() -> None:
    world, rank = world_with()
    world.do_load(rank, keys(*range(20)))
    actions = world.do(DeviceChanged(healthy=False))
    assert dict.fromkeys(range(20), Code.READ_ERROR) == failures(actions)
    run_io(world)
    world.table.validate()


def test_loads_fail_at_once_and_stores_are_dropped_while_it_is_given_up() -> None:
    world, rank = world_with()
    world.do(DeviceChanged(healthy=False))
    assert {0: Code.READ_ERROR} == failures(world.do_load(rank, keys(1)))
    assert any(isinstance(action, SendDropped) for action in offer(world, rank))


def test_loads_and_stores_go_on_when_it_is_used_again() -> None:
    world, rank = world_with()
    world.do(DeviceChanged(healthy=False))
    world.do(DeviceChanged(healthy=True))
    assert {} == failures(world.do_load(rank, keys(1)))
    assert not any(isinstance(action, SendDropped) for action in offer(world, rank))


def test_a_device_without_room_still_loads() -> None:
    world, rank = world_with()
    world.do(DeviceChanged(healthy=True, refusing=Dropped.ROOM))
    assert {} == failures(world.do_load(rank, keys(1)))
    assert any(isinstance(action, SendDropped) for action in offer(world, rank))
