"""
How fast a device is right now, from its own completions.

Theory. A window opens when a transfer is under way and closes after `WINDOW_BYTES` or `WINDOW_NS` of busy time
(time in which at least one transfer was in flight); its speed is bytes over busy time. Windows are averaged
exponentially, so that a drive that slows down shows within seconds and one odd window does not. Idle time does not
count: an idle drive keeps the last speed known.

That speed says what the device did, not what it can: one object in flight at a time tells its latency. So time with a
queue (more waits than is in flight, or as much is in flight as may be) has windows of its own. Such a stretch lasts
until what was in flight at the queue's end has ended too: devices that serve all at once end those together. And a
transfer that was alone from beginning to end tells the latency: its time without that of its bytes at queued speed.

Does not cover: prediction of waits (`measured.py`).
"""

from collections import deque

WINDOW_BYTES = 64 << 20
WINDOW_NS = 250_000_000
WEIGHT = 0.3
#: Transfers without company whose median is the latency.
ALONE_COUNT = 15


class _Windows:
    """Speed over some part of the busy time; 0.0 until the first window closed."""

    __slots__ = ("bytes", "bytes_per_s", "ns")

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.bytes = self.ns = 0

    def add(self, transfer_bytes: int, passed_ns: int) -> None:
        self.bytes += transfer_bytes
        self.ns += passed_ns
        if self.bytes < WINDOW_BYTES and self.ns < WINDOW_NS:
            return
        if self.bytes and self.ns:
            speed = self.bytes * 1e9 / self.ns
            self.bytes_per_s += (speed - self.bytes_per_s) * (WEIGHT if self.bytes_per_s else 1.0)
        self.bytes = self.ns = 0


class SpeedMeter:
    """Bytes per second of one direction of one device."""

    def __init__(self) -> None:
        self._all = _Windows()
        self._queued = _Windows()
        self._alone: deque[tuple[int, int]] = deque(maxlen=ALONE_COUNT)
        self._alone_since_ns = -1
        self._in_flight = 0
        self._seen_ns = 0
        #: Transfers of a queued stretch that have not ended; 0: this is none.
        self._draining = 0

    @property
    def bytes_per_s(self) -> float:
        """Average over recent windows; 0.0 until the first window closed."""
        return self._all.bytes_per_s

    @property
    def queued_bytes_per_s(self) -> float:
        """The same of time with a queue."""
        return self._queued.bytes_per_s

    @property
    def latency_s(self) -> float:
        """What a transfer takes beside its bytes' time at queued speed; 0.0 while either is unknown."""
        speed = self.queued_bytes_per_s
        if not speed or not self._alone:
            return 0.0
        beside_s = sorted(ns / 1e9 - size / speed for ns, size in self._alone)
        return max(0.0, beside_s[len(beside_s) // 2])

    def began(self, *, now_ns: int, queued: bool = False) -> None:
        """One transfer was started; *queued*: behind it more waits than is in flight, or no more may be in flight."""
        self._pass(0, now_ns)
        self._alone_since_ns = -1 if self._in_flight else now_ns
        self._in_flight += 1
        if queued:
            self._draining = self._in_flight

    def ended(self, transfer_bytes: int, *, now_ns: int, queued: bool = False) -> None:
        """One transfer ended; *transfer_bytes* is 0 when it failed, *queued* is of before its place is taken."""
        self._pass(transfer_bytes, now_ns)
        if self._alone_since_ns >= 0 and transfer_bytes:
            self._alone.append((now_ns - self._alone_since_ns, transfer_bytes))
        self._alone_since_ns = -1
        self._in_flight -= 1
        self._draining = self._in_flight if queued else max(0, self._draining - 1)

    def _pass(self, transfer_bytes: int, now_ns: int) -> None:
        """Count the time since the last event, and what came at its end."""
        passed_ns = now_ns - self._seen_ns if self._in_flight else 0
        self._seen_ns = now_ns
        self._all.add(transfer_bytes, passed_ns)
        if self._draining:
            self._queued.add(transfer_bytes, passed_ns)
