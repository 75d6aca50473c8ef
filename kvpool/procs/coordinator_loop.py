"""
The coordinator's one wait: descriptors, timers, calls from threads and signals in one epoll.

Theory. Every callback runs on the loop's thread, one after the other, and none may block. With no
timer set the loop sleeps without time-out. A *turn* is one return of epoll with all its callbacks;
`at_turn_end` callbacks run once after it, for what is worth doing once for many messages.

Covers: waiting. Does not cover: what is waited for. A descriptor that a callback forgets is not
called any more in the same turn, also when epoll had already reported it; and one that is watched
in a turn is called from the next one on, since its number may have been another's in this one.
"""

import contextlib
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

from kvpool.errors import invariant

Callback = Callable[[], None]
FdCallback = Callable[[int], None]


class Loop:
    """See the module. Made and run on the main thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, FdCallback] = {}
        self._watched_now: set[int] = set()
        self._timers: dict[str, tuple[int, Callback]] = {}
        self._soon: deque[Callback] = deque()
        self._turn_end: list[Callback] = []
        self._exit_code: int | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wake_fd, self._woken)
        self._signal_out, self._signal_in = socket.socketpair()
        self._signal_out.setblocking(False)
        self._signal_in.setblocking(False)

    # ---------------------------------------------------------------- descriptors

    def watch(self, fd: int, callback: FdCallback, events: int = select.EPOLLIN) -> None:
        """Call *callback(events)* whenever *fd* has one of *events*, or hangs up."""
        invariant(fd not in self._callbacks, "a descriptor is watched once", fd=fd)
        self._epoll.register(fd, events)
        self._callbacks[fd] = callback
        self._watched_now.add(fd)

    def change(self, fd: int, events: int) -> None:
        """Watch *fd* for other events."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching *fd*; call it before closing the descriptor. Unknown ones are fine."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    # ---------------------------------------------------------------- time

    def set_timer(self, name: str, when_ns: int | None, callback: Callback) -> None:
        """Call *callback* once at *when_ns* (monotonic); replaces the timer of that name. None: no timer."""
        if when_ns is None:
            self._timers.pop(name, None)
        else:
            self._timers[name] = (when_ns, callback)

    def cancel_timer(self, name: str) -> None:
        """Forget a timer; unknown ones are fine."""
        self._timers.pop(name, None)

    # ---------------------------------------------------------------- calls

    def soon(self, callback: Callback) -> None:
        """Call *callback* in this loop, not from inside the caller. May be called from any thread."""
        self._soon.append(callback)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_fd, 1)

    def at_turn_end(self, callback: Callback) -> None:
        """Call *callback* at the end of every turn."""
        self._turn_end.append(callback)

    def on_signals(self, signals: list[signal.Signals], callback: Callable[[int], None]) -> None:
        """Call *callback(signal number)* in the loop, once for each signal that arrives."""

        def arrived(_events: int) -> None:
            for number in self._signal_out.recv(64):
                callback(number)

        self.watch(self._signal_out.fileno(), arrived)
        signal.set_wakeup_fd(self._signal_in.fileno(), warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, _only_wake)

    # ---------------------------------------------------------------- running

    def run(self) -> int:
        """Run until `stop`; return its exit code."""
        while self._exit_code is None:
            reported = self._epoll.poll(self._timeout_s())
            self._watched_now.clear()
            for fd, events in reported:
                callback = self._callbacks.get(fd)
                if callback is not None and fd not in self._watched_now:
                    callback(events)
            self._run_due_timers()
            self._run_soon()
            for at_end in self._turn_end:
                at_end()
        return self._exit_code

    def stop(self, exit_code: int) -> None:
        """End `run` after this turn; the first call wins."""
        if self._exit_code is None:
            self._exit_code = exit_code

    def close(self) -> None:
        """Give everything back."""
        with contextlib.suppress(ValueError):  # not the main thread's wake-up descriptor any more
            signal.set_wakeup_fd(-1)
        self._signal_in.close()
        self._signal_out.close()
        self._epoll.close()
        os.close(self._wake_fd)

    def _timeout_s(self) -> float | None:
        if self._soon:
            return 0.0
        if not self._timers:
            return None
        first_ns = min(when_ns for when_ns, _ in self._timers.values())
        # Rounded up: a wake-up before the time would only turn the loop once more.
        return max(0, first_ns - time.monotonic_ns() + 999_999) / 1e9

    def _run_due_timers(self) -> None:
        now_ns = time.monotonic_ns()
        due = [name for name, (when_ns, _) in self._timers.items() if when_ns <= now_ns]
        for name in due:
            found = self._timers.pop(name, None)
            if found is not None:
                found[1]()

    def _run_soon(self) -> None:
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def _woken(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """A signal's work is done in the loop, never in its handler."""
