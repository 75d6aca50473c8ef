"""
Slots of staging memory: the states of one slot, and the pool of all slots of one size.

Theory. A segment of shared memory is cut into slots of one size; a slot holds one object. Who may
touch the bytes of a slot follows from its state alone:

    free         nobody
    filling      one writer: the kernel (a read) or a rank (a store). A slot whose waiters gave up
                 while the writer still runs stays filling: it is draining, never free.
    resident     readers only: `pins` of live clients, `ghosts` of departed ones; or it stays without
                 any: `held` while it is to be written to disk, `admitted` while a waiting request's
                 preload protects it, `cached` while nobody needs the slot
    quarantined  a departed client may still write to it or read from it; nobody else may

A slot leaves "filling" and "quarantined", and loses its last reader, only on proof: the operation's
completion, the rank's own word, or the word that a departed rank's copies have ended. TRANSITIONS is
the whole truth about that; a missing cell is a bug and raises InvariantError.

Of each size, the first `iodepth + FLOOR_SLOTS` slots are not for preloads and cache: the floor. A pool
that has no more slots than that preloads and caches nothing. Cached objects cost no slot that anybody
needs: what is *spare*, to loads and stores alike, is what is free and not reserved, and what is cached.

A segment that is recalled gives no slot any more; when its last slot is free it is returned. Slot
sizes never mix: each size has its pool, so one model's slots cannot starve another's.

Does not cover: which object is where (`residency.py`), who gets a slot (`loads.py`, `stores.py`).
"""

import enum
from dataclasses import dataclass, field

from kvpool.core.cache import CachePolicy, Past
from kvpool.core.object_events import ObjectId, SlotRef
from kvpool.errors import invariant, unreachable

#: Slots of each size beyond iodepth that preloads and cache never get: copied out of while reads fill the others.
FLOOR_SLOTS = 4


class SlotState(enum.Enum):
    """What may happen to the bytes of a slot now."""

    FREE = "free"
    FILLING = "filling"
    RESIDENT = "resident"
    QUARANTINED = "quarantined"

    # Members are singletons: identity is their hash, and ten times faster than Enum's.
    __hash__ = object.__hash__


class SlotStep(enum.Enum):
    """What moves a slot from one state to another."""

    TAKE = "taken for a read or a store"
    FILL = "bytes whole and verified"
    SPOIL = "writer ended, bytes not wanted"
    ABANDON = "last user departed without proof"
    DROP = "last reader gone, not kept"
    PROVE = "departed users proven gone"

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[SlotState, SlotStep], SlotState] = {
    (SlotState.FREE, SlotStep.TAKE): SlotState.FILLING,
    (SlotState.FILLING, SlotStep.FILL): SlotState.RESIDENT,
    (SlotState.FILLING, SlotStep.SPOIL): SlotState.FREE,
    (SlotState.FILLING, SlotStep.ABANDON): SlotState.QUARANTINED,
    (SlotState.RESIDENT, SlotStep.DROP): SlotState.FREE,
    (SlotState.RESIDENT, SlotStep.ABANDON): SlotState.QUARANTINED,
    (SlotState.QUARANTINED, SlotStep.PROVE): SlotState.FREE,
}


