"""What estimates never do, whatever was seen."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.curves import Curve, Curves
from kvpool.core.estimates import FADE_S
from kvpool.core.measured import Measured
from kvpool.core.speed import SpeedMeter

SECOND = 1_000_000_000
CURVES = Curves(Curve(0.0, [(100_000, 10.0)]), Curve(0.0, [(100_000, 5.0)]), Curve(0.0, [(100_000, 1.0)]))

#: Reads that begin and end: nanoseconds later, bytes that came (-1: one begins), whether more waits.
happenings = st.lists(st.tuples(st.integers(0, 10**9), st.integers(-1, 1 << 28), st.booleans()), max_size=200)
seconds = st.floats(1e-4, 1e3, allow_nan=False)


@given(happenings)
def test_without_a_queue_there_is_no_speed_of_one_and_no_latency_is_negative(
    events: list[tuple[int, int, bool]],
) -> None:
    meter, now_ns, in_flight, queued_ever = SpeedMeter(), 0, 0, False
    for passed_ns, size, queued in events:
        now_ns += passed_ns
        if size < 0 or not in_flight:
            in_flight += 1
            queued_ever |= queued
            meter.began(now_ns=now_ns, queued=queued)
        else:
            in_flight -= 1
            queued_ever |= queued and in_flight > 0
            meter.ended(size, now_ns=now_ns, queued=queued)
        assert meter.latency_s >= 0
        assert queued_ever or meter.queued_bytes_per_s == 0


@given(st.lists(st.tuples(seconds, seconds), max_size=30), st.lists(st.floats(1e6, 1e11), max_size=30))
def test_whatever_was_seen_is_forgotten_and_prices_stay_positive(
    loads: list[tuple[float, float]], speeds: list[float]
) -> None:
    measured = Measured(chunk_tokens=256, kv_bytes_per_token=100_000.0, device_count=1, curves=CURVES)
    now_ns = 0
    for predicted_s, took_s in loads:
        now_ns += SECOND
        scale = measured.load_scale(now_ns=now_ns)
        measured.load_ended(predicted_s, took_s, scale=scale, now_ns=now_ns)
    for speed in speeds:
        now_ns += SECOND
        measured.device_told(0, speed, now_ns=now_ns)
    prices = measured.maybe_prices(now_ns=now_ns)
    assert prices is not None
    assert 0 < prices.read(0, 1) < math.inf
    measured.maybe_prices(now_ns=now_ns + int(FADE_S * SECOND))
    assert math.isclose(0.0128, prices.read(0, 1), rel_tol=0.04)
