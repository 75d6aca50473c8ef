"""A rank's round trip at its start, through real processes: it proves what is so, and finds out what is not."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.copier import Copy, MemoryCopier
from kvpool.client.rank import RankClient
from kvpool.client.round_trip import FAILED, OFF, PASSED, trial_key
from kvpool.core import layout
from kvpool.errors import Code
from kvpool.health.checks import Picture, findings_of
from tests.process.pool_harness import namespace, wait_until
from tests.process.real_pool import OBJECT_BYTES, START_S, RealPool


class Memory:
    """An object's worth of main memory."""

    group = 0

    def __init__(self) -> None:
        self._bytes = bytearray(OBJECT_BYTES)

    def fill(self, seed: bytes) -> object:
        self._bytes[:] = (seed * OBJECT_BYTES)[:OBJECT_BYTES]
        return memoryview(self._bytes)

    def clear(self) -> None:
        self._bytes[:] = bytes(OBJECT_BYTES)

    def holds(self, seed: bytes) -> bool:
        return self._bytes == (seed * OBJECT_BYTES)[:OBJECT_BYTES]


class CorruptingCopier(MemoryCopier):
    """Alters one byte on the way to the engine."""

    def load(self, copies: Sequence[Copy]) -> object:
        super().load(copies)
        for copy in copies:
            copy.place[len(copy.place) // 2] ^= 1  # type: ignore[index, arg-type]
        return None


class SkippingCopier(MemoryCopier):
    """Says that it copied to the engine."""

    def load(self, copies: Sequence[Copy]) -> object:
        return None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RealPool]]:
    pools: list[RealPool] = []

    def begin(**options: Any) -> RealPool:
        pools.append(RealPool(tmp_path, **options))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()


def start_rank(pool: RealPool, copier: MemoryCopier, *, ranks: int = 1, rank: int = 0) -> RankClient:
    spec = namespace(rank_count=ranks, object_bytes=(OBJECT_BYTES,))
    client = RankClient(pool._config(), spec, engine="engine-0", rank=rank, copier=copier, trial_memory=Memory)
    pool.clients.append(client)
    return client


def ended(client: RankClient) -> tuple[object, object]:
    wait_until(lambda: client.facts()["self_test"] != "not yet", START_S)
    return client.facts()["self_test"], client.facts()["self_test_why"]


def objects_of(tmp_path: Path) -> list[Path]:
    return [path for device in ("d0", "d1") for path in (tmp_path / device).rglob("*.bin")]


@pytest.mark.parametrize("cache", ["off", "lru"])
def test_it_passes_from_every_device_and_leaves_nothing(
    start: Callable[..., RealPool], tmp_path: Path, cache: str
) -> None:
    pool = start(staging_cache=cache)
    client = start_rank(pool, MemoryCopier())
    assert (PASSED, "") == ended(client)
    assert [1, 1] == [row["table_reads"] for row in pool.worker_rows()], "from the devices, not from staging"
    wait_until(lambda: objects_of(tmp_path) == [])
    wait_until(lambda: [row["index_objects"] for row in pool.worker_rows()] == [0, 0])
    assert 0 == pool.health()[0]["keys"]
    assert (0, 0) == (client.facts()["bytes_kept"], client.facts()["bytes_served"])
    assert [] == client.take_ended()
    assert () == pool.end_of(client, pool.store(client, range(4))).failed


def test_it_passes_on_all_ranks_at_once(start: Callable[..., RealPool], tmp_path: Path) -> None:
    pool = start()
    clients = [start_rank(pool, MemoryCopier(), ranks=2, rank=rank) for rank in range(2)]
    assert [(PASSED, "")] * 2 == [ended(client) for client in clients]
    wait_until(lambda: objects_of(tmp_path) == [])


@pytest.mark.parametrize("copier", [CorruptingCopier, SkippingCopier])
def test_other_bytes_stop_stores_and_loads_of_that_rank(
    start: Callable[..., RealPool], tmp_path: Path, copier: type[MemoryCopier]
) -> None:
    pool = start()
    client = start_rank(pool, copier())
    word, why = ended(client)
    assert (FAILED, "device d0: other bytes came back than were stored") == (word, why)
    assert {Code.REFUSED} == {code for _, code in pool.end_of(client, pool.store(client, range(4))).failed}
    assert 4 == len(pool.end_of(client, pool.load(client, range(4))).failed)
    told = Picture(*pool.health())
    assert ["self_test_failed"] == [found.check for found in findings_of(told) if found.check == "self_test_failed"]
    wait_until(lambda: objects_of(tmp_path) == [])


def test_it_can_be_switched_off(start: Callable[..., RealPool]) -> None:
    client = start_rank(start(self_test=False), MemoryCopier())
    assert (OFF, "") == ended(client)


def test_what_a_killed_run_left_is_removed_when_it_is_found(start: Callable[..., RealPool], tmp_path: Path) -> None:
    pool = start()
    pool.start_rank()
    key = trial_key("engine-1", 0, 0)
    assert 36 == len(key)
    (manifest,) = wait_until(lambda: list((tmp_path / "d0").rglob("manifest.json")))
    pool.close()
    left = Path(layout.object_path(str(manifest.parent), key))
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(4096))
    start().start_rank()
    wait_until(lambda: not left.exists())
