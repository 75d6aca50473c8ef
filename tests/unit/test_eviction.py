"""Capacity: when keys go and which, from figures alone."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.eviction import Aged, Bounds, Filesystem, Occupancy, OldestKeys, Verdict

ROOMY = Filesystem(total_bytes=100_000, free_bytes=90_000)


def occupancy(used: int | None, *, capacity: int = 1000, min_free: int = 1) -> Occupancy:
    bounds = Bounds(capacity_bytes=capacity, high=0.9, low=0.7, min_free_bytes=min_free)
    made = Occupancy(bounds=bounds)
    if used is not None:
        made.scan_ended(used)
    return made


@pytest.mark.parametrize(("used", "need"), [(0, 0), (900, 0), (901, 201), (1000, 300), (5000, 4300)])
def test_above_the_high_mark_what_is_above_the_low_one_goes(used, need):
    assert need == occupancy(used).look(ROOMY).need_bytes


def test_once_begun_it_goes_on_to_the_low_mark_and_not_below():
    ours = occupancy(950)
    assert ours.look(ROOMY).need_bytes == 250
    ours.changed(-200)
    assert ours.look(ROOMY).need_bytes == 50
    ours.changed(-50)
    assert ours.look(ROOMY).need_bytes == 0
    ours.changed(150)
    assert ours.look(ROOMY).need_bytes == 0


def test_nothing_is_decided_by_a_capacity_before_it_was_counted():
    ours = occupancy(None)
    ours.changed(5000)
    assert ours.look(ROOMY) == Verdict(need_bytes=0, storing=True, why="")
    ours.scan_ended(800)
    assert ours.used_bytes == 5800
    assert not ours.look(ROOMY).storing


def test_what_is_written_during_a_scan_counts():
    ours = occupancy(100)
    ours.scan_started()
    ours.changed(50)
    ours.scan_ended(120)
    assert ours.used_bytes == 170


def test_what_is_written_during_a_scan_and_seen_by_it_counts_once():
    ours = occupancy(100)
    ours.scan_started()
    ours.changed(50)
    ours.scan_saw(20)
    ours.scan_ended(120)
    assert ours.used_bytes == 150


def test_what_others_remove_during_a_scan_is_counted_anew():
    ours = occupancy(None)
    ours.scan_started()
    ours.removed_by_others(300)
    ours.scan_ended(500)
    assert (500, True) == (ours.used_bytes, ours.recount)
    ours.scan_started()
    ours.scan_ended(200)
    assert (200, False) == (ours.used_bytes, ours.recount)
    ours.removed_by_others(50)
    assert (150, False) == (ours.used_bytes, ours.recount)


def test_what_others_use_counts_against_the_floor():
    ours = occupancy(500, min_free=10_000)
    assert ours.look(Filesystem(100_000, 10_000)) == Verdict(0, storing=True, why="")
    verdict = ours.look(Filesystem(100_000, 9_000))
    assert (1_200, False) == (verdict.need_bytes, verdict.storing)
    # Between floor and mark it goes on, and stores go on too.
    verdict = ours.look(Filesystem(100_000, 10_100))
    assert (100, True) == (verdict.need_bytes, verdict.storing)
    assert ours.look(Filesystem(100_000, 10_200)).need_bytes == 0


def test_without_a_setting_a_fiftieth_is_left_free():
    ours = occupancy(500, capacity=0, min_free=0)
    assert ours.look(Filesystem(100_000, 2_000)).storing
    assert not ours.look(Filesystem(100_000, 1_999)).storing


def test_at_capacity_nothing_is_stored():
    assert not occupancy(1000).look(ROOMY).storing
    assert occupancy(999).look(ROOMY).storing


def test_a_device_that_is_full_for_another_reason_gives_a_little():
    ours = occupancy(500)
    ours.said_full()
    assert ours.look(ROOMY).need_bytes == 200
    ours.changed(-150)
    assert ours.look(ROOMY).need_bytes == 50
    ours.changed(-50)
    assert ours.look(ROOMY).need_bytes == 0


def test_pressure_ends_when_nothing_more_can_go():
    ours = occupancy(500)
    ours.said_full()
    assert ours.look(ROOMY).need_bytes == 200
    ours.relieved()
    assert ours.look(ROOMY).need_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 100)), max_size=80), st.integers(0, 3000))
def test_the_oldest_that_hold_enough_are_kept_and_no_more(keys, want):
    aged = [Aged(used, size, 0, number.to_bytes(4, "big")) for number, (used, size) in enumerate(keys)]
    shuffled = list(aged)
    random.Random(1).shuffle(shuffled)
    oldest = OldestKeys(want)
    for key in shuffled:
        oldest.offer(key)
    kept = oldest.in_order()
    assert sorted(kept) == kept
    held = sum(key.stored_bytes for key in kept)
    assert held >= min(want, sum(key.stored_bytes for key in aged))
    left = set(aged) - set(kept)
    assert not kept or all(key.used_s >= kept[-1].used_s for key in left)
    newest = max(kept, key=lambda key: key.used_s, default=None)
    assert newest is None or held - max(k.stored_bytes for k in kept if k.used_s == newest.used_s) < want
