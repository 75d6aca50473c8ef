"""
When a pool's I/O workers are started again, and when not.

Theory. A child that ends is one of two things. A *boot failure* says with its exit code that the
configuration or the machine does not allow it (`Exit.CONFIG`, `Exit.HOST`): starting it again
changes nothing, so it stays down and health says why. Anything else is a *crash*: it is started
again after a back-off that doubles from `BACKOFF_S_MIN` to `BACKOFF_S_MAX` with every crash in a
row, and starts from the beginning once a run was ready for `STABLE_S`. A pool that drains starts
nothing.

Covers: the decision. Does not cover: processes, signals, the clock (times come in).
"""

from dataclasses import dataclass, replace

from kvpool.errors import Exit

BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 30.0
STABLE_S = 60.0
#: A child that has not said WorkerReady by then is taken for stuck and killed.
BOOT_S_MAX = 60.0

_S = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """
    One device's I/O worker, as supervision sees it.

    Attributes:
        device: The device's index.
        running: A process exists.
        ready_since_ns: Since when it is ready; None while it boots or is down.
        started_ns: Start of the current or last process; None before the first.
        ended_ns: End of the last process; None while running or before the first.
        crashes_in_row: Ends since the last stable run.
        restarts: Starts after the first, in all.
        failed: It ended with a boot failure: the exit code. None otherwise.
    """

    device: int
    running: bool = False
    ready_since_ns: int | None = None
    started_ns: int | None = None
    ended_ns: int | None = None
    crashes_in_row: int = 0
    restarts: int = 0
    failed: Exit | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Start that device's worker now."""

    device: int


@dataclass(frozen=True, slots=True)
class Kill:
    """That device's worker did not become ready in time: kill it."""

    device: int


def plan(children: list[Child], now_ns: int) -> tuple[list[Start | Kill], int | None]:
    """
    Return what to do now, and when to ask again (None: not before something happens).

    Args:
        children: One per device.
        now_ns: Monotonic clock.
    """
    actions: list[Start | Kill] = []
    wake_ns: list[int] = []
    for child in children:
        if child.failed is not None:
            continue
        due_ns = _due_ns(child)
        if due_ns is None:
            continue
        if due_ns > now_ns:
            wake_ns.append(due_ns)
        else:
            actions.append(Kill(child.device) if child.running else Start(child.device))
    return actions, min(wake_ns, default=None)


def _due_ns(child: Child) -> int | None:
    if child.running:
        if child.ready_since_ns is not None or child.started_ns is None:
            return None
        return child.started_ns + int(BOOT_S_MAX * _S)
    if child.ended_ns is None:
        return 0
    return child.ended_ns + int(backoff_s(child.crashes_in_row) * _S)


def backoff_s(crashes_in_row: int) -> float:
    """Return how long to wait, in seconds, after that many crashes in a row."""
    if crashes_in_row <= 0:
        return 0.0
    return min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2.0 ** min(crashes_in_row - 1, 30))


def started(child: Child, now_ns: int) -> Child:
    """Return *child* after its process was started."""
    again = child.started_ns is not None
    return replace(
        child,
        running=True,
        ready_since_ns=None,
        started_ns=now_ns,
        ended_ns=None,
        restarts=child.restarts + again,
    )


def ready(child: Child, now_ns: int) -> Child:
    """Return *child* after it said WorkerReady."""
    return replace(child, ready_since_ns=now_ns)


def ended(child: Child, exit_code: int, now_ns: int) -> Child:
    """
    Return *child* after its process ended.

    Args:
        exit_code: As the system tells it; negative for a signal.
    """
    stable = child.ready_since_ns is not None and now_ns - child.ready_since_ns >= int(STABLE_S * _S)
    boot_failure = child.ready_since_ns is None and exit_code in (Exit.CONFIG, Exit.HOST)
    return replace(
        child,
        running=False,
        ready_since_ns=None,
        ended_ns=now_ns,
        crashes_in_row=1 if stable else child.crashes_in_row + 1,
        failed=Exit(exit_code) if boot_failure else None,
    )
