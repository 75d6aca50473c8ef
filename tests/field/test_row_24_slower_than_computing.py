"""Row 24: offload made things slower than computing again."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

from pathlib import Path
from typing import Any

import pytest

from kvpool.core.curves import BreakEven, Curve, Curves, emit_break_even
from kvpool.io.faults import FaultSettings
from kvpool.wire.messages import DeviceState
from tests.field.conftest import MakeWorld, StartWorker
from tests.unit.vllm_there import import_vllm

import_vllm()

from kvpool_vllm import planning
from tests.unit.vllm_world import CHUNK, World

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.fixture
def measured(make_world: MakeWorld, tmp_path: Path) -> MakeWorld:
    """Make a world with a break-even file: seconds for each 1,000 tokens to compute, to read; and thresholds."""

    def made(*, compute_s: float, read_s: float, planner: str = "on", **thresholds: Any) -> World:
        curves = Curves(*(Curve(0.0, [(1000, seconds)]) for seconds in (compute_s, read_s, 0.01)))
        name = str(tmp_path / "models" / "llama")
        path = tmp_path / "break-even.json"
        path.write_text(emit_break_even(BreakEven(model_name=name, curves=curves, **thresholds)))
        return make_world(extra={"load_planner": planner, "prefix_cache_break_even_path": str(path)})

    return made


def loaded_chunks(world: World, name: str, chunks: int) -> int:
    """Let a request arrive of which everything is on the drive; return how many of its chunks are loaded."""
    world.add(name, chunks * CHUNK + 10)
    world.hit(name)
    step = world.step()
    loads = [len(spec.keys) for spec, _ in step.loads.values() if spec.request == name]
    assert loads or step.output.num_scheduled_tokens[name] == chunks * CHUNK + 10, "neither loaded nor computed"
    world.report(step, loaded={job: spec.request for job, (spec, _) in step.loads.items()})
    return sum(loads)


def test_row_24_what_the_drive_brings_later_than_the_gpu_computes_it_is_computed(measured: MakeWorld) -> None:
    assert 0 == loaded_chunks(measured(compute_s=1.725, read_s=2.45), "slow", 4)
    assert 4 == loaded_chunks(measured(compute_s=2.45, read_s=1.725), "fast", 4)


def test_row_24_a_prompt_too_short_to_gain_from_a_load_is_computed(measured: MakeWorld) -> None:
    limits = {"ssd_tokens": 4 * CHUNK, "mem_tokens": CHUNK}
    world = measured(compute_s=1.0, read_s=0.5, planner="off", **limits)
    assert 0 == loaded_chunks(world, "short", 3)
    assert 5 == loaded_chunks(world, "long", 5)


def test_row_24_a_drive_that_turns_out_slower_than_measured_is_no_longer_loaded_from(
    measured: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "PRICES_EVERY_S", 0.0)
    monkeypatch.setattr(planning, "SPEED_EVERY_S", 0.0)
    world = measured(compute_s=1.0, read_s=0.5)
    side = world.connector.side
    assert side._planning is not None
    # No model runs here: steps that take no time would tell of a very fast GPU.
    monkeypatch.setattr(side._planning._measured, "step_ended", lambda *_, **__: None)
    assert 4 == loaded_chunks(world, "before", 4)
    slow = 1000 * side._kv_bytes_per_token / 2.45
    for number in range(8):
        world.pool.states = {
            0: DeviceState(
                device=0, healthy=True, read_bytes_per_s=slow, queued_bytes_per_s=slow + number, backlog_bytes=0
            )
        }
        world.pool.changes += 1
        world.report(world.step())
    assert 0 == loaded_chunks(world, "after", 4)


def test_row_24_what_loads_without_a_queue_wait_for_is_not_taken_for_the_drives_speed(
    device: Path, start: StartWorker
) -> None:
    worker = start(device, slots=32, faults=FaultSettings(delay=1.0, delay_s=0.1))
    assert list(range(24)) == worker.store(range(24))
    for number in range(8):
        assert {number: True} == worker.load([number])
    shallow = worker.until(lambda: [state for state in worker.states if state.read_bytes_per_s])[-1]
    assert (0.0, 0.0) == (shallow.queued_bytes_per_s, shallow.read_latency_s)
    assert 24 == sum(found is True for found in worker.load(range(24)).values())
    deep = worker.until(lambda: [state for state in worker.states if state.queued_bytes_per_s])[-1]
    assert deep.queued_bytes_per_s > 1.5 * shallow.read_bytes_per_s
    assert deep.read_latency_s > 0
