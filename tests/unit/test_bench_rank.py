"""The bench's client: what its copier sees, and that every object is accounted for."""

import mmap
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from kvpool.cli.bench_rank import BenchCopier, Driver, Staged
from kvpool.cli.bench_work import Work
from kvpool.client.copier import Copy
from kvpool.client.rank import JobEnded, LoadObject, StoreObject
from kvpool.errors import Code

WORK = Work(seed=2, object_bytes=4000, object_count=10, devices=1, batch=3)


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 4 * WORK.slot_bytes + 4096)  # a mapping with views cannot be closed; it ends with them


def copy_of(index: int, slot: int) -> Copy:
    return Copy(7, slot * WORK.slot_bytes, index)


def test_a_stored_object_loads_as_right_and_another_as_wrong(memory: mmap.mmap) -> None:
    copier = BenchCopier(WORK, fill=True)
    copier.attach(7, memory)
    copier.store([copy_of(4, 0), copy_of(5, 3)], None)
    copier.load([copy_of(4, 0), copy_of(5, 3)])
    assert [] == copier.seen.wrong
    copier.load([copy_of(6, 0), copy_of(5, 2)])
    assert [6, 5] == copier.seen.wrong
    copier.whole = True
    copier.seen.wrong.clear()
    memory[100] ^= 1
    copier.load([copy_of(4, 0), copy_of(5, 3)])
    assert [4] == copier.seen.wrong
    copier.detach(7)


def test_staging_is_whole_when_less_than_a_segment_for_each_device_misses() -> None:
    staged = Staged()
    waits = [staged.wait_whole(1000, 2, 0)]
    for segment in range(4):
        staged.add(segment, np.zeros(200 // 8, dtype=np.uint64))
        waits.append(staged.wait_whole(1000, 2, 0))
    assert [False, False, False, False, True] == waits
    assert 800 == staged.mapped_bytes
    staged.remove(0)
    assert 600 == staged.mapped_bytes


class PromptPool:
    """Stands for a rank client: serves every job at once on a thread of its own, except for some objects."""

    def __init__(self, copier: BenchCopier, failing: Sequence[int] = ()) -> None:
        self._copier = copier
        self._failing = failing
        self._ended: list[JobEnded] = []
        self.under_way_max = 0
        self._under_way = 0
        self._lock = threading.Lock()

    def submit_load(self, job: int, objects: Sequence[LoadObject]) -> None:
        self._serve(job, "load", objects)

    def submit_store(self, job: int, request: str, objects: Sequence[StoreObject], after: object | None) -> None:
        self._serve(job, "store", objects)

    def take_ended(self) -> list[JobEnded]:
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def _serve(self, job: int, kind: str, objects: Sequence[LoadObject] | Sequence[StoreObject]) -> None:
        self._under_way += len(objects)
        self.under_way_max = max(self.under_way_max, self._under_way)

        def serve() -> None:
            places = [item.place for item in objects if isinstance(item.place, int)]
            good = [copy_of(place, 0) for place in places if place not in self._failing]
            for copy in good:
                self._copier.store([copy], None) if kind == "store" else self._copier.load([copy])
            self._under_way -= len(objects)
            failed = tuple((n, Code.NO_SLOT) for n, place in enumerate(places) if place in self._failing)
            with self._lock:
                self._ended.append(JobEnded(job, kind, failed, 0, 0.0))

        threading.Thread(target=serve).start()


def driver_of(memory: mmap.mmap, failing: Sequence[int] = ()) -> tuple[Driver, PromptPool, list[dict[str, object]]]:
    copier = BenchCopier(WORK, fill=True)
    copier.attach(7, memory)
    pool = PromptPool(copier, failing)
    told: list[dict[str, object]] = []
    return Driver(pool, copier, WORK, told.append), pool, told  # type: ignore[arg-type]


def test_every_object_is_stored_with_at_most_two_batches_under_way(memory: mmap.mmap) -> None:
    driver, pool, told = driver_of(memory)
    answer = driver.store()
    assert (10, {}, True) == (len(answer["at_ns"]), answer["failed"], answer["done"])  # type: ignore[arg-type]
    assert pool.under_way_max <= 2 * WORK.batch
    assert all(not said["done"] for said in told)


def test_objects_that_failed_are_named_with_their_code_and_waited_for_no_longer(memory: mmap.mmap) -> None:
    driver, _, _ = driver_of(memory, failing=[0, 5, 9])
    assert {0: "NO_SLOT", 5: "NO_SLOT", 9: "NO_SLOT"} == driver.store()["failed"]


def test_a_load_tells_for_each_object_when_it_was_asked_for_and_when_it_came(memory: mmap.mmap) -> None:
    driver, _, _ = driver_of(memory)
    answer = driver.load(list(WORK.batches()))
    asked_ns, at_ns = answer["from_ns"], answer["at_ns"]
    assert isinstance(asked_ns, list) and isinstance(at_ns, list)
    assert 10 == len(asked_ns) == len(at_ns)
    assert all(asked <= at for asked, at in zip(asked_ns, at_ns, strict=True))
    assert min(asked_ns) == answer["first_ns"]
    assert 10 == len(answer["wrong"])  # type: ignore[arg-type] # nothing was stored in that slot
