"""
Checksums of payloads, in a few threads.

xxh3_64 of the xxhash library, part of the on-disk format. The library frees the interpreter lock on large buffers,
so a thread costs the loop nothing but its hand-over; small payloads are done where they are asked for.
"""

import xxhash

from kvpool.io.thread_calls import ThreadCalls

#: Up to here (some 10 us) a hand-over to a thread costs more than the checksum.
INLINE_BYTES_MAX = 128 * 1024


def payload_checksum(payload: memoryview | bytes) -> int:
    """Return the checksum of *payload* as the trailer holds it."""
    return xxhash.xxh3_64_intdigest(payload)


class ChecksumPool(ThreadCalls):
    """Computes checksums behind the loop's back; results are checksums."""

    def __init__(self, *, threads: int) -> None:
        super().__init__(threads=threads, name="checksum")

    def checksum(self, token: int, payload: memoryview) -> None:
        """Ask for the checksum of *payload*, which must not change until it is reaped under *token*."""
        self.want(token, payload_checksum, payload)
