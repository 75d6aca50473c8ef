"""Budget: the division of staging."""

import pytest

from kvpool.core.budget import (
    QUARANTINE_PATIENCE_S,
    SEGMENT_BYTES_MAX,
    Budget,
    Create,
    DeviceShare,
    Pair,
    Recall,
    cut_slots,
    segment_slots,
    slot_bytes_of,
)
from kvpool.errors import HostError

MIB, GIB = 1 << 20, 1 << 30
OBJECT = 4 * MIB - 4096  # a slot of 4 MiB
SLOT = 4 * MIB


def budget(total: int, *weights: int, iodepth: int = 16) -> Budget:
    return Budget(total, [DeviceShare(weight=weight, iodepth=iodepth) for weight in weights])


def settle(division: Budget, now_ns: int = 0) -> list[Create | Recall]:
    """Run plan until it wants nothing, as a machine with enough memory and obedient peers would."""
    done: list[Create | Recall] = []
    for _ in range(100):
        steps, _ = division.plan(now_ns)
        division.validate()
        if not steps:
            return done
        done += steps
        for step in steps:
            if isinstance(step, Create):
                division.created(step.segment)
            else:
                division.returned(step.segment)
                division.gone(step.segment)
    raise AssertionError("the division does not settle")


def held(division: Budget, slot_bytes: int = SLOT) -> list[int]:
    return [division.held_slots(Pair(device, slot_bytes)) for device in range(len(division.devices))]


def test_a_slot_is_padded_and_has_a_trailer() -> None:
    assert [8192, 8192, 12288] == [slot_bytes_of(size) for size in (1, 4096, 4097)]


def test_equal_devices_share_evenly() -> None:
    division = budget(4 * GIB, 1, 1, 1, 1)
    division.open_namespace(1, 2, [OBJECT])
    settle(division)
    assert [256, 256, 256, 256] == held(division)
    assert 0 == division.free_bytes


def test_weights_share_unevenly() -> None:
    division = budget(4 * GIB, 3, 1)
    division.open_namespace(1, 2, [OBJECT])
    settle(division)
    assert [768, 256] == held(division)


def test_namespaces_share_by_their_weights_the_greatest_of_their_engines() -> None:
    division = budget(4 * GIB, 1)
    division.open_namespace(1, 1, [OBJECT], weight=1)
    division.open_namespace(2, 1, [2 * SLOT - 4096])
    division.open_namespace(1, 1, [OBJECT], weight=3)
    division.open_namespace(1, 1, [OBJECT], weight=2)
    settle(division)
    assert ([768], [128]) == (held(division), held(division, 2 * SLOT))
    division.close_namespace(1)
    division.open_namespace(1, 1, [OBJECT])
    settle(division)
    assert ([512], [256]) == (held(division), held(division, 2 * SLOT))


def test_groups_get_as_many_slots_each() -> None:
    division = budget(3 * GIB, 1)
    division.open_namespace(1, 1, [OBJECT, 2 * OBJECT + 4096])
    settle(division)
    assert (256, 256) == (division.held_slots(Pair(0, SLOT)), division.held_slots(Pair(0, 2 * SLOT)))


def test_two_groups_of_one_size_share_their_slots() -> None:
    division = budget(1 * GIB, 1)
    division.open_namespace(1, 1, [OBJECT, OBJECT])
    settle(division)
    assert [256] == held(division)


def test_a_light_device_still_gets_its_depth() -> None:
    division = budget(1 * GIB, 1000, 1)
    division.open_namespace(1, 2, [OBJECT])
    settle(division)
    assert [236, 20] == held(division)


def test_little_staging_shrinks_depth_but_not_below_the_ranks() -> None:
    division = budget(24 * MIB, 1, 1)
    division.open_namespace(1, 3, [OBJECT])
    settle(division)
    assert [3, 3] == held(division)


def test_staging_below_the_minimum_is_refused_with_the_number_needed() -> None:
    division = budget(24 * MIB, 1, 1)
    with pytest.raises(HostError) as caught:
        division.open_namespace(1, 4, [OBJECT])
    assert (24 * MIB, 32 * MIB) == (caught.value.context["staging_bytes"], caught.value.context["needed_bytes"])


