"""
What is remembered of stores: each engine's offers, and the one decision per key for all its ranks.

Theory. All ranks of an engine offer the same keys under the same store number, each in its own job
and at its own time. The first rank's ask creates the decision (a StoreKey), the others find it:

    WAITING ──► FILLING ──all ranks filled──► WRITING ──► ENDED   kept
       │           └──cancelled, left, late──► DROPPED            not stored
       ├──► EXISTS    stored, resident, or being stored by somebody else
       └──► DROPPED   no slots for all ranks; then everything after it in the offer, too

A decision is remembered until every rank has asked; an offer until its deadline, when ranks that
still have not asked will not any more.
"""

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.core.clients import StoreJob, Waiter
from kvpool.core.key_index import Namespace
from kvpool.core.object_events import Dropped, ObjectId
from kvpool.core.slots import Slot, SlotPool
from kvpool.errors import invariant


class Decision(enum.Enum):
    """What was decided for one key of an offer."""

    WAITING = "waiting"
    FILLING = "filling"
    WRITING = "writing"
    EXISTS = "exists"
    DROPPED = "dropped"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Ask:
    """A rank's ask for a key: index *index* of *job*."""

    job: StoreJob
    index: int


class OfferId(NamedTuple):
    """What is the same on all ranks of one offer."""

    engine: str
    namespace: int
    store: int


@dataclass(slots=True, eq=False)
class StoreKey:
    """
    One key of one offer.

    Attributes:
        asks: By rank. A rank in it was, or will be, answered once.
        told: Mask of the ranks that were given their slot.
        filled: Mask of the ranks whose bytes are whole.
        slots: One per rank, from FILLING on.
        engines: Who hears how it ends: the offer's engine, and those told "exists" meanwhile.
        waiters: Loads that wait for the fill to end.
        due_ns: Deadline of the decision, then of the fill; 0 afterwards.
        unwritten: Objects whose PublishObject has not ended.
        failed: Some object could not be written.
    """

    offer: "Offer"
    key: bytes
    pool: SlotPool
    decision: Decision = Decision.WAITING
    asks: dict[int, Ask] = field(default_factory=dict)
    told: int = 0
    filled: int = 0
    slots: list[Slot] = field(default_factory=list)
    engines: dict[str, None] = field(default_factory=dict)
    waiters: dict[Waiter, None] = field(default_factory=dict)
    due_ns: int = 0
    unwritten: int = 0
    failed: bool = False

    @property
    def space(self) -> Namespace:
        """The namespace of the key."""
        return self.offer.space

    def object_of(self, rank: int) -> ObjectId:
        """The object of that rank."""
        return ObjectId(self.space.namespace, self.key, rank)


@dataclass(slots=True, eq=False)
class Offer:
    """
    What one engine offers under one store number.

    Attributes:
        keys: Decisions that are remembered.
        undecided: Those that still wait, in prefix order.
        cut: Why no later key gets slots: what the next one is dropped for; None while they may.
        filling: How many of its keys are FILLING.
        due_ns: When the offer is forgotten.
    """

    id: OfferId
    space: Namespace
    keys: dict[bytes, StoreKey] = field(default_factory=dict)
    undecided: deque[StoreKey] = field(default_factory=deque)
    cut: Dropped | None = None
    filling: int = 0
    due_ns: int = 0

    def validate(self) -> None:
        """Check that the decisions agree with the slots and the asks."""
        filling = 0
        for key, store_key in self.keys.items():
            invariant(store_key.key == key, "decision under another key", key=key.hex())
            invariant(store_key.filled & ~store_key.told == 0, "filled without being told", key=key.hex())
            if store_key.decision is Decision.FILLING:
                invariant(len(store_key.slots) == self.space.rank_count, "not a slot for each rank", key=key.hex())
                invariant(store_key.filled != self.space.full, "filled but not complete", key=key.hex())
                filling += 1
        invariant(self.filling == filling, "offer miscounts what is filling", offer=self.id, filling=filling)
