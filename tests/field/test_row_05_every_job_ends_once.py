"""Row 5: assertion on preemption, abort or a hybrid model with transfers in flight."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import time
from collections import Counter
from pathlib import Path

import pytest

from tests.field.conftest import MakeWorld
from tests.process.fake_pool import FakePool
from tests.process.test_rank_client import GatedCopier, Rank, wait_until
from tests.unit.vllm_there import import_vllm

import_vllm()

from vllm.v1.request import RequestStatus

from tests.unit.vllm_world import CHUNK, full_attention, sliding_window

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


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "hybrid"])
@pytest.mark.parametrize("failed", [False, True], ids=["landed", "failed"])
def test_row_05_a_request_aborted_during_its_load_ends_without_an_assertion_and_gives_its_blocks_back(
    make_world: MakeWorld, hybrid: bool, failed: bool
) -> None:
    world = make_world(groups=[full_attention(), sliding_window()] if hybrid else None)
    unused = world.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    world.add("a", 5 * CHUNK + 10)
    world.hit("a")
    step = world.step()
    ((job, (spec, blocks)),) = step.loads.items()
    world.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    world.add("b", CHUNK + 10, max_tokens=1)
    lost = {job: {spec.keys[0]}} if failed else {}
    broken = {} if not failed else {"failed_requests": {"a"}} if hybrid else {"invalid": set(blocks)}
    world.report(step, loaded={job: "a"}, failed=lost, **broken)  # type: ignore[arg-type]
    deadline = time.monotonic() + 20
    while world.scheduler.requests:
        assert time.monotonic() < deadline
        step = world.step()
        world.report(step, stored=tuple(step.stores))
    world.step()
    assert unused == world.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert not world.connector.side.guard.broken


@pytest.mark.parametrize("hybrid", [False, True], ids=["one group", "hybrid"])
def test_row_05_a_request_preempted_while_it_is_stored_stores_and_runs_on(make_world: MakeWorld, hybrid: bool) -> None:
    world = make_world(groups=[full_attention(), sliding_window()] if hybrid else None)
    world.add("a", 3 * CHUNK + 10, max_tokens=2)
    step = world.step()
    stores = tuple(step.stores)
    assert stores
    world.report(step)
    request = world.scheduler.requests["a"]
    world.scheduler.running.remove(request)
    world.scheduler._preempt_request(request, time.monotonic())
    step = world.step()
    world.report(step, stored=stores)
    for _ in range(4):
        step = world.step()
        world.report(step, stored=tuple(step.stores))
    assert "a" not in world.scheduler.requests
    assert not world.connector.side.guard.broken
