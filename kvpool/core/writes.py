"""
Publishing: filled objects go to disk behind the store, as far as the drive's depth allows.

Theory. The objects of a key are written one by one and stay in staging until all ranks' objects
are published, so that the key is a hit all the time: resident first, stored and resident, then
stored. A failed write makes the key a miss again; its bytes serve the loads that have them pinned.
"No space" is a state of the device, not of one object: new stores are dropped until a back-off has
passed, while what was filled is still tried and loads go on.
"""

from collections import deque
from dataclasses import dataclass

from kvpool.core.drive import Drive, Operation
from kvpool.core.key_index import KeyIndex
from kvpool.core.object_events import Action, PublishObject
from kvpool.core.residency import Residency
from kvpool.core.slots import Slot
from kvpool.core.store_offers import Decision, StoreKey
from kvpool.errors import Code, invariant


@dataclass(slots=True, eq=False, kw_only=True)
class Write(Operation):
    """The PublishObject of one rank's object."""

    store_key: StoreKey
    rank: int
    slot: Slot


class Writes:
    """All writes of one device."""

    def __init__(
        self, *, full_backoff_ns: int, index: KeyIndex, residency: Residency, drive: Drive, actions: list[Action],
        counts: dict[str, int],
    ) -> None:  # fmt: skip
        self.full_backoff_ns = full_backoff_ns
        self.index = index
        self.residency = residency
        self.drive = drive
        self.actions = actions
        self.counts = counts
        self.queue: deque[Write] = deque()
        self.full_until_ns = 0

    def add(self, store_key: StoreKey) -> None:
        """Write all ranks' objects of a filled key."""
        store_key.unwritten = len(store_key.slots)
        for rank, slot in enumerate(store_key.slots):
            self.queue.append(Write(store_key=store_key, rank=rank, slot=slot))
        self.drive.writes_queued = len(self.queue)

    def pump(self, now_ns: int) -> None:
        """Start what may start now."""
        while self.queue and self.drive.may_write():
            write = self.queue.popleft()
            self.drive.writes += 1
            op = self.drive.begin(write, now_ns)
            object_id = write.store_key.object_of(write.rank)
            self.actions.append(PublishObject(op=op, object=object_id, slot=write.slot.ref))
        self.drive.writes_queued = len(self.queue)

    def published(self, op: int, error: Code | None, now_ns: int) -> None:
        """A PublishObject ended."""
        write = self.drive.find(op, Write)
        store_key = write.store_key
        self.drive.writes -= 1
        self.drive.end(write)
        if error is None:
            self.counts["writes"] += 1
            self.counts["write_bytes"] += write.slot.pool.slot_bytes
            self.index.add(store_key.object_of(write.rank), self.actions)
        else:
            self.counts["write_errors"] += 1
            store_key.failed = True
            if error is Code.DEVICE_FULL:
                self.counts["writes_no_space"] += 1
                self.full_until_ns = now_ns + self.full_backoff_ns
        store_key.unwritten -= 1
        if store_key.unwritten == 0:
            self._end(store_key)

    def _end(self, store_key: StoreKey) -> None:
        store_key.decision = Decision.ENDED
        self.counts["keys_lost" if store_key.failed else "keys_stored"] += 1
        for slot in store_key.slots:
            self.residency.release_hold(slot, lost=store_key.failed)
        store_key.slots.clear()

    def validate(self) -> None:
        """Check that the drive's counts and the slots agree."""
        running = [write for write in self.drive.ops.values() if isinstance(write, Write)]
        invariant(len(running) == self.drive.writes, "drive miscounts writes", writes=self.drive.writes)
        for write in (*running, *self.queue):
            invariant(write.slot.held, "a slot is written that may go", slot=write.slot.ref)
            object_id = write.store_key.object_of(write.rank)
            invariant(write.slot.object == object_id, "another object is written", slot=write.slot.ref)
