"""Claims of kvpool.core.speed."""

import pytest

from kvpool.core.speed import WINDOW_BYTES, SpeedMeter

MS = 1_000_000


def run(meter: SpeedMeter, *, seconds: float, speed: float, start_ns: int = 0, piece: int = 4 << 20) -> int:
    now_ns = start_ns
    for _ in range(int(seconds * speed / piece)):
        meter.began(now_ns=now_ns)
        now_ns += int(piece / speed * 1e9)
        meter.ended(piece, now_ns=now_ns)
    return now_ns


def test_speed_is_unknown_until_a_window_closed() -> None:
    meter = SpeedMeter()
    meter.began(now_ns=0)
    meter.ended(4096, now_ns=MS)

    assert 0.0 == meter.bytes_per_s


def test_idle_time_does_not_count() -> None:
    meter = SpeedMeter()
    end_ns = run(meter, seconds=1, speed=1e9)
    run(meter, seconds=1, speed=1e9, start_ns=end_ns + 3600 * 10**9)

    assert meter.bytes_per_s == pytest.approx(1e9, rel=0.01)


def test_parallel_transfers_share_the_time() -> None:
    meter = SpeedMeter()
    for _ in range(16):
        meter.began(now_ns=0)
    for _ in range(16):
        meter.ended(WINDOW_BYTES // 16, now_ns=32 * MS)

    assert meter.bytes_per_s == pytest.approx(WINDOW_BYTES / 0.032, rel=0.01)


def test_half_the_speed_shows_within_seconds() -> None:
    meter = SpeedMeter()
    end_ns = run(meter, seconds=3, speed=2e9)
    run(meter, seconds=3, speed=1e9, start_ns=end_ns)

    assert meter.bytes_per_s == pytest.approx(1e9, rel=0.1)


def load(
    meter: SpeedMeter,
    reads: int,
    *,
    depth: int,
    latency_s: float,
    speed: float,
    start_ns: int = 0,
    piece: int = 4 << 20,
) -> int:
    """Read so many pieces at that depth, of a device that brings one after the other; return when they are there."""
    waiting, last_ns = reads, start_ns
    flying: list[int] = []
    while waiting or flying:
        while waiting and len(flying) < depth:
            waiting -= 1
            meter.began(now_ns=last_ns, queued=waiting > 0)
            free_ns = max([last_ns + int(latency_s * 1e9), *flying])
            flying.append(free_ns + int(piece / speed * 1e9))
        last_ns = flying.pop(0)
        meter.ended(piece, now_ns=last_ns, queued=waiting > 0)
    return last_ns


def test_loads_without_a_queue_say_nothing_of_its_speed() -> None:
    meter = SpeedMeter()
    now_ns = 0
    for _ in range(100):
        now_ns = load(meter, 1, depth=1, latency_s=0.01, speed=4e9, start_ns=now_ns + MS)
    assert (4 << 20) / (0.01 + (4 << 20) / 4e9) == pytest.approx(meter.bytes_per_s, rel=0.01)
    assert (0.0, 0.0) == (meter.queued_bytes_per_s, meter.latency_s)


def test_a_queue_tells_the_speed_and_a_read_without_company_then_the_latency() -> None:
    meter = SpeedMeter()
    now_ns = 0
    for _ in range(50):
        now_ns = load(meter, 1, depth=1, latency_s=0.01, speed=4e9, start_ns=now_ns + MS)
    load(meter, 500, depth=16, latency_s=0.01, speed=4e9, start_ns=now_ns)
    assert 4e9 == pytest.approx(meter.queued_bytes_per_s, rel=0.06)
    assert 0.01 == pytest.approx(meter.latency_s, rel=0.02)


def test_short_loads_after_a_long_one_leave_its_speed_as_it_was() -> None:
    meter = SpeedMeter()
    now_ns = load(meter, 500, depth=16, latency_s=0.01, speed=4e9)
    before = meter.queued_bytes_per_s
    for _ in range(200):
        now_ns = load(meter, 1, depth=1, latency_s=0.01, speed=4e9, start_ns=now_ns + MS)
    assert before == meter.queued_bytes_per_s
    assert 1e9 > meter.bytes_per_s


def test_what_is_in_flight_when_the_queue_ends_still_counts() -> None:
    meter = SpeedMeter()
    for _ in range(16):
        meter.began(now_ns=0, queued=True)
    meter.ended(WINDOW_BYTES // 16, now_ns=32 * MS, queued=True)
    meter.began(now_ns=32 * MS)
    for _ in range(15):
        meter.ended(WINDOW_BYTES // 16, now_ns=32 * MS)
    assert WINDOW_BYTES / 0.032 == pytest.approx(meter.queued_bytes_per_s)
    before = meter.queued_bytes_per_s
    meter.ended(WINDOW_BYTES, now_ns=1000 * MS)  # alone since then
    assert before == meter.queued_bytes_per_s


def test_one_read_that_stalled_is_not_the_latency() -> None:
    meter = SpeedMeter()
    now_ns = load(meter, 500, depth=16, latency_s=0.001, speed=4e9)
    for number in range(15):
        latency_s = 1.0 if number == 14 else 0.002
        now_ns = load(meter, 1, depth=1, latency_s=latency_s, speed=4e9, start_ns=now_ns + MS)
    assert 0.002 == pytest.approx(meter.latency_s, rel=0.1)


def test_a_read_that_failed_tells_no_latency() -> None:
    meter = SpeedMeter()
    now_ns = load(meter, 500, depth=16, latency_s=0.001, speed=4e9)
    meter.began(now_ns=now_ns)
    meter.ended(0, now_ns=now_ns + 1000 * MS)
    assert 0.0 == meter.latency_s
