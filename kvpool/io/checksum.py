"""
Checksums of payloads, in a few threads.

xxh3_64 of the xxhash library, part of the on-disk format. The library frees the interpreter lock on large buffers,
so a thread costs the loop nothing but its hand-over; small payloads are done where they are asked for.
"""

import contextlib
import os
import threading
from collections import deque
from queue import SimpleQueue

import xxhash

#: Up to here (some 10 us) a hand-over to a thread costs more than the checksum.
INLINE_BYTES_MAX = 128 * 1024


def payload_checksum(payload: memoryview | bytes) -> int:
    """Return the checksum of *payload* as the trailer holds it."""
    return xxhash.xxh3_64_intdigest(payload)


class ChecksumPool:
    """
    Computes checksums behind the loop's back.

    Attributes:
        fd: Polls readable when something is to be reaped.
        in_flight: Checksums asked for and not yet reaped.
    """

    def __init__(self, *, threads: int) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.in_flight = 0
        self._wanted: SimpleQueue[tuple[int, memoryview] | None] = SimpleQueue()
        self._ended: deque[tuple[int, int]] = deque()
        self._threads = [
            threading.Thread(target=self._serve, name=f"checksum-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def checksum(self, token: int, payload: memoryview) -> None:
        """Ask for the checksum of *payload*, which must not change until it is reaped under *token*."""
        self.in_flight += 1
        self._wanted.put((token, payload))

    def reap(self) -> list[tuple[int, int]]:
        """Return (token, checksum) of all that is done."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)  # first: a thread adds its result before it counts it here
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        self.in_flight -= len(ended)
        return ended

    def _serve(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            token, payload = wanted
            self._ended.append((token, payload_checksum(payload)))
            del payload, wanted
            os.eventfd_write(self.fd, 1)

    def close(self) -> None:
        """End the threads after what they were asked for."""
        for _ in self._threads:
            self._wanted.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self.fd)
