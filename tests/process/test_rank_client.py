"""The rank client against a pool of real sockets and shared memory, with the pool's misfortunes."""

import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from kvpool.client import link as link_module
from kvpool.client.copier import Copier, Copy, MemoryCopier
from kvpool.client.launch import ClientConfig
from kvpool.client.rank import JobEnded, LoadObject, RankClient, StoreObject
from kvpool.errors import Code, InvariantError, PoolUnavailable
from kvpool.wire.messages import GroupSpec, NamespaceSpec
from tests.process.fake_pool import FakePool

OBJECT_BYTES = 5000  # no multiple of 4096
WAIT_S = 10.0


def namespace(ranks: int = 1) -> NamespaceSpec:
    return NamespaceSpec(
        fingerprint="0" * 64,
        model_name="tiny",
        block_size=16,
        blocks_per_file=16,
        tp=ranks,
        pp=1,
        pcp=1,
        dtype="bfloat16",
        rank_count=ranks,
        groups=[GroupSpec(group=0, object_bytes=OBJECT_BYTES)],
        identity={},
    )


def keys(count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() + bytes(4) for number in range(count)]


class GatedCopier(MemoryCopier):
    """Launched copies run, but count as running until the gate opens; remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.launched: list[Sequence[Copy]] = []
        self.attached: list[int] = []
        self.attach_gate = threading.Event()
        self.attach_gate.set()
        self.launch = threading.Event()

    def attach(self, segment: int, memory: mmap.mmap) -> None:
        assert self.attach_gate.wait(WAIT_S)
        self.attached.append(segment)
        super().attach(segment, memory)

    def detach(self, segment: int) -> None:
        assert self.gate.is_set(), "detached under a running copy"
        self.attached.remove(segment)
        super().detach(segment)

    def load(self, copies: Sequence[Copy]) -> object:
        self.launched.append(copies)
        self.launch.set()
        return super().load(copies)

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        self.launched.append(copies)
        self.launch.set()
        return super().store(copies, after)

    def ended(self, ticket: object) -> bool:
        return self.gate.is_set()

    def wait(self, ticket: object) -> None:
        assert self.gate.wait(WAIT_S)


class Rank:
    """A client under test, with what tests do all the time."""

    def __init__(self, pool: FakePool, copier: Copier | None = None, *, rank: int = 0) -> None:
        self.copier = GatedCopier() if copier is None else copier
        self.client = RankClient(
            ClientConfig(run_dir=pool.run_dir), namespace(pool.ranks), engine="engine", rank=rank, copier=self.copier
        )
        self.pool = pool
        self.ended: dict[int, JobEnded] = {}

    def connected(self) -> "Rank":
        assert self.client.wait_connected(WAIT_S)
        return self

    def store(self, job: int, count: int, *, request: str = "r", first: int = 0) -> list[bytearray]:
        data = [bytearray(os.urandom(OBJECT_BYTES)) for _ in range(count)]
        named = zip(keys(first + count)[first:], data, strict=True)
        objects = [
            StoreObject(key, (first + i) % self.pool.devices, memoryview(one)) for i, (key, one) in enumerate(named)
        ]
        self.client.submit_store(job, request, objects, None)
        return data

    def load(self, job: int, count: int) -> list[bytearray]:
        data = [bytearray(OBJECT_BYTES) for _ in range(count)]
        named = zip(keys(count), data, strict=True)
        objects = [LoadObject(key, i % self.pool.devices, memoryview(one)) for i, (key, one) in enumerate(named)]
        self.client.submit_load(job, objects)
        return data

    def end_of(self, job: int) -> JobEnded:
        wait_until(lambda: self._take() or job in self.ended)
        return self.ended.pop(job)

    def _take(self) -> None:
        for ended in self.client.take_ended():
            assert ended.job not in self.ended, "a job ended twice"
            self.ended[ended.job] = ended


def wait_until(what: Callable[[], object]) -> None:
    """Wait for another thread's doing."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "did not come"
        time.sleep(0.002)


@pytest.fixture
def pool(tmp_path: Path, open_descriptors: None) -> Iterator[FakePool]:
    pool = FakePool(str(tmp_path), devices=2)
    yield pool
    pool.close()


@pytest.fixture
def rank(pool: FakePool) -> Iterator[Rank]:
    rank = Rank(pool)
    yield rank.connected()
    if isinstance(rank.copier, GatedCopier):
        rank.copier.gate.set()
        rank.copier.attach_gate.set()
    rank.client.close()
    rank._take()
    assert {} == rank.ended, "jobs that nobody waited for"


