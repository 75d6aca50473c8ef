"""The bench's objects: their keys, and bytes that tell a wrong object from the right one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.cli.bench_work import MARKS, Content, Words, Work

WORK = Work(seed=1, object_bytes=8 * 1000, object_count=5, devices=2, batch=2)


@pytest.fixture(scope="module")
def content() -> Content:
    return Content(WORK)


def stored(content: Content, index: int) -> Words:
    payload = content.pattern.copy()
    content.mark(payload, index)
    return payload


def test_keys_are_as_long_as_vllms_and_differ_between_objects_and_seeds() -> None:
    keys = [
        Work(seed=seed, object_bytes=800, object_count=3, devices=1, batch=1).key(i)
        for seed in (0, 1)
        for i in range(3)
    ]
    assert {36} == {len(key) for key in keys}
    assert 6 == len(set(keys))


@given(st.integers(1, 40), st.integers(1, 50))
def test_batches_cover_every_object_once_in_order(batch: int, count: int) -> None:
    work = Work(seed=0, object_bytes=800, object_count=count, devices=1, batch=batch)
    assert list(range(count)) == [index for part in work.batches() for index in part]
    assert all(0 < len(part) <= batch for part in work.batches())


def test_a_slot_is_the_payload_rounded_up_and_the_trailer() -> None:
    assert 8192 + 4096 == WORK.slot_bytes


def test_rounds_share_a_namespace_and_object_sizes_do_not() -> None:
    assert WORK.namespace() == Work(seed=9, object_bytes=8000, object_count=1, devices=1, batch=1).namespace()
    assert (
        WORK.namespace().fingerprint
        != Work(seed=1, object_bytes=8008, object_count=5, devices=2, batch=2).namespace().fingerprint
    )


def test_a_stored_object_is_recognized_by_its_marks_and_as_a_whole(content: Content) -> None:
    for index in range(WORK.object_count):
        assert content.marked(stored(content, index), index)
        assert content.equal(stored(content, index), index)


def test_another_objects_bytes_are_not_taken_for_it(content: Content) -> None:
    assert not content.marked(stored(content, 1), 2)
    assert not content.equal(stored(content, 1), 2)


def test_a_slot_that_was_never_read_is_noticed(content: Content) -> None:
    assert not content.marked(content.pattern.copy(), 0)
    assert not content.marked(np.zeros(content.words, dtype=np.uint64), 0)


@given(cut=st.integers(0, 999))
def test_a_read_that_ended_early_is_noticed_by_the_marks(cut: int) -> None:
    content = Content(WORK)
    payload = stored(content, 3)
    payload[cut:] = stored(content, 2)[cut:]
    assert not content.marked(payload, 3)


@given(word=st.integers(0, 999))
def test_one_wrong_word_anywhere_is_noticed_by_the_comparison_of_the_whole(word: int) -> None:
    content = Content(WORK)
    payload = stored(content, 0)
    payload[word] ^= np.uint64(1)
    assert not content.equal(payload, 0)


def test_marks_reach_from_the_first_word_to_the_last(content: Content) -> None:
    assert (0, content.words - 1, MARKS) == (content.positions[0], content.positions[-1], len(set(content.positions)))
