"""Row 30: staging exhausted: HTTP 500."""

from pathlib import Path

from kvpool.errors import Code
from kvpool.wire import messages as m
from tests.field.conftest import StartWorker
from tests.process.worker_harness import key_of


def test_row_30_without_a_free_slot_loads_wait_and_stores_are_dropped(device: Path, start: StartWorker) -> None:
    worker = start(device, slots=8, pool={"client_share": 1.0, "store_deadline_s": 0.3})
    for number in range(12):
        worker.store([number])
    talker = worker.ranks[0]
    talker.send(m.Load(job=900, first=0, keys=[key_of(number) for number in range(8)]))
    held: list[tuple[int, int]] = []
    while len(held) < 8:
        answer, _ = talker.wait(m.Ready)
        held += [(answer.job, slot.index) for slot in answer.slots]
    assert [] == worker.store([50])  # no slot in time: dropped, not an error
    talker.send(m.Load(job=901, first=0, keys=[key_of(9)]))
    assert talker.is_silent(0.3, m.Ready)
    talker.send(m.Release(job=900, indices=[index for _, index in held]))
    answer, _ = talker.wait(m.Ready, lambda ready: ready.job == 901)
    talker.send(m.Release(job=901, indices=[0]))
    assert 1 == len(answer.slots)
    assert Code.NO_SLOT not in worker.load(range(12)).values()
    assert [51] == worker.store([51])
