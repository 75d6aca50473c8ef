"""Preload with real I/O workers and real clients: bytes are in staging before the load asks for them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.pool_harness import MIB, namespace, wait_until
from tests.process.real_pool import SLOT_BYTES, RealPool, is_resident, key_of, pump_until

NUMBERS = range(24)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RealPool]]:
    pools: list[RealPool] = []

    def begin(**options: Any) -> RealPool:
        pools.append(RealPool(tmp_path, **{"enable_preload": True, "preload_lookahead_requests": 8, **options}))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(start: Callable[..., RealPool]) -> RealPool:
    return start()


def announce(pool: RealPool, scheduler: Any, request: str, numbers: range = NUMBERS) -> None:
    scheduler.announce(request, [key_of(number) for number in numbers])


def test_an_announced_request_finds_everything_in_staging_and_its_load_reads_nothing_more(pool: RealPool) -> None:
    rank, scheduler = pool.start_rank(), pool.start_scheduler()
    pool.stored(rank, NUMBERS)
    announce(pool, scheduler, "r")
    pump_until(scheduler, lambda: is_resident(scheduler, "r", NUMBERS))
    assert () == pool.end_of(rank, pool.load(rank, NUMBERS)).failed
    assert len(NUMBERS) * SLOT_BYTES == pool.told("bytes_loaded")


def test_what_a_started_request_leaves_is_freed_without_a_cache(pool: RealPool) -> None:
    rank, scheduler = pool.start_rank(), pool.start_scheduler()
    pool.stored(rank, NUMBERS)
    announce(pool, scheduler, "r")
    pump_until(scheduler, lambda: is_resident(scheduler, "r", NUMBERS))
    scheduler.started("r")
    scheduler.pump()
    wait_until(lambda: pool.told("slots_resident") == 0)


def test_what_a_finished_request_leaves_is_cache_where_there_is_one(start: Callable[..., RealPool]) -> None:
    pool = start(staging_cache="lru")
    rank, scheduler = pool.start_rank(), pool.start_scheduler()
    pool.stored(rank, NUMBERS)
    announce(pool, scheduler, "r")
    pump_until(scheduler, lambda: is_resident(scheduler, "r", NUMBERS))
    scheduler.withdraw("r")
    announce(pool, scheduler, "again")
    pump_until(scheduler, lambda: is_resident(scheduler, "again", NUMBERS))
    assert 0 == pool.told("bytes_loaded")  # kept from the store on


def test_an_abort_while_it_is_read_ahead_leaves_no_slot_behind(pool: RealPool) -> None:
    rank, scheduler = pool.start_rank(), pool.start_scheduler()
    pool.stored(rank, NUMBERS)
    announce(pool, scheduler, "r")
    scheduler.withdraw("r")
    scheduler.pump()
    wait_until(lambda: pool.health()[0]["preload_admissions"] == 0)
    wait_until(lambda: pool.told("slots_resident") + pool.told("slots_filling") == 0)


def test_fifty_requests_with_the_same_prefix_read_each_object_once(start: Callable[..., RealPool]) -> None:
    pool = start(preload_lookahead_requests=50)
    rank, scheduler = pool.start_rank(), pool.start_scheduler()
    pool.stored(rank, NUMBERS)
    for number in range(50):
        announce(pool, scheduler, f"r{number}")
    pump_until(scheduler, lambda: is_resident(scheduler, "r49", NUMBERS))
    wait_until(lambda: pool.health()[0]["preload_admissions_landed"] == 50)
    for number in range(50):
        assert () == pool.end_of(rank, pool.load(rank, NUMBERS)).failed
        scheduler.started(f"r{number}")
        scheduler.pump()
    assert len(NUMBERS) * SLOT_BYTES == pool.told("bytes_loaded")


def test_staging_moves_from_an_idle_model_to_the_one_whose_requests_wait(start: Callable[..., RealPool]) -> None:
    pool = start(devices=("d0",), staging_bytes=12 * MIB, preload_lookahead_requests=2)
    rank, scheduler = pool.start_rank(), pool.start_scheduler()
    other = namespace("b", rank_count=1, object_bytes=(150_000,))
    pool.start_rank("engine-1", other)
    wait_until(lambda: not pool.health()[0]["staging_changing"])
    numbers = range(72)
    for first in range(0, 72, 12):
        pool.stored(rank, range(first, first + 12))
    announce(pool, scheduler, "r", numbers)  # more than its half of staging, less than that and what is lent
    pump_until(scheduler, lambda: is_resident(scheduler, "r", numbers), 30)
    assert pool.health()[0]["preload_refused"]


def test_requests_beyond_the_room_are_read_when_those_before_them_have_started(start: Callable[..., RealPool]) -> None:
    pool = start(devices=("d0",), staging_bytes=3 * MIB)
    rank, scheduler = pool.start_rank(), pool.start_scheduler()
    first, second = range(12), range(12, 24)
    for numbers in (first, second):
        pool.stored(rank, numbers)
    announce(pool, scheduler, "first", first)
    announce(pool, scheduler, "second", second)
    pump_until(scheduler, lambda: is_resident(scheduler, "first", first))
    assert not is_resident(scheduler, "second", second)
    scheduler.started("first")
    pump_until(scheduler, lambda: is_resident(scheduler, "second", second))
