"""Trackers follow what changed, and nothing else; prices follow the trackers."""

import math
import random

import pytest

from kvpool.core.curves import Curve, Curves
from kvpool.core.estimates import FADE_S, HEARD_S, STEPS_ENOUGH, FadingScale, PrefillMeter, RatioTracker
from kvpool.core.measured import LOAD_TELLS_S, Measured
from kvpool.core.planner import Ask, Kind, Load, Planner
from kvpool.core.profiles import Profile

SECOND = 1_000_000_000
#: After everything that was told, long before it is forgotten.
NOW = 30 * SECOND


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
    prices = measured.maybe_prices(now_ns=NOW)
    assert prices is not None
    assert math.isclose(0.0128, prices.read(0, 1), rel_tol=1e-6)  # 2 GB/s
    for second in range(30):
        measured.device_told(0, 1e9, now_ns=second * SECOND)
    measured.maybe_prices(now_ns=NOW)
    assert math.isclose(0.0256, prices.read(0, 1), rel_tol=0.1)


def test_with_curves_prefill_follows_the_engine() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1, curves=CURVES)
    for second in range(30):
        measured.step_ended(0, 1000, 0.15, now_ns=second * SECOND)
    prices = measured.maybe_prices(now_ns=NOW)
    assert prices is not None
    assert math.isclose(1.5, prices.prefill(0, 10_000), rel_tol=0.05)


def test_without_curves_there_are_no_prices_until_enough_was_seen() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=2)
    for second in range(STEPS_ENOUGH):
        assert measured.maybe_prices(now_ns=NOW) is None
        measured.step_ended(0, 2048, 0.2048, now_ns=second * SECOND)
    assert measured.maybe_prices(now_ns=NOW) is None
    for second in range(2):
        measured.device_told(0, 1e9, now_ns=second * SECOND)
    prices = measured.maybe_prices(now_ns=NOW)
    assert prices is not None
    assert math.isclose(1.024, prices.prefill(0, 10_240), rel_tol=0.02)
    assert math.isclose(0.256, prices.read(0, 10), rel_tol=0.05)


def test_prices_stay_the_same_tables_while_nothing_moves() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1)
    for second in range(STEPS_ENOUGH):
        measured.step_ended(0, 2048, 0.2048, now_ns=second * SECOND)
        measured.device_told(0, 1e9, now_ns=second * SECOND)
    first = measured.maybe_prices(now_ns=NOW)
    measured.device_told(0, 1.001e9, now_ns=60 * SECOND)
    assert first is measured.maybe_prices(now_ns=NOW)


def test_a_drive_that_slows_down_turns_an_admitted_length_into_a_declined_one() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1, curves=CURVES)

    def verdict() -> Kind:
        prices = measured.maybe_prices(now_ns=NOW)
        assert prices is not None
        ask = Ask("a", Profile(10_240, 0, [0] * 39, chunk_tokens=256))
        return Planner().decide(ask, Load(0.0, [0.0]), prices, behind=0, now_ns=0).kind

    assert Kind.ADMIT is verdict()
    for second in range(30):
        measured.device_told(0, 0.8e9, now_ns=second * SECOND)
    assert Kind.DECLINE is verdict()


def slowed(measured: Measured, *, before: float = 2e9, after: float = 1e9, since: int = 0) -> int:
    """Tell of a drive that was fast and is slow now; return when that was."""
    for second in range(since, since + 60):
        measured.device_told(0, (before if second < since + 30 else after) + second, now_ns=second * SECOND)
    return (since + 59) * SECOND


def with_curves() -> Measured:
    return Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1, curves=CURVES)


def read_s(measured: Measured, now_ns: int) -> float:
    """Return the price of one chunk: 12.8 ms by the curve."""
    prices = measured.maybe_prices(now_ns=now_ns)
    assert prices is not None
    return prices.read(0, 1)


def test_the_first_speed_told_is_the_curves_where_that_is_less() -> None:
    measured = with_curves()
    measured.device_told(0, 5e9, now_ns=0)
    assert 0.0128 == pytest.approx(read_s(measured, 0))
    now_ns = slowed(measured, before=5e9, after=2.5e9, since=1)
    assert 0.0256 == pytest.approx(read_s(measured, now_ns), rel=0.05)


def test_a_drive_that_is_half_as_fast_shows_within_thirty_seconds_and_so_does_one_that_recovers() -> None:
    measured = with_curves()
    now_ns = slowed(measured)
    assert 0.0256 == pytest.approx(read_s(measured, now_ns), rel=0.05)
    for second in range(60, 90):
        measured.device_told(0, 2e9 + second, now_ns=second * SECOND)
    assert 0.0128 == pytest.approx(read_s(measured, 90 * SECOND), rel=0.05)