def test_a_namespace_that_does_not_fit_beside_others_is_refused_and_changes_nothing() -> None:
    division = budget(64 * MIB, 1)
    division.open_namespace(1, 8, [OBJECT])
    with pytest.raises(HostError):
        division.open_namespace(2, 8, [2 * OBJECT])
    settle(division)
    assert [16] == held(division)


def test_an_object_larger_than_a_segment_is_refused() -> None:
    with pytest.raises(HostError, match="block_size"):
        budget(8 * GIB, 1).open_namespace(1, 1, [SEGMENT_BYTES_MAX])


def test_a_second_namespace_takes_half_from_the_first_by_recall() -> None:
    division = budget(1 * GIB, 1)
    division.open_namespace(1, 1, [OBJECT])
    settle(division)
    division.open_namespace(2, 1, [8 * MIB - 4096])
    steps = settle(division)
    assert any(isinstance(step, Recall) for step in steps)
    assert (128, 64) == (division.held_slots(Pair(0, SLOT)), division.held_slots(Pair(0, 8 * MIB)))
    assert 0 == division.free_bytes


def test_nothing_is_recalled_while_free_bytes_suffice() -> None:
    division = budget(1 * GIB, 1)
    division.open_namespace(1, 1, [OBJECT])
    settle(division)
    division.open_namespace(2, 1, [OBJECT])
    assert [] == settle(division)


def test_a_recalled_segment_still_counts_until_it_is_gone() -> None:
    division = budget(1 * GIB, 1)
    division.open_namespace(1, 1, [OBJECT])
    settle(division)
    division.open_namespace(2, 1, [8 * MIB - 4096])
    steps, _ = division.plan(0)
    assert {Recall} == {type(step) for step in steps}
    assert 0 == division.free_bytes
    assert ([], None) == division.plan(0)
    first = steps[0].segment
    assert division.returned(first)
    assert 0 == division.free_bytes
    division.gone(first)
    assert 0 < division.free_bytes


def test_a_starving_size_gets_memory_even_if_one_segment_held_it_all() -> None:
    division = budget(20 * MIB, 1)
    division.open_namespace(1, 2, [OBJECT])
    settle(division)
    division.open_namespace(2, 2, [4096])
    settle(division)
    assert division.held_slots(Pair(0, SLOT)) >= 2
    assert division.held_slots(Pair(0, 8192)) >= 2


def test_a_dead_workers_segments_are_not_free_and_come_back_after_proof() -> None:
    division = budget(1 * GIB, 1, 1)
    division.open_namespace(1, 1, [OBJECT])
    settle(division)
    quarantined = division.worker_down(0, 0)
    assert 0 == division.free_bytes
    assert ([], int(QUARANTINE_PATIENCE_S * 10**9)) == division.plan(0)
    assert (quarantined, []) == division.proven(quarantined)
    for segment in quarantined:
        division.created(segment)
    assert [128, 128] == held(division)


def test_a_dead_workers_recalled_segments_wait_for_proof_too() -> None:
    division = budget(1 * GIB, 1)
    division.open_namespace(1, 1, [OBJECT])
    settle(division)
    division.open_namespace(2, 1, [8 * MIB - 4096])
    recalled = [step.segment for step in division.plan(0)[0] if isinstance(step, Recall)]
    assert set(recalled) < set(division.worker_down(0, 0))
    assert not division.returned(recalled[0])


def test_a_quarantine_without_end_leaves_the_successor_others_memory() -> None:
    division = budget(1 * GIB, 1, 1)
    division.open_namespace(1, 1, [OBJECT])
    settle(division)
    quarantined = division.worker_down(0, 0)
    settle(division, now_ns=int(QUARANTINE_PATIENCE_S * 10**9))
    assert [64, 64] == held(division)
    again, close = division.proven(quarantined)
    assert (4, 4) == (len(again), len(close))


