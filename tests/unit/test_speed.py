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
