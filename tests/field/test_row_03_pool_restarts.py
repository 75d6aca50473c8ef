"""Row 3: the cache server restarted: a rank died in vanished memory, or nobody saw the restart."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import gc
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool.client.copier import Copy
from tests.process.fake_pool import FakePool
from tests.process.test_rank_client import WAIT_S, GatedCopier, Rank, wait_until
from tests.unit.vllm_there import import_vllm

import_vllm()

from tests.field.fake_cuda import FakeCuda


class LateCopier(GatedCopier):
    """Loads copy their bytes only when told to; remembers whether copies still ran when a segment was unmapped."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.unmapped_under_copies: list[bool] = []

    def load(self, copies: Sequence[Copy]) -> object:
        self.launch.set()
        assert self.go.wait(WAIT_S)
        return super().load(copies)

    def detach(self, segment: int) -> None:
        self.unmapped_under_copies.append(not self.gate.is_set())
        super().detach(segment)


def test_row_03_a_copy_out_of_the_memory_of_a_pool_that_vanished_ends_well(
    tmp_path: Path, open_descriptors: None
) -> None:
    pool, copier = FakePool(str(tmp_path)), LateCopier()
    rank = Rank(pool, copier).connected()
    stored = rank.store(1, 4)
    rank.end_of(1)
    wait_until(lambda: len(pool.objects) == 4)
    copier.go.clear()
    copier.launch.clear()
    loaded = rank.load(2, 4)
    wait_until(copier.launch.is_set)
    pool.vanish()
    copier.go.set()
    assert 2 == rank.end_of(2).job  # its end may say either: the pool is gone
    assert stored == loaded
    pool.start()
    rank.connected()
    rank.client.close()
    pool.close()


def test_row_03_a_restart_between_two_looks_is_seen_and_the_memory_of_the_new_pool_is_used(
    tmp_path: Path, open_descriptors: None
) -> None:
    pool, copier = FakePool(str(tmp_path)), LateCopier()
    rank = Rank(pool, copier).connected()
    rank.store(1, 2)
    rank.end_of(1)
    copier.gate.clear()
    copier.launch.clear()
    rank.store(2, 2, first=2)
    wait_until(copier.launch.is_set)
    pool.vanish()
    pool.start()  # at once, with the same names for other memory
    wait_until(lambda: not rank.client.connected)
    assert not rank.client.wait_connected(0.3), "a new pool is greeted while copies of the old one run"
    copier.gate.set()
    assert 2 == len(rank.end_of(2).failed)
    rank.connected()
    assert [False] == copier.unmapped_under_copies
    stored = rank.store(3, 3, request="another")
    assert () == rank.end_of(3).failed
    wait_until(lambda: len(pool.objects) == 3)
    loaded = rank.load(4, 3)
    assert () == rank.end_of(4).failed
    assert stored == loaded
    rank.client.close()
    pool.close()


def test_row_03_no_object_of_a_copy_calls_cuda_when_it_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    copier = cuda.copier()
    ticket = copier.store([], copier.mark())
    del ticket
    gc.collect()
    assert [] == cuda.collected
    copier.close()
