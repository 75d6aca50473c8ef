"""Placement: which device a chunk of a prefix goes to."""

from collections import Counter

from kvpool.core.placement import device_of, smooth_sequence


def test_equal_devices_take_turns() -> None:
    assert (0, 1, 2, 3) == smooth_sequence((1, 1, 1, 1))


def test_a_weight_is_spread_not_clustered() -> None:
    assert (0, 0, 1, 0, 2, 0, 0) == smooth_sequence((5, 1, 1))


def test_weights_are_reduced_by_their_common_divisor() -> None:
    assert smooth_sequence((2, 1)) == smooth_sequence((200, 100))


def test_sixteen_chunks_use_four_drives_evenly() -> None:
    counts = Counter(device_of((1, 1, 1, 1), (True,) * 4, b"first", position) for position in range(16))
    assert {0: 4, 1: 4, 2: 4, 3: 4} == counts


def test_prefixes_start_on_different_drives() -> None:
    starts = Counter(device_of((1, 1, 1, 1), (True,) * 4, b"key %d" % number, 0) for number in range(400))
    assert {0, 1, 2, 3} == set(starts)
    assert min(starts.values()) > 50


def test_a_lost_drive_moves_only_its_own_chunks_and_spreads_them() -> None:
    before = [device_of((1, 1, 1, 1), (True,) * 4, b"first", position) for position in range(120)]
    after = [device_of((1, 1, 1, 1), (True, False, True, True), b"first", position) for position in range(120)]
    moved = [new for old, new in zip(before, after, strict=True) if old == 1]
    assert [old for old in before if old != 1] == [new for old, new in zip(before, after, strict=True) if old != 1]
    assert {0: 10, 2: 10, 3: 10} == Counter(moved)


def test_without_a_healthy_device_there_is_no_place() -> None:
    assert device_of((1, 1), (False, False), b"first", 3) is None
