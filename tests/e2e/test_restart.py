"""
The main job with one rank: what one engine stored, another engine loads after engine and pool were restarted.

One engine stores, ends, and one more serves all tests of this file, on a pool that is restarted between them with
other settings, other faults, other bytes. Two devices, so that every prompt is striped.
"""

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from kvpool.health import facts
from tests.e2e.answers import CHUNK, Prompts, Reference, Scene, StartEngine, chunks, loadable, tokens
from tests.e2e.pool import Pool, alter_payload, wait_until
from tools.engine_process import Answer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

#: Asked together: two conversations and one prompt shorter than a chunk.
FIRST_TURNS = {"a": tokens(1, 1500), "b": tokens(2, 1100), "short": tokens(3, 200)}
#: One for each way to harm an object.
HARMED = {"truncated": tokens(11, 1300), "removed": tokens(12, 1300), "altered": tokens(13, 1300)}
#: 27 chunks of 1 MiB each.
LONG = {f"long-{index}": tokens(20 + index, 7000) for index in range(3)}
SHORT = tokens(50, 100)
#: 160 blocks of 128 tokens hold two long prompts (55 each), not three.
GPU_BLOCKS = 160

SLOW = {"read_bytes_per_s": 8 << 20}


@pytest.fixture(scope="module")
def scene(
    engines: StartEngine, reference: Reference, pools: list[Pool], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    pool = Pool(tmp_path_factory.mktemp("restart"), devices=2)
    pools.append(pool)
    pool.start()
    reference.prepare("llama")
    with engines("llama", name="restart-stores", connector=pool.connector()) as engine:
        engine.wait_up()
        pool.wait_clients(2)
        stored = Scene(pool, engine, reference)
        stored.store({**FIRST_TURNS, **HARMED, **LONG})
    pool.stop()
    pool.start()
    with engines(
        "llama", name="restart-loads", connector=pool.connector(), num_gpu_blocks_override=GPU_BLOCKS
    ) as engine:
        engine.wait_up()
        pool.wait_clients(2)
        scene = Scene(pool, engine, reference)
        scene.objects_of = stored.objects_of
        yield scene


def test_answers_after_a_restart_equal_those_without_kvpool_and_need_the_stored_bytes(scene: Scene) -> None:
    scene.check_with_control(FIRST_TURNS, {"a": 1280, "b": 1024, "short": 0})


def test_every_further_turn_of_a_conversation_loads_all_turns_before(scene: Scene) -> None:
    prompt = FIRST_TURNS["a"]
    for turn in range(2):
        stored = chunks(prompt) * CHUNK
        asked = scene.check_of(_extended([*prompt, *scene.reference.answer(prompt)], 30 + turn, 400), {"x": stored})
        scene.check_control(asked, {"x": stored})
        prompt = list(asked["x"])
        # What was computed has been stored.
        scene.check({"x": prompt}, {"x": loadable(prompt)})


def test_a_prompt_that_extends_a_stored_one_loads_the_common_part(scene: Scene) -> None:
    asked = scene.check_of(_extended(FIRST_TURNS["b"][:1050], 40, 700), {"x": 1024})
    scene.check_control(asked, {"x": 1024})


def test_a_prefix_larger_than_staging_streams_through_it(scene: Scene) -> None:
    scene.restart(staging="16MiB")
    scene.check_with_control({"long-0": LONG["long-0"]}, {"long-0": loadable(LONG["long-0"])})
    scene.restart(staging="256MiB")


@pytest.mark.parametrize(("harm", "error"), [("truncated", "CORRUPT"), ("removed", "MISSING"), ("altered", "CORRUPT")])
def test_a_harmed_object_is_recomputed_and_stored_again(scene: Scene, harm: str, error: str) -> None:
    prompt = HARMED[harm]
    scene.check({harm: prompt}, {harm: loadable(prompt)})
    scene.restart()
    scene.pool.wait_indexed()
    victim = scene.objects_of[harm][2]
    match harm:
        case "truncated":
            os.truncate(victim, victim.stat().st_size // 2)
        case "removed":
            victim.unlink()
        case "altered":
            alter_payload(victim)
    answer = scene.fresh({harm: prompt})[harm]
    assert scene.reference.answer(prompt) == answer.tokens
    assert 1 == scene.pool.total(facts.errors(error))
    scene.engine.ask(tokens(97, 8), 2)
    wait_until(victim.exists, "the object is stored again")
    scene.restart()
    scene.check_with_control({harm: prompt}, {harm: loadable(prompt)})


def test_a_request_aborted_during_its_load_leaves_nothing_behind(scene: Scene) -> None:
    scene.restart(faults=SLOW)
    prompt = LONG["long-1"]

    def abort(_: int) -> list[int]:
        scene.engine.submit("aborted", prompt)
        wait_until(lambda: _reading(scene.pool) or scene.engine.answered("aborted"), "the load has begun")
        scene.engine.abort("aborted")
        return scene.engine.wait("aborted").tokens

    assert [] == scene.in_time(abort)
    wait_until(scene.pool.idle, "all slots are given back")
    wait_until(lambda: scene.engine.counters()["vllm:kv_cache_usage_perc"] == 0, "all GPU blocks are given back")
    scene.check_with_control({"long-1": prompt}, {"long-1": loadable(prompt)})


def test_a_short_new_request_passes_three_long_hits_on_a_slow_device(scene: Scene) -> None:
    scene.restart(faults=SLOW)
    expected = {**scene.reference.answers(LONG), "short": scene.reference.answer(SHORT)}
    loaded = {name: loadable(prompt) for name, prompt in LONG.items()}

    def ask(_: int) -> tuple[list[str], dict[str, Answer]]:
        scene.engine.submit_all({**LONG, "short": SHORT})
        scene.engine.wait("short")
        passed = [name for name in LONG if not scene.engine.answered(name)]
        return passed, {name: scene.engine.wait(name) for name in (*LONG, "short")}

    passed, answers = scene.in_time(ask)
    assert list(LONG) == passed
    assert expected == {name: answer.tokens for name, answer in answers.items()}
    assert {**loaded, "short": 0} == {name: answer.cached for name, answer in answers.items()}
    scene.check_control(LONG, loaded)


def test_an_io_worker_killed_during_loads_costs_only_time(scene: Scene) -> None:
    scene.restart(faults=SLOW)
    loaded = {name: loadable(prompt) for name, prompt in LONG.items()}
    before = {int(row[facts.PID]) for row in scene.pool.workers()}
    assert scene.engine.reset()
    scene.engine.submit_all(LONG)
    victim = wait_until(lambda: _reading(scene.pool), "a worker reads")
    os.kill(victim, signal.SIGKILL)
    # Slots are wanted at once: a store while the loads are recomputed.
    new = tokens(60, 1500)
    stored = scene.engine.ask(new)
    answers = {name: scene.engine.wait(name) for name in LONG}
    assert scene.reference.answers(LONG) == {name: answer.tokens for name, answer in answers.items()}
    assert scene.reference.answer(new) == stored.tokens
    wait_until(lambda: _all_run_again(scene.pool, before - {victim}), "the worker was started again")
    scene.check(LONG, loaded)
    scene.restart()
    scene.check_with_control(LONG, loaded)


def _extended(prompt: list[int], seed: int, count: int) -> Callable[[int], Prompts]:
    """Return what makes prompts that go on after *prompt*, another one for every attempt."""
    return lambda attempt: {"x": [*prompt, *tokens(1000 * attempt + seed, count)]}


def _reading(pool: Pool) -> int:
    """Return the pid of an I/O worker that has reads in flight; 0 when none has."""
    return next((int(row[facts.PID]) for row in pool.workers() if row.get(facts.IN_FLIGHT_READS)), 0)


def _all_run_again(pool: Pool, survivors: set[int]) -> bool:
    rows = [row for row in pool.workers() if row.get(facts.STATE) == facts.RUNNING]
    return len(rows) == len(pool.devices) and survivors < {int(row[facts.PID]) for row in rows}
