"""Row 4: "Running 0, waiting N" for ever: loads held GPU blocks behind a request without any."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import pytest

from kvpool.wire.messages import DeviceState
from tests.field.conftest import MakeWorld
from tests.unit.vllm_there import import_vllm

import_vllm()

from tests.unit.vllm_world import World

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
#: A drive that reads a byte a second: what is admitted and has not landed is more than a second of work.
SLOW = {0: DeviceState(device=0, healthy=True, read_bytes_per_s=1.0, backlog_bytes=0)}


def blocks_of(world: World, request: str) -> int:
    return sum(len(blocks) for blocks in world.scheduler.kv_cache_manager.get_block_ids(request))


def test_row_04_a_request_that_waits_for_the_drive_holds_no_block_and_others_run_meanwhile(
    make_world: MakeWorld,
) -> None:
    world = make_world(blocks=60)
    world.pool.states = SLOW
    world.add("first", 1300)
    world.hit("first")
    step = world.step()
    ((job, _),) = step.loads.items()
    for name in ("second", "third"):
        world.add(name, 1500)
        world.hit(name)
    world.add("computed", 1400)
    step = world.step()
    assert {} == step.loads
    assert [0, 0] == [blocks_of(world, name) for name in ("second", "third")]
    assert ["computed"] == list(step.output.num_scheduled_tokens)
    world.report(step, loaded={job: "first"})
    assert ["second"] == [spec.request for spec, _ in world.step().loads.values()]


def test_row_04_a_load_that_does_not_fit_beside_what_runs_holds_nobody_up_and_all_requests_end(
    make_world: MakeWorld,
) -> None:
    world = make_world(blocks=34)
    names = ["first", "second", "third", "fourth"]
    for name, tokens in zip(names, (1300, 1300, 1900, 1900), strict=True):
        world.add(name, tokens, max_tokens=2)
        world.hit(name)
    step = world.step()
    assert ["first", "second"] == [spec.request for spec, _ in step.loads.values()]
    names.append("short")
    world.add("short", 500, max_tokens=2)
    reported, step = step, world.step()
    assert [0, 0] == [blocks_of(world, name) for name in ("third", "fourth")]
    assert ["short"] == list(step.output.num_scheduled_tokens)
    world.report(step, loaded={job: spec.request for job, (spec, _) in reported.loads.items()})
    for _ in range(30):
        step = world.step()
        world.report(step, loaded={job: spec.request for job, (spec, _) in step.loads.items()})
    assert [] == [name for name in names if name in world.scheduler.requests]