def test_a_slow_drive_of_which_nothing_more_is_heard_is_given_another_chance() -> None:
    measured = with_curves()
    now_ns = slowed(measured)
    half = now_ns + int((HEARD_S + FADE_S) / 2 * SECOND)
    assert 0.0128 * 2**0.5 == pytest.approx(read_s(measured, half), rel=0.05)
    assert 0.0128 == pytest.approx(read_s(measured, now_ns + int(FADE_S * SECOND)), rel=0.03)


def test_a_speed_told_again_and_again_is_no_news() -> None:
    measured = with_curves()
    for second in range(int(HEARD_S + FADE_S) + 1):
        measured.device_told(0, 1e9, now_ns=second * SECOND)
        if second == int(HEARD_S):
            assert 0.0256 == pytest.approx(read_s(measured, second * SECOND), rel=0.1)
    assert 0.0128 == pytest.approx(read_s(measured, int(HEARD_S + FADE_S) * SECOND), rel=0.03)


def test_without_curves_a_load_takes_a_latency_and_its_bytes_at_the_speed_of_a_queue() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1)
    for second in range(STEPS_ENOUGH):
        measured.step_ended(0, 2048, 0.2048, now_ns=second * SECOND)
        measured.device_told(0, 1e9, 0.003, now_ns=second * SECOND)
    prices = measured.maybe_prices(now_ns=NOW)
    assert prices is not None
    assert 0.003 + 0.0256 == pytest.approx(prices.read(0, 1))
    assert 0.003 + 2.56 == pytest.approx(prices.read(0, 100))


def test_without_curves_what_was_long_not_heard_of_is_not_known() -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1)
    for second in range(STEPS_ENOUGH):
        measured.step_ended(0, 2048, 0.2048, now_ns=second * SECOND)
        measured.device_told(0, 1e9, now_ns=second * SECOND)
    before = measured.maybe_prices(now_ns=NOW)
    assert before is not None
    assert None is measured.maybe_prices(now_ns=NOW + int(FADE_S * SECOND))
    measured.device_told(0, 2e9, now_ns=2 * NOW + int(FADE_S * SECOND))
    again = measured.maybe_prices(now_ns=2 * NOW + int(FADE_S * SECOND))
    assert again is not None
    assert again.version > before.version


def test_whole_loads_correct_what_they_were_predicted_to_take() -> None:
    measured = with_curves()
    for second in range(20):
        scale = measured.load_scale(now_ns=second * SECOND)
        measured.load_ended(1.0 * scale, 2.0, scale=scale, now_ns=second * SECOND)
    assert 2.0 == pytest.approx(measured.load_scale(now_ns=20 * SECOND), rel=0.1)
    assert 0.0256 == pytest.approx(read_s(measured, 20 * SECOND), rel=0.1)
    assert 1.0 == pytest.approx(measured.load_scale(now_ns=20 * SECOND + int(FADE_S * SECOND)))


def test_one_load_that_stalled_is_not_believed_not_even_the_first() -> None:
    measured = with_curves()
    measured.load_ended(0.1, 30.0, scale=1.0, now_ns=NOW)
    assert 1.2 > measured.load_scale(now_ns=NOW)


def test_what_a_short_load_takes_beside_its_bytes_does_not_make_long_ones_longer() -> None:
    measured = with_curves()
    for second in range(20):
        measured.load_ended(LOAD_TELLS_S / 50, LOAD_TELLS_S / 2, scale=1.0, now_ns=second * SECOND)
    assert 1.0 == measured.load_scale(now_ns=20 * SECOND)
    for second in range(20, 40):
        measured.load_ended(LOAD_TELLS_S / 50, LOAD_TELLS_S * 4, scale=1.0, now_ns=second * SECOND)
    assert 4.0 == pytest.approx(measured.load_scale(now_ns=40 * SECOND), rel=0.1)


def test_a_scale_that_faded_goes_on_from_where_it_is() -> None:
    scale = FadingScale()
    for second in range(20):
        scale.observe(4.0, now_ns=second * SECOND)
    late_ns = 20 * SECOND + int(FADE_S * SECOND)
    scale.observe(1.0, now_ns=late_ns)
    assert 1.0 == pytest.approx(scale.value(now_ns=late_ns), rel=0.05)


def test_a_device_never_heard_of_reads_at_the_curves_speed() -> None:
    assert 2e9 == pytest.approx(with_curves().bytes_per_s(0))
    assert 0.0 == Measured(chunk_tokens=256, kv_bytes_per_token=1.0, device_count=1).bytes_per_s(0)
