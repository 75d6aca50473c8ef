"""The connector's scheduler role inside vLLM's real scheduler: announcing, admitting, deferring, failing, storing."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_offload.base import get_offload_group_idx
from vllm.v1.request import RequestStatus

from kvpool.client.scheduler import Hit, Later
from kvpool.wire.messages import DeviceState
from kvpool_vllm import connector as connector_module
from kvpool_vllm import scheduling
from kvpool_vllm import spec as spec_module
from tests.unit.vllm_world import CHUNK, FakePool, World, full_attention, sliding_window, vllm_config

MakeWorld = Callable[..., World]

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def make(models: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    """Make a world: `make(blocks=…)`, `make(groups=[…])`, `make(extra={…})`."""
    monkeypatch.setattr(spec_module, "SchedulerClient", FakePool)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def made(*, groups: Any = None, blocks: int = 200, **changes: Any) -> World:
        return World(vllm_config(models, **changes), groups or [full_attention()], blocks=blocks)

    return made


def slow(speed: float) -> dict[int, DeviceState]:
    return {0: DeviceState(device=0, healthy=True, read_bytes_per_s=speed, backlog_bytes=0)}


def load(world: World, name: str, tokens: int, **hit: Any) -> tuple[Any, int, Any, list[int]]:
    """Let a request arrive whose keys are hits, and admit its load: step, job, spec, blocks."""
    world.add(name, tokens)
    world.hit(name, **hit)
    step = world.step()
    ((job, (spec, blocks)),) = step.loads.items()
    return step, job, spec, blocks


def test_all_keys_of_all_groups_are_announced_on_arrival_in_prefix_order(make: MakeWorld) -> None:
    world = make(groups=[full_attention(), sliding_window()])
    request = world.add("a", 3 * CHUNK + 10)
    announced = world.pool.announced["a"]
    hashes = [bytes(request.block_hashes[2 * chunk + 1]) for chunk in range(3)]
    expected = [digest + group.to_bytes(4, "big") for digest in hashes for group in range(2)]
    assert expected == announced


def test_the_default_chunk_is_256_tokens_and_failures_are_recomputed(make: MakeWorld) -> None:
    world = make()
    transfer = world.config.kv_transfer_config
    assert transfer is not None
    assert (256, "recompute") == (transfer.kv_connector_extra_config["block_size"], transfer.kv_load_failure_policy)
    assert 2 == world.connector.scheduler.config.blocks_per_chunk


def test_a_hit_is_loaded_with_the_devices_the_index_names(make: MakeWorld) -> None:
    world = make()
    _, _, spec, blocks = load(world, "a", 5 * CHUNK + 10, device=0)
    assert tuple(world.pool.announced["a"]) == spec.keys
    assert (0,) * 5 == spec.devices
    assert 10 == len(blocks)


def test_a_miss_is_computed_and_its_chunks_are_offered_once(make: MakeWorld) -> None:
    world = make()
    world.add("a", 2 * CHUNK + 10)
    step = world.step()
    ((job, spec),) = step.stores.items()
    assert tuple(world.pool.announced["a"]) == spec.keys
    assert (CHUNK, 2 * CHUNK) == spec.ends
    world.report(step, stored=(job,))
    assert {} == world.step().stores


def test_a_finished_request_is_withdrawn(make: MakeWorld) -> None:
    world = make()
    world.add("a", CHUNK, max_tokens=1)
    step = world.step()
    world.report(step)
    world.step()
    assert ["a"] == world.pool.withdrawn


def test_objects_are_kept_for_a_request_until_its_load_has_landed(make: MakeWorld) -> None:
    world = make()
    step, job, _, _ = load(world, "a", 2 * CHUNK + 10)
    assert {"a"} == world.pool.waiting
    world.report(step, loaded={job: "a"})
    assert set() == world.pool.waiting


def test_objects_are_kept_for_a_deferred_request(make: MakeWorld) -> None:
    world = make()
    world.pool.states = slow(1.0)
    load(world, "a", 2 * CHUNK + 10)
    world.add("b", 2 * CHUNK + 10)
    world.hit("b")
    assert {} == world.step().loads
    assert "b" in world.pool.waiting


def test_nothing_is_kept_for_a_request_that_runs_without_a_load(make: MakeWorld) -> None:
    world = make()
    world.add("a", CHUNK + 10)
    world.step()
    assert set() == world.pool.waiting


def test_a_preempted_request_waits_again(make: MakeWorld) -> None:
    world = make()
    world.add("a", CHUNK + 10)
    step = world.step()
    step.output.preempted_req_ids = {"a"}
    world.connector.side.step_built(step.output)
    assert {"a"} == world.pool.waiting


def test_nothing_is_read_ahead_for_an_engine_that_only_stores(make: MakeWorld) -> None:
    world = make()
    world.connector.side._manager._loads = False
    world.add("a", CHUNK + 10)
    assert set() == world.pool.waiting


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", 0), ("priority", 7)])
def test_a_requests_priority_counts_where_vllm_schedules_by_it(make: MakeWorld, policy: str, expected: int) -> None:
    world = make(scheduling_policy=policy)
    world.add("a", CHUNK + 10, priority=7)
    assert expected == world.pool.priorities["a"]


def test_an_unanswered_lookup_is_later_and_polls_do_not_repeat_it(make: MakeWorld) -> None:
    world = make()
    world.pool.default = Later(0, "unanswered")
    world.add("a", 5 * CHUNK)
    assert {} == world.step().loads
    first = world.pool.lookups
    for _ in range(3):
        world.step()
    assert first == world.pool.lookups
    world.hit("a")
    assert 1 == len(world.step().loads)


def test_an_unanswered_lookup_is_repeated_after_a_while_since_its_end_is_a_deadline(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    world.pool.default = Later(0, "unanswered")
    world.add("a", CHUNK + 10)
    world.step()
    first = world.pool.lookups
    monkeypatch.setattr(scheduling, "RETRY_EVERY_S", 0.0)
    world.pool.changes += 1
    world.step()
    middle = world.pool.lookups
    world.step()
    assert first < middle < world.pool.lookups


def test_an_answer_that_comes_within_a_millisecond_is_used_in_the_same_pass(make: MakeWorld) -> None:
    world = make()
    world.pool.default = Later(0, "unanswered")
    world.add("a", CHUNK + 10)
    world.pool.on_wait = lambda: world.hit("a")
    assert 1 == len(world.step().loads)


def test_a_load_is_deferred_while_the_drive_has_a_second_of_admitted_work(make: MakeWorld) -> None:
    world = make()
    world.pool.states = slow(speed=2 * CHUNK * 1024)  # a chunk has 4 layers x 4 heads x 64 values of 2 bytes a token
    step, job, _, _ = load(world, "a", 5 * CHUNK + 10)
    world.add("b", 5 * CHUNK + 10)
    world.hit("b")
    world.report(step)
    step = world.step()
    assert {} == step.loads
    assert RequestStatus.WAITING == world.scheduler.requests["b"].status
    world.add("c", 100)
    step = world.step()
    assert ["c"] == list(step.output.num_scheduled_tokens)
    world.report(step, loaded={job: "a"})
    assert ["b"] == [spec.request for spec, _ in world.step().loads.values()]


def test_a_resident_hit_is_admitted_whatever_the_drive_has_to_do(make: MakeWorld) -> None:
    world = make()
    world.pool.states = slow(speed=1.0)
    load(world, "a", 5 * CHUNK + 10)
    world.add("b", 5 * CHUNK + 10)
    world.hit("b", resident=True)
    assert ["b"] == [spec.request for spec, _ in world.step().loads.values()]


def test_a_load_whose_blocks_do_not_fit_waits_and_a_short_request_passes_it(make: MakeWorld) -> None:
    world = make(blocks=34)
    load(world, "a", 1300)
    load(world, "b", 1300)
    world.add("c", 1900)
    world.hit("c")
    world.add("short", 500)
    step = world.step()
    assert {} == step.loads
    assert ["short"] == list(step.output.num_scheduled_tokens)


def test_a_load_whose_blocks_do_not_fit_is_left_to_vllm_where_nobody_will_free_any(make: MakeWorld) -> None:
    world = make(blocks=30)
    world.add("a", 4000)
    world.hit("a")
    asked = []
    answer = world.connector.get_num_new_matched_tokens
    world.connector.get_num_new_matched_tokens = lambda *args: asked.append(answer(*args)) or asked[-1]  # type: ignore[method-assign, func-returns-value]
    world.step()
    assert [(4000 // CHUNK * CHUNK, True)] == asked


def test_a_deferral_ends(make: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make()
    world.pool.states = slow(speed=1.0)
    load(world, "a", 5 * CHUNK + 10)
    world.add("b", 5 * CHUNK + 10)
    world.hit("b")
    assert {} == world.step().loads
    later = time.monotonic() + 11
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert ["b"] == [spec.request for spec, _ in world.step().loads.values()]


def test_a_poll_of_a_deferred_request_takes_microseconds(make: MakeWorld) -> None:
    world = make()
    world.pool.states = slow(speed=1.0)
    load(world, "a", 5 * CHUNK + 10)
    request = world.add("b", 30 * CHUNK + 10)
    world.hit("b")
    world.step()
    lookups = world.pool.lookups
    times = []
    for _ in range(200):
        start = time.perf_counter()
        assert (None, False) == world.connector.get_num_new_matched_tokens(request, 0)
        times.append(time.perf_counter() - start)
    assert lookups == world.pool.lookups
    assert min(times) < 20e-6


def test_a_block_that_did_not_load_is_recomputed_without_a_second_load_and_stored_again(make: MakeWorld) -> None:
    world = make()
    step, job, spec, blocks = load(world, "a", 5 * CHUNK + 10)
    lost = set(spec.keys[2:3])
    world.report(step, loaded={job: "a"}, failed={job: lost}, invalid=set(blocks[4:6]))
    step = world.step()
    assert {} == step.loads
    assert 3 * CHUNK + 10 == step.output.num_scheduled_tokens["a"]
    (stored,) = step.stores.values()
    assert tuple(lost) == stored.keys
    assert (3 * CHUNK,) == stored.ends


def test_a_load_that_failed_from_its_first_block_on_gets_no_second_one(make: MakeWorld) -> None:
    world = make()
    step, job, spec, blocks = load(world, "a", 5 * CHUNK + 10)
    world.report(step, loaded={job: "a"}, failed={job: set(spec.keys)}, invalid=set(blocks))
    step = world.step()
    assert {} == step.loads
    assert 5 * CHUNK + 10 == step.output.num_scheduled_tokens["a"]
    (stored,) = step.stores.values()
    assert spec.keys == stored.keys


def test_a_failed_load_of_several_groups_is_recomputed_as_a_whole(make: MakeWorld) -> None:
    world = make(groups=[full_attention(), sliding_window()])
    step, job, spec, _ = load(world, "a", 5 * CHUNK + 10)
    assert {0, 1} == {get_offload_group_idx(key) for key in spec.keys}
    world.report(step, loaded={job: "a"}, failed={job: {spec.keys[1]}}, failed_requests={"a"})
    step = world.step()
    assert {} == step.loads
    assert 5 * CHUNK + 10 == step.output.num_scheduled_tokens["a"]
    (stored,) = step.stores.values()
    assert spec.keys[1] in stored.keys


def test_other_requests_may_still_load_what_failed_for_one(make: MakeWorld) -> None:
    world = make()
    step, job, spec, blocks = load(world, "a", 2 * CHUNK + 10)
    world.report(step, loaded={job: "a"}, failed={job: set(spec.keys)}, invalid=set(blocks))
    world.add("b", 2 * CHUNK + 11, seed=sum(b"a"))
    world.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert [("b", spec.keys)] == [(spec.request, spec.keys) for spec, _ in world.step().loads.values()]


def test_after_a_reset_a_load_in_flight_and_all_later_requests_find_nothing(make: MakeWorld) -> None:
    world = make()
    step, job, _, blocks = load(world, "a", 2 * CHUNK + 10)
    assert not world.scheduler.reset_prefix_cache(reset_connector=True), "a load holds blocks"
    assert {job} == world.scheduler.connector.scheduler._current_batch_jobs_to_flush  # type: ignore[union-attr]
    world.report(step, loaded={job: "a"}, failed={job: {b"any"}}, invalid=set(blocks))
    world.pool.default = Hit(0, True)
    world.add("b", 2 * CHUNK + 10, seed=5)
    step = world.step()
    assert ({}, {}) == (step.loads, step.stores)
    assert {"a": 2 * CHUNK + 10, "b": 2 * CHUNK + 10} == step.output.num_scheduled_tokens


def test_after_a_reset_with_nothing_in_use_requests_load_and_store_in_the_new_epoch(make: MakeWorld) -> None:
    world = make()
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    world.add("a", 2 * CHUNK + 10)
    step = world.step()
    assert [1] == [spec.epoch for spec in step.stores.values()]
    world.pool.default = Hit(0, True)
    world.add("b", 2 * CHUNK + 10, seed=5)
    assert [1] == [spec.epoch for spec, _ in world.step().loads.values()]


def test_tenants_have_block_hashes_of_their_own_and_one_tenant_has_the_same(make: MakeWorld) -> None:
    world = make()
    hashes = {}
    for name, params in {
        "plain": None, "a1": {"kvpool_tenant": "a"}, "a2": {"kvpool_tenant": "a"}, "b": {"kvpool_tenant": "b"},
    }.items():  # fmt: skip
        request = world.add(name, 2 * CHUNK + 10, seed=1, params=params)
        hashes[name] = [bytes(block) for block in request.block_hashes]
    assert hashes["a1"] == hashes["a2"]
    assert 3 == len({hashes[name][0] for name in ("plain", "a1", "b")})
    assert set() == set(hashes["a1"]) & (set(hashes["plain"]) | set(hashes["b"]))
    announced = {name: set(keys) for name, keys in world.pool.announced.items()}
    assert announced["a1"] == announced["a2"]
    assert set() == announced["a1"] & (announced["plain"] | announced["b"])


def test_a_sliding_window_chunk_whose_head_is_gone_is_not_stored(make: MakeWorld) -> None:
    world = make(groups=[full_attention(), sliding_window()])
    world.add("a", 5 * CHUNK + 10)
    status = world.connector.scheduler._req_status["a"]
    choose = world.connector.scheduler._build_store_jobs

    def with_a_hole(output: Any) -> Any:
        status.group_states[1].block_ids[6] = 0  # the first block of chunk 3, as when it was given to somebody else
        return choose(output)

    world.connector.scheduler._build_store_jobs = with_a_hole  # type: ignore[method-assign]
    (spec,) = world.step().stores.values()
    position = status.req_context.get_offload_key_position
    window_ends = [position(key) for key in spec.keys if get_offload_group_idx(key) == 1]
    assert [5 * CHUNK] == window_ends
    assert (None,) * len(spec.keys) == spec.masks


def test_a_window_shorter_than_a_chunk_stores_its_tail_with_a_mask(make: MakeWorld) -> None:
    world = make(groups=[full_attention(), sliding_window(window=100)])
    world.add("a", 2 * CHUNK + 10)
    status = world.connector.scheduler._req_status["a"]
    choose = world.connector.scheduler._build_store_jobs

    def with_a_hole(output: Any) -> Any:
        status.group_states[1].block_ids[2] = 0
        return choose(output)

    world.connector.scheduler._build_store_jobs = with_a_hole  # type: ignore[method-assign]
    (spec,) = world.step().stores.values()
    masks = {key: mask for key, mask in zip(spec.keys, spec.masks, strict=True) if get_offload_group_idx(key) == 1}
    assert b"\0\1" in masks.values()


def test_preempted_requests_hold_no_blocks_for_the_rule(make: MakeWorld) -> None:
    world = make()
    world.add("a", CHUNK)
    step = world.step()
    assert ["a"] == list(world.connector.side._holding)
    step.output.preempted_req_ids = {"a"}
    world.connector.side.step_built(step.output)
    assert [] == list(world.connector.side._holding)


def test_hits_are_counted_by_the_tier_they_come_from(make: MakeWorld) -> None:
    world = make()
    request = world.add("a", 2 * CHUNK + 10)
    keys = world.pool.announced["a"]
    world.pool.known = {keys[0]: Hit(0, True), keys[1]: Hit(0, False)}
    world.pool.changes += 1
    world.step()
    sources = world.connector.get_external_cache_hit_sources(request, 2 * CHUNK)
    assert {"host": CHUNK, "disk": CHUNK} == {source.value: tokens for source, tokens in sources.items()}


def test_a_hit_that_vllm_finds_no_blocks_for_is_not_looked_up_again_while_nothing_changes(make: MakeWorld) -> None:
    world = make(blocks=30)
    world.add("a", 4000)
    world.hit("a")
    world.step()
    world.step()
    lookups = world.pool.lookups
    world.step()
    assert lookups == world.pool.lookups
    world.pool.changes += 1
    world.step()
    assert lookups < world.pool.lookups


def test_what_the_pool_tells_of_others_does_not_repeat_the_lookup_of_a_deferred_request(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "RETRY_EVERY_S", 60.0)
    world = make()
    world.pool.states = slow(speed=1.0)
    step, job, _, _ = load(world, "a", 5 * CHUNK + 10)
    world.add("b", 5 * CHUNK + 10)
    world.hit("b")
    assert {} == world.step().loads
    lookups = world.pool.lookups
    world.pool.changes += 1
    world.step()
    assert lookups == world.pool.lookups
    world.report(step, loaded={job: "a"})
    assert ["b"] == [spec.request for spec, _ in world.step().loads.values()]
    assert lookups < world.pool.lookups


def test_a_rank_without_failures_speaks_the_same_metadata_as_one_with_them(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    side = connector_module.OffloadingWorkerMetadata({1: 1})
    monkeypatch.setattr(connector_module.OffloadingConnector, "build_connector_worker_meta", lambda self: side)
    without = world.connector.build_connector_worker_meta()
    world.connector._failed_loads = {1: {b"a"}}
    with_failures = world.connector.build_connector_worker_meta()
    assert without is not None
    assert with_failures is not None
    joined = without.aggregate(with_failures)
    assert {1: {b"a"}} == joined.failed_loads  # type: ignore[attr-defined]


def test_an_error_of_ours_in_the_scheduler_becomes_a_miss(make: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make()
    world.add("a", 2 * CHUNK + 10)
    world.hit("a")
    monkeypatch.setattr(world.connector.side, "_wish", lambda *_: 1 / 0)
    step = world.step()
    assert ({}, {}) == (step.loads, step.stores)
    assert {"a": 2 * CHUNK + 10} == step.output.num_scheduled_tokens


def test_workers_metadata_joins_over_ranks() -> None:
    first = connector_module.KvPoolWorkerMetadata({1: 1}, failed_loads={1: {b"a"}})
    second = connector_module.KvPoolWorkerMetadata({1: 1, 2: 1}, failed_loads={1: {b"b"}})
    joined = first.aggregate(second)
    assert isinstance(joined, connector_module.KvPoolWorkerMetadata)
    assert ({1: 2, 2: 1}, {1: {b"a", b"b"}}) == (joined.completed_jobs, joined.failed_loads)


def test_free_blocks_exclude_what_a_load_in_flight_will_need(make: MakeWorld) -> None:
    world = make(blocks=34)
    load(world, "a", 1500)
    pool = world.scheduler.kv_cache_manager.block_pool
    assert isinstance(pool.blocks[0], KVCacheBlock)
    side = world.connector.side
    side._promised = None
    # 10 of 12 blocks are allocated: 1280 of 1500 tokens are loaded.
    assert pool.get_num_free_blocks() - 2 == side._blocks_free()
