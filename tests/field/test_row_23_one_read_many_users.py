"""Row 23: fifty requests with one prefix each waited for their own load."""

import time
from pathlib import Path

from kvpool.io.faults import FaultSettings
from kvpool.wire import messages as m
from tests.field.conftest import StartWorker
from tests.process.worker_harness import key_of


def test_row_23_many_loads_of_one_prefix_are_one_read_of_each_object(device: Path, start: StartWorker) -> None:
    worker = start(device, faults=FaultSettings(read_bytes_per_s=2 << 20), slots=64)
    assert list(range(8)) == worker.store(range(8))
    talker, keys = worker.ranks[0], [key_of(number) for number in range(8)]
    started = time.monotonic()
    for job in range(100, 150):
        talker.send(m.Load(job=job, first=0, keys=keys))
    ready = 0
    while ready < 50 * 8:
        answer, _ = talker.wait(m.Ready)
        ready += len(answer.slots)
        talker.send(m.Release(job=answer.job, indices=[slot.index for slot in answer.slots]))
    one_by_one_s = 50 * 8 * 65536 / (2 << 20)
    assert time.monotonic() - started < one_by_one_s / 2
    assert worker.facts()["table_reads"] <= 16
