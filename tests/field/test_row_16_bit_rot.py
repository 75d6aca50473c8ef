"""Row 16: bit rot of the right size was used silently."""

import random
from pathlib import Path

from kvpool.config import PoolSettings
from kvpool.errors import Code
from tests.field.conftest import StartWorker
from tests.process.worker_harness import OBJECT_BYTES, key_of


def test_row_16_a_flipped_bit_is_found_at_the_load_set_aside_and_a_miss(device: Path, start: StartWorker) -> None:
    assert PoolSettings(run_dir="").verify is True
    worker = start(device)
    worker.store(range(6))
    chance = random.Random(16)
    for number in range(5):
        with open(worker.file_of(number), "r+b") as file:
            place = chance.randrange(OBJECT_BYTES)
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
    found = worker.load(range(6))
    assert {**dict.fromkeys(range(5), Code.CORRUPT), 5: True} == found
    worker.until(lambda: all(worker.flags[key_of(number)] == 0 for number in range(5)))
    assert not any(worker.file_of(number).exists() for number in range(5))
    assert worker.facts()["set_aside"] == 5
    assert [0, 1] == worker.store([0, 1])
    assert {0: True, 1: True} == worker.load([0, 1])
