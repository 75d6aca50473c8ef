"""Removing keys in the background: whole keys, not those used meanwhile, in the order in which it was asked."""

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.io.remover import Condemned, Removed, Remover
from tests.process.stored_files import Stored, key_of


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    made = Stored(tmp_path / "device", ranks=2)
    made.put(1, 2, 3, hours=5)
    return made


@pytest.fixture
def remover(open_descriptors: None) -> Iterator[Remover]:
    made = Remover()
    yield made
    made.close()


def condemned(stored: Stored, number: int, used_s: float) -> Condemned:
    return Condemned(number, tuple(str(stored.path(number, rank)) for rank in range(2)), used_s)


def wait(remover: Remover, count: int) -> list[Removed]:
    ended: list[Removed] = []
    while len(ended) < count:
        assert select.select([remover.fd], [], [], 10)[0]
        ended += remover.reap()
    return ended


def test_a_key_goes_with_all_ranks_files_and_their_empty_folders(stored, remover):
    size = sum(stored.path(1, rank).stat().st_blocks * 512 for rank in range(2))
    folders = sum(stored.path(1, rank).parent.stat().st_blocks * 512 for rank in range(2))
    remover.remove([condemned(stored, 1, time.time())])
    assert [Removed(1, size + folders)] == wait(remover, 1)
    assert [2, 3] == stored.there(1, 2, 3)
    assert not stored.path(1).parent.exists()
    assert stored.path(1).parent.parent.exists()


def test_a_key_that_was_used_since_stays_whole(stored, remover):
    known_s = stored.path(2).stat().st_mtime
    remover.renew([str(stored.path(2, 1))])
    remover.remove([condemned(stored, 2, known_s), condemned(stored, 3, known_s + 1)])
    kept, gone = wait(remover, 2)
    assert (2, 0, (0, 1), "") == tuple(kept)
    assert ((), "") == (gone.left, gone.error)
    assert [2] == stored.there(2, 3)


def test_a_file_that_is_gone_already_is_no_trouble(stored, remover):
    stored.path(1).unlink()
    remover.remove([condemned(stored, 1, time.time())])
    assert ((), "") == wait(remover, 1)[0][2:]


def test_what_cannot_be_removed_is_told_with_its_reason(stored, remover):
    blocked = stored.path(1)
    blocked.unlink()
    blocked.mkdir()  # unlink(2) refuses it, for root too
    os.utime(blocked, (1, 1))
    remover.remove([condemned(stored, 1, time.time())])
    left, error = wait(remover, 1)[0][2:]
    assert ((0,), "EISDIR") == (left, error)
    assert not stored.path(1, 1).exists()


def test_a_renewed_time_is_now_and_a_file_that_is_gone_stays_gone(stored, remover):
    remover.renew([str(stored.path(3)), str(stored.path(9))])
    remover.remove([condemned(stored, 1, time.time())])
    wait(remover, 1)
    assert abs(stored.path(3).stat().st_mtime - time.time()) < 60
    assert not stored.path(9).exists()
    assert key_of(3) != key_of(9)
