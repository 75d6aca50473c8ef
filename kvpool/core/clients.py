"""
The ranks attached to this worker: their jobs, what they hold, and how much they may hold.

Theory. A client's number names one attachment of one rank; a rank that comes back is another
client. What a client asked for is found through its jobs, so that a message from a misbehaving peer
can reach only what is its own. A client *uses* a slot from the moment that somebody works on filling
it for this client, or grants it to this client, until the client's pin or fill ends; while several
engines share a slot size, a client that uses its share of the slots waits (its waiters are parked,
its stores stay undecided), so a stopped rank cannot take the pool.

A departed client keeps a record while slots wait for the proof that its copies have ended.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from kvpool.core.key_index import Namespace
from kvpool.core.object_events import ObjectId
from kvpool.core.slots import Slot, SlotPool
from kvpool.errors import invariant

if TYPE_CHECKING:
    from kvpool.core.reads import Read
    from kvpool.core.store_offers import StoreKey


@dataclass(slots=True, eq=False)
class Waiter:
    """
    One index of a load job that has no answer yet.

    Attributes:
        place: What it waits for; None while it is parked because its client is at its cap.
        counted: It counts as a slot that its client uses.
        due_ns: Its deadline; 0 once it is answered or taken back.
    """

    job: "LoadJob"
    index: int
    object: ObjectId
    pool: SlotPool
    place: Union["Read", "StoreKey", None] = None
    counted: bool = False
    due_ns: int = 0


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load job: indices below *end* were asked for; each is waiting, pinned, or over."""

    client: "Client"
    job: int
    end: int = 0
    waiting: dict[int, Waiter] = field(default_factory=dict)
    pinned: dict[int, Slot] = field(default_factory=dict)

    def maybe_forget(self) -> None:
        """Forget the job when nothing of it waits or is pinned."""
        if not self.waiting and not self.pinned:
            self.client.loads.pop(self.job, None)


@dataclass(slots=True, eq=False)
class StoreJob:
    """A store job: each index is waiting for its answer, granted and not yet filled, or over."""

    client: "Client"
    job: int
    end: int = 0
    waiting: dict[int, "StoreKey"] = field(default_factory=dict)
    granted: dict[int, "StoreKey"] = field(default_factory=dict)

    def maybe_forget(self) -> None:
        """Forget the job when nothing of it waits or is granted."""
        if not self.waiting and not self.granted:
            self.client.stores.pop(self.job, None)


@dataclass(slots=True, eq=False)
class Client:
    """
    One attached, or departed and not yet proven, rank.

    Attributes:
        share: Share of the slots of one size that it may use while another engine uses that size.
        used: Slots it uses, per size.
        parked: Waiters that wait for *used* to fall, per size, oldest first.
        ghosts: After it left: the slots that its copies may still touch, once per use.
    """

    client: int
    engine: str
    space: Namespace
    rank: int
    share: float
    loads: dict[int, LoadJob] = field(default_factory=dict)
    stores: dict[int, StoreJob] = field(default_factory=dict)
    used: dict[SlotPool, int] = field(default_factory=dict)
    parked: dict[SlotPool, OrderedDict[Waiter, None]] = field(default_factory=dict)
    ghosts: list[Slot] = field(default_factory=list)
    left: bool = False

    def capped(self, pool: SlotPool) -> bool:
        """Return whether it may use no further slot of that size now."""
        return len(pool.engines) > 1 and self.used.get(pool, 0) >= max(1, int(self.share * pool.total))

    def begin_use(self, pool: SlotPool) -> None:
        """One more slot of that size is used for it."""
        self.used[pool] = self.used.get(pool, 0) + 1

    def end_use(self, pool: SlotPool) -> None:
        """One slot of that size less is used for it."""
        self.used[pool] -= 1

    def park(self, waiter: Waiter) -> None:
        """Let *waiter* wait until the client uses less."""
        waiter.place = None
        self.parked.setdefault(waiter.pool, OrderedDict())[waiter] = None

    def validate(self) -> None:
        """Check that the count of used slots agrees with the jobs, and jobs with slots."""
        counted: dict[SlotPool, int] = {}
        for job in self.loads.values():
            invariant(bool(job.waiting or job.pinned), "an empty load job is remembered", job=job.job)
            for index, waiter in job.waiting.items():
                counted[waiter.pool] = counted.get(waiter.pool, 0) + waiter.counted
                invariant(waiter.index == index, "waiter under another index", index=index)
                invariant(waiter.due_ns > 0, "an answered waiter still waits", job=job.job, index=index)
                if waiter.place is None:
                    invariant(waiter in self.parked[waiter.pool], "a waiter waits nowhere", job=job.job, index=index)
                else:
                    invariant(waiter in waiter.place.waiters, "a waiter is not where it waits", index=index)
            for slot in job.pinned.values():
                counted[slot.pool] = counted.get(slot.pool, 0) + 1
        for store_job in self.stores.values():
            busy = bool(store_job.waiting or store_job.granted)
            invariant(busy, "an empty store job is remembered", job=store_job.job)
            for store_key in store_job.granted.values():
                counted[store_key.pool] = counted.get(store_key.pool, 0) + 1
        for pool in {*counted, *self.used}:
            invariant(
                self.used.get(pool, 0) == counted.get(pool, 0), "client miscounts its slots",
                client=self.client, used=self.used.get(pool, 0), counted=counted.get(pool, 0),
            )  # fmt: skip
