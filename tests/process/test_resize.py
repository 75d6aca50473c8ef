"""Staging that grows and shrinks while real I/O workers and ranks use it: no job fails, bytes stay what they are."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import admin
from kvpool.client.rank import RankClient
from kvpool.errors import HostError
from kvpool.wire.messages import ResizeState
from tests.process.pool_harness import MIB, wait_until
from tests.process.real_pool import RealPool


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RealPool]]:
    pools: list[RealPool] = []

    def begin(**options: Any) -> RealPool:
        pools.append(RealPool(tmp_path, **options))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()


def resize(pool: RealPool, size: int) -> list[ResizeState]:
    states: list[ResizeState] = []
    admin.resize(pool.run_dir, size, timeout_s=60, told=states.append)
    return states


def made_bytes(pool: RealPool) -> int:
    """Return the memory that the coordinator's segments have in fact."""
    fds = Path(f"/proc/{pool.popen.pid}/fd")
    sizes = [fd.stat().st_blocks * 512 for fd in fds.iterdir() if "/dev/shm/" in str(fd.readlink())]
    return sum(sizes)


def pinned_bytes(pool: RealPool) -> int:
    """Return the memory that the kernel has pinned for the I/O workers' rings."""
    total = 0
    for row in pool.worker_rows():
        lines = Path(f"/proc/{row['pid']}/status").read_text().splitlines()
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmPin"))
    return total


class Traffic:
    """Stores once, then loads again and again on a thread of its own, until stopped; every byte is checked."""

    def __init__(self, pool: RealPool, rank: RankClient, count: int) -> None:
        self.pool, self.rank, self.count = pool, rank, count
        self.rounds = 0
        self.failed: list[Any] = []
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                store = self.pool.store(
                    self.rank, range(self.count * (self.rounds + 1), self.count * (self.rounds + 2))
                )
                load = self.pool.load(self.rank, range(self.count))
                self.failed += self.pool.end_of(self.rank, load).failed
                self.pool.end_of(self.rank, store)
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001 - told by the test's thread
            self.errors.append(error)

    def goes_on(self) -> None:
        """Wait for three more rounds."""
        wanted = self.rounds + 3
        wait_until(lambda: self.rounds >= wanted or self.errors, 60)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert [] == self.errors
        assert [] == self.failed


@pytest.mark.parametrize("cache", ["off", "lru"])
def test_staging_grows_and_shrinks_under_load(start: Callable[..., RealPool], cache: str) -> None:
    pool = start(staging_bytes=8 * MIB, staging_cache=cache)
    rank = pool.start_rank()
    pool.stored(rank, range(20))
    traffic = Traffic(pool, rank, 20)
    try:
        for size in (32 * MIB, 6 * MIB, 16 * MIB):
            states = resize(pool, size)
            assert states[-1].done and size == states[-1].staging_bytes
            assert 0.8 * size <= states[-1].ready_bytes <= size
            traffic.goes_on()
            facts = pool.health()[0]
            assert (size, False) == (facts["staging_bytes"], facts["staging_changing"])
    finally:
        traffic.stop()


def test_memory_that_is_given_back_is_free_and_the_rank_maps_it_no_more(start: Callable[..., RealPool]) -> None:
    pool = start(staging_bytes=32 * MIB)
    rank = pool.start_rank()
    pool.stored(rank, range(20))
    before = made_bytes(pool)
    resize(pool, 8 * MIB)
    assert 24 * MIB < before
    wait_until(lambda: made_bytes(pool) <= 8 * MIB)
    wait_until(lambda: pinned_bytes(pool) <= 9 * MIB)
    facts, rows = pool.health()
    assert [facts["segments"]] == [row["segments_mapped"] for row in rows if row["role"] == "rank"]
    assert () == pool.end_of(rank, pool.load(rank, range(20))).failed


def test_a_size_below_what_is_needed_is_refused_with_the_number(start: Callable[..., RealPool]) -> None:
    pool = start()
    pool.start_rank()
    with pytest.raises(HostError) as refused:
        resize(pool, MIB)
    assert 2 * MIB == refused.value.context["needed_bytes"]


def test_a_size_beyond_the_machine_is_refused_with_its_limit(start: Callable[..., RealPool]) -> None:
    pool = start()
    pool.start_rank()
    with pytest.raises(HostError) as refused:
        resize(pool, 1 << 50)
    assert refused.value.context["value_bytes"] < refused.value.context["needed_bytes"]
    assert 16 * MIB == pool.health()[0]["staging_bytes"]


def test_the_command_tells_progress_and_the_end(start: Callable[..., RealPool]) -> None:
    pool = start()
    pool.start_rank()
    command = [sys.executable, "-m", "kvpool.cli.main", "resize", "--staging", "24MiB", "--run-dir", pool.run_dir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert 0 == done.returncode, done.stderr
    assert done.stdout.splitlines()[-1].endswith("; done")
    command[5] = "1MiB"
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (11, True) == (refused.returncode, "needed_bytes=2097152" in refused.stderr)
