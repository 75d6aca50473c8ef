"""
One-shot timer behind a descriptor, for epoll: its own time-outs are whole milliseconds, too coarse beside copies.

Covers: timerfd (Python has it from 3.13 on). Does not cover: what is due when.
"""

import contextlib
import ctypes
import os

from kvpool.errors import HostError

_CLOCK_MONOTONIC = 1
_SECOND_NS = 1_000_000_000


class _Itimerspec(ctypes.Structure):
    """`struct itimerspec`: interval, then time to the first expiry, each in seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Timer:
    """A timer that makes its descriptor readable once."""

    def __init__(self) -> None:
        """Make a timer that is not armed; HostError where no descriptor is free."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise HostError("cannot make a timer", reason=os.strerror(ctypes.get_errno()))

    def fileno(self) -> int:
        """Return the descriptor, for epoll."""
        return self._fd

    def arm(self, delay_ns: int | None) -> None:
        """Expire *delay_ns* from now (at once if that is past), instead of whatever was armed; None: never."""
        delay_ns = 0 if delay_ns is None else max(1, delay_ns)
        spec = _Itimerspec(0, 0, delay_ns // _SECOND_NS, delay_ns % _SECOND_NS)
        if self._libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None) != 0:
            raise HostError("cannot set a timer", reason=os.strerror(ctypes.get_errno()))

    def clear(self) -> None:
        """Make the descriptor unreadable again after an expiry."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
