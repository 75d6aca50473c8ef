"""What vLLM's `/metrics` says of the pool: from what jobs, requests and the pool itself tell."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.v1.kv_offload.base import make_offload_key

from kvpool.errors import Code
from kvpool.wire.messages import DeviceState, GroupSpec, NamespaceSpec
from kvpool_vllm import metrics as metrics_module
from kvpool_vllm import spec as spec_module
from kvpool_vllm.connector import KvPoolConnector, KvPoolWorkerMetadata
from kvpool_vllm.metrics import EVERY_S, PREFIX, JobCounts, PoolMetrics, definitions
from tests.unit.vllm_world import CHUNK, FakePool, World, full_attention, vllm_config

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

ROOT = Path(__file__).resolve().parents[2]
OBJECT_BYTES = 1000
KEYS = [bytes(make_offload_key(bytes([index]) * 32, group)) for index in range(4) for group in (0, 1)]
Values = dict[tuple[str, tuple[str, ...]], float]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(metrics_module, "time", made)
    return made


@pytest.fixture
def pool(clock: Clock) -> FakePool:
    return FakePool()


@pytest.fixture
def metrics() -> PoolMetrics:
    """Of an engine of two ranks; group 0 is the one whose chunks count as tokens."""
    namespace = NamespaceSpec(
        fingerprint="f", model_name="m", block_size=128, blocks_per_file=2, tp=2, pp=1, pcp=1, dtype="d", rank_count=2,
        groups=[GroupSpec(group=group, object_bytes=OBJECT_BYTES * (1 + group)) for group in (0, 1)], identity={},
    )  # fmt: skip
    return PoolMetrics(namespace, {0: CHUNK, 1: CHUNK})


def taken(metrics: PoolMetrics, pool: FakePool) -> Values:
    """Return what is told now, by name and labels."""
    stats = metrics.take(pool)  # type: ignore[arg-type]
    data = {} if stats is None else stats.to_dict()["data"]
    return {
        (name.removeprefix(PREFIX), labels): value for name, values in data.items() for labels, value in values.items()
    }


def state(device: int = 0, **changes: Any) -> DeviceState:
    return DeviceState(**{"device": device, "healthy": True, "read_bytes_per_s": 5.0, "backlog_bytes": 0, **changes})


# ---------------------------------------------------------------- jobs


def test_the_objects_of_a_job_are_counted_when_it_ends_by_device_tier_group_and_reason() -> None:
    counts = JobCounts()
    counts.submitted(1, KEYS[:4], [0, 0, 1, 1], bytes([1, 0, 0, 0]))
    counts.submitted(2, KEYS[4:6], [0, 1])
    assert {} == counts.take()
    counts.ended(1, [(3, Code.CORRUPT)])
    counts.ended(2, [])
    expected = {
        (True, 0, True, 0, 0): 1,
        (True, 0, False, 1, 0): 1,
        (True, 1, False, 0, 0): 1,
        (True, 1, False, 1, int(Code.CORRUPT)): 1,
        (False, 0, False, 0, 0): 1,
        (False, 1, False, 1, 0): 1,
    }
    assert expected == counts.take()
    assert {} == counts.take()
    counts.ended(1, [])
    assert {} == counts.take()


def test_what_jobs_came_to_is_told_in_tokens_and_bytes_by_device_and_tier(metrics: PoolMetrics, pool: FakePool) -> None:
    taken(metrics, pool)
    metrics.jobs_counted(
        {
            (True, 0, True, 0, 0): 4,
            (True, 1, False, 0, 0): 2,
            (True, 1, False, 1, 0): 2,
            (True, 1, False, 1, int(Code.DEADLINE)): 2,
            (False, 0, False, 0, 0): 6,
            (False, 1, False, 0, int(Code.NO_SLOT)): 2,
        }
    )
    expected = {
        ("served_tokens", ("nvme0", "memory")): 2 * CHUNK,
        ("served_bytes", ("nvme0", "memory")): 4 * OBJECT_BYTES,
        ("served_tokens", ("nvme1", "disk")): CHUNK,
        ("served_bytes", ("nvme1", "disk")): 2 * OBJECT_BYTES + 2 * 2 * OBJECT_BYTES,
        ("failed_bytes", ("nvme1", "deadline")): 2 * 2 * OBJECT_BYTES,
        ("stored_bytes", ("nvme0",)): 6 * OBJECT_BYTES,
        ("dropped_bytes", ("nvme1", "no_slot")): 2 * OBJECT_BYTES,
    }
    assert expected == taken(metrics, pool)
    assert {} == taken(metrics, pool)


def test_a_device_has_its_name_although_its_job_ended_before_that_was_known(
    metrics: PoolMetrics, pool: FakePool
) -> None:
    pool.devices = []
    taken(metrics, pool)
    metrics.jobs_counted({(False, 1, False, 0, 0): 1})
    pool.devices = ["a", "b"]
    assert {("stored_bytes", ("b",)): OBJECT_BYTES} == taken(metrics, pool)


# ---------------------------------------------------------------- the pool


def test_the_pools_state_is_told_once_a_second_and_only_what_has_changed(
    metrics: PoolMetrics, pool: FakePool, clock: Clock
) -> None:
    pool.states = {0: state(staging_bytes=70, resident_bytes=60, pinned_bytes=20, staged_bytes=10, read_bytes=5)}
    first = taken(metrics, pool)
    gauges = ("staging_bytes", "resident_bytes", "pinned_bytes", "staged_bytes", "device_read_bytes", "connected")
    assert [70, 60, 20, 10, 5] == [first[name, ("nvme0",)] for name in gauges[:5]]
    assert 1 == first["connected", ()]
    pool.states = {0: state(staging_bytes=70, resident_bytes=50, read_bytes=9, pinned_bytes=20, staged_bytes=10)}
    assert {} == taken(metrics, pool)
    clock.now += EVERY_S
    expected = {("resident_bytes", ("nvme0",)): 50, ("device_read_bytes", ("nvme0",)): 4}
    assert expected == taken(metrics, pool)


def test_a_counter_of_a_worker_that_started_anew_does_not_fall(
    metrics: PoolMetrics, pool: FakePool, clock: Clock
) -> None:
    for total, added in ((7, 7), (9, 2), (3, 3)):
        pool.states = {0: state(written_bytes=total)}
        assert added == taken(metrics, pool)["device_written_bytes", ("nvme0",)]
        clock.now += EVERY_S


def test_misses_are_told_by_reason(metrics: PoolMetrics, pool: FakePool) -> None:
    pool.misses = 3
    assert 3 == taken(metrics, pool)["missed_lookups", ("absent",)]


# ---------------------------------------------------------------- requests

MakeWorld = Callable[..., World]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def world(models: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(spec_module, "SchedulerClient", FakePool)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return World(vllm_config(models), [full_attention()])


def told(world: World) -> Values:
    return taken(world.connector.scheduler.manager.metrics, world.pool)


def test_a_deferred_request_is_counted_once_when_it_gets_its_blocks(world: World) -> None:
    world.pool.states = {0: state(read_bytes_per_s=1.0)}
    for name in ("a", "b"):
        world.add(name, 4 * CHUNK + 10)
        world.hit(name)
    step = world.step()
    ((job, _),) = step.loads.items()
    for _ in range(3):
        world.report(step)
        step = world.step()
    assert [] == [name for name, _ in told(world) if name == "deferred_requests"]
    world.report(step, loaded={job: "a"}, counted={(True, 0, False, 0, 0): 4})
    step = world.step()
    assert 1 == len(step.loads)
    assert 1 == told(world)["deferred_requests", ("drive_backlog",)]


def test_a_request_whose_load_failed_counts_as_declined(world: World) -> None:
    world.add("a", 4 * CHUNK + 10)
    world.hit("a")
    step = world.step()
    ((job, (spec, blocks)),) = step.loads.items()
    world.report(step, loaded={job: "a"}, failed={job: set(spec.keys)}, invalid=set(blocks))
    world.step()
    assert 1 == told(world)["declined_requests", ("load_failed",)]


def test_a_load_says_which_tier_each_object_is_in(world: World) -> None:
    world.add("a", 4 * CHUNK + 10)
    world.hit("a")
    world.hit("a", resident=True, chunks=3)
    ((spec, _),) = world.step().loads.values()
    assert bytes([1, 1, 1, 0]) == spec.resident


# ---------------------------------------------------------------- vLLM's side


def prometheus(models: Path, *, spec_named: bool) -> tuple[Any, CollectorRegistry]:
    """Return vLLM's end of the metrics as its API server makes it, in a registry of its own."""
    config = vllm_config(models)
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert spec_named == ("spec_name" in extra)
    registry = CollectorRegistry()
    kinds = {kind: lambda *a, kind=kind, **k: kind(*a, registry=registry, **k) for kind in (Counter, Gauge, Histogram)}
    prom = KvPoolConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})  # type: ignore[arg-type]
    return prom, registry


