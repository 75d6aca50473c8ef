"""The scanner as the process it is: what it finds, what it leaves alone, what it removes."""

import os
import subprocess
import time
from pathlib import Path

import msgpack
import pytest

from kvpool.core import layout
from kvpool.procs import scanner
from kvpool.procs.scanner import Found, FrameReader, ScanEnded
from tests.process.engine_bench import key


def put(directory: Path, *keys: bytes) -> None:
    for one in keys:
        path = Path(layout.object_path(str(directory), one))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def scan(*directories: Path) -> tuple[dict[int, set[bytes]], ScanEnded]:
    output = subprocess.run(
        scanner.command([str(directory) for directory in directories]), stdout=subprocess.PIPE, check=True, timeout=30
    ).stdout
    *batches, ended = FrameReader().feed(output)
    assert isinstance(ended, ScanEnded)
    found: dict[int, set[bytes]] = {}
    for batch in batches:
        assert isinstance(batch, Found)
        assert len(batch.keys) <= scanner.KEYS_MAX
        assert not found.setdefault(batch.rank, set()) & set(batch.keys)
        found[batch.rank] |= set(batch.keys)
    return found, ended


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "ns").mkdir()
    (tmp_path / "ns" / "manifest.json").write_text("{}")
    return tmp_path / "ns"


def test_every_object_of_every_rank_and_group_is_found(tmp_path):
    ranks = {0: {key(n, n % 3) for n in range(700)}, 1: {key(n) for n in range(5)}}
    for rank, keys in ranks.items():
        put(tmp_path / str(rank), *keys)
    found, ended = scan(tmp_path / "0", tmp_path / "1")
    assert ranks == found
    assert (705, 0, 0, 0) == (ended.objects, ended.ignored, ended.removed, ended.unreadable)


def test_an_empty_or_absent_directory_is_an_empty_index(directory):
    found, ended = scan(directory, directory / "absent")
    assert {} == found
    assert (0, 0, 0) == (ended.objects, ended.ignored, ended.unreadable)


def test_names_that_no_object_has_are_counted_and_stay(directory):
    put(directory, key(1))
    folder = Path(layout.object_path(str(directory), key(1))).parent
    strangers = [
        folder / "README",
        folder / f"{key(2).hex()}.bin",
        directory / "notes",
        directory / "abc",
        folder / "é.bin",
    ]
    for path in strangers:
        path.write_bytes(b"")
    found, ended = scan(directory)
    assert {0: {key(1)}} == found
    assert len(strangers) == ended.ignored
    assert all(path.exists() for path in strangers)


def test_an_object_in_a_folder_that_is_not_its_own_is_none(directory):
    put(directory, key(1))
    wrong = directory / "fff" / "ff"
    wrong.mkdir(parents=True)
    os.rename(layout.object_path(str(directory), key(1)), wrong / layout.object_name(key(1)))
    assert {} == scan(directory)[0]


def test_temporaries_of_dead_workers_are_removed_and_new_ones_stay(directory):
    put(directory, key(1))
    folder = Path(layout.object_path(str(directory), key(1))).parent
    old, new = folder / layout.temporary_name("1", 1), folder / layout.temporary_name("1", 2)
    for path in (old, new):
        path.write_bytes(b"part")
    os.utime(new, (time.time() + 3600,) * 2)
    os.utime(old, (time.time() - 10,) * 2)
    _, ended = scan(directory)
    assert (False, True, 1) == (old.exists(), new.exists(), ended.removed)


def test_links_to_elsewhere_are_not_followed(directory, tmp_path):
    put(tmp_path / "elsewhere", key(1))
    (directory / "abc").symlink_to(tmp_path / "elsewhere" / layout.object_directory(key(1))[:3])
    assert {} == scan(directory)[0]


def test_the_output_is_plain_messagepack_and_may_arrive_in_any_pieces(directory):
    put(directory, key(1), key(2))
    output = subprocess.run(scanner.command([str(directory)]), stdout=subprocess.PIPE, check=True, timeout=30).stdout
    size = int.from_bytes(output[:4], "little")
    assert {"type", "rank", "keys"} == set(msgpack.unpackb(output[4 : 4 + size]))
    reader = FrameReader()
    pieces = [message for byte in output for message in reader.feed(bytes([byte]))]
    assert FrameReader().feed(output) == pieces


def test_it_ends_quietly_when_its_reader_is_gone(directory):
    put(directory, *(key(n) for n in range(3000)))
    child = subprocess.Popen(scanner.command([str(directory)]), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    with child.stderr:
        assert b"" == child.stderr.read()
    assert 0 == child.wait(30)
