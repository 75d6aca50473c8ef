"""The storage engine on real filesystems, over every kind of ring that this host has."""

import contextlib
import errno
import itertools
import mmap
import os
import select
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.core.object_events import SlotRef
from kvpool.errors import Code, InvariantError
from kvpool.io import errnos
from kvpool.io.engine import Kind, SegmentMemory
from kvpool.io.faults import FaultSettings
from kvpool.io.files import Naming
from tests.process.engine_bench import SEGMENT, Bench, key, ring_kinds, temporaries

MakeBench = Callable[..., Bench]
FALLBACKS = [
    {},
    {"direct": False},
    {"unnamed": False},
    {"unnamed": False, "naming": Naming.RENAME_NOREPLACE},
    {"unnamed": False, "naming": Naming.RENAME},
    {"unnamed": False, "direct": False},
]


@pytest.fixture(params=ring_kinds())
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["disk", "tmpfs"])
def root(request: pytest.FixtureRequest) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="engine-test-", dir="/dev/shm" if request.param == "tmpfs" else None))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make(root: Path, kind: str, open_descriptors: None) -> Iterator[MakeBench]:
    with contextlib.ExitStack() as stack:

        def make_bench(**options: object) -> Bench:
            bench = Bench(root, kind, **options)
            stack.callback(bench.close)
            return bench

        yield make_bench


# ------------------------------------------------------------ round trips


@pytest.mark.parametrize("payload_bytes", [1, 4095, 4096, 100_001, 1 << 20])
def test_what_is_stored_is_loaded_byte_by_byte(make, payload_bytes):
    bench = make(payload_bytes=payload_bytes)
    written = {number: bench.fill(number, number) for number in range(bench.slots)}
    for number in written:
        bench.publish(number, number)
    assert {(Kind.PUBLISHED, None)} == {(end.kind, end.error) for end in bench.wait(bench.slots)}
    bench.poison()
    opened = [bench.open(number) for number in written]
    assert {(Kind.OPENED, None)} == {(end.kind, end.error) for end in bench.wait(bench.slots)}
    for number, op in enumerate(opened):
        bench.read(op, number, bench.slots - 1 - number)
    assert {(Kind.READ, None)} == {(end.kind, end.error) for end in bench.wait(bench.slots)}
    assert written == {number: bench.payload(bench.slots - 1 - number) for number in written}


def test_a_file_is_the_slot_private_and_padded_with_zeros(make):
    bench = make(payload_bytes=5000)
    assert bench.store(1).error is None
    raw = bench.path(1).read_bytes()
    assert bench.slot_bytes == len(raw)
    assert bytes(8192 - 5000) == raw[5000:8192]
    assert 0o600 == stat.S_IMODE(bench.path(1).stat().st_mode)
    assert {0o700} == {stat.S_IMODE(folder.stat().st_mode) for folder in bench.path(1).parents[:5]}


@pytest.mark.parametrize("features", FALLBACKS, ids=str)
@pytest.mark.parametrize("sync", [False, True])
def test_each_way_to_publish_makes_the_same_file_and_leaves_nothing_else(make, features, sync):
    bench = make(sync=sync, **features)
    assert bench.store(1).error is None
    first = bench.path(1).read_bytes()
    again = bench.store(1)
    assert again.error is None
    assert first == bench.path(1).read_bytes()
    assert bench.load(1).error is None
    bench.settle()
    assert [] == temporaries(bench.root)


def test_a_name_that_exists_is_a_success_and_stays_untouched(make):
    bench = make()
    assert not bench.store(1).existed
    inode = bench.path(1).stat().st_ino
    again = bench.store(1)
    assert (None, True) == (again.error, again.existed)
    assert inode == bench.path(1).stat().st_ino


def test_two_publications_of_one_object_at_once_make_one_file(make):
    bench = make()
    for slot in range(4):
        bench.fill(slot, 1)
        bench.publish(1, slot)
    assert [False, True, True, True] == sorted(end.existed for end in bench.wait(4))
    assert bench.load(1).error is None


