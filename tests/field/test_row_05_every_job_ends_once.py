"""Row 5: assertion on preemption, abort or a hybrid model with transfers in flight."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

from collections import Counter
from pathlib import Path

import pytest

from kvpool.wire.messages import DeviceState
from tests.field.conftest import MakeWorld
from tests.process.fake_pool import FakePool
from tests.process.test_rank_client import GatedCopier, Rank, wait_until
from tests.unit.vllm_there import import_vllm

import_vllm()

from vllm.v1.request import RequestStatus

from tests.unit.vllm_world import CHUNK, World, full_attention, sliding_window

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def test_row_05_a_rank_reports_every_job_exactly_once_whatever_happens_to_it(
    tmp_path: Path, open_descriptors: None
) -> None:
    pool, copier = FakePool(str(tmp_path), devices=2), GatedCopier()
    rank = Rank(pool, copier).connected()
    ends: Counter[int] = Counter()

    def count() -> int:
        ends.update(ended.job for ended in rank.client.take_ended())
        return len(ends)

    rank.store(1, 6, request="stored")
    wait_until(lambda: count() == 1)
    wait_until(lambda: len(pool.objects) == 6)
    copier.gate.clear()
    copier.launch.clear()
    rank.load(2, 6)  # launched, not ended: flushed so
    wait_until(copier.launch.is_set)
    pool.hold_loads = pool.hold_stores = True
    rank.load(3, 6)  # flushed without a slot
    rank.store(4, 3, first=10, request="flushed")
    rank.load(5, 6)  # its worker is lost
    rank.store(6, 3, first=20, request="lost")
    copier.gate.set()
    rank.client.flush([2, 3, 4, 99])
    rank.client.flush([2, 3, 4])
    pool.worker_hangs_up(0)
    pool.worker_hangs_up(1)
    wait_until(lambda: count() == 6)
    rank.connected()
    rank.load(7, 6)  # the pool goes
    pool.vanish()
    wait_until(lambda: count() == 7)
    rank.load(8, 2)  # there is none
    wait_until(lambda: count() == 8)
    pool.start()
    rank.connected()
    rank.load(9, 2)  # the client is closed
    rank.client.close()
    rank.store(10, 2)
    count()
    assert dict.fromkeys(range(1, 11), 1) == dict(ends)
    pool.close()


def unused_blocks(world: World) -> int:
    return world.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def run_out(world: World) -> None:
    """Let the scheduler step, and every job end at once, until no request is left."""
    for _ in range(200):
        if not world.scheduler.requests:
            break
        step = world.step()
        loaded = {job: spec.request for job, (spec, _) in step.loads.items()}
        world.report(step, loaded=loaded, stored=tuple(step.stores))
    assert {} == world.scheduler.requests
    world.step()


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "hybrid"])
@pytest.mark.parametrize("failed", [False, True], ids=["landed", "failed"])
def test_row_05_the_load_of_an_aborted_request_counts_until_its_job_has_ended_and_no_longer(
    make_world: MakeWorld, hybrid: bool, failed: bool
) -> None:
    world = make_world(groups=[full_attention(), sliding_window()] if hybrid else None)
    world.pool.states = {0: DeviceState(device=0, healthy=True, read_bytes_per_s=1.0, backlog_bytes=0)}
    unused = unused_blocks(world)
    world.add("a", 5 * CHUNK + 10)
    world.hit("a")
    step = world.step()
    ((job, (spec, blocks)),) = step.loads.items()
    world.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    world.add("b", 2 * CHUNK + 10, max_tokens=1)
    world.hit("b")
    assert {} == world.step().loads
    lost = {job: {spec.keys[0]}} if failed else {}
    broken = {} if not failed else {"failed_requests": {"a"}} if hybrid else {"invalid": set(blocks)}
    world.report(step, loaded={job: "a"}, failed=lost, **broken)  # type: ignore[arg-type]
    step = world.step()
    assert ["b"] == [spec.request for spec, _ in step.loads.values()]
    world.report(step, loaded=dict.fromkeys(step.loads, "b"))
    run_out(world)
    assert unused == unused_blocks(world)
    assert not world.connector.side.guard.broken


def test_row_05_a_request_preempted_while_it_is_stored_waits_again_and_all_blocks_come_back(
    make_world: MakeWorld,
) -> None:
    world = make_world(blocks=26)
    unused, pending = unused_blocks(world), set[int]()
    for name in ("a", "b"):  # 12 blocks each, and room for one more: the next token but 35 preempts one of them
        world.add(name, 1500, max_tokens=60)
    preempted: set[str] = set()
    for _ in range(60):
        step = world.step()
        pending |= set(step.stores)
        preempted |= set(step.output.preempted_req_ids or ())
        if preempted:
            break
        world.report(step)
    assert {"b"} == preempted
    assert pending, "its stores are in flight"
    assert "b" in world.pool.waiting
    world.report(step, stored=tuple(pending))
    run_out(world)
    assert unused == unused_blocks(world)
    assert not world.connector.side.guard.broken
