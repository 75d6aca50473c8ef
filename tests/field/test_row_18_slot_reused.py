"""Row 18: a staging buffer was reused while a copy still ran: wrong answers, no error."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from kvpool.client.copier import Copy
from kvpool.core.object_events import TimePassed
from tests.process.fake_pool import FakePool
from tests.process.test_rank_client import GatedCopier, Rank, wait_until
from tests.property.object_world import SETTINGS
from tests.unit.test_objects_loads import WIDE, keys, run_io, world_with
from tests.unit.vllm_there import import_vllm

import_vllm()

from kvpool_vllm.places import GroupLayout, Place, TensorRef
from tests.field.fake_cuda import Event, FakeCuda


def test_row_18_a_slot_that_a_rank_copies_from_serves_nobody_else_until_it_says_so() -> None:
    world, rank = world_with(slots=1)
    job = world.load(rank, keys(1))
    world.load(rank, keys(2))
    run_io(world)
    world.pass_time(SETTINGS.op_deadline_ns)
    run_io(world)
    assert [job] == [number for number, _ in rank.pinned]
    world.release(rank, job, [0])
    run_io(world)
    assert [job + 1] == [number for number, _ in rank.pinned]


def test_row_18_the_slot_of_a_departed_rank_serves_nobody_until_its_process_is_proven_gone() -> None:
    world, rank = world_with(slots=1)
    world.load(rank, keys(1))
    run_io(world)
    world.leave(rank)
    other = world.join("c", 0)
    world.load(other, keys(2))
    run_io(world)
    assert ({}, 1) == (other.pinned, world.table.statistics()["slots_quarantined"])
    world.prove(rank)
    run_io(world)
    assert 1 == len(other.pinned)


def test_row_18_the_slot_of_a_late_read_serves_nobody_until_the_read_has_ended() -> None:
    world, rank = world_with(slots=1)
    world.load(rank, keys(1))
    world.end_open(1)
    world.now_ns += WIDE.op_deadline_ns
    world.do(TimePassed())
    world.load(rank, keys(2))
    world.end_open(2)
    assert [1] == list(world.reading)
    world.end_read(1)
    assert [2] == list(world.reading)


def test_row_18_a_rank_says_so_only_when_its_copy_has_ended(tmp_path: Path, open_descriptors: None) -> None:
    pool, copier = FakePool(str(tmp_path)), GatedCopier()
    rank = Rank(pool, copier).connected()
    rank.store(1, 2)
    rank.end_of(1)
    wait_until(lambda: len(pool.objects) == 2)
    filled = pool.kinds_heard("rank0").count("Filled")
    copier.gate.clear()
    rank.load(2, 2)
    rank.store(3, 2, first=2)
    wait_until(lambda: len(copier.launched) == 3)
    rank.client.wait_connected(0.1)
    heard = pool.kinds_heard("rank0")
    assert (0, filled) == (heard.count("Release"), heard.count("Filled"))
    copier.gate.set()
    assert [(), ()] == [rank.end_of(2).failed, rank.end_of(3).failed]
    wait_until(lambda: "Release" in pool.kinds_heard("rank0"))
    rank.client.close()
    pool.close()


def test_row_18_copies_wait_for_the_compute_stream_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    copier, staging = cuda.copier(), mmap.mmap(-1, 4096)
    kv_cache = ctypes.create_string_buffer(64)
    layout = GroupLayout(0, 1, 64, (TensorRef(ctypes.addressof(kv_cache), 64, 64),))
    blocks = np.array([0], dtype=np.int64)
    copier.attach(0, staging)

    written = copier.mark()
    copier.store([Copy(0, 0, Place(layout, blocks))], written)
    zeroed = copier.mark()
    copier.load([Copy(0, 0, Place(layout, blocks, after=zeroed))])

    assert isinstance(written, Event)
    assert isinstance(zeroed, Event)
    expected = [
        ("compute", "record", written.number),
        ("store", "wait", written.number),
        ("store", "copy", 1),  # its sources are what the compute stream writes: not before the wait
        ("compute", "record", zeroed.number),
        ("load", "wait", zeroed.number),
        ("load", "copy, sources read at any time", 1),
    ]
    assert expected == [entry for entry in cuda.log if entry[0] == "compute" or entry[1] != "record"]
    assert [("store", "record"), ("load", "record")] == [(cuda.log[i][0], cuda.log[i][1]) for i in (3, 7)]
    copier.detach(0)
    copier.close()
    staging.close()
