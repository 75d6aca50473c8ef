"""Epochs: what counts, who has to keep it, and that no object of one is an object of another."""

import os
from pathlib import Path

import pytest

from kvpool.core import layout
from kvpool.core.epochs import EPOCH_OF, EpochBook, Raised, base_of, epoch_of, spec_of
from kvpool.errors import InvariantError
from kvpool.io import epoch_files
from tests.unit.test_identities import spec

F = "0" * 64
G = "1" * 64


@pytest.fixture
def book() -> EpochBook:
    book = EpochBook(2)
    book.settle([0, 1])
    return book


def test_every_epoch_has_a_fingerprint_and_a_folder_of_its_own() -> None:
    base = spec()
    epochs = [spec_of(base, number) for number in range(4)]
    assert base == epochs[0]
    assert 4 == len({epoch.fingerprint for epoch in epochs})
    assert [0, 1, 2, 3] == [epoch_of(epoch) for epoch in epochs]
    assert {base.fingerprint} == {base_of(epoch) for epoch in epochs}
    assert ("m", "m+00000000") == layout.model_directories(base)
    for epoch in epochs[1:]:
        assert (f"m+{epoch.fingerprint[:8]}",) * 2 == layout.model_directories(epoch)


def test_an_epoch_of_an_epoch_is_refused() -> None:
    with pytest.raises(InvariantError):
        spec_of(spec_of(spec(), 1), 2)


def test_an_epoch_that_is_no_number_is_older_than_all() -> None:
    assert 0 == epoch_of(spec(identity={"epoch": "-3", EPOCH_OF: F}))


def test_nobody_is_served_before_every_device_has_said_its_epochs() -> None:
    book = EpochBook(2)
    assert [False, False] == [book.settled, book.settle([0])]
    assert [True, True] == [book.settle([1]), book.settled]
    assert not book.settle([1])


def test_the_highest_epoch_of_any_device_counts(book: EpochBook) -> None:
    assert [True, False, True] == [book.told(0, F, 2), book.told(1, F, 1), book.told(1, G, 1)]
    assert [2, 1, 0] == [book.current(F), book.current(G), book.current("2" * 64)]
    assert [(G, 1)] == book.behind(0)
    assert [(F, 2)] == book.behind(1)
    book.validate()


def test_a_raise_ends_when_every_device_has_answered(book: EpochBook) -> None:
    assert [0, 1] == book.raise_to(F, 1, [1, 0])
    assert [True, 0] == [book.rising(F), book.current(F)]
    assert book.answered(0, F, 1, kept=True) is None
    assert 0 == book.current(F)
    book.validate()
    assert Raised(F, 1, kept=True) == book.answered(1, F, 1, kept=False)
    assert [False, 1] == [book.rising(F), book.current(F)]
    assert [(F, 1)] == book.behind(1)
    book.validate()


def test_a_raise_that_no_device_keeps_changes_nothing(book: EpochBook) -> None:
    book.raise_to(F, 1, [0, 1])
    assert [] == book.gone(0)
    assert [Raised(F, 1, kept=False)] == book.gone(1)
    assert [0, False] == [book.current(F), book.rising(F)]


def test_a_device_that_does_not_answer_is_not_waited_for(book: EpochBook) -> None:
    book.raise_to(F, 1, [0, 1])
    book.answered(0, F, 1, kept=True)
    assert Raised(F, 1, kept=True) == book.give_up(F, 1)
    assert book.give_up(F, 1) is None
    assert book.answered(1, F, 1, kept=True) is None
    assert [] == book.behind(1)
    book.validate()


def test_numbers_only_rise(book: EpochBook) -> None:
    book.told(0, F, 2)
    with pytest.raises(InvariantError):
        book.raise_to(F, 2, [0])


def test_a_number_half_kept_by_a_killed_worker_is_removed_at_the_next_start(tmp_path: Path) -> None:
    epoch_files.keep_epoch(str(tmp_path), "a" * 64, 3)
    left, fresh = (tmp_path / "epochs" / f".{'a' * 64}-{pid}" for pid in (1, 2))
    left.touch()
    fresh.touch()  # another host's, at work
    os.utime(left, (0, 0))
    epoch_files.remove_leftovers(str(tmp_path))
    assert (False, True) == (left.exists(), fresh.exists())
    assert {"a" * 64: 3} == epoch_files.read_epochs(str(tmp_path))