def transitions_text() -> str:
    """Return TRANSITIONS as an aligned table, one transition a line, for the documentation."""
    rows = [(old.value, step.value, new.value) for (old, step), new in TRANSITIONS.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{old:<{widths[0]}}  --{step:-<{widths[1]}}-->  {new}" for old, step, new in rows)


def transitions_dot() -> str:
    """Return TRANSITIONS as a Graphviz digraph, for the documentation."""
    edges = [f'  {old.value} -> {new.value} [label="{step.value}"];' for (old, step), new in TRANSITIONS.items()]
    return "\n".join(["digraph slot {", *edges, "}"])


@dataclass(slots=True, eq=False)
class Segment:
    """
    Staging that was granted to this worker.

    Attributes:
        slots: All its slots, by index.
        in_use: Slots of it that are not free.
        recalled: It gives no slot any more and is returned when *in_use* is 0.
    """

    segment: int
    pool: "SlotPool"
    slots: list["Slot"] = field(default_factory=list)
    in_use: int = 0
    recalled: bool = False


@dataclass(slots=True, eq=False)
class Slot:
    """
    One slot.

    Attributes:
        object: What is in it or is being filled into it; None when free.
        pins: Live clients' Ready answers that are not released yet.
        ghosts: Uses by departed clients that are not proven to have ended.
        held: The object stays without any pin: it is still to be published.
        admitted: An admission protects it.
        loose: It is counted in `SlotPool.loose`.
        cached: Only the cache keeps it, and its policy knows it as idle.
        lost: The object could not be published: it is not kept as cache.
        uses: How often the object was stored into, or answered out of, this slot.
        unread: It was read ahead and not asked for since.
        past: What the cache remembered of the object when the slot was taken for it.
        by_store: Taken by a store, counted in `SlotPool.store_held` until the object is published.
    """

    ref: SlotRef
    home: Segment
    state: SlotState = SlotState.FREE
    object: ObjectId | None = None
    pins: int = 0
    ghosts: int = 0
    held: bool = False
    admitted: bool = False
    loose: bool = False
    cached: bool = False
    lost: bool = False
    uses: int = 0
    unread: bool = False
    past: Past = Past.UNKNOWN
    by_store: bool = False

    def step(self, step: SlotStep) -> None:
        """Move on; every change of state of every slot goes through here."""
        new = TRANSITIONS.get((self.state, step))
        if new is None:
            unreachable("no such slot transition", slot=self.ref, state=self.state.value, step=step.value)
        if new is SlotState.RESIDENT:
            self.pool.resident += 1
        elif self.state is SlotState.RESIDENT:
            self.pool.resident -= 1
        self.state = new
        if new is SlotState.FREE:
            invariant(self.pins == 0, "a pinned slot became free", slot=self.ref, pins=self.pins)
            invariant(self.ghosts == 0, "a slot with unproven users became free", slot=self.ref, ghosts=self.ghosts)
            invariant(not self.held, "a held slot became free", slot=self.ref)
            invariant(not self.cached, "a cached slot became free", slot=self.ref)
            invariant(not self.admitted, "an admitted slot became free", slot=self.ref)
            self.object = None
            self.lost = self.unread = False
            self.uses = 0
            self.home.pool.take_back(self)

    @property
    def pool(self) -> "SlotPool":
        """The pool of the slot's size."""
        return self.home.pool

    def pin(self) -> None:
        """One more client copies from it."""
        if not self.pins:
            self.pool.pinned += 1
        self.pins += 1

    def unpin(self) -> None:
        """One client less copies from it."""
        self.pins -= 1
        if not self.pins:
            self.pool.pinned -= 1


@dataclass(slots=True, eq=False)
class SlotPool:
    """
    All slots of one size.

    Attributes:
        slot_bytes: The size.
        iodepth: Sets the reserve for loads and the floor.
        cache: Decides which idle objects stay; None when none does.
        free: Free slots of segments that are not recalled; last freed is first used.
        total: Slots of segments that are not recalled, in any state.
        store_held: Slots with `by_store`, also those of recalled segments.
        reserved: Free slots that admissions have for objects still to be read.
        admitted: Objects of this size that admissions want: reserved, coming or landed.
        loose: Landed ones that nobody else uses, in segments that are not recalled.
        saved: Free slots that loads leave for a store now, so that stores are not starved.
        wanted: Opened reads that wait for a slot of this size.
        resident, pinned: Slots in that state, and of them those with a pin, also those of recalled segments.
        engines: Clients attached per engine that use this size.
        emptied: Recalled segments whose last slot became free, of all sizes; the table returns them.
    """

    slot_bytes: int
    iodepth: int
    emptied: list[Segment]
    cache: CachePolicy[ObjectId] | None = None
    free: list[Slot] = field(default_factory=list)
    segments: dict[int, Segment] = field(default_factory=dict)
    total: int = 0
    store_held: int = 0
    reserved: int = 0
    admitted: int = 0
    loose: int = 0
    saved: int = 0
    wanted: int = 0
    resident: int = 0
    pinned: int = 0
    engines: dict[str, int] = field(default_factory=dict)

    def add_segment(self, segment: int, slot_count: int) -> Segment:
        """Add *slot_count* free slots."""
        home = Segment(segment, self)
        home.slots = [Slot(SlotRef(segment, index), home) for index in range(slot_count)]
        self.segments[segment] = home
        self.total += slot_count
        self.free.extend(reversed(home.slots))
        self._resize_cache()
        return home

    def recall_segment(self, home: Segment) -> None:
        """Give nothing from that segment any more."""
        home.recalled = True
        self.total -= len(home.slots)
        self.free = [slot for slot in self.free if slot.home is not home]
        self._resize_cache()
        if home.in_use == 0:
            self._retire(home)

    def take(self, object_id: ObjectId, *, by_store: bool) -> Slot:
        """Take a free slot; the caller has checked that there is one."""
        invariant(bool(self.free), "no free slot to take", slot_bytes=self.slot_bytes)
        slot = self.free.pop()
        slot.step(SlotStep.TAKE)
        slot.object = object_id
        slot.home.in_use += 1
        if by_store:
            slot.by_store = True
            self.store_held += 1
        return slot

    def take_back(self, slot: Slot) -> None:
        """Called by `Slot.step` only: the slot is free now."""
        self.end_store_hold(slot)
        home = slot.home
        home.in_use -= 1
        if not home.recalled:
            self.free.append(slot)
        elif home.in_use == 0:
            self._retire(home)

    def end_store_hold(self, slot: Slot) -> None:
        """The slot no longer counts as a store's."""
        if slot.by_store:
            slot.by_store = False
            self.store_held -= 1

    def store_capacity(self, rank_count: int) -> int:
        """
        Return how many slots stores may hold together.

        All but a reserve for loads of min(iodepth, half the slots), but at least *rank_count*
        where the pool has as many, so that one key at a time can always be stored. What is admitted
        is not theirs, and must not leave loads without that reserve.
        """
        reserve = min(self.iodepth, self.total // 2)
        return max(self.total - reserve - self.admitted, min(rank_count, self.total))

    def spare(self) -> int:
        """Return how many slots nobody needs: the free ones that are not reserved, and the cached ones."""
        return len(self.free) - self.reserved + self.cached()

    def cached(self) -> int:
        """Return how many slots only the cache keeps."""
        return len(self.cache) if self.cache is not None else 0

    def free_for_loads(self) -> int:
        """Return how many slots a load could take now."""
        return max(0, self.spare() - self.saved)

    def above_floor(self) -> int:
        """Return how many slots preloads and cache may have."""
        return max(0, self.total - self.iodepth - FLOOR_SLOTS)

    def cache_room(self) -> int:
        """Return how many slots cache may have beside what is admitted."""
        return max(0, self.above_floor() - self.admitted)

    def _resize_cache(self) -> None:
        if self.cache is not None:
            self.cache.resize(self.above_floor())

    def _retire(self, home: Segment) -> None:
        del self.segments[home.segment]
        self.emptied.append(home)

    def validate(self) -> None:
        """Check that counts and lists agree with the slots' states."""
        free = {id(slot) for slot in self.free}
        invariant(len(free) == len(self.free), "a slot is twice in the free list", slot_bytes=self.slot_bytes)
        total = store_held = free_seen = cached = loose = resident = pinned = 0
        for home in self.segments.values():
            in_use = 0
            for slot in home.slots:
                in_use += slot.state is not SlotState.FREE
                store_held += slot.by_store
                cached += slot.cached
                loose += slot.loose
                resident += slot.state is SlotState.RESIDENT
                pinned += slot.pins > 0
                free_seen += id(slot) in free
                _validate_slot(slot, listed=id(slot) in free)
            invariant(home.in_use == in_use, "segment miscounts its used slots", segment=home.segment)
            total += 0 if home.recalled else len(home.slots)
        invariant(free_seen == len(free), "a free slot belongs to no segment", slot_bytes=self.slot_bytes)
        invariant(self.total == total, "pool miscounts its slots", total=self.total, counted=total)
        invariant(self.store_held == store_held, "pool miscounts stores' slots", slot_bytes=self.slot_bytes)
        invariant(cached == self.cached(), "the cache's policy miscounts its objects", cached=cached)
        invariant(cached <= self.cache_room(), "the cache is in the floor", cached=cached, total=self.total)
        invariant(self.admitted <= self.above_floor(), "preloads are in the floor", admitted=self.admitted)
        invariant(len(self.free) >= self.reserved, "a reserved slot is not free", reserved=self.reserved)
        invariant(self.loose == loose, "pool miscounts its loose slots", loose=self.loose, counted=loose)
        counted = (resident, pinned)
        invariant((self.resident, self.pinned) == counted, "pool miscounts its residents", counted=counted)
        if self.cache is not None:
            self.cache.validate()


def _validate_slot(slot: Slot, *, listed: bool) -> None:
    state = slot.state
    wanted = state is SlotState.FREE and not slot.home.recalled
    invariant(listed == wanted, "free list and state differ", slot=slot.ref, state=state.value)
    invariant((slot.object is None) == (state is SlotState.FREE), "object and state differ", slot=slot.ref)
    invariant(slot.pins == 0 or state is SlotState.RESIDENT, "a pin outside of resident", slot=slot.ref)
    invariant(not slot.held or state is SlotState.RESIDENT, "held outside of resident", slot=slot.ref)
    invariant(slot.ghosts == 0 or state in _GHOSTLY, "a departed user of a slot in that state", slot=slot.ref)
    invariant(slot.ghosts > 0 or state is not SlotState.QUARANTINED, "quarantined for nobody", slot=slot.ref)
    invariant(not slot.cached or state is SlotState.RESIDENT, "cached outside of resident", slot=slot.ref)
    invariant(not slot.admitted or state is SlotState.RESIDENT, "admitted outside of resident", slot=slot.ref)
    loose = slot.admitted and not (slot.pins or slot.held or slot.ghosts or slot.home.recalled)
    invariant(slot.loose == loose, "a slot is wrongly counted as loose", slot=slot.ref)
    users = slot.pins + slot.ghosts + slot.held + slot.admitted
    invariant(users == 0 or not slot.cached, "a cached slot is in use", slot=slot.ref)
    invariant(not slot.cached or not slot.home.recalled, "a recalled segment's slot is cached", slot=slot.ref)
    used = users + slot.cached
    invariant(used > 0 or state is not SlotState.RESIDENT, "resident for nobody", slot=slot.ref)


_GHOSTLY = (SlotState.RESIDENT, SlotState.QUARANTINED)
