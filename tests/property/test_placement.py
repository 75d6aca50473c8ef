"""Placement by properties: every window of a prefix is spread by weight over the healthy devices."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.placement import device_of

_DEVICES = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=8)


@given(
    weights=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    key=st.binary(max_size=8),
    start=st.integers(0, 500),
    count=st.integers(0, 200),
)
def test_every_window_has_each_device_in_its_share(weights: list[int], key: bytes, start: int, count: int) -> None:
    healthy = [True] * len(weights)
    placed = [device_of(weights, healthy, key, position) for position in range(start, start + count)]
    for device, weight in enumerate(weights):
        fair = count * weight / sum(weights)
        assert abs(placed.count(device) - fair) < 2


@given(devices=_DEVICES, key=st.binary(max_size=8), position=st.integers(0, 10_000))
def test_only_healthy_devices_are_chosen(devices: list[tuple[int, bool]], key: bytes, position: int) -> None:
    weights, healthy = [weight for weight, _ in devices], [ok for _, ok in devices]
    device = device_of(weights, healthy, key, position)
    assert (device is None) == (not any(healthy))
    assert device is None or healthy[device]


@given(devices=_DEVICES, key=st.binary(max_size=8), position=st.integers(0, 10_000))
def test_a_lost_device_moves_no_chunk_of_a_healthy_one(
    devices: list[tuple[int, bool]], key: bytes, position: int
) -> None:
    weights, healthy = [weight for weight, _ in devices], [ok for _, ok in devices]
    before = device_of(weights, [True] * len(weights), key, position)
    assert before is not None
    if healthy[before]:
        assert before == device_of(weights, healthy, key, position)


@given(devices=_DEVICES, key=st.binary(max_size=8))
def test_what_a_lost_device_had_goes_to_the_others_in_their_shares(devices: list[tuple[int, bool]], key: bytes) -> None:
    weights, healthy = [weight for weight, _ in devices], [ok for _, ok in devices]
    if not any(healthy):
        return
    before = [device_of(weights, [True] * len(weights), key, position) or 0 for position in range(300)]
    moved = [device_of(weights, healthy, key, position) for position, old in enumerate(before) if not healthy[old]]
    left = sum(weight for weight, ok in devices if ok)
    for device, (weight, ok) in enumerate(devices):
        if ok:
            assert abs(moved.count(device) - len(moved) * weight / left) < 2
