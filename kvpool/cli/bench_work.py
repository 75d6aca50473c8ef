"""
The work that `kvpool bench` gives a pool: objects, their keys, their bytes. Pure, but for numpy.

Theory. Objects are alike but for their marks: one random pattern fills every slot once, before the clock
starts, and every object carries 17 words of its own, spread over its length from its first word to its last, written
when its slot is granted and compared when it is Ready. So a slot that was not read, holds another object, or
only a part of one is seen at once, and the client touches 136 bytes of an object, not its payload.
Afterwards a sample of the objects is compared as a whole.

Does not cover: sending the work to a pool (`bench_rank`), timing it.
"""

import hashlib
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from kvpool.wire.messages import GroupSpec, NamespaceSpec

MARKS = 17
SLOT_ALIGN = 4096
Words = npt.NDArray[np.uint64]


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    What one round stores and loads.

    Attributes:
        seed: Other rounds have other keys and other bytes.
        object_bytes: Payload of an object; a multiple of 8, at least 8 * MARKS.
        object_count: Objects in all.
        devices: Devices of the pool; objects go round them.
        batch: Objects of one job.
    """

    seed: int
    object_bytes: int
    object_count: int
    devices: int
    batch: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the payload rounded up, and the trailer."""
        return -(-self.object_bytes // SLOT_ALIGN) * SLOT_ALIGN + SLOT_ALIGN

    @property
    def total_bytes(self) -> int:
        """Payload bytes of all objects."""
        return self.object_bytes * self.object_count

    def key(self, index: int) -> bytes:
        """Return the key of object *index*: 32 bytes of hash and the number of the KV group, as vLLM's keys."""
        return hashlib.sha256(f"kvpool bench {self.seed} {index}".encode()).digest() + (0).to_bytes(4, "big")

    def device(self, index: int) -> int:
        """Return the index of the device that holds object *index*."""
        return index % self.devices

    def batches(self) -> Iterator[range]:
        """Cut the objects into jobs."""
        for first in range(0, self.object_count, self.batch):
            yield range(first, min(first + self.batch, self.object_count))

    def namespace(self) -> NamespaceSpec:
        """Return the namespace that the objects belong to."""
        identity = {"model": "kvpool-bench", "object_bytes": str(self.object_bytes)}
        return NamespaceSpec(
            fingerprint=hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest(),
            model_name="kvpool-bench",
            block_size=16,
            blocks_per_file=16,
            tp=1,
            pp=1,
            pcp=1,
            dtype="bytes",
            rank_count=1,
            groups=[GroupSpec(group=0, object_bytes=self.object_bytes)],
            identity=identity,
        )


class Content:
    """The bytes of the objects of one `Work`: pattern and marks."""

    def __init__(self, work: Work) -> None:
        self.words = work.object_bytes // 8
        generator = np.random.Generator(np.random.SFC64(work.seed))
        self.pattern: Words = generator.integers(0, 2**64, self.words, dtype=np.uint64)
        #: Word positions of the marks, from the first word to the last.
        self.positions = np.linspace(0, self.words - 1, MARKS).astype(np.int64)
        first = np.array(
            [int.from_bytes(work.key(index)[:8], "little") for index in range(work.object_count)], dtype=np.uint64
        )
        step = np.arange(MARKS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        #: The marks of every object, shape (object_count, MARKS).
        self.marks: Words = first[:, None] + step[None, :]

    def mark(self, payload: Words, index: int) -> None:
        """Make a payload that holds the pattern that of object *index*."""
        payload[self.positions] = self.marks[index]

    def marked(self, payload: Words, index: int) -> bool:
        """Tell whether *payload* carries the marks of object *index*."""
        return bool((payload[self.positions] == self.marks[index]).all())

    def equal(self, payload: Words, index: int) -> bool:
        """Tell whether *payload* is object *index*, every word of it."""
        expected = self.pattern.copy()
        self.mark(expected, index)
        return bool(np.array_equal(payload, expected))
