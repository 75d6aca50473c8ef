"""Index snapshots with real workers and helpers: what a start knows at once, what the walk behind it sets right."""

import contextlib
import fcntl
import os
import select
import shutil
import stat
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.core.key_index import KeyIndex, Namespace
from kvpool.core.object_events import KeysUnseen, ObjectId
from kvpool.errors import Code, IntegrityError
from kvpool.health import facts
from kvpool.io import snapshot_file
from kvpool.procs import scanner
from kvpool.procs.scanner import Found, FrameReader, Remembered, ScanEnded, SnapshotRead
from kvpool.procs.turns import Walker
from kvpool.procs.worker_scans import QUEUE_MAX, Scans
from kvpool.procs.worker_snapshots import LOOK_S, Snapshots
from kvpool.wire import messages as m
from tests.process.engine_bench import key
from tests.process.worker_harness import WorkerProcess, key_of

OWNER = "ab" * 32
Start = Callable[[], WorkerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a worker on the one device, wait until it has walked it."""
    with contextlib.ExitStack() as stack:
        (tmp_path / "device").mkdir()

        def begin() -> WorkerProcess:
            (tmp_path / "worker.log").write_text("")
            worker = WorkerProcess(tmp_path / "device", log=tmp_path / "worker.log")
            stack.callback(worker.close)
            worker.scanned()
            return worker

        yield begin


def snapshot_of(worker: WorkerProcess) -> Path:
    return Path(snapshot_file.path_of(f"{worker.path}/.kvpool", worker.spec.fingerprint))


def stored(start: Start, *numbers: int) -> WorkerProcess:
    """Store these objects and end; return the worker that was."""
    worker = start()
    assert list(numbers) == worker.store(numbers)
    assert 0 == worker.drain()
    worker.close()
    return worker


def known(worker: WorkerProcess, count: int) -> None:
    """Wait until the worker knows so many objects."""
    worker.until(lambda: worker.facts()[facts.INDEX_OBJECTS] == count)


# ---------------------------------------------------------------- from one run to the next


def test_an_end_leaves_a_snapshot_for_the_owner_alone_and_the_next_start_reads_it(start: Start) -> None:
    before = stored(start, 1, 2, 3)
    path = snapshot_of(before)
    assert [0o600, 0o700] == [stat.S_IMODE(os.stat(name).st_mode) for name in (path, path.parent)]
    worker = start()
    worker.until(lambda: all(worker.flags.get(key_of(number)) == m.STORED for number in (1, 2, 3)))
    assert "3 keys known from the last run" in worker.log()
    assert {1: True, 2: True, 3: True} == worker.load([1, 2, 3])


def test_a_key_whose_file_went_meanwhile_is_a_miss_and_then_unknown(start: Start) -> None:
    before = stored(start, 1, 2, 3)
    before.file_of(2).unlink()
    worker = start()
    worker.until(lambda: worker.flags.get(key_of(2)) == 0)
    known(worker, 2)
    assert {1: True, 2: Code.MISSING, 3: True} == worker.load([1, 2, 3])
    assert [2] == worker.store([2]), "it can be stored again"


def test_the_walk_finds_what_the_snapshot_does_not_name(start: Start, tmp_path: Path) -> None:
    path = snapshot_of(stored(start, 1, 2))
    shutil.copy(path, tmp_path / "old")
    stored(start, 3)
    shutil.copy(tmp_path / "old", path)
    worker = start()
    known(worker, 3)
    assert "2 keys known" in worker.log()
    assert {3: True} == worker.load([3])


def test_a_damaged_snapshot_is_not_used_and_the_reason_is_said(start: Start) -> None:
    path = snapshot_of(stored(start, 1, 2))
    raw = bytearray(path.read_bytes())
    raw[60] ^= 1
    path.write_bytes(raw)
    worker = start()
    known(worker, 2)
    assert "scanned for anew: index snapshot is damaged" in worker.log()
    assert "known from the last run" not in worker.log()


def test_what_was_reset_is_not_remembered(start: Start) -> None:
    worker = start()
    assert [1] == worker.store([1])
    assert 0 == worker.drain()
    worker.close()
    worker = start()
    path = snapshot_of(worker)
    assert path.exists()
    worker.control.send(m.EpochWanted(fingerprint=worker.spec.fingerprint, epoch=1))
    worker.control.wait(m.EpochKept)
    assert not path.exists()
    assert 0 == worker.drain()
    assert not path.exists()


def test_an_index_that_has_not_changed_is_not_written_again(start: Start) -> None:
    path = snapshot_of(stored(start, 1))
    before = path.stat().st_mtime_ns, path.stat().st_ino
    stored(start)
    assert before == (path.stat().st_mtime_ns, path.stat().st_ino)
    stored(start, 2)
    assert before != (path.stat().st_mtime_ns, path.stat().st_ino)


# ---------------------------------------------------------------- the file


def pieces(*keys: bytes) -> list[bytes]:
    """Return a snapshot of these keys, in pieces."""
    index = KeyIndex()
    index.add_namespace(1, 1, {0: 4096})
    for one in keys:
        index.add(ObjectId(1, one, 0), [])
    maker = Snapshots("d", select.epoll(), names("unused"), index_of=index.namespaces.get)  # type: ignore[arg-type]
    with contextlib.closing(maker._poller):
        return list(maker._pieces(1, index.namespaces[1]))


def names(path: str) -> Any:
    """Return what a worker's snapshots ask of its namespaces."""
    return SimpleNamespace(snapshot_path=lambda _: path, fingerprint=lambda _: OWNER)


def test_a_stream_that_breaks_off_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "index" / "x.snapshot"
    snapshot_file.write(str(path), pieces(key(1)))
    for cut in ([], pieces(key(2))[:-1]):
        with pytest.raises(IntegrityError):
            snapshot_file.write(str(path), cut)
    assert [([key(1)], [1])] == list(snapshot_file.read(str(path), OWNER, 1))
    assert ["x.snapshot"] == os.listdir(path.parent)
    assert [] == list(snapshot_file.read(str(tmp_path / "absent"), OWNER, 1))


def test_what_killed_writers_left_and_what_nobody_uses_goes(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    folder.mkdir()
    for name, age_s in ((".a.snapshot-1", 3600.0), (".b.snapshot-2", 0.0), ("c.snapshot", 3600.0), ("d.snapshot", 9e6)):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    snapshot_file.tidy(str(tmp_path))
    assert {".b.snapshot-2", "c.snapshot"} == set(os.listdir(folder))


# ---------------------------------------------------------------- the helpers


def frames_of(walker: Walker) -> list[scanner.Frame]:
    """Return all that a helper still says; it ends."""
    reader, frames = FrameReader(), []
    while select.select([walker.fd], [], [], 30.0)[0] and (data := os.read(walker.fd, 1 << 16)):
        frames += reader.feed(data)
    walker.end(kill=False)
    return frames


def put(directory: Path, *keys: bytes) -> None:
    for one in keys:
        digits = one.hex()
        folder = directory / digits[:3] / digits[3:5]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{one[:-4].hex()}.bin").write_bytes(b"")


def test_the_scanner_tells_the_snapshot_before_it_walks_but_no_trial(tmp_path: Path) -> None:
    trial = m.TRIAL_KEY.ljust(32, b"x") + bytes(4)
    many = [key(number) for number in range(600)]
    snapshot_file.write(str(tmp_path / "s"), pieces(trial, *many))
    put(tmp_path / "rank", key(1000))
    *told, read, found, ended = frames_of(Walker(scanner.command([str(tmp_path / "rank")], str(tmp_path / "s"), OWNER)))
    assert all(isinstance(frame, Remembered) and len(frame.keys) <= scanner.KEYS_MAX for frame in told)
    assert sorted((one, 1) for one in many) == sorted(
        pair for frame in told if isinstance(frame, Remembered) for pair in zip(frame.keys, frame.masks, strict=True)
    )
    assert SnapshotRead(keys=600, reason="") == read
    assert Found(rank=0, keys=[key(1000)]) == found
    assert isinstance(ended, ScanEnded)


def test_a_walk_waits_for_its_turn(tmp_path: Path) -> None:
    put(tmp_path, key(1))
    walker = Walker(scanner.command([str(tmp_path)]))
    walker.let(False)
    deadline = time.monotonic() + 30.0
    while fcntl.ioctl(walker._words, termios.FIONREAD, bytes(4)) != bytes(4):
        assert time.monotonic() < deadline, "the helper does not take the word"
        time.sleep(0.01)
    assert [] == select.select([walker.fd], [], [], 0.3)[0]
    walker.let(True)
    found, ended = frames_of(walker)
    assert Found(rank=0, keys=[key(1)]) == found
    assert isinstance(ended, ScanEnded)


# ---------------------------------------------------------------- beside a worker's work


class Beside:
    """Snapshots of one namespace, as a worker's loop serves them."""

    def __init__(self, path: Path) -> None:
        self.index = KeyIndex()
        self.index.add_namespace(1, 1, {0: 4096})
        self.poller = select.epoll()
        self.made = Snapshots("d", self.poller, names(str(path)), index_of=self.index.namespaces.get)
        self.made.opened(1)
        self.now_ns = time.monotonic_ns()

    def add(self, *keys: bytes) -> None:
        for one in keys:
            self.index.add(ObjectId(1, one, 0), [])

    def pass_time(self, seconds: float) -> bool:
        """So much later, look; return whether a helper was started."""
        self.now_ns += int(seconds * 1e9)
        self.made.look(self.now_ns)
        return bool(self.made.fds())

    def serve(self) -> None:
        """Serve until nothing is under way."""
        deadline = time.monotonic() + 60.0
        while self.made.fds():
            assert time.monotonic() < deadline, "the helper does not end"
            for fd, _ in self.poller.poll(1.0):
                self.made.on_ready(fd)

    def close(self) -> None:
        self.made.close()
        self.poller.close()


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    made = Beside(tmp_path / "index" / "s")
    yield made
    made.close()


def test_an_index_is_written_beside_the_work_once_it_has_changed(beside: Beside, tmp_path: Path) -> None:
    assert not beside.pass_time(601.0)
    assert beside.made.due_ns() is None
    many = [key(number) for number in range(3000)]
    beside.add(*many)
    assert beside.made.due_ns() == beside.now_ns + LOOK_S * 1e9
    assert beside.pass_time(11.0)
    beside.serve()
    read = snapshot_file.read(str(tmp_path / "index" / "s"), OWNER, 1)
    assert sorted(many) == sorted(one for keys, _ in read for one in keys)
    assert not beside.pass_time(601.0), "nothing has changed since"


def test_a_writer_that_fails_is_followed_by_another(beside: Beside, tmp_path: Path) -> None:
    (tmp_path / "index").write_text("in the way")
    beside.add(key(1))
    assert beside.pass_time(601.0)
    beside.serve()
    (tmp_path / "index").unlink()
    assert beside.pass_time(601.0)
    beside.serve()
    assert (tmp_path / "index" / "s").exists()


def test_a_reset_ends_the_writing_of_what_it_is_about(beside: Beside, tmp_path: Path) -> None:
    beside.add(key(1))
    assert beside.pass_time(601.0)
    beside.made.retired(1)
    assert frozenset() == beside.made.fds()
    beside.made.finish()
    assert not (tmp_path / "index" / "s").exists()


# ---------------------------------------------------------------- what walks bring


class Heard:
    """Stands for everything around `Scans`: an epoll, a table, namespaces with one scan on descriptor 5."""

    def __init__(self, space: Namespace | None = None) -> None:
        self.listened = {5}
        self.told: list[Any] = []
        namespaces: Any = SimpleNamespace(scan_fds=lambda: frozenset({5}), let_scans=lambda _: None)
        self.scans = Scans(
            namespaces, Any, self,  # type: ignore[arg-type]
            tell=self.told.append, send=self.told.append, index_of=lambda _: space,
        )  # fmt: skip

    def register(self, fd: int, _mask: int) -> None:
        self.listened.add(fd)

    def unregister(self, fd: int) -> None:
        self.listened.remove(fd)

    def look(self, queue_length: int = 0) -> None:
        self.scans.look(0, busy=False, queue_length=queue_length)


def test_scans_are_not_read_while_the_coordinator_has_enough_to_read() -> None:
    heard = Heard()
    for queue_length, listened in ((QUEUE_MAX, {5}), (QUEUE_MAX + 1, set()), (999, set()), (QUEUE_MAX, {5}), (0, {5})):
        heard.look(queue_length)
        assert listened == heard.listened


def test_what_no_walk_has_seen_is_dropped_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.procs.worker_scans.DROP_MAX", 4)
    index = KeyIndex()
    index.add_namespace(1, 1, {0: 4096})
    space = index.namespaces[1]
    keys = [key(number) for number in range(1000)]
    index.remember(space, keys, [1] * len(keys), [])
    index.add(ObjectId(1, keys[7], 0), [])
    heard = Heard(space)
    heard.scans._sweeps.append((1, 0))
    for _ in range(1000):
        if heard.scans.due_ns(walking=False) is None:
            break
        heard.look()
        for event in heard.told:
            assert isinstance(event, KeysUnseen)
            assert len(event.keys) <= 4
            index.forget_unseen(space, event.keys, [])
        heard.told.clear()
    assert [keys[7]] == list(space.masks)