def test_what_was_stored_is_loaded(rank: Rank) -> None:
    stored = rank.store(1, 20)
    assert () == rank.end_of(1).failed
    loaded = rank.load(2, 20)
    ended = rank.end_of(2)
    assert ((), 20 * OBJECT_BYTES, "load") == (ended.failed, ended.bytes, ended.kind)
    assert stored == loaded


def test_altered_bytes_are_not_what_was_stored(rank: Rank) -> None:
    """The control of the test above: the comparison can fail."""
    stored = rank.store(1, 2)
    rank.end_of(1)
    wait_until(lambda: len(rank.pool.objects) == 2)
    rank.pool.alter(keys(2)[1])
    loaded = rank.load(2, 2)
    rank.end_of(2)
    assert stored[0] == loaded[0]
    assert stored[1] != loaded[1]


def test_every_slot_of_a_load_is_released(rank: Rank) -> None:
    rank.store(1, 8)
    rank.end_of(1)
    rank.load(2, 8)
    rank.end_of(2)
    released = lambda: sum(  # noqa: E731
        len(message.indices) for _, message in rank.pool.heard if type(message).__name__ == "Release"
    )
    wait_until(lambda: released() == 8)
    assert 2 >= rank.pool.kinds_heard("rank0").count("Release"), "one message per device"


def test_a_missing_object_fails_alone(rank: Rank) -> None:
    stored = rank.store(1, 2)
    rank.end_of(1)
    loaded = rank.load(2, 3)
    assert ((2, Code.MISSING),) == rank.end_of(2).failed
    assert stored == loaded[:2]


def test_a_refused_key_ends_the_stored_prefix_over_all_devices(rank: Rank) -> None:
    refused = keys(6)[2]
    rank.pool.refuse = lambda key: key == refused
    rank.store(1, 6)
    failed = dict(rank.end_of(1).failed)
    assert {2: Code.NO_SLOT, 3: Code.CANCELLED, 4: Code.CANCELLED, 5: Code.CANCELLED} == failed
    rank.pool.refuse = lambda key: False
    rank.store(2, 4, first=6)
    assert 4 == len(rank.end_of(2).failed), "the request is cut"
    wait_until(lambda: rank.pool.free_slots() == 2 * 64 - 2)
    rank.store(3, 4, request="another", first=6)
    assert () == rank.end_of(3).failed


def test_a_store_without_an_answer_is_dropped_in_time(rank: Rank) -> None:
    rank.pool.hold_stores = True
    rank.store(1, 2)
    ended = rank.end_of(1)
    assert ((0, Code.DEADLINE), (1, Code.CANCELLED)) == ended.failed
    assert ended.seconds < rank.pool.store_deadline_s + 2


