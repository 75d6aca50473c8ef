"""Deciding by cost with a real vLLM, on a device whose speed is known."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.core.curves import BreakEven, Curve, Curves, emit_break_even
from tests.e2e.answers import Reference, Scene, StartEngine, loadable, tokens
from tests.e2e.pool import Pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

LONG = tokens(701, 8000)
SHORT = {f"short-{index}": tokens(710 + index, 200) for index in range(3)}
#: Bytes of a token's KV in the tiny model, in float32.
KV_BYTES = 4 * 2 * 4 * 32 * 4
#: Seconds to compute prompts of the tiny model on some two cores; what counts is the shape, the test measures the rest.
PREFILL_S = [(200, 0.04), (1000, 0.18), (3000, 1.1), (5000, 2.6), (8000, 6.2)]
#: Loading the long prompt takes that share of computing it.
LOAD_SHARE = 0.4


def break_even(model: Path, long_s: float, read_bytes_per_s: int) -> str:
    """Return what computing costs, and lines for reading at the device's speed and copying in 10 us a token."""
    slower = long_s / PREFILL_S[-1][1]
    computing = Curve(0.0, [(count, seconds * slower) for count, seconds in PREFILL_S])
    reading, copying = (Curve(0.0, [(1000, seconds)]) for seconds in (1000 * KV_BYTES / read_bytes_per_s, 0.01))
    return emit_break_even(BreakEven(model_name=str(model), curves=Curves(computing, reading, copying)))


@pytest.fixture(scope="module")
def scene(
    engines: StartEngine, reference: Reference, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """An engine that knows the costs, on a slow device with preload; a long prompt is loaded faster than computed."""
    folder = tmp_path_factory.mktemp("planner")
    pool = Pool(folder, enable_preload=True, preload_lookahead_requests=4)
    reference.prepare("llama")
    long_s = reference.seconds(LONG)
    read_bytes_per_s = int(len(LONG) * KV_BYTES / (LOAD_SHARE * long_s))
    pool.start(faults={"read_bytes_per_s": read_bytes_per_s})
    file = folder / "break-even.json"
    file.write_text(break_even(models / "llama", long_s, read_bytes_per_s))
    connector = pool.connector(load_planner="on", prefix_cache_break_even_path=str(file))
    engine = engines("llama", name="planner", connector=connector).wait_up()
    pool.wait_clients(2)
    yield Scene(pool, engine, reference)
    engine.close()
    pool.stop()


def test_a_long_prompt_on_a_slow_device_is_passed_by_short_ones_and_all_answer_alike(
    scene: Scene, reference: Reference
) -> None:
    scene.store({"long": LONG})
    assert scene.engine.reset()
    scene.engine.submit("long", LONG, 8)
    scene.engine.submit_all(SHORT, 8)
    short = {name: scene.engine.wait(name) for name in SHORT}
    assert not scene.engine.answered("long")
    long = scene.engine.wait("long")
    assert loadable(LONG) == long.cached
    assert reference.answers({**SHORT, "long": LONG}) == {
        name: answer.tokens for name, answer in {**short, "long": long}.items()
    }
