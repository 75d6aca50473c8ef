"""Row 32: a file was deleted between lookup and open."""

import shutil
from pathlib import Path

from kvpool.errors import Code
from kvpool.wire.messages import STORED
from tests.field.conftest import StartWorker
from tests.process.worker_harness import key_of


def test_row_32_a_file_deleted_between_lookup_and_open_is_a_miss(device: Path, start: StartWorker) -> None:
    worker = start(device)
    worker.store(range(4))
    assert worker.flags[key_of(0)] & STORED
    worker.file_of(0).unlink()
    shutil.rmtree(worker.file_of(1).parent.parent)
    assert {0: Code.MISSING, 1: Code.MISSING, 2: True} == worker.load(range(3))
    worker.until(lambda: worker.flags[key_of(0)] == worker.flags[key_of(1)] == 0)
    assert [0, 1] == worker.store([0, 1])
    assert {0: True, 1: True} == worker.load([0, 1])
    assert worker.popen.poll() is None
