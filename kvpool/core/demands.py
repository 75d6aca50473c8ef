"""
What is remembered of preloads: admissions, and the objects they want in staging.

Theory. The coordinator asks for slots for all ranks' objects of a request's keys: an *admission*. What is
wanted belongs to the object, not to the admission: a *demand*, shared by all admissions that name the object.

    RESERVED ──ReadFile──► COMING ──► LANDED        resident, and protected until the last admission goes
        │                    ▲  │
        │   being stored ────┘  └──► given up       its file is missing, corrupt or cannot be read
        └──────────────────────────► given up

A reserved demand has one of the pool's free slots for itself (`SlotPool.reserved`), whichever it will be.
An admission is there with all its demands, or not at all. `preloads.py` moves them on.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvpool.core.object_events import ObjectId
from kvpool.core.slots import Slot, SlotPool

if TYPE_CHECKING:
    from kvpool.core.reads import Read


class Place(NamedTuple):
    """Where an admission stands in the scheduler's order: ascending; the last is the first to lose its slots."""

    priority: int
    arrival: int
    admission: int


@dataclass(slots=True, eq=False)
class Admission:
    """
    One request's objects.

    Attributes:
        demands: What it wants, in the order of its keys, less what was given up.
        sizes: How many of them there are of each slot size; never 0.
        missing: How many of them have not landed.
        committed: They may be read.
        landed: The coordinator was told that nothing is missing.
        pending: Demands that may have to be read, in order; some may be on their way meanwhile.
        listed: It is among those whose *pending* is looked at.
    """

    place: Place
    demands: dict[ObjectId, "Demand"] = field(default_factory=dict)
    sizes: dict[SlotPool, int] = field(default_factory=dict)
    missing: int = 0
    committed: bool = False
    landed: bool = False
    pending: deque["Demand"] = field(default_factory=deque)
    listed: bool = False

    def add(self, demand: "Demand") -> None:
        """Want that object too."""
        self.demands[demand.object] = demand
        self.sizes[demand.pool] = self.sizes.get(demand.pool, 0) + 1
        self.missing += demand.slot is None
        demand.admissions[self] = None

    def remove(self, demand: "Demand") -> None:
        """Want that object no more."""
        del self.demands[demand.object]
        self.sizes[demand.pool] -= 1
        if not self.sizes[demand.pool]:
            del self.sizes[demand.pool]
        self.missing -= demand.slot is None
        del demand.admissions[self]


@dataclass(slots=True, eq=False)
class Demand:
    """
    One object that admissions want.

    Attributes:
        admissions: Who wants it; never empty.
        reserved: A free slot is reserved for it.
        read: The read that brings it, if there is one.
        slot: Where it has landed.
    """

    object: ObjectId
    pool: SlotPool
    admissions: dict[Admission, None] = field(default_factory=dict)
    reserved: bool = False
    read: "Read | None" = None
    slot: Slot | None = None

    @property
    def committed(self) -> bool:
        """Whether it may be read."""
        return any(admission.committed for admission in self.admissions)