def test_every_metric_reaches_the_registry_of_a_process_that_never_made_the_connector(
    models: Path, metrics: PoolMetrics, pool: FakePool
) -> None:
    prom, registry = prometheus(models, spec_named=False)
    pool.states, pool.misses = {0: state(resident_bytes=60)}, 1
    metrics.jobs_counted({(True, 0, True, 0, 0): 4, (False, 1, False, 0, int(Code.NO_SLOT)): 2})
    metrics.declined("below_break_even")
    stats = metrics.take(pool)  # type: ignore[arg-type]
    assert stats is not None
    prom.observe(stats.to_dict())
    text = generate_latest(registry).decode()
    assert f'vllm:kvpool_served_tokens_total{{device="nvme0",engine="0",tier="memory"}} {2 * CHUNK}.0' in text
    assert 'vllm:kvpool_dropped_bytes_total{device="nvme1",engine="0",reason="no_slot"} 2000.0' in text
    assert 'vllm:kvpool_declined_requests_total{engine="0",reason="below_break_even"} 1.0' in text
    assert 'vllm:kvpool_resident_bytes{device="nvme0",engine="0"} 60.0' in text
    families = {family.name for family in registry.collect() if family.name.startswith(PREFIX)}
    assert set(definitions()) == families


def test_stats_that_vllms_side_does_not_know_are_dropped_without_an_error(models: Path) -> None:
    prom, _ = prometheus(models, spec_named=False)
    prom.observe({"types": {"vllm:kvpool_of_tomorrow": "counter"}, "data": {"vllm:kvpool_of_tomorrow": {(): 1}}})


def test_ranks_counts_add_up_on_their_way_to_the_scheduler() -> None:
    one, two = (True, 0, False, 0, 0), (False, 0, False, 0, 0)
    joined = KvPoolWorkerMetadata({5: 1}, counted={one: 3}).aggregate(
        KvPoolWorkerMetadata({5: 1}, counted={one: 3, two: 1})
    )
    assert isinstance(joined, KvPoolWorkerMetadata)
    assert {one: 6, two: 1} == joined.counted


def test_the_documentation_names_every_metric_with_its_labels() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(vllm:kvpool_\w+)` \| (counter|gauge) \| (.*?) \|", text, re.MULTILINE)
    expected = {
        (name + ("_total" if kind == "counter" else ""), kind, ", ".join(f"`{label}`" for label in metric.labelnames))
        for name, metric in definitions().items()
        for kind in ["counter" if "Counter" in type(metric).__name__ else "gauge"]
    }
    assert expected == set(rows)
