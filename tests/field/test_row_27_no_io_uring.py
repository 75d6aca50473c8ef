"""Row 27: default container profiles forbid io_uring."""

import sys
from pathlib import Path

from tests.field.conftest import StartWorker

FORBIDDING = [sys.executable, "-m", "tests.process.forbidding_io_uring"]


def test_row_27_where_io_uring_is_forbidden_the_same_engine_runs_over_threads_and_says_so(
    device: Path, start: StartWorker
) -> None:
    worker = start(device, launcher=FORBIDDING)
    numbers = list(range(12))
    assert numbers == [*worker.store(numbers[:6]), *worker.store(numbers[6:])]
    assert dict.fromkeys(numbers, True) == worker.load(numbers)
    told = worker.facts()
    assert told["io_mode"].startswith("threads")
    assert told["io_degraded"] is True
    assert "no io_uring (io_uring: Operation not permitted (EPERM))" in worker.log()
