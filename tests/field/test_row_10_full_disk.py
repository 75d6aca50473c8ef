"""Row 10: 319 GB in 11 hours, the disk full, other programs evicted."""

import os
from pathlib import Path

from tests.field.conftest import StartWorker
from tests.process.worker_harness import SLOT_BYTES, used_bytes


def test_row_10_a_device_holds_what_it_may_as_the_filesystem_counts_however_much_is_stored(
    small_disk: Path, start: StartWorker
) -> None:
    capacity, in_flight = 40 * SLOT_BYTES, 6 * (SLOT_BYTES + 8192)
    worker = start(small_disk / "kv", device={"capacity_bytes": capacity, "high_watermark": 0.8, "low_watermark": 0.5})
    worker.until(lambda: "used_bytes" in worker.facts())
    for first in range(0, 120, 6):  # three times the capacity
        worker.store(range(first, first + 6))
        assert used_bytes(small_disk / "kv") <= capacity + in_flight
        worker.until(lambda: worker.facts()["storing"])
    assert worker.facts()["evicted_keys"] >= 60
    worker.close()

    free_floor = 12 << 20
    worker = start(small_disk / "kv", device={"min_free_bytes": free_floor})
    (small_disk / "others").write_bytes(bytes(8 << 20))
    for first in range(200, 260, 6):
        worker.store(range(first, first + 6))
    worker.until(lambda: os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize >= free_floor)
