"""Row 11: after a restart usage was counted from zero: 460 GB used of 250 allowed."""

from pathlib import Path

from tests.field.conftest import StartWorker
from tests.process.worker_harness import SLOT_BYTES, used_bytes


def test_row_11_what_an_earlier_run_left_counts_before_anything_is_decided(
    small_disk: Path, start: StartWorker
) -> None:
    first = start(small_disk / "kv")
    for number in range(0, 48, 8):
        first.store(range(number, number + 8))
    assert 0 == first.drain()
    (small_disk / "kv" / "leftover-of-another-version").write_bytes(bytes(10 * SLOT_BYTES))
    before = used_bytes(small_disk / "kv")

    capacity = int(before / 1.5)
    second = start(small_disk / "kv", device={"capacity_bytes": capacity, "high_watermark": 0.9, "low_watermark": 0.7})
    second.until(lambda: "used_bytes" in second.facts())
    second.until(lambda: used_bytes(small_disk / "kv") <= 0.75 * capacity)
    assert second.facts()["evicted_keys"] > 0
    second.until(lambda: second.facts()["storing"])
    second.store(range(60, 64))
    assert used_bytes(small_disk / "kv") <= capacity
