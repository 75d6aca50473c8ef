"""
A device's breaker: when the device is given up for now, and when it is tried again.

Theory. Each direction (reading, writing) has a level of trouble: a failure that is the device's adds one, an
operation that does what it was asked takes one away. A device that fails more often than it works therefore reaches
`failures`, a drive with a bad sector does not. An operation past its deadline counts as a failure, and if nothing
at all has ended well since a whole deadline, the device stalls and is given up at once.

    closed ──trouble or stall──► open ──back-off──► probing ──probe did well──► closed
                                  ▲                    │
                                  └── probe failed ────┘   (the back-off doubles, up to RETRY_GROWTH_MAX times)

A probe that does not end leaves the breaker probing: the device is still given up, and no second probe is made. A
device that opens again soon after it closed has not recovered: the back-off goes on from where it was.

Does not cover: what a probe is (`io/engine.py`), what is refused meanwhile (`core/objects.py`).
"""

import enum
from dataclasses import dataclass, field

from kvpool.errors import invariant

#: The back-off grows to this many times its first value.
RETRY_GROWTH_MAX = 64


class State(enum.Enum):
    """What may be asked of the device now."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Direction(enum.Enum):
    """Reading and writing fail apart from one another."""

    READ = "read"
    WRITE = "write"


@dataclass(slots=True, kw_only=True)
class Breaker:
    """
    The breaker of one device.

    Attributes:
        failures: Level of trouble at which it opens.
        retry_ns: The first back-off.
        stall_ns: Nothing ended well for so long, and an operation is late: a stall.
        opened: Times it opened.
        probes_failed: Probes that did not do well.
        since_ns: When it entered its state.
        why: What opened it last, in words.
    """

    failures: int
    retry_ns: int
    stall_ns: int
    state: State = State.CLOSED
    opened: int = 0
    probes_failed: int = 0
    since_ns: int = 0
    why: str = ""
    _levels: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))
    _well_ns: int = 0
    _backoff_ns: int = 0
    _due_ns: int = 0

    @property
    def healthy(self) -> bool:
        """Whether the device is used."""
        return self.state is State.CLOSED

    def answered(self, now_ns: int) -> None:
        """The device said something that is neither success nor trouble: no such file, no space, wrong bytes."""
        self._well_ns = now_ns

    def did_well(self, direction: Direction, now_ns: int) -> None:
        """An operation did what it was asked."""
        self._well_ns = now_ns
        self._levels[direction] = max(0, self._levels[direction] - 1)

    def failed(self, direction: Direction, what: str, now_ns: int) -> bool:
        """An operation failed by the device's fault; return whether that opened the breaker."""
        if self.state is not State.CLOSED:
            return False
        self._levels[direction] += 1
        if self._levels[direction] < self.failures:
            return False
        self._open(f"{self._levels[direction]} {direction.value}s failed, the last with {what}", now_ns)
        return True

    def late(self, direction: Direction, now_ns: int) -> bool:
        """An operation is past its deadline; return whether that opened the breaker."""
        if self.state is State.CLOSED and now_ns - self._well_ns >= self.stall_ns:
            self._open(f"a {direction.value} is late and nothing has ended in {self.stall_ns / 1e9:g} s", now_ns)
            return True
        return self.failed(direction, "lateness", now_ns)

    def probe_due_ns(self) -> int | None:
        """Return when the device is to be tried; None while it is not to be."""
        return self._due_ns if self.state is State.OPEN else None

    def probe_started(self, now_ns: int) -> None:
        """The device is being tried."""
        invariant(self.state is State.OPEN, "only an open breaker probes", state=self.state.value)
        self.state, self.since_ns = State.PROBING, now_ns

    def probe_ended(self, *, well: bool, now_ns: int) -> None:
        """The trial ended: use the device again, or wait twice as long."""
        invariant(self.state is State.PROBING, "a probe ended that was not started", state=self.state.value)
        self.since_ns = now_ns
        if well:
            self.state = State.CLOSED
            self._levels = dict.fromkeys(Direction, 0)
            self._well_ns = now_ns
        else:
            self.state = State.OPEN
            self.probes_failed += 1
            self._wait_longer(now_ns)

    def _open(self, why: str, now_ns: int) -> None:
        recovered = self.opened == 0 or now_ns - self.since_ns >= self.retry_ns * RETRY_GROWTH_MAX
        self.state, self.since_ns, self.why = State.OPEN, now_ns, why
        self.opened += 1
        if recovered:
            self._backoff_ns = 0
        self._wait_longer(now_ns)

    def _wait_longer(self, now_ns: int) -> None:
        longest_ns = self.retry_ns * RETRY_GROWTH_MAX
        self._backoff_ns = min(longest_ns, 2 * self._backoff_ns) if self._backoff_ns else self.retry_ns
        self._due_ns = now_ns + self._backoff_ns
