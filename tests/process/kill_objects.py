"""What the clients of the kill matrix store: objects are numbers, and their bytes depend on the weights' version."""

import random

from kvpool.core.budget import slot_bytes_of
from tests.process.pool_harness import namespace

OBJECT_BYTES = 100_000
SLOT_BYTES = slot_bytes_of(OBJECT_BYTES)
SPEC = namespace(rank_count=1, object_bytes=(OBJECT_BYTES,))


def key_of(number: int) -> bytes:
    """Return a key like vLLM's."""
    return random.Random(number).randbytes(32) + bytes(4)


def payload_of(number: int, version: int) -> bytes:
    """Return what object *number* holds."""
    return random.Random(1_000_000 * (version + 1) + number).randbytes(OBJECT_BYTES)
