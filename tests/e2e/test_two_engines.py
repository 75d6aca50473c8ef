"""
Two engines on one pool that the first of them started, and deaths without warning.

The pool is not served by hand here: whoever needs it first starts it, detached.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvpool.errors import PoolUnavailable
from kvpool.health import facts
from tests.e2e.answers import Reference, Scene, StartEngine, chunks, loadable, tokens
from tests.e2e.pool import Pool, alter_payload, kill_all, wait_until
from tools.engine_process import Engine

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(420)]

BY_FIRST = {"first": tokens(301, 1500)}
BY_SECOND = {"second": tokens(302, 1300)}
LOADED = {name: loadable(prompt) for name, prompt in {**BY_FIRST, **BY_SECOND}.items()}
WHILE_KILLED = {f"killed-{index}": tokens(310 + index, 2000) for index in range(3)}
#: What vLLM and Python's multiprocessing leave in /dev/shm when they are killed.
NAMES_OF_VLLM = ("psm_", "sem.mp-")


@dataclass
class Pair:
    """The pool, the engine that started it, the other engine, and names in /dev/shm from before."""

    pool: Pool
    starter: Engine
    other: Engine
    shm_before: set[str]


@pytest.fixture(scope="module")
def pair(engines: StartEngine, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pool = Pool(tmp_path_factory.mktemp("two-engines"), devices=2)
    shm_before = set(os.listdir("/dev/shm"))
    reference.prepare("llama")
    starter = engines("llama", name="starter", connector=pool.connector())
    wait_until(lambda: pool.run_dir.joinpath("pool.sock").exists(), "the first engine starts the pool", within_s=200)
    other = engines("llama", name="other", connector=pool.connector())
    starter.wait_up()
    other.wait_up()
    pool.wait_clients(4)
    yield Pair(pool, starter, other, shm_before)
    kill_all([*starter.tree(), *other.tree()])


def test_what_one_engine_stores_the_other_loads(pair: Pair, reference: Reference) -> None:
    answer = pair.starter.ask(BY_FIRST["first"])
    assert reference.answer(BY_FIRST["first"]) == answer.tokens
    pair.starter.ask(tokens(0, 8), 2)
    pair.pool.wait_objects(chunks(BY_FIRST["first"]))
    Scene(pair.pool, pair.other, reference).check(BY_FIRST, {"first": loadable(BY_FIRST["first"])})


def test_the_starter_killed_with_its_process_tree_harms_no_other_engine(pair: Pair, reference: Reference) -> None:
    pool = set(pair.pool.pids())
    pair.other.submit("running", BY_SECOND["second"], 64)
    killed = pair.starter.kill_tree()
    assert set() == pool & set(killed)
    assert reference.answer(BY_SECOND["second"]) == pair.other.wait("running").tokens[:8]
    assert pool == set(pair.pool.pids())
    wait_until(lambda: 2 == _clients(pair.pool), "the dead clients are gone")
    Scene(pair.pool, pair.other, reference).check({**BY_FIRST, **BY_SECOND}, LOADED)


def test_after_sigkill_of_everything_nothing_is_left_and_the_next_start_serves(
    pair: Pair, reference: Reference, engines: StartEngine
) -> None:
    pool = pair.pool
    published = set(pool.objects())
    pair.other.submit_all(WHILE_KILLED)
    wait_until(lambda: set(pool.objects()) - published, "stores are under way", within_s=120)
    kill_all([*pair.other.tree(), *pool.pids()])

    left = set(os.listdir("/dev/shm")) - pair.shm_before
    assert [] == [name for name in sorted(left) if not name.startswith(NAMES_OF_VLLM)]
    for name in left:
        Path("/dev/shm", name).unlink(missing_ok=True)
    abandoned = _plant_temporary(published)

    pool.configure(verify=False)
    with engines("llama", name="next", connector=pool.connector()) as engine:
        engine.wait_up()
        pool.wait_clients(2)
        wait_until(lambda: not abandoned.exists(), "the abandoned temporary is removed")
        assert [] == [path for device in pool.devices for path in device.rglob("*.tmp")]
        scene = Scene(pool, engine, reference)
        scene.check({**BY_FIRST, **BY_SECOND}, LOADED)
        again = scene.fresh(WHILE_KILLED)
        assert reference.answers(WHILE_KILLED) == {name: answer.tokens for name, answer in again.items()}
        _assert_bytes_matter(scene)
        pids = pool.pids()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), "the pool ends after its last client")


def _assert_bytes_matter(scene: Scene) -> None:
    """The control of this file's equalities: the engine's next pool (it starts one itself) serves altered bytes."""
    wait_until(scene.pool.idle, "all is written")
    generation = scene.pool.pids()
    scene.pool.kill()
    for path in scene.pool.objects():
        alter_payload(path)
    wait_until(lambda: _another_pool(scene.pool, generation), "the engine has started a pool")
    scene.wait_attached()
    answers = scene.fresh({**BY_FIRST, **BY_SECOND})
    assert LOADED == {name: answer.cached for name, answer in answers.items()}
    assert [] == [
        name for name, answer in answers.items()
        if answer.tokens == scene.reference.answer({**BY_FIRST, **BY_SECOND}[name])
    ]  # fmt: skip


def _another_pool(pool: Pool, before: list[int]) -> bool:
    try:
        pids = pool.pids()
    except PoolUnavailable:
        return False
    return len(pids) == 1 + len(pool.devices) and not set(pids) & set(before)


def _clients(pool: Pool) -> int:
    roles = (facts.RANK_CLIENT, facts.SCHEDULER_CLIENT)
    return sum(row.get(facts.ROLE) in roles for row in pool.rows())


def _plant_temporary(published: set[Path]) -> Path:
    """Leave what a worker without unnamed files would leave behind when it is killed."""
    folder = next(iter(sorted(published))).parent
    abandoned = folder / ".kvpool-4194000-1.tmp"
    abandoned.write_bytes(b"half")
    return abandoned
