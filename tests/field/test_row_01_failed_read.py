"""Row 1: one failed read killed the engine."""

from pathlib import Path

from kvpool.errors import Code
from kvpool.io.faults import FaultSettings
from tests.field.conftest import StartWorker


def test_row_01_a_failed_read_is_a_value_in_a_reply_and_serving_goes_on(device: Path, start: StartWorker) -> None:
    worker = start(device, faults=FaultSettings(seed=1, read_error=0.3, short_read=0.3), pool={"breaker_failures": 50})
    worker.store(range(8))
    rounds = [worker.load(range(8)) for _ in range(8)]
    answers = [answer for found in rounds for answer in found.values()]
    assert {True, Code.READ_ERROR} == set(answers)
    assert answers.count(Code.READ_ERROR) >= 8
    assert [9] == worker.store([9])
    assert worker.popen.poll() is None
