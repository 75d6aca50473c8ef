"""Deciding by cost inside vLLM's real scheduler."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

from vllm.v1.request import RequestStatus

from kvpool.client.scheduler import Hit, Later
from kvpool.core.curves import BreakEven, Curve, Curves, emit_break_even
from kvpool.errors import ConfigError
from kvpool.wire.messages import DeviceState
from kvpool_vllm import spec as spec_module
from kvpool_vllm.planning import PLACES_DEFERRED_EVERY_S, Planning
from tests.unit.vllm_world import CHUNK, FakePool, World, full_attention, sliding_window, vllm_config

MakeWorld = Callable[..., World]

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def make(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    """Make a world with a break-even file: seconds for each 1,000 tokens, and thresholds."""
    monkeypatch.setattr(spec_module, "SchedulerClient", FakePool)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def made(
        *, read_s: float = 0.5, copy_s: float = 0.1, planner: str = "on", groups: Any = None, blocks: int = 200,
        model: str | None = None, extra: dict[str, Any] | None = None, **thresholds: Any,
    ) -> World:  # fmt: skip
        lines = (Curve(0.0, [(1000, seconds)]) for seconds in (1.0, read_s, copy_s))
        name = str(models / "llama") if model is None else model
        path = tmp_path / "break-even.json"
        path.write_text(emit_break_even(BreakEven(model_name=name, curves=Curves(*lines), **thresholds)))
        chosen = {"load_planner": planner, "prefix_cache_break_even_path": str(path), **(extra or {})}
        return World(vllm_config(models, extra=chosen), groups or [full_attention()], blocks=blocks)

    return made


def planning_of(world: World) -> Planning:
    found = world.connector.side._planning
    assert found is not None
    return found


def tell_backlog(world: World, seconds: float) -> None:
    """Let the one device have reads to do, at the speed of a curve of 0.5 s for 1,000 tokens."""
    speed = 2000 * world.connector.side._kv_bytes_per_token
    world.pool.states = {
        0: DeviceState(
            device=0, healthy=True, read_bytes_per_s=speed, backlog_bytes=int(speed * seconds), queued_bytes_per_s=speed
        )
    }
    world.pool.changes += 1


def first_step(world: World, name: str, tokens: int, **hit: Any) -> Any:
    """Let a request arrive whose keys are hits; return the first scheduling pass."""
    world.add(name, tokens)
    world.hit(name, **hit)
    return world.step()


def test_a_load_that_costs_less_is_admitted(make: MakeWorld) -> None:
    step = first_step(make(), "a", 4 * CHUNK + 10)
    ((spec, _),) = step.loads.values()
    assert 4 == len(spec.keys)


def test_a_load_that_costs_more_is_computed_without_a_job(make: MakeWorld) -> None:
    step = first_step(make(read_s=1.5), "a", 4 * CHUNK + 10)
    assert {} == step.loads
    assert {"a": 4 * CHUNK + 10} == step.output.num_scheduled_tokens


def test_only_what_is_worth_its_wait_is_loaded_and_the_rest_computed(make: MakeWorld) -> None:
    world = make()
    tell_backlog(world, 20.0)
    world.add("a", 4 * CHUNK + 10)
    world.hit("a")
    world.hit("a", resident=True, chunks=2)
    ((spec, blocks),) = world.step().loads.values()
    assert (2, 4) == (len(spec.keys), len(blocks))


def test_a_model_of_several_groups_loads_the_whole_hit_or_nothing(make: MakeWorld) -> None:
    groups = [full_attention(), sliding_window()]
    world = make(groups=groups)
    tell_backlog(world, 20.0)
    world.add("a", 4 * CHUNK + 10)
    world.hit("a")
    world.hit("a", resident=True, chunks=4)
    assert {} == world.step().loads
    assert {} != first_step(make(groups=groups), "b", 4 * CHUNK + 10).loads


def test_what_the_pool_has_not_answered_is_asked_again(make: MakeWorld) -> None:
    world = make()
    world.pool.default = Later(1 << 62, "unanswered")
    world.add("a", 4 * CHUNK + 10)
    step = world.step()
    assert ({}, {}) == (step.loads, step.output.num_scheduled_tokens)
    world.pool.default = Hit(0, True)
    world.pool.changes += 1
    assert {} != world.step().loads


def test_a_users_own_bound_holds_beside_the_planners(make: MakeWorld) -> None:
    world = make()
    world.add("a", 4 * CHUNK + 10)
    world.hit("a")
    world.connector.side._states["a"].max_load_tokens = CHUNK
    ((spec, _),) = world.step().loads.values()
    assert 1 == len(spec.keys)


def test_a_request_behind_a_busy_gpu_waits_for_its_bytes_until_its_deadline(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(extra={"enable_preload": True, "preload_lookahead_requests": 4})
    # No model runs here: steps that take no time would tell of a very fast GPU.
    monkeypatch.setattr(planning_of(world)._measured, "step_ended", lambda *_, **__: None)
    world.add("busy", 24 * CHUNK)
    world.report(world.step())
    world.scheduler.requests["busy"].num_computed_tokens = 8  # as if most of its prompt were still to be computed
    step = first_step(world, "a", 4 * CHUNK + 10)
    assert {} == step.loads
    assert "a" not in step.output.num_scheduled_tokens
    verdict = planning_of(world)._rounds.known("a")
    assert verdict is not None
    assert verdict.until_ns > 0
    world.hit("a", resident=True)
    time.sleep(PLACES_DEFERRED_EVERY_S)
    assert any(world.step().loads for _ in range(3))


def test_without_a_planner_the_gate_declines_what_is_too_short(make: MakeWorld) -> None:
    short, long = 3 * CHUNK + 10, 5 * CHUNK + 10
    limits = {"ssd_tokens": 4 * CHUNK, "mem_tokens": CHUNK}
    assert {} == first_step(make(planner="off", **limits), "a", short).loads
    assert {} != first_step(make(planner="off", **limits), "a", long).loads
    assert {} != first_step(make(planner="off", **limits), "a", short, resident=True).loads


def test_a_prefix_too_short_to_be_loaded_is_not_stored_and_whole_when_it_is_long_enough(make: MakeWorld) -> None:
    world = make(ssd_tokens=4 * CHUNK, mem_tokens=3 * CHUNK)
    world.add("short", 2 * CHUNK + 10, seed=5)
    step = world.step()
    assert {} == step.stores
    world.report(step)
    world.add("long", 4 * CHUNK + 10, seed=5)
    specs = [spec for _ in range(2) for spec in world.step().stores.values()]
    assert world.pool.announced["long"] == [
        key for spec in specs for key in spec.keys if key in world.pool.announced["long"]
    ]


def test_without_a_file_it_is_as_if_the_planner_were_off_until_enough_was_measured(
    make: MakeWorld, models: Path
) -> None:
    world = make(planner="auto", extra={"prefix_cache_break_even_path": None})
    assert {} != first_step(world, "a", 4 * CHUNK + 10).loads
    assert "measuring" == planning_of(world).facts()["planner"]


def test_switched_off_without_a_file_nothing_decides(make: MakeWorld) -> None:
    world = make(planner="off", extra={"prefix_cache_break_even_path": None})
    assert world.connector.side._planning is None


def test_a_file_of_another_model_is_refused_at_start(make: MakeWorld) -> None:
    with pytest.raises(ConfigError, match="model_name is 'another'"):
        make(model="another")


def test_what_runs_or_is_over_no_longer_waits(make: MakeWorld) -> None:
    world = make()
    step = first_step(world, "a", 4 * CHUNK + 10)
    assert 0 == planning_of(world).facts()["planned_waiting"]
    ((job, _),) = step.loads.items()
    world.report(step, loaded={job: "a"})
    assert 1 == planning_of(world).facts()["waits_predicted"]
    world.add("b", 40 * CHUNK)
    world.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    world.step()
    assert 0 == planning_of(world).facts()["planned_waiting"]


def test_a_poll_of_a_request_that_waits_is_cheap(make: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make(extra={"enable_preload": True, "preload_lookahead_requests": 4})
    # No model runs here: steps that take no time would tell of a very fast GPU.
    monkeypatch.setattr(planning_of(world)._measured, "step_ended", lambda *_, **__: None)
    world.add("busy", 24 * CHUNK)
    world.report(world.step())
    world.scheduler.requests["busy"].num_computed_tokens = 8
    first_step(world, "a", 20 * CHUNK + 10)
    lookups = world.pool.lookups
    request, side = world.scheduler.requests["a"], world.connector.side
    start = time.thread_time()
    for _ in range(200):
        assert (None, False) == world.connector.get_num_new_matched_tokens(request, 0)
    assert lookups == world.pool.lookups
    assert (time.thread_time() - start) / 200 < 200e-6
    assert side._planning is not None


def test_every_decision_is_counted_and_the_last_one_told_with_its_reason(make: MakeWorld) -> None:
    world = make(read_s=1.5)
    first_step(world, "a", 4 * CHUNK + 10)
    facts = world.pool.more_facts()
    assert (1, "decline 0 chunks: computing costs no more") == (facts["planner_decline"], facts["planner_last"])


def test_a_device_that_this_engine_was_not_told_of_is_loaded_from_without_a_price(make: MakeWorld) -> None:
    world = make()
    world.add("a", 4 * CHUNK + 10)
    world.hit("a", device=7)
    world.hit("a", chunks=2)
    ((spec, _),) = world.step().loads.values()
    assert (0, 0, 7, 7) == spec.devices
    assert not world.connector.side.guard.broken


@pytest.mark.parametrize(("alone", "copied_bytes", "told"), [(True, 0, 1), (False, 0, 0), (True, 4096, 0)])
def test_a_load_from_the_drive_that_nothing_held_up_corrects_predictions(
    make: MakeWorld, monkeypatch: pytest.MonkeyPatch, alone: bool, copied_bytes: int, told: int
) -> None:
    world, seen = make(), []
    planning = planning_of(world)
    monkeypatch.setattr(planning._measured, "load_ended", lambda *figures, **more: seen.append((figures, more)))
    first_step(world, "a", 4 * CHUNK + 10)
    ((predicted_s, _, _),) = planning._loading.values()
    planning.load_landed("a", copied_bytes=copied_bytes, alone=alone)
    assert told == len(seen)
    facts = planning.facts()
    assert (pytest.approx(predicted_s, abs=1e-4), True) == (facts["wait_last_predicted_s"], facts["wait_last_s"] > 0)


def test_the_planner_takes_in_speeds_of_queues_only(make: MakeWorld) -> None:
    world = make()
    speed = 2000 * world.connector.side._kv_bytes_per_token
    slow = DeviceState(device=0, healthy=True, read_bytes_per_s=speed / 10, backlog_bytes=0)
    world.pool.states = {0: slow}
    assert {} != first_step(world, "a", 4 * CHUNK + 10).loads
    assert speed == pytest.approx(planning_of(world)._measured.bytes_per_s(0))
