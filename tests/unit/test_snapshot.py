"""Snapshots as bytes: what was written is read, and nothing else is ever read as if it were."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core import snapshot
from kvpool.core.packed_map import PackedMap
from kvpool.core.snapshot import Writer, entries_of, is_due, is_whole
from kvpool.errors import IntegrityError

OWNER, OTHER = "ab" * 32, "cd" * 32
RANKS = 3


def written(masks: dict[bytes, int], owner: str = OWNER, ranks: int = RANKS) -> bytes:
    """Return the snapshot of these keys."""
    index = PackedMap(2)
    for key, mask in masks.items():
        index[key] = mask
    writer = Writer(owner, ranks)
    parts = [writer.block(length, 2, raw) for length, raw in map(index.packed_part, range(index.part_count))]
    return b"".join(parts) + writer.end()


def read(raw: bytes, owner: str = OWNER, ranks: int = RANKS) -> dict[bytes, int]:
    """Return what a snapshot names."""
    found: dict[bytes, int] = {}
    for block in snapshot.read(raw, owner, ranks):
        found.update(zip(*entries_of(block, ranks), strict=True))
    return found


SOME = {random.Random(number).randbytes(32) + bytes(4): 1 + number % 7 for number in range(20)}


@given(masks=st.dictionaries(st.binary(min_size=1, max_size=40), st.integers(1, 7)))
def test_what_was_written_is_read(masks: dict[bytes, int]) -> None:
    raw = written(masks)
    assert is_whole(raw)
    assert masks == read(raw)


@pytest.mark.parametrize("mask_bytes", [1, 2])
def test_of_a_mask_only_the_ranks_are_read_and_a_key_that_no_rank_has_is_none(mask_bytes: int) -> None:
    raw = b"".join(
        key + mask.to_bytes(mask_bytes, "little")
        for key, mask in ((b"a", 0b101_111), (b"b", 0b111_001), (b"c", 0b111_000))
    )
    writer = Writer(OWNER, RANKS)
    assert {b"a": 7, b"b": 1} == read(writer.block(1, mask_bytes, raw) + writer.end())


def test_no_damage_is_read_wherever_it_is() -> None:
    raw = written(SOME)
    for place in range(len(raw)):
        damaged = bytearray(raw)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(IntegrityError):
            read(bytes(damaged))


def test_a_part_is_not_read_and_neither_is_more() -> None:
    raw = written(SOME)
    for cut in [raw[:length] for length in range(len(raw))] + [raw + b"\0", raw + raw]:
        with pytest.raises(IntegrityError):
            read(cut)


@given(raw=st.binary(max_size=300))
def test_other_bytes_are_no_snapshot(raw: bytes) -> None:
    with pytest.raises(IntegrityError):
        read(raw)


def sealed(body: bytes, count: int) -> bytes:
    """Return bytes with a right checksum: what only a bug can have written."""
    writer = Writer(OWNER, RANKS)
    writer._count = count
    writer._first += body
    return writer.end()


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"", 1),
        (snapshot._BLOCK.pack(4, 2, 9) + bytes(6), 9),
        (snapshot._BLOCK.pack(0, 2, 1) + bytes(2), 1),
        (snapshot._BLOCK.pack(4, 0, 1) + bytes(4), 1),
        (snapshot._BLOCK.pack(600, 2, 1) + bytes(602), 1),
        (snapshot._BLOCK.pack(0, 0, 0) + bytes(6), 0),
    ],
)
def test_blocks_that_cannot_be_are_refused_though_the_checksum_is_right(body: bytes, count: int) -> None:
    raw = sealed(body, count)
    assert is_whole(raw)
    with pytest.raises(IntegrityError):
        read(raw)


def test_another_namespace_epoch_rank_count_or_format_is_not_read_and_the_reason_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = written(SOME)
    with pytest.raises(IntegrityError, match="another namespace"):
        read(raw, owner=OTHER)
    with pytest.raises(IntegrityError, match="number of ranks"):
        read(raw, ranks=RANKS + 1)
    for version in (0, 2):
        monkeypatch.setattr(snapshot, "FORMAT_VERSION", version)
        other = written(SOME)
        monkeypatch.undo()
        with pytest.raises(IntegrityError, match="another format"):
            read(other)


@pytest.mark.parametrize(
    ("changes", "keys", "age_s", "due"),
    [
        (0, 10, 1e6, False),
        (10_000, 10, 59.0, False),
        (1, 10, 599.0, False),
        (1, 10, 600.0, True),
        (1023, 10, 60.0, False),
        (1024, 10, 60.0, True),
        (1024, 1_000_000, 60.0, False),
        (62_500, 1_000_000, 60.0, True),
    ],
)
def test_it_is_due_when_much_has_changed_or_something_long_ago(
    changes: int, keys: int, age_s: float, due: bool
) -> None:
    assert due == is_due(changes, keys, age_s)
