"""
A real engine's reset: no token from before it comes after it, also of a load that was in flight.

What is stored before the resets is altered on disk, and the pool does not verify: whoever is served any of it answers
otherwise. The control shows that.
"""

from collections.abc import Iterator

import pytest

from kvpool.health import facts
from tests.e2e.answers import CHUNK, Reference, Scene, StartEngine, loadable, tokens
from tests.e2e.pool import Pool, alter_payload, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(420)]

PROMPT, LONG = tokens(1, 1500), tokens(2, 7000)
SLOW = {"read_bytes_per_s": 4 << 20}


@pytest.fixture(scope="module")
def scene(
    engines: StartEngine, reference: Reference, pools: list[Pool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """One engine that has stored two prompts, whose files were then altered, on a slow pool that does not verify."""
    pool = Pool(tmp_path_factory.mktemp("reset"), devices=2)
    pools.append(pool)
    pool.start()
    reference.prepare("llama")
    with engines("llama", name="reset", connector=pool.connector()) as engine:
        engine.wait_up()
        pool.wait_clients(2)
        scene = Scene(pool, engine, reference)
        scene.store({"short": PROMPT, "long": LONG})
        pool.stop()
        for path in pool.objects():
            alter_payload(path)
        scene.start(faults=SLOW, verify=False)
        yield scene


def test_after_a_reset_no_token_is_from_before_it(scene: Scene) -> None:
    engine, reference = scene.engine, scene.reference
    assert reference.answer(PROMPT) != scene.fresh({"x": PROMPT})["x"].tokens, "the control: these bytes are served"
    # A load is in flight: vLLM cannot empty its own cache, says so, and computes what was being loaded.
    assert engine.reset()
    engine.submit("load", LONG, 8)
    wait_until(lambda: _reading(scene.pool), "the load reads")
    assert not engine.reset(connector=True)
    assert reference.answer(LONG) == engine.wait("load").tokens
    # Until a reset finds nothing in use, nothing is loaded or stored; what vLLM kept of its own is what it computed.
    assert engine.reset()
    assert (0, reference.answer(PROMPT)) == (engine.ask(PROMPT).cached, engine.ask(PROMPT).tokens)

    assert engine.reset(connector=True)
    wait_until(lambda: _served_again(scene), "the engine is in the new epoch")
    external = engine.external_tokens()
    assert reference.answer(LONG) == engine.ask(LONG).tokens
    assert external == engine.external_tokens()
    # What was computed after the reset has been stored, and is served.
    engine.ask(tokens(0, 8), 2)
    scene.pool.wait_objects(loadable(LONG) // CHUNK)
    scene.check({"x": LONG}, {"x": loadable(LONG)})


def _reading(pool: Pool) -> bool:
    return any(row.get(facts.IN_FLIGHT_READS) for row in pool.workers())


def _served_again(scene: Scene) -> bool:
    scene.engine.ask(tokens(0, 8), 1)  # an idle scheduler does not look for its pool
    return scene.pool.attached() >= scene.clients
