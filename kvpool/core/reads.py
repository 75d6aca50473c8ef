"""
What is remembered of reads: how far each has come, and the reads of one slot size.

Theory. A read belongs to an object, not to whoever wants it:

    QUEUED ──OpenFile──► OPENING ──opened──► OPENED ──ReadFile──► READING ──► resident, all answered
       └──────────── last waiter gone: forgotten, an open file is given back ───────────┘ (not READING)

Only while OPENING or READING is it with the kernel and cannot be taken back; it may be without
waiters then, and whoever wants the object meanwhile joins it. A read belongs to the loads
(`loads.py`) or, while it has no waiter but a demand, to the preloads (`preloads.py`).
"""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from kvpool.core.clients import Waiter
from kvpool.core.drive import Operation
from kvpool.core.fair_queue import FairQueue
from kvpool.core.object_events import ObjectId
from kvpool.core.slots import Slot, SlotPool

if TYPE_CHECKING:
    from kvpool.core.demands import Demand


class Phase(enum.Enum):
    """How far a read has come."""

    QUEUED = "queued"
    OPENING = "opening"
    OPENED = "opened"
    READING = "reading"


@dataclass(slots=True, eq=False, kw_only=True)
class Read(Operation):
    """
    One read of one object's file.

    Attributes:
        owner: The client whose turn it takes.
        waiters: Who is answered when it ends; may be empty while OPENING or READING.
        slot: Where to; set while READING.
        demand: The demand of admissions that it serves, if any.
        preload: It is counted among the preloads' reads.
    """

    object: ObjectId
    pool: SlotPool
    owner: int
    waiters: dict[Waiter, None] = field(default_factory=dict)
    phase: Phase = Phase.QUEUED
    slot: Slot | None = None
    demand: Union["Demand", None] = None
    preload: bool = False


@dataclass(slots=True, eq=False)
class Lane:
    """
    The reads of one slot size.

    Attributes:
        queued: Not opened yet, in turns by client.
        opened: Open, waiting for a slot and depth, oldest first.
        opening: Opens in flight.
        due_ns: When loads that wait for a slot lose their patience; 0 while none waits.
        impatient: They have lost it, and take an admission's slots.
    """

    pool: SlotPool
    queued: FairQueue[Read] = field(default_factory=FairQueue)
    opened: dict[Read, None] = field(default_factory=dict)
    opening: int = 0
    due_ns: int = 0
    impatient: bool = False

    @property
    def places(self) -> int:
        """Places of the look-ahead that it holds."""
        return self.opening + len(self.opened)

    def end_wait(self) -> None:
        """A load got a slot, or none waits."""
        self.due_ns = 0
        self.impatient = False
