"""Claims of kvpool.io.syscall_ring, on the kernel here."""

import errno
import mmap
import os
import select
from pathlib import Path

import pytest

from kvpool.io import syscall_ring
from kvpool.io.syscall_ring import SyscallRing

REASON = syscall_ring.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no io_uring here: {REASON}")

BLOCK = 1 << 20


def drain(ring: SyscallRing) -> dict[int, int]:
    ring.submit()
    results: dict[int, int] = {}
    with select.epoll() as poller:
        poller.register(ring.fd, select.EPOLLIN)
        while ring.in_flight:
            assert poller.poll(10), "the ring's eventfd is not signalled"
            results.update(ring.reap())
    return results


@pytest.mark.parametrize("registered", [True, False])
def test_a_file_written_and_linked_reads_back_byte_for_byte(tmp_path: Path, registered: bool) -> None:
    memory = mmap.mmap(-1, 4 * BLOCK)
    view = memoryview(memory)
    ring = SyscallRing(entries=8, pipe_fd=None)
    if registered:
        assert ring.register([view])
    payload = os.urandom(BLOCK)
    memory[:BLOCK] = payload
    source, target = ring.vector(view[:BLOCK]), ring.vector(view[2 * BLOCK : 3 * BLOCK])
    ring.open(1, str(tmp_path), os.O_TMPFILE | os.O_WRONLY, 0o600)
    fd = drain(ring)[1]
    ring.write(2, fd, source, 0, 0)
    assert {2: BLOCK} == drain(ring)
    ring.link_fd(3, fd, str(tmp_path / "a"))
    assert {3: 0} == drain(ring)
    ring.link_fd(4, fd, str(tmp_path / "a"))
    assert {4: -errno.EEXIST} == drain(ring)
    ring.close_file(5, fd)
    assert {5: 0} == drain(ring)
    ring.open(6, str(tmp_path / "a"), os.O_RDONLY, 0)
    fd = drain(ring)[6]
    ring.read(7, fd, target, 0, 0)
    assert {7: BLOCK} == drain(ring)
    os.close(fd)

    assert payload == memory[2 * BLOCK : 3 * BLOCK]
    assert payload != memory[:BLOCK][::-1]
    ring.close()
    view.release()
    memory.close()


def test_names_are_made_moved_and_removed(tmp_path: Path) -> None:
    ring = SyscallRing(entries=8, pipe_fd=None)
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "taken").write_bytes(b"y")
    ring.mkdir(1, str(tmp_path / "sub"), 0o700)
    ring.link(2, str(tmp_path / "a"), str(tmp_path / "b"))
    ring.stat(3, str(tmp_path / "a"))
    ring.stat(4, str(tmp_path / "none"))
    assert {1: 0, 2: 0, 3: 0, 4: -errno.ENOENT} == drain(ring)
    ring.rename_noreplace(5, str(tmp_path / "a"), str(tmp_path / "taken"))
    assert {5: -errno.EEXIST} == drain(ring)
    ring.rename(6, str(tmp_path / "a"), str(tmp_path / "taken"))
    assert {6: 0} == drain(ring)
    ring.unlink(7, str(tmp_path / "b"))
    assert {7: 0} == drain(ring)

    assert ["sub", "taken"] == sorted(path.name for path in tmp_path.iterdir())
    assert 0o700 == (tmp_path / "sub").stat().st_mode & 0o777
    ring.close()


def test_more_requests_than_entries_all_come_back_once(tmp_path: Path) -> None:
    ring = SyscallRing(entries=8, pipe_fd=None)
    for token in range(100):
        ring.stat(token, str(tmp_path / f"{token}"))

    assert dict.fromkeys(range(100), -errno.ENOENT) == drain(ring)
    ring.close()


def test_the_ring_pipe_hangs_up_when_the_ring_is_gone() -> None:
    read_end, write_end = os.pipe()
    ring = SyscallRing(entries=8, pipe_fd=write_end)
    os.close(write_end)
    poller = select.poll()
    poller.register(read_end, 0)
    assert [] == poller.poll(50)
    ring.close()

    assert [(read_end, select.POLLHUP)] == poller.poll(5000)
    os.close(read_end)
