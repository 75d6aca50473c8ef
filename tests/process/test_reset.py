"""
Resets with real I/O workers and real clients: nothing from before one is served after it, whoever is killed when.

Every engine stores bytes of its own under the same keys, so that bytes from before a reset are told from later ones.
"""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.client import admin
from kvpool.client.copier import MemoryCopier
from kvpool.client.launch import ClientConfig
from kvpool.client.rank import JobEnded, LoadObject, RankClient, StoreObject
from kvpool.client.scheduler import Hit, Miss, SchedulerClient
from kvpool.core.epochs import spec_of
from kvpool.errors import Code
from tests.process.pool_harness import ROOT, PoolProcess, namespace, wait_until

OBJECT_BYTES = 50_000
SPEC = namespace(rank_count=1, object_bytes=(OBJECT_BYTES,))
KEYS = [hashlib.sha256(b"%d" % number).digest() + bytes(4) for number in range(6)]
WAIT_S = 15.0

Begin = Callable[[], PoolProcess]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def content(version: int, index: int) -> bytes:
    """Return what object *index* holds when it is computed with weights of that version."""
    return hashlib.sha256(b"%d %d" % (version, index)).digest() * (OBJECT_BYTES // 32 + 1)


class Engine:
    """One engine's scheduler and only rank, on the pool of *directory*."""

    def __init__(self, directory: Path, name: str = "engine-a") -> None:
        config = ClientConfig(run_dir=str(directory / "run"), settings=None, autostart=False)
        self.scheduler = SchedulerClient(config, SPEC, engine=name)
        self.rank = RankClient(config, SPEC, engine=name, rank=0, copier=MemoryCopier())
        self._job = 0
        self._request = 0

    def wait_connected(self) -> "Engine":
        """Wait until both roles are in the pool, in the same epoch."""

        def there() -> bool:
            self.scheduler.pump()
            return self.scheduler.connected and self.rank.connected and self._rank_epoch() == self.scheduler.epoch

        wait_until(there, WAIT_S)
        assert self.rank.wait_connected(WAIT_S)
        wait_until(lambda: int(self.rank.facts()["segments_mapped"]) > 0, WAIT_S)
        return self

    def _rank_epoch(self) -> int | None:
        return self.rank._link.epoch

    def store(self, version: int, *, epoch: int | None = None) -> JobEnded:
        """Offer all keys; wait until the pool says that they can be loaded."""
        self._job += 1
        objects = [
            StoreObject(key, index % 2, memoryview(bytearray(content(version, index)[:OBJECT_BYTES])))
            for index, key in enumerate(KEYS)
        ]
        self.rank.submit_store(
            self._job, f"s{self._job}", objects, None, epoch=self.scheduler.epoch if epoch is None else epoch
        )
        return self._end()

    def load(self, *, epoch: int | None = None) -> tuple[JobEnded, list[bytes]]:
        """Load all keys, whatever lookups say."""
        self._job += 1
        places = [bytearray(OBJECT_BYTES) for _ in KEYS]
        objects = [LoadObject(key, index % 2, memoryview(places[index])) for index, key in enumerate(KEYS)]
        self.rank.submit_load(self._job, objects, epoch=self.scheduler.epoch if epoch is None else epoch)
        return self._end(), [bytes(place) for place in places]

    def _end(self) -> JobEnded:
        ended = wait_until(self.rank.take_ended, WAIT_S)
        assert [self._job] == [end.job for end in ended]
        return ended[0]

    def lookups(self) -> list[type]:
        """Announce a request, and return what is said of its keys."""
        self._request += 1
        name = f"r{self._request}"
        self.scheduler.announce(name, KEYS)

        def answered() -> bool:
            self.scheduler.pump()
            return all(isinstance(self.scheduler.lookup(name, key), Hit | Miss) for key in KEYS)

        wait_until(answered, WAIT_S)
        found = [type(self.scheduler.lookup(name, key)) for key in KEYS]
        self.scheduler.withdraw(name)
        return found

    def wait_hits(self) -> None:
        """Wait until all keys are hits."""
        wait_until(lambda: set(self.lookups()) == {Hit}, WAIT_S)

    def reset(self) -> None:
        """Reset, and wait until the pool has answered."""
        self.scheduler.reset()
        assert -1 == self.scheduler.epoch
        self.wait_connected()

    def close(self) -> None:
        self.scheduler.close()
        self.rank.close()


def served(engine: Engine, version: int) -> bool:
    """Tell whether all keys load, with the bytes of that version; no bytes of another one may come."""
    ended, found = engine.load()
    failed = {index for index, _ in ended.failed}
    good = [content(version, index)[:OBJECT_BYTES] for index in range(len(KEYS))]
    assert all(index in failed or found[index] == good[index] for index in range(len(KEYS))), "bytes of another version"
    return not failed


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a pool with real workers; it ends with the test."""
    pools: list[PoolProcess] = []

    def start() -> PoolProcess:
        pools.append(PoolProcess(tmp_path, worker_module="kvpool.procs.io_worker", answer_deadline_s=5.0))
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


def files_of(tmp_path: Path, epoch: int) -> list[Path]:
    """Return the objects on disk of that epoch."""
    folder = "tiny" if epoch == 0 else f"tiny+{spec_of(SPEC, epoch).fingerprint[:8]}"
    return [path for device in ("d0", "d1") for path in (tmp_path / device / folder).rglob("*.bin")]


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
