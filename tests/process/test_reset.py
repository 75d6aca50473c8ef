"""Resets with real workers and clients: nothing from before one is served after it, whoever is killed when."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import admin
from kvpool.client.scheduler import Hit, Miss
from kvpool.errors import Code
from tests.process.engine_harness import KEYS, WAIT_S, Engine, files_of, served
from tests.process.pool_harness import ROOT, PoolProcess, wait_until

Begin = Callable[..., PoolProcess]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a pool with real workers; it ends with the test."""
    pools: list[PoolProcess] = []

    def start(**options: Any) -> PoolProcess:
        pools.append(PoolProcess(tmp_path, worker_module="kvpool.procs.io_worker", answer_deadline_s=5.0, **options))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(name: str = "engine-a") -> Engine:
        made.append(Engine(tmp_path, name))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_nothing_from_before_a_reset_is_served_after_it_and_later_bytes_are(
    begin: Begin, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    begin()
    engine = engines().wait_connected()
    assert () == engine.store(1).failed
    engine.wait_hits()
    assert served(engine, 1), "the control: without a reset these bytes come"
    wait_until(lambda: len(files_of(tmp_path, 0)) == len(KEYS), WAIT_S)

    engine.reset()
    assert 1 == engine.scheduler.epoch
    assert {Miss} == set(engine.lookups())
    ended, _ = engine.load()
    assert len(KEYS) == len(ended.failed)
    wait_until(lambda: files_of(tmp_path, 0) == [], WAIT_S)

    assert () == engine.store(2).failed
    engine.wait_hits()
    assert served(engine, 2)


def test_a_job_of_another_epoch_is_neither_loaded_nor_stored(begin: Begin, engines: Callable[..., Engine]) -> None:
    begin()
    engine = engines().wait_connected()
    engine.store(1)
    engine.reset()
    late = engine.store(1, epoch=0)
    assert [(index, Code.EPOCH) for index in range(len(KEYS))] == list(late.failed)
    assert {Code.EPOCH} == {code for _, code in engine.load(epoch=0)[0].failed}
    assert {Miss} == set(engine.lookups())


@pytest.mark.parametrize("killed", [False, True])
def test_a_reset_outlives_the_pool(begin: Begin, engines: Callable[..., Engine], tmp_path: Path, killed: bool) -> None:
    pool = begin()
    engine = engines().wait_connected()
    engine.store(1)
    engine.wait_hits()
    wait_until(lambda: len(files_of(tmp_path, 0)) == len(KEYS), WAIT_S)
    engine.scheduler.reset()
    if killed:  # at the first sign of an answer, before anything else has happened
        wait_until(lambda: (engine.scheduler.pump(), engine.scheduler.connected)[1], WAIT_S)
        pool.popen.send_signal(signal.SIGKILL)
        pool.popen.wait()
    else:
        engine.wait_connected()
        engine.store(2)
        engine.wait_hits()
        assert 0 == pool.end(WAIT_S)
    begin()
    engine.wait_connected()
    assert 1 == engine.scheduler.epoch
    other = engines("engine-b").wait_connected()
    assert 1 == other.scheduler.epoch
    for one in (engine, other):
        assert {Miss if killed else Hit} == set(one.lookups())
        assert served(one, 2) is not killed
    wait_until(lambda: files_of(tmp_path, 0) == [], WAIT_S)


def test_a_reset_while_no_pool_is_there_is_told_to_the_next(begin: Begin, engines: Callable[..., Engine]) -> None:
    pool = begin()
    engine = engines().wait_connected()
    engine.store(1)
    engine.wait_hits()
    assert 0 == pool.end(WAIT_S)
    engine.scheduler.reset()
    begin()
    engine.wait_connected()
    assert 1 == engine.scheduler.epoch
    assert {Miss} == set(engine.lookups())


def test_other_engines_neither_load_nor_store_until_they_reset_too(
    begin: Begin, engines: Callable[..., Engine]
) -> None:
    pool = begin()
    first, second = engines("engine-a").wait_connected(), engines("engine-b").wait_connected()
    second.store(1)
    second.wait_hits()
    first.reset()
    wait_until(lambda: (second.scheduler.pump(), not second.scheduler.connected)[1], WAIT_S)
    assert {Miss} == set(second.lookups())
    assert {Code.EPOCH} == {code for _, code in second.load(epoch=0)[0].failed}
    assert len(KEYS) == len(second.store(1, epoch=0).failed)
    assert "engine-b" == wait_until(lambda: pool.health()[0]["engines_outdated"], WAIT_S)
    assert {Miss} == set(first.lookups())

    first.store(2)
    first.wait_hits()
    second.reset()
    assert [1, 1] == [first.scheduler.epoch, second.scheduler.epoch]
    second.wait_hits()
    assert served(second, 2)
    assert "" == pool.health()[0]["engines_outdated"]


def test_the_command_resets_for_good_and_names_who_has_to_follow(
    begin: Begin, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    begin()
    engine = engines().wait_connected()
    engine.store(1)
    engine.wait_hits()
    command = [sys.executable, "-m", "kvpool.cli.main", "reset", "tiny", "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    said = done.stdout.splitlines()
    assert ["reset: tiny aaaaaaaa", True] == [said[0], said[1].startswith("engine engine-a neither loads nor stores")]
    wait_until(lambda: (engine.scheduler.pump(), not engine.scheduler.connected)[1], WAIT_S)
    assert {Miss} == set(engine.lookups())
    engine.reset()
    assert {Miss} == set(engine.lookups())
    with pytest.raises(Exception, match="no open namespace"):
        admin.reset(str(tmp_path / "run"), "unknown")


def test_a_device_that_missed_a_reset_follows(begin: Begin, engines: Callable[..., Engine], tmp_path: Path) -> None:
    pool = begin()
    engine = engines().wait_connected()
    engine.store(1)
    engine.wait_hits()
    engine.reset()
    assert 0 == pool.end(WAIT_S)
    (epoch_file,) = (tmp_path / "d0" / ".kvpool" / "epochs").iterdir()
    epoch_file.unlink()
    begin()
    engine.wait_connected()
    assert 1 == engine.scheduler.epoch
    wait_until(epoch_file.exists, WAIT_S)
    assert {Miss} == set(engine.lookups())


@pytest.mark.parametrize("cache", ["off", "lru"])
def test_a_reset_leaves_no_key_in_the_index_and_no_object_in_staging(
    begin: Begin, engines: Callable[..., Engine], cache: str
) -> None:
    pool = begin(staging_cache=cache)
    engine = engines().wait_connected()
    engine.store(1)
    engine.wait_hits()
    wait_until(lambda: len(KEYS) == sum(row["index_objects"] for row in pool.worker_rows()), WAIT_S)
    assert served(engine, 1)
    engine.reset()
    wait_until(lambda: 0 == sum(row["index_objects"] + row["slots_resident"] for row in pool.worker_rows()), WAIT_S)
    engine.store(2)
    engine.wait_hits()
    assert served(engine, 2)
