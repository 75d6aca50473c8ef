"""
Calls in a few threads, each under a token, with results that a loop collects.

Theory. Threads take calls from one queue; what is called frees the interpreter lock while it works. An eventfd polls
readable when something is to be reaped. Made, asked and reaped by one thread.
"""

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_Call = tuple[int, Callable[..., Any], tuple[Any, ...]]


class ThreadCalls:
    """
    See the module.

    Attributes:
        fd: Polls readable when something is to be reaped.
        in_flight: Calls wanted and not yet reaped.
    """

    def __init__(self, *, threads: int, name: str) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.in_flight = 0
        self._wanted: SimpleQueue[_Call | None] = SimpleQueue()
        self._ended: deque[tuple[int, int]] = deque()
        self._threads = [threading.Thread(target=self._serve, name=f"{name}-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def want(self, token: int, call: Callable[..., Any], *arguments: Any) -> None:
        """Have *call* called. Its result is the int it returns, 0 for anything else, or minus the errno of OSError."""
        self.in_flight += 1
        self._wanted.put((token, call, arguments))

    def reap(self) -> list[tuple[int, int]]:
        """Return (token, result) of every call that has ended."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)  # first: a thread adds its result before it counts it here
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        self.in_flight -= len(ended)
        return ended

    def close(self) -> None:
        """End the threads after what they were asked for."""
        for _ in self._threads:
            self._wanted.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self.fd)

    def _serve(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            token, call, arguments = wanted
            try:
                result = call(*arguments)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            del wanted, arguments  # memory that is waited for must not be held by an idle thread
            self._ended.append((token, result if isinstance(result, int) else 0))
            os.eventfd_write(self.fd, 1)
