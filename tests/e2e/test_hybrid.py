"""A model with three KV groups, two of them sliding windows, which store and load only what they keep."""

from collections.abc import Iterator

import pytest

from tests.e2e.answers import Reference, Scene, StartEngine, loadable, tokens
from tests.e2e.pool import Pool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

MODEL = "gemma3"
PROMPT = tokens(201, 1500)
#: Five chunks of the full-attention group, and two of each sliding-window group: what 512 tokens touch.
OBJECTS = 5 + 2 * 2


@pytest.fixture(scope="module")
def scene(
    engines: StartEngine, reference: Reference, pools: list[Pool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    pool = Pool(tmp_path_factory.mktemp("hybrid"), devices=2)
    pools.append(pool)
    pool.start()
    reference.prepare(MODEL)
    with engines(MODEL, name="hybrid-stores", connector=pool.connector()) as engine:
        engine.wait_up()
        pool.wait_clients(2)
        answer = engine.ask(PROMPT)
        assert (0, reference.answer(PROMPT, model=MODEL)) == (answer.cached, answer.tokens)
        engine.ask(tokens(0, 8), 2)
        pool.wait_objects(OBJECTS)
    pool.stop()
    pool.start()
    with engines(MODEL, name="hybrid-loads", connector=pool.connector()) as engine:
        engine.wait_up()
        pool.wait_clients(2)
        yield Scene(pool, engine, reference, model=MODEL)


def test_a_hybrid_model_answers_after_a_restart_as_without_kvpool(scene: Scene) -> None:
    scene.check_with_control({"a": PROMPT}, {"a": loadable(PROMPT)})


def test_a_hybrid_prompt_that_extends_a_stored_one_answers_as_without_kvpool(scene: Scene) -> None:
    loaded = {"x": loadable(PROMPT)}
    asked = scene.check_of(lambda attempt: {"x": [*PROMPT, *tokens(1000 * attempt + 202, 600)]}, loaded)
    scene.check_control(asked, loaded)


def test_a_harmed_object_of_a_hybrid_model_is_recomputed(scene: Scene) -> None:
    scene.check({"a": PROMPT}, {"a": loadable(PROMPT)})
    for victim in scene.pool.objects()[:3]:
        victim.unlink()
    scene.restart()
    answer = scene.fresh({"a": PROMPT})["a"]
    assert scene.reference.answer(PROMPT, model=MODEL) == answer.tokens