def test_folders_that_vanish_are_made_again(make):
    bench = make()
    assert bench.store(1).error is None
    shutil.rmtree(bench.root / "model")
    assert bench.store(1).error is None
    assert bench.load(1).error is None


# ------------------------------------------------------------ never wrong bytes


def test_a_missing_file_is_missing_and_no_trouble(make):
    end = make().load(1)
    assert (Kind.OPENED, Code.MISSING, False) == (end.kind, end.error, end.device_trouble)


@pytest.mark.parametrize("place", ["first byte", "last payload byte", "padding", "trailer", "last byte"])
def test_any_flipped_byte_that_is_used_is_found(make, place):
    bench = make(payload_bytes=150_000)
    bench.store(1)
    raw = bytearray(bench.path(1).read_bytes())
    offset = {"first byte": 0, "last payload byte": 149_999, "padding": 150_001, "trailer": len(raw) - 4000}.get(
        place, -1
    )
    raw[offset] ^= 0x10
    bench.path(1).write_bytes(raw)
    end = bench.load(1)
    assert (None if place == "padding" else Code.CORRUPT) == end.error
    assert not end.device_trouble


def test_without_verification_a_flipped_payload_byte_passes_and_a_swapped_file_does_not(make):
    bench = make(verify=False)
    bench.store(1)
    bench.store(2)
    raw = bytearray(bench.path(1).read_bytes())
    raw[77] ^= 1
    bench.path(1).write_bytes(raw)
    assert bench.load(1).error is None
    assert Code.CORRUPT == bench.load(1, path=bench.path(2)).error


def test_an_object_stored_without_verification_is_not_served_where_it_is_on(make):
    unverified = make(verify=False)
    unverified.store(1)
    assert unverified.load(1).error is None
    end = make().load(1)
    assert Code.CORRUPT == end.error
    assert "without a checksum" in end.detail


@pytest.mark.parametrize("left", [0, 1, 4096, 8192, 150_000, -4096, -1])
def test_a_truncated_file_is_found(make, left):
    bench = make()
    bench.store(1)
    os.truncate(bench.path(1), left if left >= 0 else bench.slot_bytes + left)
    end = bench.load(1)
    assert Code.CORRUPT == end.error
    assert "too short" in end.detail


def test_a_swapped_file_is_found_and_named(make):
    bench = make()
    bench.store(1)
    bench.store(2)
    os.replace(bench.path(2), bench.path(1))
    end = bench.load(1)
    assert Code.CORRUPT == end.error
    assert "key is another one" in end.detail


def test_a_file_set_aside_is_missing_and_can_be_stored_again(make):
    bench = make()
    bench.store(1)
    bench.path(1).write_bytes(b"junk")
    assert Code.CORRUPT == bench.load(1).error
    bench.engine.set_aside(str(bench.path(1)))
    assert Code.MISSING == bench.load(1).error
    assert not bench.store(1).existed
    assert bench.load(1).error is None
    assert [b"junk"] == [Path(path).read_bytes() for path in bench.files.quarantined()]


# ------------------------------------------------------------ faults


def test_short_reads_continue_to_the_whole_object(make):
    bench = make(faults=FaultSettings(short_read=0.8, seed=3))
    payload = bench.fill(0, 1)
    bench.publish(1, 0)
    bench.wait(1)
    bench.poison()
    assert bench.load(1).error is None
    assert payload == bench.payload(0)


@pytest.mark.parametrize(
    ("faults", "store", "load"),
    [(FaultSettings(open_error=1), None, Code.READ_ERROR), (FaultSettings(read_error=1), None, Code.READ_ERROR),
     (FaultSettings(write_error=1), Code.WRITE_ERROR, Code.MISSING),
     (FaultSettings(no_space=1), Code.DEVICE_FULL, Code.MISSING)],
)  # fmt: skip
def test_an_error_ends_the_operation_with_its_code_and_leaves_nothing(make, faults, store, load):
    bench = make(faults=faults, unnamed=False)
    stored = bench.store(1)
    assert (store, store is Code.WRITE_ERROR) == (stored.error, stored.device_trouble)
    loaded = bench.load(1)
    assert (load, load is Code.READ_ERROR) == (loaded.error, loaded.device_trouble)
    bench.settle()
    assert [] == temporaries(bench.root)


