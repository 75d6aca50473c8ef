"""Capacity on a filesystem of its own: what goes, what stays, what others use, what a restart knows."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.errors import Code
from kvpool.io.inventory import Walk, find_spaces
from kvpool.wire import messages as m
from tests.process.pool_harness import namespace
from tests.process.worker_harness import (
    DEVICE,
    OBJECT_BYTES,
    SLOT_BYTES,
    WorkerProcess,
    key_of,
    mounted_disk,
    used_bytes,
)

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small ext4 of its own: a loop device over a file in shared memory."""
    with contextlib.ExitStack() as stack:
        try:
            yield mounted_disk(stack, tmp_path / "disk")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device can be mounted here: {error}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    with contextlib.ExitStack() as stack:

        def start_worker(path: Path, **device: object) -> WorkerProcess:
            others = {name: device.pop(name) for name in ("spec", "slots") if name in device}
            worker = WorkerProcess(path, device=device, log=tmp_path / "worker.log", **others)
            stack.callback(worker.close)
            worker.scanned()
            return worker

        yield start_worker


def objects_in(root: Path) -> set[bytes]:
    return {found.key for space in find_spaces(str(root)) for found in Walk().keys_of(space)}


def age(worker: WorkerProcess, number: int, hours: float, ranks: int = 1) -> None:
    """Let an object be that much older."""
    for rank in range(ranks):
        when = time.time() - 3600 * hours
        os.utime(worker.file_of(number, rank), (when, when))


def numbers_in(worker: WorkerProcess, numbers: range) -> list[int]:
    return [number for number in numbers if worker.file_of(number).exists()]


def test_above_the_high_mark_the_least_recently_used_keys_go_down_to_the_low_one(disk, start):
    capacity = 40 * (SLOT_BYTES + 4096)
    worker = start(disk / "kv", capacity_bytes=capacity, high_watermark=0.9, low_watermark=0.5, min_free_bytes=MIB)
    for first in range(0, 32, 8):
        assert list(range(first, first + 8)) == worker.store(range(first, first + 8))
    for number in range(32):
        age(worker, number, hours=100 - number)
    age(worker, 3, hours=1)
    assert {5: True} == worker.load([5])  # renews its time
    assert 8 == len(worker.store(range(32, 40)))
    worker.until(lambda: worker.facts()["evicted_keys"] >= 16)
    worker.until(lambda: used_bytes(disk / "kv") <= 0.55 * capacity)
    left = numbers_in(worker, range(40))
    assert {3, 5, *range(32, 40)} <= set(left)
    gone = sorted(set(range(40)) - set(left))
    assert gone == [number for number in range(max(gone) + 1) if number not in (3, 5)]
    worker.until(lambda: all(worker.flags[key_of(number)] == 0 for number in gone))
    assert dict.fromkeys(left[:8], True) == worker.load(left[:8])


def test_what_is_counted_is_what_the_filesystem_counts_also_after_a_restart(disk, start):
    worker = start(disk / "kv", capacity_bytes=16 * MIB)
    worker.store(range(30))
    (disk / "kv" / "left-behind").write_bytes(bytes(2 * MIB))
    assert 0 == worker.drain()
    again = start(disk / "kv", capacity_bytes=16 * MIB)
    again.until(lambda: "used_bytes" in again.facts())
    counted = again.facts()["used_bytes"]
    assert abs(counted - used_bytes(disk / "kv")) <= 0.02 * counted


def test_a_restart_with_more_than_the_capacity_removes_at_once_what_is_too_much(disk, start):
    worker = start(disk / "kv")
    worker.store(range(16))
    worker.store(range(16, 32))
    for number in range(32):
        age(worker, number, hours=100 - number)
    assert 0 == worker.drain()
    capacity = 16 * (SLOT_BYTES + 8192)
    again = start(disk / "kv", capacity_bytes=capacity)
    again.until(lambda: used_bytes(disk / "kv") <= 0.95 * capacity)
    left = numbers_in(again, range(32))
    assert list(range(left[0], 32)) == left
    assert 8 <= len(left) <= 16


def test_what_others_put_on_the_drive_makes_room_for_them_and_stops_stores_meanwhile(disk, start):
    worker = start(disk / "kv", min_free_bytes=4 * MIB)
    for first in range(0, 64, 8):
        worker.store(range(first, first + 8))
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "others").write_bytes(bytes(free - 2 * MIB))
    worker.until(lambda: worker.facts()["evicted_keys"] > 0)
    worker.until(lambda: os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize >= 4 * MIB)
    worker.until(lambda: worker.facts()["storing"])
    left = numbers_in(worker, range(64))
    assert {left[-1]: True} == worker.load([left[-1]])
    assert "stores stop (the drive has less free space than is left to others), loads go on" in worker.log()


