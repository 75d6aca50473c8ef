"""The coordinator with preload on, with stand-ins for the I/O workers: what reaches schedulers and workers."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.health.facts import MEANING
from kvpool.wire import messages as m
from tests.process.pool_harness import PoolProcess, Talker, wait_until

HIT = m.STORED | m.RESIDENT


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., PoolProcess]]:
    """Start a coordinator with preload that ends with the test."""
    pools: list[PoolProcess] = []

    def begin(**options: Any) -> PoolProcess:
        settings = {"enable_preload": True, "preload_lookahead_requests": 4, **options}
        pools.append(PoolProcess(tmp_path, **settings))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(start: Callable[..., PoolProcess]) -> PoolProcess:
    return start()


def store(pool: PoolProcess, rank: Talker, device: int, *keys: bytes) -> None:
    """Let a stand-in say that it has these keys."""
    worker, _ = pool.worker_of(rank, device)
    worker.send(m.Store(job=1, store=1, first=0, keys=list(keys)))
    worker.wait(m.StoreAnswer)


def announce(scheduler: Talker, request: str, *keys: bytes, first: int = 0, more: bool = False) -> None:
    scheduler.send(m.Announce(request=request, first=first, keys=list(keys), more=more))


def wait_resident(scheduler: Talker, *keys: bytes) -> None:
    """Wait until the scheduler has heard that these keys are in staging."""
    missing = set(keys)
    while missing:
        changed, _ = scheduler.wait(m.KeysChanged)
        missing -= {entry.key for entry in changed.entries if entry.flags & m.RESIDENT}


def admitted(pool: PoolProcess) -> list[int]:
    """Return how many keys each stand-in has admissions for."""
    return [row.get("admitted", 0) for row in pool.worker_rows()]


def test_an_arriving_request_has_its_objects_read_on_every_device(pool: PoolProcess) -> None:
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    store(pool, rank, 0, b"a", b"b")
    store(pool, rank, 1, b"c")
    announce(scheduler, "r", b"a", b"c", b"b", b"missing")
    wait_resident(scheduler, b"a", b"b", b"c")
    assert [2, 1] == admitted(pool)
    facts = pool.health()[0]
    assert {name for name in facts if name.startswith(("preload_", "staging_"))} <= set(MEANING)
    assert (1, 1, 1) == (facts["preload_admissions"], facts["preload_admissions_landed"], facts["preload_committed"])


def test_a_request_that_one_device_has_no_room_for_is_read_nowhere(pool: PoolProcess) -> None:
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    store(pool, rank, 0, b"a")
    store(pool, rank, 1, b"full")
    announce(scheduler, "r", b"a", b"full")
    wait_until(lambda: pool.health()[0]["preload_refused"])
    wait_until(lambda: admitted(pool) == [0, 0])
    assert 0 == pool.health()[0]["preload_committed"]


@pytest.mark.parametrize("started", [True, False])
def test_an_admission_ends_with_its_request(pool: PoolProcess, started: bool) -> None:
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    store(pool, rank, 0, b"a")
    announce(scheduler, "r", b"a")
    wait_resident(scheduler, b"a")
    wait_until(lambda: pool.health()[0]["preload_admissions_landed"])
    scheduler.send(m.Withdraw(requests=["r"], started=started))
    wait_until(lambda: admitted(pool) == [0, 0])
    assert int(started) == pool.health()[0]["preload_used"]


def test_a_started_request_that_waits_again_is_read_ahead_again(pool: PoolProcess) -> None:
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    store(pool, rank, 0, b"a")
    announce(scheduler, "r", b"a")
    scheduler.send(m.Withdraw(requests=["r"], started=True))
    announce(scheduler, "r", first=1)
    wait_until(lambda: admitted(pool) == [1, 0])


def test_admissions_end_with_their_scheduler(pool: PoolProcess) -> None:
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    store(pool, rank, 0, b"a")
    announce(scheduler, "r", b"a")
    wait_resident(scheduler, b"a")
    scheduler.close()
    wait_until(lambda: admitted(pool) == [0, 0])


def test_a_long_request_reaches_its_worker_in_parts_and_is_admitted_once(pool: PoolProcess) -> None:
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    keys = [b"%04d" % number for number in range(2 * m.ITEMS_MAX)]
    worker, _ = pool.worker_of(rank, 0)
    for first in (0, m.ITEMS_MAX):
        worker.send(m.Store(job=1, store=1, first=first, keys=keys[first : first + m.ITEMS_MAX]))
        worker.wait(m.StoreAnswer)
    announce(scheduler, "r", *keys[: m.ITEMS_MAX], more=True)
    announce(scheduler, "r", *keys[m.ITEMS_MAX :], first=m.ITEMS_MAX)
    wait_resident(scheduler, *keys)
    assert 1 == pool.health()[0]["preload_asked"]


def test_a_killed_worker_takes_a_whole_admission_with_it_and_its_successor_is_asked_anew(pool: PoolProcess) -> None:
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    store(pool, rank, 0, b"a")
    announce(scheduler, "r", b"a")
    wait_resident(scheduler, b"a")
    os.kill(pool.worker_rows()[0]["pid"], signal.SIGKILL)
    wait_until(lambda: pool.health()[0]["preload_lost"])
    assert 0 == pool.health()[0]["preload_admissions"]


def test_without_preload_no_worker_hears_of_any(start: Callable[..., PoolProcess]) -> None:
    pool = start(enable_preload=False)
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    store(pool, rank, 0, b"a")
    announce(scheduler, "r", b"a")
    scheduler.wait(m.Status)
    facts, rows = pool.health()
    assert not any(name.startswith("preload_") for name in facts)
    assert [0, 0] == [row.get("admitted", 0) for row in rows if row["role"] == "io_worker"]
