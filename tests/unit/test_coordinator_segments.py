"""Staging: batches, their order towards ranks and workers, and a machine with too little memory."""

import os
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvpool.core.budget import DeviceShare
from kvpool.errors import HostError
from kvpool.io import shm
from kvpool.procs import coordinator_segments as c
from kvpool.procs.coordinator_loop import Loop
from kvpool.procs.coordinator_segments import Staging
from kvpool.wire import messages as m

MIB = 1 << 20
OBJECT = MIB - 4096  # a slot of 1 MiB


class Ear:
    """A rank or a worker: writes what it hears into a common list."""

    def __init__(self, name: str, heard: list[tuple[str, m.Message]]) -> None:
        self.name, self.heard = name, heard

    def send(self, message: m.Message, fds: Sequence[int] = ()) -> None:
        assert len(fds) == message.fd_count
        self.heard.append((self.name, message))


@pytest.fixture
def loop(open_descriptors: None) -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


@pytest.fixture
def heard() -> list[tuple[str, m.Message]]:
    return []


def turn_until(loop: Loop, fact: Callable[[], bool]) -> None:
    """Let the loop work until *fact* holds."""
    deadline = time.monotonic() + 10

    def look() -> None:
        assert time.monotonic() < deadline
        if fact():
            loop.stop(0)

    loop.at_turn_end(look)
    loop.soon(look)
    loop.run()
    loop._exit_code = None
    loop._turn_end.remove(look)


def granted(staging: Staging) -> int:
    return staging.budget.statistics()["staging_granted_bytes"]


def test_a_segment_is_shown_to_ranks_before_it_is_granted(loop: Loop, heard: list[tuple[str, m.Message]]) -> None:
    staging = Staging(loop, 32 * MIB, [DeviceShare(weight=1, iodepth=4)])
    staging.rank_joined(1, Ear("rank", heard))
    staging.worker_up(0, Ear("worker", heard))
    staging.open_namespace(1, 1, [OBJECT])
    turn_until(loop, lambda: granted(staging) == 32 * MIB)
    shown: set[int] = set()
    for _, message in heard:
        if isinstance(message, m.SegmentUp):
            shown.add(message.segment)
        elif isinstance(message, m.SegmentGranted):
            assert message.segment in shown
    assert 8 == len(shown)
    staging.close()


def test_the_first_batch_is_small_and_later_ones_are_large(
    loop: Loop, heard: list[tuple[str, m.Message]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c, "FIRST_BATCH_BYTES_MAX", 8 * MIB)
    monkeypatch.setattr(c, "BATCH_BYTES_MAX", 16 * MIB)
    staging = Staging(loop, 32 * MIB, [DeviceShare(weight=1, iodepth=4)])
    staging.worker_up(0, Ear("worker", heard))
    staging.open_namespace(1, 1, [OBJECT])
    turn_until(loop, lambda: granted(staging) == 32 * MIB)
    assert [2, 4, 2] == [message.count for _, message in heard if isinstance(message, m.SegmentsGranted)]
    staging.close()


def test_what_was_made_before_its_worker_is_granted_when_it_comes(
    loop: Loop, heard: list[tuple[str, m.Message]]
) -> None:
    staging = Staging(loop, 32 * MIB, [DeviceShare(weight=1, iodepth=4)])
    staging.open_namespace(1, 1, [OBJECT])
    turn_until(loop, lambda: len(staging._making[0].batch) == 8)
    assert [] == heard
    staging.worker_up(0, Ear("worker", heard))
    assert [8] == [message.count for _, message in heard if isinstance(message, m.SegmentsGranted)]
    staging.close()


def test_a_machine_without_the_memory_gets_a_smaller_pool_that_says_so(
    loop: Loop, heard: list[tuple[str, m.Message]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    create = shm.create_segment

    def create_some(segment_bytes: int) -> int:
        if len(made) == 3:
            raise HostError("shared memory is full", needed_bytes=segment_bytes)
        made.append(segment_bytes)
        return create(segment_bytes)

    monkeypatch.setattr(shm, "create_segment", create_some)
    staging = Staging(loop, 32 * MIB, [DeviceShare(weight=1, iodepth=4)])
    staging.worker_up(0, Ear("worker", heard))
    staging.open_namespace(1, 1, [OBJECT])
    turn_until(loop, lambda: granted(staging) == 12 * MIB)
    assert (12 * MIB, 32 * MIB) == (staging.budget.total_bytes, staging.facts()["staging_bytes"])
    assert "shared memory is full" in str(staging.facts()["staging_advice"])
    made.clear()
    staging._retry()
    turn_until(loop, lambda: staging.advice != "" or granted(staging) > 12 * MIB)
    staging.close()


def test_staging_above_the_machine_is_cut_before_it_is_touched(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "shm_free_bytes", lambda *_: 24 * MIB)
    staging = Staging(loop, 32 * MIB, [DeviceShare(weight=1, iodepth=4)])
    assert 24 * MIB == staging.budget.total_bytes
    assert "needed_bytes=33554432" in staging.advice
    staging.close()


def test_memory_that_was_made_and_not_taken_is_given_back_at_the_end(
    loop: Loop, heard: list[tuple[str, m.Message]], open_descriptors: None
) -> None:
    staging = Staging(loop, 32 * MIB, [DeviceShare(weight=1, iodepth=4)])
    staging.worker_up(0, Ear("worker", heard))
    staging.open_namespace(1, 1, [OBJECT])
    staging._threads.shutdown(wait=True)
    assert staging._come
    staging.close()


def test_memory_that_everyone_forgot_is_given_back_to_the_machine(
    loop: Loop, heard: list[tuple[str, m.Message]]
) -> None:
    staging = Staging(loop, 32 * MIB, [DeviceShare(weight=1, iodepth=4)])
    staging.rank_joined(1, Ear("rank", heard))
    staging.rank_joined(2, Ear("rank", heard))
    staging.worker_up(0, Ear("worker", heard))
    staging.open_namespace(1, 1, [OBJECT])
    turn_until(loop, lambda: granted(staging) == 32 * MIB)
    staging.open_namespace(2, 1, [2 * MIB])
    recalled = [message.segment for _, message in heard if isinstance(message, m.SegmentRecalled)]
    kept = os.dup(staging._memories[recalled[0]].fd)
    staging.returned(recalled[0])
    assert 2 == sum(isinstance(message, m.SegmentDown) for _, message in heard)
    staging.forgotten(1, recalled[0])
    assert recalled[0] in staging.budget.segments
    staging.rank_left(2)
    staging.rank_proven(2)
    turn_until(loop, lambda: recalled[0] not in staging.budget.segments)
    assert 0 == os.fstat(kept).st_blocks
    os.close(kept)
    staging.close()
