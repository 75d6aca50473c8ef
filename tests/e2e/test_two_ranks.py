"""Tensor parallelism of two: the same job, complete on both ranks or not at all."""

import random
from collections.abc import Iterator

import pytest

from kvpool.health import facts
from tests.e2e.answers import CHUNK, Reference, Scene, StartEngine, chunks, loadable, tokens
from tests.e2e.pool import Pool, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(420)]

STORED = {"a": tokens(101, 1500), "b": tokens(102, 900)}
MISSING = {"missing": tokens(103, 1500)}
#: Stored while the drive is slow and staging nearly full: some chunks are refused.
PRESSED = {f"pressed-{index}": tokens(110 + index, 2600) for index in range(6)}


@pytest.fixture(scope="module")
def scene(
    engines: StartEngine, reference: Reference, pools: list[Pool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    pool = Pool(tmp_path_factory.mktemp("two-ranks"), devices=2)
    pools.append(pool)
    pool.start()
    with engines("llama", name="two-ranks-store", connector=pool.connector(), tp=2) as engine:
        engine.wait_up()
        pool.wait_clients(3)
        stored = Scene(pool, engine, reference, ranks=2)
        stored.store({**STORED, **MISSING}, objects_per_chunk=2)
    pool.stop()
    pool.start()
    with engines("llama", name="two-ranks-load", connector=pool.connector(), tp=2) as engine:
        engine.wait_up()
        pool.wait_clients(3)
        scene = Scene(pool, engine, reference, ranks=2)
        scene.objects_of = stored.objects_of
        yield scene


def test_two_ranks_answer_after_a_restart_as_without_kvpool_and_need_the_stored_bytes(scene: Scene) -> None:
    scene.check_with_control(STORED, {name: loadable(prompt) for name, prompt in STORED.items()})


def test_a_chunk_that_one_rank_lacks_is_a_miss_for_both(scene: Scene) -> None:
    scene.check(MISSING, {"missing": loadable(MISSING["missing"])})
    scene.pool.stop()
    of_rank_1 = [path for path in scene.objects_of["missing"] if "rank_1" in path.parts]
    assert chunks(MISSING["missing"]) == len(of_rank_1)
    for path in of_rank_1:
        path.unlink()
    scene.restart()
    scene.check(MISSING, {"missing": 0})
    # It was stored again, for both.
    wait_until(lambda: all(path.exists() for path in of_rank_1), "rank 1 has its objects again")
    scene.check_with_control(MISSING, {"missing": loadable(MISSING["missing"])})


def test_refused_stores_leave_no_hole_in_any_prefix(scene: Scene) -> None:
    faults = {"write_bytes_per_s": 2 << 20, "delay": 0.3, "delay_s": 0.2, "seed": random.randrange(1 << 30)}
    print("faults:", faults)
    before = set(scene.pool.objects())
    scene.restart(faults=faults, staging="12MiB", store_deadline_s=0.05)
    answers = scene.fresh(PRESSED)
    assert scene.reference.answers(PRESSED) == {name: answer.tokens for name, answer in answers.items()}
    wait_until(scene.pool.idle, "all that was kept is written", within_s=90)
    refused = scene.pool.total(facts.STORES_DROPPED)
    scene.restart(staging="256MiB", store_deadline_s=1.0)
    new = {path.name for path in set(scene.pool.objects()) - before}
    on_both = [name for name in new if 2 == sum(path.name == name for path in scene.pool.objects())]
    loaded = {name: answer.cached for name, answer in scene.fresh(PRESSED).items()}
    assert 0 < refused
    assert 0 < sum(loaded.values()) < sum(chunks(prompt) * CHUNK for prompt in PRESSED.values())
    # A chunk behind a hole is stored and never loaded.
    assert sum(loaded.values()) == len(on_both) * CHUNK
    assert len(new) == len(on_both)
    scene.restart()
