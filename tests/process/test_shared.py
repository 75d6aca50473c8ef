"""Two pools, as of two hosts, on the same directories: what one stores the other serves, and both live on."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.scheduler import Hit, Miss, SchedulerClient
from kvpool.core import layout
from kvpool.core.directory import ABSENT_S
from kvpool.errors import Code
from kvpool.health import facts
from kvpool.io.files import LEFTOVER_AGE_S
from tests.process.pool_harness import wait_until
from tests.process.real_pool import RealPool, key_of, pump_until

NUMBERS = range(8)
KEYS = [key_of(number) for number in NUMBERS]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RealPool]]:
    pools: list[RealPool] = []

    def begin(host: str, *, shared: bool = True, **options: Any) -> RealPool:
        pool = RealPool(tmp_path / host, device_root=tmp_path, shared=shared, answer_deadline_s=10.0, **options)
        pools.append(pool)
        return pool

    yield begin
    for pool in pools:
        pool.close()


def scanned(pool: RealPool) -> SchedulerClient:
    """Return a scheduler of a pool whose devices have told all they know."""
    scheduler = pool.start_scheduler()
    wait_until(lambda: all(row.get("index_complete") for row in pool.worker_rows()))
    return scheduler


def answers(scheduler: SchedulerClient, request: str) -> list[object]:
    """Announce all keys for *request* and return what becomes of them."""
    scheduler.announce(request, KEYS)
    pump_until(scheduler, lambda: all(isinstance(scheduler.lookup(request, key), Hit | Miss) for key in KEYS))
    return [scheduler.lookup(request, key) for key in KEYS]


def hits(scheduler: SchedulerClient, request: str) -> int:
    return sum(isinstance(answer, Hit) for answer in answers(scheduler, request))


@pytest.mark.parametrize("shared", [True, False])
def test_what_another_host_stores_is_found_and_its_evictions_are_misses(
    start: Callable[..., RealPool], tmp_path: Path, shared: bool
) -> None:
    here, there = start("here", shared=shared), start("there", shared=shared)
    rank, scheduler = here.start_rank(), scanned(here)
    there.stored(there.start_rank("engine-1"), NUMBERS)
    if not shared:
        assert 0 == hits(scheduler, "alone")
        return
    assert len(KEYS) == hits(scheduler, "found")
    assert () == here.end_of(rank, here.load(rank, NUMBERS)).failed

    gone = [path for path in tmp_path.glob("d*/**/*.bin") if ".kvpool" not in path.parts]
    assert len(KEYS) == len(gone)
    for path in gone:
        path.unlink()
    failed = here.end_of(rank, here.load(rank, NUMBERS)).failed
    assert {Code.MISSING} == {code for _, code in failed}
    pump_until(scheduler, lambda: all(isinstance(scheduler.lookup("found", key), Miss) for key in KEYS))
    assert 0 == here.told("set_aside")
    assert {facts.BREAKER_CLOSED} == {row[facts.BREAKER] for row in here.worker_rows()}
    here.stored(rank, NUMBERS)
    assert len(KEYS) == hits(scheduler, "again")


def test_what_was_not_there_is_looked_for_again_after_a_while(start: Callable[..., RealPool]) -> None:
    here, there = start("here"), start("there")
    here.start_rank()
    scheduler = scanned(here)
    rank = there.start_rank("engine-1")
    assert 0 == hits(scheduler, "early")
    there.stored(rank, NUMBERS)
    time.sleep(ABSENT_S)
    assert len(KEYS) == hits(scheduler, "late")


def test_two_hosts_that_store_the_same_keys_at_once_make_one_file_of_each(
    start: Callable[..., RealPool], tmp_path: Path
) -> None:
    pools = [start("here"), start("there")]
    ranks = [pool.start_rank(f"engine-{number}") for number, pool in enumerate(pools)]
    for pool in pools:
        wait_until(lambda pool=pool: all(row.get("slots_free", 0) > 0 for row in pool.worker_rows()))
    jobs = [pool.store(rank, NUMBERS) for pool, rank in zip(pools, ranks, strict=True)]
    for pool, rank, job in zip(pools, ranks, jobs, strict=True):
        assert () == pool.end_of(rank, job).failed
    wait_until(lambda: len(KEYS) == len(_objects(tmp_path)))
    for pool, rank in zip(pools, ranks, strict=True):
        wait_until(lambda pool=pool: not pool.told("queue_store") and not pool.told("in_flight_writes"))
        assert () == pool.end_of(rank, pool.load(rank, NUMBERS)).failed
    assert len(KEYS) == len(_objects(tmp_path))


def test_a_start_removes_no_temporary_file_that_another_host_may_be_writing(
    start: Callable[..., RealPool], tmp_path: Path
) -> None:
    first = start("here")
    first.stored(first.start_rank(), NUMBERS)
    folder = _objects(tmp_path)[0].parent
    young, old = (folder / layout.temporary_name("ab", number) for number in (1, 2))
    for path, age_s in ((young, LEFTOVER_AGE_S / 2), (old, 2 * LEFTOVER_AGE_S)):
        path.write_bytes(b"")
        os.utime(path, (time.time() - age_s,) * 2)
    second = start("there")
    second.start_rank("engine-1")
    scanned(second)
    assert (True, False) == (young.exists(), old.exists())


def _objects(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("d*/**/*.bin") if ".kvpool" not in path.parts)