def test_a_disk_filled_by_others_stops_stores_and_not_loads_until_space_returns(disk, start):
    worker = start(disk / "kv", min_free_bytes=2 * MIB)
    worker.store(range(4))
    others = disk / "others"
    with open(others, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(64 * 1024))
    worker.until(lambda: not worker.facts()["storing"])
    assert [] == worker.store([50])
    assert worker.load([3])[3] in (True, Code.MISSING)  # it may have made room
    others.unlink()
    worker.until(lambda: worker.facts()["storing"])
    assert [51] == worker.store([51])


def test_keys_go_with_the_files_of_all_ranks_and_folders(disk, start):
    spec = namespace(rank_count=2, object_bytes=(OBJECT_BYTES,))
    capacity = 20 * 2 * (SLOT_BYTES + 4096)
    worker = start(disk / "kv", spec=spec, slots=64, capacity_bytes=capacity, high_watermark=0.7, low_watermark=0.3)
    assert 8 == len(worker.store(range(8)))
    for number in range(8):
        age(worker, number, hours=50 - number, ranks=2)
    assert 8 == len(worker.store(range(8, 16)))
    worker.until(lambda: used_bytes(disk / "kv") <= 0.35 * capacity)
    for number in range(16):
        assert worker.file_of(number, 0).exists() == worker.file_of(number, 1).exists()
        assert worker.file_of(number, 1).parent.exists() == worker.file_of(number, 1).exists()


def test_namespaces_that_nobody_has_opened_share_the_capacity(disk, start):
    old = start(disk / "kv", spec=namespace("b", rank_count=1, object_bytes=(OBJECT_BYTES,)))
    old.store(range(16))
    for number in range(16):
        age(old, number, hours=10)
    assert 0 == old.drain()
    capacity = 34 * (SLOT_BYTES + 4096)
    new = start(
        disk / "kv", spec=namespace("c", rank_count=1, object_bytes=(OBJECT_BYTES,)),
        capacity_bytes=capacity, high_watermark=0.9, low_watermark=0.55,
    )  # fmt: skip
    kept = [*new.store(range(20, 28)), *new.store(range(28, 36))]
    assert len(kept) == 16
    new.until(lambda: used_bytes(disk / "kv") <= 0.6 * capacity)
    assert objects_in(disk / "kv") >= {key_of(number) for number in kept}


def test_a_key_that_is_pinned_stays(disk, start):
    capacity = 12 * (SLOT_BYTES + 4096)
    worker = start(disk / "kv", capacity_bytes=capacity, high_watermark=0.8, low_watermark=0.2)
    worker.store(range(8))
    for number in range(8):
        age(worker, number, hours=50 - number)
    talker = worker.ranks[0]
    talker.send(m.Load(job=77, first=0, keys=[key_of(0)]))
    talker.wait(m.Ready)
    age(worker, 0, hours=60)  # what renewing did is undone: only the pin protects it
    worker.store(range(8, 12))
    worker.until(lambda: used_bytes(disk / "kv") <= 0.4 * capacity)
    assert worker.file_of(0).exists()
    assert worker.flags[key_of(0)] & m.STORED
    talker.send(m.Release(job=77, indices=[0]))


def test_inodes_that_run_out_stop_stores_and_loads_go_on(tmp_path, start):
    with contextlib.ExitStack() as stack:
        try:
            disk = mounted_disk(stack, tmp_path / "few", "-N", "96")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device can be mounted here: {error}")
        worker = start(disk / "kv", min_free_bytes=MIB)
        kept: list[int] = []
        for first in range(0, 64, 8):
            kept += worker.store(range(first, first + 8), wait=False)
        worker.until(lambda: worker.facts().get("errors_device_full", 0) > 0)
        there = numbers_in(worker, range(64))
        assert {there[-1]: True} == worker.load([there[-1]])
        worker.close()


def test_a_device_named_in_the_log_is_the_settings_one(disk, start):
    worker = start(disk / "kv", capacity_bytes=8 * MIB)
    worker.until(lambda: f"device {DEVICE}: 0 keys" in worker.log())