def test_a_segment_is_given_back_only_if_it_was_recalled() -> None:
    division = budget(1 * GIB, 1)
    division.open_namespace(1, 1, [OBJECT])
    settle(division)
    assert not division.returned(1)
    assert not division.returned(999)


@pytest.mark.parametrize(
    ("slot_bytes", "target", "expected"),
    [
        (4 * MIB, 4 * GIB, 64 * MIB),  # the usual size
        (4 * MIB, 16 * GIB, 256 * MIB),  # not more than about 64 of them
        (4 * MIB, 256 * GIB, 1 * GIB),  # the kernel's limit for one buffer
        (4 * MIB, 64 * MIB, 16 * MIB),  # several even of little staging
        (32 * MIB, 256 * MIB, 128 * MIB),  # four slots
        (512 * MIB, 4 * GIB, 1 * GIB),  # four slots would be above the limit
    ],
)
def test_segment_sizes(slot_bytes: int, target: int, expected: int) -> None:
    assert expected == segment_slots(slot_bytes, target) * slot_bytes


def test_slots_are_cut_evenly_and_add_up() -> None:
    assert [[], [3], [4, 4], [4, 3], [3, 3, 3]] == [cut_slots(slots, 4) for slots in (0, 3, 8, 7, 9)]


# ---------------------------------------------------------------- loans


def test_staging_moves_to_the_size_that_needs_it_and_back() -> None:
    division = budget(1 * GIB, 1)
    division.open_namespace(1, 1, [OBJECT])
    division.open_namespace(2, 1, [2 * OBJECT])
    settle(division)
    small, large = sorted(division.targets(0))
    before = division.held_slots(small)
    division.lending.used(small, 1 * GIB, 0)
    division.lending.used(large, 0, 0)
    settle(division, 3 * 10**9)
    assert 1.4 * before < division.held_slots(small) <= 1.6 * before
    assert 20 <= division.held_slots(large)
    later_ns = 60 * 10**9
    division.lending.used(small, 0, later_ns)
    division.lending.used(large, 1 * GIB, later_ns)
    settle(division, later_ns)
    assert division.held_slots(small) < before


# ---------------------------------------------------------------- live size


def test_staging_that_grows_gives_every_pair_more() -> None:
    division = budget(1 * GIB, 1, 1)
    division.open_namespace(1, 2, [OBJECT])
    settle(division)
    division.resize(2 * GIB)
    steps = settle(division)
    assert not any(isinstance(step, Recall) for step in steps)
    assert [256, 256] == held(division)


def test_staging_that_shrinks_takes_back_what_is_beyond_it_the_youngest_first() -> None:
    division = budget(2 * GIB, 1, 1)
    division.open_namespace(1, 2, [OBJECT])
    settle(division)
    oldest = min(division.segments)
    division.resize(1 * GIB)
    assert not division.is_settled
    settle(division)
    assert [128, 128] == held(division)
    assert (0, True) == (division.free_bytes, division.is_settled)
    assert oldest in division.segments


def test_staging_shrinks_also_by_less_than_a_segment() -> None:
    division = budget(1 * GIB, 1)
    division.open_namespace(1, 2, [OBJECT])
    settle(division)
    division.resize(1 * GIB - 5 * SLOT)
    settle(division)
    assert [251] == held(division)
    assert 0 <= division.free_bytes


def test_what_is_being_taken_back_is_not_taken_twice() -> None:
    division = budget(2 * GIB, 1)
    division.open_namespace(1, 2, [OBJECT])
    settle(division)
    division.resize(1 * GIB)
    first, _ = division.plan(0)
    assert 1 * GIB == sum(division.segments[step.segment].segment_bytes for step in first)
    assert ([], None) == division.plan(0)


def test_staging_below_what_the_open_namespaces_need_is_refused_with_that_number() -> None:
    division = budget(1 * GIB, 1, 1)
    division.open_namespace(1, 4, [OBJECT])
    with pytest.raises(HostError) as refused:
        division.resize(16 * MIB)
    assert 2 * 4 * SLOT == refused.value.context["needed_bytes"]
    assert 1 * GIB == division.total_bytes
