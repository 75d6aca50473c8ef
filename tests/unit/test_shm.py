"""Shared memory: unnamed from the start, refused with the number to set, filled before it is used."""

import os
import resource
from pathlib import Path

import posix_ipc
import pytest

from kvpool.errors import HostError, ProtocolError
from kvpool.io import shm

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_descriptor_is_left(open_descriptors: object) -> None:
    """Every test here ends with the descriptors it began with."""


def test_a_segment_has_no_name_and_its_size_and_is_shared() -> None:
    before = set(os.listdir("/dev/shm"))
    fd = shm.create_segment(MIB)
    assert set() == {name for name in os.listdir("/dev/shm") if name.startswith("kvpool")} - before
    assert MIB == os.fstat(fd).st_size
    assert not os.get_inheritable(fd)
    first, second = shm.map_segment(fd, MIB), shm.map_segment(fd, MIB)
    os.close(fd)
    first[MIB - 4 :] = b"here"
    assert b"here" == second[MIB - 4 :]
    first.close()
    assert b"here" == second[MIB - 4 :], "a mapping outlives the others and the descriptor"
    second.close()


def test_prefault_gives_every_page_its_memory_and_tells_progress() -> None:
    size = shm._PREFAULT_PIECE_BYTES + 2 * MIB
    fd = shm.create_segment(size)
    assert 0 == os.fstat(fd).st_blocks
    told: list[int] = []
    shm.prefault(fd, size, told.append)
    assert size == os.fstat(fd).st_blocks * 512
    assert [shm._PREFAULT_PIECE_BYTES, size] == told
    os.close(fd)


def test_the_memory_behind_a_large_segment_is_whole_huge_pages() -> None:
    size = shm.ROUNDED_SINCE_BYTES + 4096
    fd = shm.create_segment(size)
    assert size + 2 * MIB - 4096 == os.fstat(fd).st_size
    shm.prefault(fd, size)
    mapping = shm.map_segment(fd, size)
    assert (size, os.fstat(fd).st_size) == (len(mapping), 512 * os.fstat(fd).st_blocks)
    mapping.close()
    shm.punch_out(fd, size)
    assert 0 == os.fstat(fd).st_blocks
    os.close(fd)
    assert shm.ROUNDED_SINCE_BYTES - 4096 == shm.backing_bytes(shm.ROUNDED_SINCE_BYTES - 4096)


def test_prefault_of_more_than_there_is_says_how_much_is_missing() -> None:
    """A memfd has the machine's memory as its limit, without touching the limit of /dev/shm."""
    needed = 1 << 60
    fd = shm.create_segment(needed)
    with pytest.raises(HostError, match=f"needed_bytes={needed}"):
        _prefault_at_once(fd, needed)
    os.close(fd)


def _prefault_at_once(fd: int, size: int) -> None:
    pieces = shm._PREFAULT_PIECE_BYTES
    shm._PREFAULT_PIECE_BYTES = size
    try:
        shm.prefault(fd, size)
    finally:
        shm._PREFAULT_PIECE_BYTES = pieces


def test_a_segment_of_another_size_than_told_is_refused() -> None:
    fd = shm.create_segment(MIB)
    for told in (2 * MIB, 0, -1):
        with pytest.raises(ProtocolError, match="size"):
            shm.map_segment(fd, told)
    os.close(fd)


def test_what_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises((HostError, ProtocolError)):
        shm.map_segment(fd, 4096)
    os.close(fd)


def test_no_descriptor_left_is_a_host_error_and_leaves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(HostError, match="cannot create shared memory"):
            shm.create_segment(MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_staging_larger_than_the_file_system_names_limit_value_and_need() -> None:
    with pytest.raises(HostError, match=rf"/dev/shm.*value_bytes=\d+ needed_bytes={1 << 60}"):
        shm.check_staging(1 << 60)


def test_staging_larger_than_memory_names_limit_value_and_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "memory_available_bytes", lambda: 5 * MIB)
    shm.check_staging(5 * MIB)
    with pytest.raises(HostError, match=rf"memory.*value_bytes={5 * MIB} needed_bytes={6 * MIB}"):
        shm.check_staging(6 * MIB)


def test_without_shared_memory_nothing_is_free(tmp_path: Path) -> None:
    assert 0 == shm.shm_free_bytes(str(tmp_path / "none"))
    with pytest.raises(HostError):
        shm.check_staging(1, str(tmp_path / "none"))


def test_memory_limits_of_the_cgroup_and_those_above_count(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/sys/fs/cgroup/a/b/memory.max": "max",
        "/sys/fs/cgroup/a/memory.max": "1000000",
        "/sys/fs/cgroup/a/memory.current": "700000",
    }
    monkeypatch.setattr(shm, "_cgroup_directory", lambda: "/sys/fs/cgroup/a/b")
    monkeypatch.setattr(shm, "_inactive_file_bytes", lambda directory: 200_000)
    monkeypatch.setattr(shm, "_first_word", lambda path: files[path] if path in files else _missing(path))
    assert 500_000 == shm.memory_available_bytes()


def _missing(path: str) -> str:
    raise FileNotFoundError(path)


def test_the_locked_memory_limit_counts_unless_we_may_lock_any(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    monkeypatch.setattr(shm, "_may_lock_any", lambda: False)
    assert (None if limit == resource.RLIM_INFINITY else limit) == shm.memlock_bytes_max()
    monkeypatch.setattr(shm, "_may_lock_any", lambda: True)
    assert shm.memlock_bytes_max() is None


def test_leftover_names_of_dead_processes_are_removed_and_no_others() -> None:
    dead, alive, other = f"kvpool-{2**22 + 5}-{'0' * 16}", f"kvpool-{os.getpid()}-{'0' * 16}", "kvpool-other"
    for name in (dead, alive, other):
        os.close(posix_ipc.SharedMemory(f"/{name}", posix_ipc.O_CREX, mode=0o600).fd)
    try:
        assert [dead] == shm.remove_leftovers()
        assert {alive, other} == {alive, dead, other} & set(os.listdir("/dev/shm"))
    finally:
        posix_ipc.unlink_shared_memory(f"/{alive}")
        posix_ipc.unlink_shared_memory(f"/{other}")
