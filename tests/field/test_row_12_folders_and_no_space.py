"""Row 12: 7.5 million files in one directory, and "no space" with 24 TB free."""

import random
from collections import Counter
from pathlib import Path

from kvpool.core import layout
from kvpool.io.faults import FaultSettings
from tests.field.conftest import StartWorker


def test_row_12_files_fan_out_and_no_space_is_a_state_that_passes(
    tmp_path: Path, device: Path, start: StartWorker
) -> None:
    chance = random.Random(12)
    folders = Counter(layout.object_directory(chance.randbytes(36)) for _ in range(50_000))
    assert max(folders.values()) <= 5
    assert max(Counter(folder[:3] for folder in folders).values()) <= 256

    full = tmp_path / "full"
    worker = start(device, faults=FaultSettings(no_space=1.0, while_exists=str(full)))
    assert [0, 1, 2] == worker.store(range(3))
    full.touch()
    worker.store([3], wait=False)  # finds out
    worker.until(lambda: worker.facts().get("errors_device_full", 0) > 0)
    assert [] == worker.store([4])
    assert {0: True, 1: True, 2: True} == worker.load(range(3))
    full.unlink()
    worker.until(lambda: [5] == worker.store([5]))
    assert worker.popen.poll() is None
