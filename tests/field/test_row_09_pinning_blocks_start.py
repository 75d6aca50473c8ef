"""Row 9: the start blocked for minutes by pinning."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.client.launch import ClientConfig
from kvpool.client.scheduler import Hit, SchedulerClient
from kvpool.core.budget import DeviceShare
from kvpool.io import shm
from kvpool.procs.coordinator_loop import Loop
from kvpool.procs.coordinator_segments import Staging
from kvpool.wire import messages as m
from tests.process.fake_pool import FakePool
from tests.process.real_pool import pump_until
from tests.process.test_rank_client import WAIT_S, GatedCopier, Rank, keys, namespace, wait_until
from tests.unit.test_coordinator_segments import MIB, OBJECT, Ear, granted, turn_until

DEVICES = 4


def test_row_09_staging_gets_its_memory_for_all_devices_at_once_and_the_coordinator_works_meanwhile(
    monkeypatch: pytest.MonkeyPatch, open_descriptors: None
) -> None:
    together, go_on, prefault = threading.Barrier(DEVICES, timeout=WAIT_S), threading.Event(), shm.prefault
    first = threading.local()

    def slow(fd: int, segment_bytes: int, progress: Callable[[int], None] | None = None) -> None:
        if not hasattr(first, "done"):
            first.done = True
            together.wait()
            assert go_on.wait(WAIT_S)
        prefault(fd, segment_bytes, progress)

    monkeypatch.setattr(shm, "prefault", slow)
    loop, heard = Loop(), list[tuple[str, m.Message]]()
    staging = Staging(loop, 64 * MIB, [DeviceShare(weight=1, iodepth=4)] * DEVICES)
    for device in range(DEVICES):
        staging.worker_up(device, Ear("worker", heard))
    staging.open_namespace(1, 1, [OBJECT])
    turns: list[int] = []
    loop.soon(lambda: turns.append(granted(staging)))
    turn_until(loop, lambda: bool(turns))
    assert [0] == turns
    go_on.set()
    turn_until(loop, lambda: granted(staging) == 64 * MIB)
    assert not together.broken, "one after the other"
    staging.close()
    loop.close()


def test_row_09_while_a_segment_is_pinned_nobody_waits_for_it_and_then_it_is_used(
    tmp_path: Path, open_descriptors: None
) -> None:
    pool, copier = FakePool(str(tmp_path)), GatedCopier()
    copier.attach_gate.clear()
    rank = Rank(pool, copier).connected()  # the engine has started
    scheduler = SchedulerClient(ClientConfig(run_dir=pool.run_dir), namespace(), engine="engine")
    pump_until(scheduler, lambda: scheduler.connected)
    scheduler.announce("r", keys(2))
    pump_until(scheduler, lambda: not isinstance(scheduler.lookup("r", keys(1)[0]), Hit))
    rank.store(1, 2)
    assert 2 == len(rank.end_of(1).failed), "a store of an engine whose staging is not pinned yet is dropped"
    assert [] == copier.attached
    copier.attach_gate.set()
    wait_until(lambda: copier.attached == [0])
    stored = rank.store(2, 2, request="another")
    assert () == rank.end_of(2).failed
    loaded = rank.load(3, 2)
    assert () == rank.end_of(3).failed
    assert stored == loaded
    scheduler.close()
    rank.client.close()
    pool.close()
