"""
How fast a device is right now, from its own completions.

Theory. A window opens when a transfer is under way and closes after `WINDOW_BYTES` or `WINDOW_NS` of busy time
(time in which at least one transfer was in flight); its speed is bytes over busy time. Windows are averaged
exponentially, so that a drive that slows down shows within seconds and one odd window does not. Idle time does not
count: an idle drive keeps the last speed known.

Does not cover: latency, prediction of waits.
"""

WINDOW_BYTES = 64 << 20
WINDOW_NS = 250_000_000
WEIGHT = 0.3


class SpeedMeter:
    """
    Bytes per second of one direction of one device.

    Attributes:
        bytes_per_s: Average over recent windows; 0.0 until the first window closed.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._in_flight = 0
        self._busy_since_ns = 0
        self._window_ns = 0
        self._window_bytes = 0

    def began(self, *, now_ns: int) -> None:
        """One transfer was started."""
        if self._in_flight == 0:
            self._busy_since_ns = now_ns
        self._in_flight += 1

    def ended(self, transfer_bytes: int, *, now_ns: int) -> None:
        """One transfer ended; *transfer_bytes* is 0 when it failed."""
        self._in_flight -= 1
        self._window_ns += now_ns - self._busy_since_ns
        self._busy_since_ns = now_ns
        self._window_bytes += transfer_bytes
        if self._window_bytes >= WINDOW_BYTES or self._window_ns >= WINDOW_NS:
            self._close_window()

    def _close_window(self) -> None:
        if self._window_bytes and self._window_ns:
            speed = self._window_bytes * 1e9 / self._window_ns
            self.bytes_per_s += (speed - self.bytes_per_s) * (WEIGHT if self.bytes_per_s else 1.0)
        self._window_bytes = self._window_ns = 0