def test_a_bandwidth_limit_delays_without_sleeping(make):
    bench = make(payload_bytes=1 << 20, faults=FaultSettings(read_bytes_per_s=20 << 20))
    for number in range(4):
        bench.store(number, number)
    opened = [bench.open(number) for number in range(4)]
    bench.wait(4)
    started_s = time.monotonic()
    for number, op in enumerate(opened):
        bench.read(op, number, number)
    assert time.monotonic() - started_s < 0.1
    assert bench.engine.next_due_ns() is not None
    assert {None} == {end.error for end in bench.wait(4)}
    assert 0.2 <= time.monotonic() - started_s < 2


# ------------------------------------------------------------ the rest


def test_a_probe_tells_which_paths_exist(make):
    bench = make()
    bench.store(1)
    bench.store(3)
    bench.engine.probe(99, [str(bench.path(number)) for number in range(5)])
    end = bench.wait(1)[0]
    assert (99, Kind.PROBED, (1, 3)) == (end.op, end.kind, end.found)


def test_a_probe_of_nothing_ends_too(make):
    bench = make()
    bench.engine.probe(99, [])
    assert () == bench.wait(1)[0].found


def test_a_file_opened_ahead_is_given_back(make):
    bench = make()
    bench.store(1)
    op = bench.open(1)
    bench.wait(1)
    assert 1 == bench.engine.statistics()["files_open"]
    bench.engine.close_file(op)
    bench.engine.submit()
    bench.settle()
    assert 0 == bench.engine.statistics()["files_open"]
    with pytest.raises(InvariantError):
        bench.engine.close_file(op)


def test_many_operations_at_once_all_end_exactly_once(make):
    bench = make(payload_bytes=6000, slots=128)
    for number in range(128):
        bench.fill(number, number)
        bench.publish(number, number)
    stored = bench.wait(128)
    opened = [bench.open(number) for number in range(128)]
    bench.wait(128)
    for number, op in enumerate(opened):
        bench.read(op, number, number)
    loaded = bench.wait(128)
    assert 256 == len({end.op for end in stored + loaded})
    assert {None} == {end.error for end in stored + loaded}
    bench.settle()
    assert 0 == bench.engine.in_flight()
    assert [] == bench.engine.reap()


def test_further_segments_serve_beside_the_first_and_can_be_dropped(make):
    bench = make(payload_bytes=6000)
    memory = mmap.mmap(-1, bench.slot_bytes * 4)
    bench.engine.add_segments([SegmentMemory(8, memory, bench.slot_bytes)])
    payload = bench.fill(0, 1)
    bench.publish(1, 0)
    bench.wait(1)
    op = bench.open(1)
    bench.wait(1)
    bench.engine.read_file(op, SlotRef(8, 3), bench.expected(1))
    assert bench.wait(1)[0].error is None
    assert payload == memory[3 * bench.slot_bytes : 3 * bench.slot_bytes + 6000]
    bench.settle()
    bench.engine.drop_segment(8)
    assert bench.load(1).error is None