def test_a_load_without_an_answer_fails_in_time(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.pool.load_deadline_s = 0.0
    monkeypatch.setattr(link_module, "LOAD_MARGIN_S", 0.1)
    rank.pool.vanish()
    wait_until(lambda: not rank.client.connected)
    rank.pool.start()
    rank.connected()
    rank.pool.hold_loads = True
    rank.load(1, 2)
    assert ((0, Code.DEADLINE), (1, Code.DEADLINE)) == rank.end_of(1).failed
    wait_until(lambda: "LoadCancel" in rank.pool.kinds_heard("rank0"))


def test_the_loads_of_a_lost_worker_fail_and_the_others_go_on(rank: Rank) -> None:
    rank.store(1, 4)
    rank.end_of(1)
    wait_until(lambda: len(rank.pool.objects) == 4)
    rank.pool.hold_loads = True
    loaded = rank.load(2, 4)
    wait_until(lambda: rank.pool.kinds_heard("rank0").count("Load") == 2)
    rank.pool.worker_hangs_up(0, back=False)
    rank.pool.worker_hangs_up(1, back=False)
    assert {0, 1, 2, 3} == {index for index, code in rank.end_of(2).failed if code is Code.WORKER_LOST}
    assert [bytearray(OBJECT_BYTES)] * 4 == loaded
    wait_until(lambda: "CopiesEnded" in rank.pool.kinds_heard("rank"))


def test_a_job_of_a_device_without_worker_fails_at_once(rank: Rank) -> None:
    rank.store(1, 2)
    rank.end_of(1)
    wait_until(lambda: len(rank.pool.objects) == 2)
    rank.pool.worker_hangs_up(1, back=False)
    wait_until(lambda: not rank.client.wait_connected(0))
    stored = rank.load(2, 2)
    assert ((1, Code.WORKER_LOST),) == rank.end_of(2).failed
    assert bytearray(OBJECT_BYTES) == stored[1]
    rank.store(3, 2, first=10)
    assert ((1, Code.WORKER_LOST),) == rank.end_of(3).failed


def test_a_worker_that_returns_serves_again(rank: Rank) -> None:
    stored = rank.store(1, 4)
    rank.end_of(1)
    wait_until(lambda: len(rank.pool.objects) == 4)
    rank.pool.worker_hangs_up(0)
    wait_until(lambda: "CopiesEnded" in rank.pool.kinds_heard("rank"))
    rank.connected()
    loaded = rank.load(2, 4)
    assert () == rank.end_of(2).failed
    assert stored == loaded


def test_a_worker_that_hangs_up_without_a_word_is_lost_and_the_pool_is_attached_anew(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "ORPHAN_S", 0.3)
    stored = rank.store(1, 4)
    rank.end_of(1)
    wait_until(lambda: len(rank.pool.objects) == 4)
    rank.pool.worker_hangs_up(0, told=False, back=False)
    wait_until(lambda: "CopiesEnded" in rank.pool.kinds_heard("rank"))
    rank.load(2, 1)
    assert ((0, Code.WORKER_LOST),) == rank.end_of(2).failed
    rank.connected()
    loaded = rank.load(3, 4)
    assert () == rank.end_of(3).failed
    assert stored == loaded


def test_copies_end_before_a_lost_worker_is_told_so(rank: Rank) -> None:
    assert isinstance(rank.copier, GatedCopier)
    rank.copier.gate.clear()
    rank.store(1, 2)
    wait_until(rank.copier.launch.is_set)
    rank.pool.worker_hangs_up(0)
    wait_until(lambda: rank.client.facts()["requests_cut"] == 1)
    assert "CopiesEnded" not in rank.pool.kinds_heard("rank")
    rank.copier.gate.set()
    assert {0, 1} == {index for index, _ in rank.end_of(1).failed}
    wait_until(lambda: "CopiesEnded" in rank.pool.kinds_heard("rank"))


def test_a_lost_pool_ends_jobs_and_unmaps_and_a_new_one_is_joined(rank: Rank) -> None:
    assert isinstance(rank.copier, GatedCopier)
    rank.store(1, 2)
    rank.end_of(1)
    rank.pool.hold_loads = True
    rank.load(2, 2)
    wait_until(lambda: "Load" in rank.pool.kinds_heard("rank0"))
    rank.pool.vanish()
    assert 2 == len(rank.end_of(2).failed)
    rank.load(3, 1)
    assert ((0, Code.WORKER_LOST),) == rank.end_of(3).failed
    rank.store(4, 1)
    assert ((0, Code.WORKER_LOST),) == rank.end_of(4).failed
    wait_until(lambda: rank.copier.attached == [])  # type: ignore[attr-defined]
    rank.pool.hold_loads = False
    rank.pool.start()
    rank.connected()
    stored = rank.store(5, 3, request="another")
    assert () == rank.end_of(5).failed
    loaded = rank.load(6, 3)
    rank.end_of(6)
    assert stored == loaded


def test_a_new_pool_is_not_greeted_while_copies_of_the_old_one_run(rank: Rank) -> None:
    assert isinstance(rank.copier, GatedCopier)
    rank.copier.gate.clear()
    rank.store(1, 2)
    wait_until(rank.copier.launch.is_set)
    rank.pool.vanish()
    wait_until(lambda: not rank.client.connected)
    rank.pool.start()
    assert not rank.client.wait_connected(0.6)
    rank.copier.gate.set()
    rank.connected()
    assert 2 == len(rank.end_of(1).failed)


def test_flush_drops_what_is_not_launched_and_waits_for_what_is(rank: Rank) -> None:
    assert isinstance(rank.copier, GatedCopier)
    rank.copier.gate.clear()
    rank.store(1, 2)
    wait_until(rank.copier.launch.is_set)
    rank.pool.hold_stores = True
    rank.store(2, 2, request="other", first=2)
    opened = threading.Timer(0.2, rank.copier.gate.set)
    opened.start()
    begin = time.monotonic()
    rank.client.flush([1, 2, 99])
    assert 0.15 < time.monotonic() - begin < 5
    ended = {ended.job: ended.failed for ended in rank.client.take_ended()}
    assert {1: (), 2: ((0, Code.CANCELLED), (1, Code.CANCELLED))} == ended
    opened.join()


def test_flushed_loads_fail_and_no_copy_of_theirs_is_launched_afterwards(rank: Rank) -> None:
    assert isinstance(rank.copier, GatedCopier)
    rank.store(1, 2)
    rank.end_of(1)
    rank.pool.hold_loads = True
    loaded = rank.load(2, 2)
    wait_until(lambda: rank.pool.kinds_heard("rank0").count("Load") == 2)
    rank.client.flush([2])
    assert ((0, Code.CANCELLED), (1, Code.CANCELLED)) == rank.end_of(2).failed
    launched = len(rank.copier.launched)
    rank.pool.hold_loads = False
    rank.load(3, 2)
    rank.end_of(3)
    assert launched + 1 == len(rank.copier.launched) or launched + 2 == len(rank.copier.launched)
    assert [bytearray(OBJECT_BYTES)] * 2 == loaded


def test_a_load_that_landed_fails_when_flushed_before_it_was_taken(rank: Rank) -> None:
    rank.store(1, 2)
    rank.end_of(1)
    rank.load(2, 2)
    wait_until(lambda: rank.client.facts()["loads_ended"] == 1)
    rank.client.flush([2])
    assert ((0, Code.CANCELLED), (1, Code.CANCELLED)) == rank.end_of(2).failed


def test_objects_in_a_segment_that_is_not_mapped_yet_wait_for_it(pool: FakePool) -> None:
    copier = GatedCopier()
    copier.attach_gate.clear()
    rank = Rank(pool, copier).connected()
    stored = rank.store(1, 4)
    wait_until(lambda: "Store" in pool.kinds_heard("rank0"))
    assert [] == rank.client.take_ended()
    copier.attach_gate.set()
    assert () == rank.end_of(1).failed
    loaded = rank.load(2, 4)
    rank.end_of(2)
    assert stored == loaded
    rank.client.close()


def test_loads_of_known_segments_go_on_while_another_is_mapped(rank: Rank) -> None:
    assert isinstance(rank.copier, GatedCopier)
    stored = rank.store(1, 4)
    rank.end_of(1)
    rank.copier.attach_gate.clear()
    rank.pool.add_segment(7)
    loaded = rank.load(2, 4)
    assert () == rank.end_of(2).failed
    assert stored == loaded
    rank.copier.attach_gate.set()
    wait_until(lambda: 7 in rank.copier.attached)  # type: ignore[attr-defined]


def test_a_recalled_segment_is_unmapped_and_said_to_be(rank: Rank) -> None:
    assert isinstance(rank.copier, GatedCopier)
    wait_until(lambda: sorted(rank.copier.attached) == [0, 1])  # type: ignore[attr-defined]
    rank.pool.recall(1)
    wait_until(lambda: "SegmentForgotten" in rank.pool.kinds_heard("rank"))
    assert [0] == rank.copier.attached


def test_a_copier_that_raises_fails_the_job_only(pool: FakePool) -> None:
    class Raising(MemoryCopier):
        broken = False

        def load(self, copies: Sequence[Copy]) -> object:
            if self.broken:
                raise RuntimeError("no such stream")
            return super().load(copies)

    copier = Raising()
    rank = Rank(pool, copier).connected()
    stored = rank.store(1, 2)
    rank.end_of(1)
    copier.broken = True
    rank.load(2, 2)
    assert {(0, Code.COPY_ERROR), (1, Code.COPY_ERROR)} == set(rank.end_of(2).failed)
    copier.broken = False
    loaded = rank.load(3, 2)
    assert () == rank.end_of(3).failed
    assert stored == loaded
    rank.client.close()


def test_a_bug_disables_the_client_and_every_job_still_ends(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank.pool.hold_loads = True
    rank.load(1, 2)
    wait_until(lambda: "Load" in rank.pool.kinds_heard("rank0"))

    def broken(*_: object, **__: object) -> None:
        raise InvariantError("planted")

    monkeypatch.setattr(rank.client._table, "handle", broken)
    rank.load(2, 1)
    assert {0, 1} == {index for index, _ in rank.end_of(1).failed}
    assert {0} == {index for index, _ in rank.end_of(2).failed}
    rank.load(3, 1)
    assert {0} == {index for index, _ in rank.end_of(3).failed}
    rank.client.flush([4])
    assert 1 == sum("is disabled" in record.message for record in caplog.records)


def test_a_bug_met_in_flush_ends_the_flushed_jobs_too(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.pool.hold_loads = True
    rank.load(1, 2)
    wait_until(lambda: "Load" in rank.pool.kinds_heard("rank0"))

    def broken(*_: object, **__: object) -> None:
        raise InvariantError("planted")

    monkeypatch.setattr(rank.client._table, "handle", broken)
    rank.client.flush([1])
    assert [1] == [ended.job for ended in rank.client.take_ended()]


def test_close_ends_jobs_waits_for_copies_and_unmaps(pool: FakePool) -> None:
    copier = GatedCopier()
    rank = Rank(pool, copier).connected()
    copier.gate.clear()
    rank.store(1, 1)
    wait_until(copier.launch.is_set)
    pool.hold_loads = True
    rank.load(2, 2)
    opened = threading.Timer(0.2, copier.gate.set)
    opened.start()
    rank.client.close()
    assert {1, 2} == {ended.job for ended in rank.client.take_ended()}
    assert [] == copier.attached
    rank.load(3, 1)
    assert {3} == {ended.job for ended in rank.client.take_ended()}
    opened.join()


def test_without_a_pool_jobs_end_at_once(tmp_path: Path, open_descriptors: None) -> None:
    client = RankClient(ClientConfig(run_dir=str(tmp_path)), namespace(), engine="e", rank=0, copier=MemoryCopier())
    client.submit_load(1, [LoadObject(keys(1)[0], 0, memoryview(bytearray(OBJECT_BYTES)))])
    client.submit_store(2, "r", [StoreObject(keys(1)[0], 0, memoryview(bytearray(OBJECT_BYTES)))], None)
    client.submit_load(3, [])
    ended: dict[int, JobEnded] = {}
    wait_until(lambda: ended.update({one.job: one for one in client.take_ended()}) or len(ended) == 3)
    assert ((0, Code.WORKER_LOST),) == ended[1].failed
    assert ((0, Code.WORKER_LOST),) == ended[2].failed
    assert () == ended[3].failed
    client.close()


def test_a_pool_that_cannot_be_started_is_tried_again_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, open_descriptors: None
) -> None:
    tries: list[float] = []

    def failing(config: ClientConfig) -> None:
        tries.append(time.monotonic())
        raise PoolUnavailable("the coordinator ended at its start")

    monkeypatch.setattr(link_module, "ensure_pool", failing)
    monkeypatch.setattr(link_module, "RETRY_S_MAX", 0.05)
    monkeypatch.setattr(link_module, "START_RETRY_S_MIN", 0.1)
    config = ClientConfig(run_dir=str(tmp_path), autostart=True)
    client = RankClient(config, namespace(), engine="e", rank=0, copier=MemoryCopier())
    wait_until(lambda: len(tries) == 4)
    client.close()
    gaps = [after - before for before, after in pairwise(tries)]
    assert gaps[0] < gaps[1] < gaps[2]
    assert 1 == sum("no pool" in record.message for record in caplog.records)


def test_two_ranks_store_only_what_both_filled(tmp_path: Path, open_descriptors: None) -> None:
    pool = FakePool(str(tmp_path), devices=2, ranks=2)
    ranks = [Rank(pool, rank=number).connected() for number in (0, 1)]
    refused = keys(8)[5]
    pool.refuse = lambda key: key == refused
    for rank in ranks:
        rank.store(1, 8)
    for rank in ranks:
        assert {5, 6, 7} == {index for index, _ in rank.end_of(1).failed}
    wait_until(lambda: len(pool.objects) == 2 * 5 and pool.free_slots() == 2 * 64 - 2 * 5)
    assert set(keys(5)) == {key for key, _ in pool.objects}
    for rank in ranks:
        rank.client.close()
    pool.close()


def test_an_idle_client_uses_no_cpu(rank: Rank) -> None:
    rank.store(1, 4)
    rank.end_of(1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05


def test_a_worker_that_does_not_speak_as_agreed_is_left(rank: Rank) -> None:
    rank.pool.hold_loads = True
    rank.load(1, 2)
    wait_until(lambda: rank.pool.kinds_heard("rank0").count("Load") == 2)
    rank.pool.send_nonsense(0)
    wait_until(lambda: rank.client.facts().get("workers_dropped") == 1)
    rank.client.flush([1])
    assert {(0, Code.WORKER_LOST), (1, Code.CANCELLED)} == set(rank.end_of(1).failed)
