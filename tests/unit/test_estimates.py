"""Trackers follow what changed, and nothing else; prices follow the trackers."""

import math
import random

import pytest

from kvpool.core.curves import Curve, Curves
from kvpool.core.estimates import STEPS_ENOUGH, DeviceEstimate, PrefillMeter, RatioTracker
from kvpool.core.measured import Measured, backlog_seconds
from kvpool.core.planner import Ask, Kind, Load, Planner
from kvpool.core.profiles import Profile

SECOND = 1_000_000_000


def followed_s(tracker: RatioTracker, before: float, after: float, *, noise: float = 0.0, seed: int = 1) -> int:
    """Return after how many seconds of one sample each a step is followed to within 10 %."""
    chance = random.Random(seed)
    for second in range(60):
        tracker.observe(before * math.exp(chance.gauss(0, noise)), now_ns=second * SECOND)
    for second in range(60, 120):
        tracker.observe(after * math.exp(chance.gauss(0, noise)), now_ns=second * SECOND)
        if abs(tracker.value / after - 1) < 0.1:
            return second - 59
    return 60


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_half_the_speed_is_followed_within_thirty_seconds(noise: float, seed: int) -> None:
    assert 30 >= followed_s(RatioTracker(), 1.0, 2.0, noise=noise, seed=seed)


def test_one_stalled_read_moves_little() -> None:
    tracker = RatioTracker()
    for second in range(30):
        tracker.observe(1.0, now_ns=second * SECOND)
    tracker.observe(100.0, now_ns=30 * SECOND)
    assert 1.06 > tracker.value


def test_a_burst_is_not_a_hundred_votes() -> None:
    tracker = RatioTracker()
    for second in range(30):
        tracker.observe(1.0, now_ns=second * SECOND)
    for sample in range(10):
        tracker.observe(1.2, now_ns=30 * SECOND + sample)
    assert 1.08 > tracker.value


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_ratio_is_passed_over(ratio: float) -> None:
    tracker = RatioTracker()
    tracker.observe(ratio, now_ns=1)
    assert (0, 1.0) == (tracker.samples, tracker.value)


def test_bandwidth_and_latency_are_told_apart() -> None:
    device = DeviceEstimate()
    for second in range(20):
        device.observe(4096, 0.002 + 4096 / 2e9, now_ns=second * SECOND)
        device.observe(1_000_000_000, 0.002 + 0.5, now_ns=second * SECOND + SECOND // 2)
    assert math.isclose(2e9, device.bytes_per_s, rel_tol=0.05)
    assert math.isclose(0.002, device.latency_s, rel_tol=0.2)


def test_a_prefill_curve_is_made_of_the_steps_of_an_engine() -> None:
    meter = PrefillMeter()
    assert meter.maybe_curve() is None
    for step in range(STEPS_ENOUGH):
        meter.observe(0, 16, 0.01, now_ns=step * SECOND)
        meter.observe(step * 2048, (step + 1) * 2048, 0.01 + 2048 * 1e-4, now_ns=step * SECOND)
    curve = meter.maybe_curve()
    assert curve is not None
    assert math.isclose(0.01 + 0.8192, curve.at(8192), rel_tol=0.02)
    assert math.isclose(0.01, curve.floor, rel_tol=0.01)


CURVES = Curves(Curve(0.0, [(100_000, 10.0)]), Curve(0.0, [(100_000, 5.0)]), Curve(0.0, [(100_000, 1.0)]))


def test_with_curves_there_are_prices_at_once_and_they_follow_the_drive() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1, curves=CURVES)
    prices = measured.maybe_prices()
    assert prices is not None
    assert math.isclose(0.0128, prices.read(0, 1), rel_tol=1e-6)  # 2 GB/s
    for second in range(30):
        measured.device_told(0, 1e9, now_ns=second * SECOND)
    measured.maybe_prices()
    assert math.isclose(0.0256, prices.read(0, 1), rel_tol=0.1)


def test_with_curves_prefill_follows_the_engine() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1, curves=CURVES)
    for second in range(30):
        measured.step_ended(0, 1000, 0.15, now_ns=second * SECOND)
    prices = measured.maybe_prices()
    assert prices is not None
    assert math.isclose(1.5, prices.prefill(0, 10_000), rel_tol=0.05)


def test_without_curves_there_are_no_prices_until_enough_was_seen() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=2)
    for second in range(STEPS_ENOUGH):
        assert measured.maybe_prices() is None
        measured.step_ended(0, 2048, 0.2048, now_ns=second * SECOND)
    assert measured.maybe_prices() is None
    for second in range(2):
        measured.device_told(0, 1e9, now_ns=second * SECOND)
    prices = measured.maybe_prices()
    assert prices is not None
    assert math.isclose(1.024, prices.prefill(0, 10_240), rel_tol=0.02)
    assert math.isclose(0.256, prices.read(0, 10), rel_tol=0.05)


def test_prices_stay_the_same_tables_while_nothing_moves() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1)
    for second in range(STEPS_ENOUGH):
        measured.step_ended(0, 2048, 0.2048, now_ns=second * SECOND)
        measured.device_told(0, 1e9, now_ns=second * SECOND)
    first = measured.maybe_prices()
    measured.device_told(0, 1.001e9, now_ns=60 * SECOND)
    assert first is measured.maybe_prices()


def test_a_drive_that_slows_down_turns_an_admitted_length_into_a_declined_one() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1, curves=CURVES)

    def verdict() -> Kind:
        prices = measured.maybe_prices()
        assert prices is not None
        ask = Ask("a", Profile(10_240, 0, [0] * 39, chunk_tokens=256))
        return Planner().decide(ask, Load(0.0, [0.0]), prices, behind=0, now_ns=0).kind

    assert Kind.ADMIT is verdict()
    for second in range(30):
        measured.device_told(0, 0.8e9, now_ns=second * SECOND)
    assert Kind.DECLINE is verdict()


def test_a_backlog_takes_its_bytes_at_the_measured_speed() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=1.0, device_count=2)
    measured.device_told(0, 1e9, now_ns=0)
    assert [2.0, 0.0] == pytest.approx(backlog_seconds({0: 2_000_000_000, 1: 5}, measured, 2))