def pinned_bytes() -> int:
    """Return the memory of this process that the kernel has pinned."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPin")]
    return int(line.split()[1]) * 1024


def test_pages_of_a_dropped_segment_are_given_back_while_the_others_of_its_batch_serve_on(make):
    bench = make(payload_bytes=6000)
    if not bench.engine._names.registered:
        pytest.skip("nothing is registered here")
    one, other = (mmap.mmap(-1, bench.slot_bytes * 1024) for _ in range(2))
    batch = [SegmentMemory(8, one, bench.slot_bytes), SegmentMemory(9, other, bench.slot_bytes)]
    bench.engine.add_segments(batch)
    payload = bench.fill(0, 1)
    bench.publish(1, 0)
    bench.wait(1)
    op = bench.open(1)
    bench.wait(1)
    before = pinned_bytes()
    bench.engine.drop_segment(8)
    bench.engine.read_file(op, SlotRef(9, 3), bench.expected(1))  # on its way while the buffers change
    assert bench.wait(1)[0].error is None
    deadline = time.monotonic() + 10
    while bench.engine._stale:
        assert time.monotonic() < deadline
        due_ns = bench.engine.next_due_ns()
        assert due_ns is not None
        select.select(bench.engine.fds(), [], [], max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
        bench.engine.reap()
    assert 1024 * bench.slot_bytes - 4096 == before - pinned_bytes()  # a page stands in for it
    assert payload == other[3 * bench.slot_bytes : 3 * bench.slot_bytes + 6000]
    op = bench.open(1)
    bench.wait(1)
    bench.engine.read_file(op, SlotRef(9, 1000), bench.expected(1))
    assert bench.wait(1)[0].error is None
    assert bench.engine.mode.count("registered")


def test_an_object_of_another_size_than_its_slot_is_our_mistake(make):
    bench = make(payload_bytes=6000)
    with pytest.raises(InvariantError, match="fills its slot"):
        bench.engine.publish_object(
            1, bench.namespace, "x", SlotRef(SEGMENT, 0), bench.expected(1)._replace(payload_bytes=9000)
        )


def test_the_ring_pipe_hangs_up_when_the_engine_has_ended(make):
    bench = make()
    fd = bench.engine.take_ring_pipe()
    with contextlib.closing(select.epoll()) as epoll:
        epoll.register(fd, select.EPOLLHUP)
        assert [] == epoll.poll(0)
        bench.close()
        assert [(fd, select.EPOLLHUP)] == epoll.poll(5)
    os.close(fd)


def test_a_full_filesystem_is_full_and_no_trouble(tmp_path, kind):
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem takes root")
    mount = tmp_path / "small"
    mount.mkdir()
    if os.system(f"mount -t tmpfs -o size=2m none {mount} 2>/dev/null"):
        pytest.skip("this host does not let us mount")
    try:
        bench = Bench(mount / "device", kind, payload_bytes=500_000)
        ends = [bench.store(number) for number in range(6)]
        bench.close()
    finally:
        os.system(f"umount -l {mount}")
    assert {None, Code.DEVICE_FULL} == {end.error for end in ends}
    assert [Code.DEVICE_FULL] == [code for code, _ in itertools.groupby(end.error for end in ends)][1:]
    assert not any(end.device_trouble for end in ends)


def test_statistics_count_what_was_done(make):
    bench = make()
    bench.store(1)
    bench.load(1)
    bench.load(2)
    counts = bench.engine.statistics()
    assert (1, 1, 1, 0) == (counts["writes"], counts["reads"], counts["missing"], counts["errors"])
    assert bench.slot_bytes == counts["read_bytes"] == counts["written_bytes"]


def test_an_errno_that_nobody_foresaw_is_our_mistake():
    with pytest.raises(InvariantError, match="EDOM"):
        errnos.meaning("read", errno.EDOM)


def test_keys_of_the_bench_differ():
    assert key(1) != key(2)


# ------------------------------------------------------------ trials of the device


@pytest.mark.parametrize("segments_first", [True, False])
def test_a_trial_writes_and_reads_the_device_and_leaves_nothing(make, segments_first):
    bench = make()
    if not segments_first:  # also the page that is registered beside them serves
        bench.engine.drop_segment(SEGMENT)
    bench.engine.try_device(99)
    ended = bench.wait(1)[0]
    assert (99, Kind.TRIED, None) == (ended.op, ended.kind, ended.error)
    bench.settle()
    assert [] == temporaries(bench.root)


@pytest.mark.parametrize("trouble", ["read_error", "write_error"])
def test_a_trial_tells_a_device_that_fails(make, trouble):
    bench = make(faults=FaultSettings(**{trouble: 1.0}))
    bench.engine.try_device(99)
    ended = bench.wait(1)[0]
    assert (Kind.TRIED, Code.READ_ERROR, True) == (ended.kind, ended.error, ended.device_trouble)
    bench.settle()
    assert [] == temporaries(bench.root)


def test_a_device_without_space_passes_its_trial(make):
    bench = make(faults=FaultSettings(no_space=1.0))
    bench.engine.try_device(99)
    assert bench.wait(1)[0].error is None
