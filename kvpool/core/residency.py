"""
Which object's bytes are in which slot, and until when.

Theory. A resident object is pinned by every Ready that is not released, held while it is to be
published, and admitted while a preload protects it. When the last of these ends it is *idle*: the
cache keeps it as long as nobody needs its slot; without a cache its slot is free at once, or
quarantined where a departed client may still be reading it. `objects` names the slot that new loads
get; an older slot with the same object (a read that a store overtook) serves its pins and goes.

The bytes of a resident slot never change, so a departed reader does not keep anybody else from
using them; it only keeps the slot from being filled anew.

The cache (`cache.py`, one policy for each slot size) has objects as its entries, since each rank uses
its own and at its own time. But what it drops it drops by key: all ranks' idle objects of the
victim's key go together. The ranks of an engine load a key at the same time and wait for the slowest,
so a key of which one rank is missing costs nearly as much as one of which all are, while its other
slots would be of use to a key that can be whole. A key is told to be RESIDENT while the objects of
all its ranks stay (`key_index.py`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvpool.core.arc import Arc
from kvpool.core.cache import CachePolicy, Past
from kvpool.core.clients import Client, LoadJob
from kvpool.core.key_index import KeyIndex
from kvpool.core.lru import Lru
from kvpool.core.object_events import Action, ObjectId, SendReady
from kvpool.core.slots import Segment, Slot, SlotPool, SlotState, SlotStep
from kvpool.errors import invariant, unreachable
from kvpool.wire.messages import TRIAL_KEY

POLICIES: dict[str, Callable[[], CachePolicy[ObjectId]] | None] = {"off": None, "lru": Lru, "arc": Arc}


def policy_named(name: str) -> CachePolicy[ObjectId] | None:
    """Return a new cache policy of that name (`TableSettings.staging_cache`); None for "off"."""
    invariant(name in POLICIES, "no such cache policy", name=name)
    policy = POLICIES[name]
    return policy() if policy is not None else None


@dataclass(slots=True, eq=False)
class Residency:
    """The resident objects of one device. Answers and what is told of keys are appended to *actions*."""

    actions: list[Action]
    counts: dict[str, int]
    index: KeyIndex
    objects: dict[ObjectId, Slot] = field(default_factory=dict)

    # ------------------------------------------------------------ slots are taken and filled

    def take(self, pool: SlotPool, object_id: ObjectId, *, by_store: bool) -> Slot:
        """Take a slot for that object, a cached one if none is free; the caller has checked that one is spare."""
        past = pool.cache.recall(object_id) if pool.cache is not None else Past.UNKNOWN
        if len(pool.free) <= pool.reserved:
            self._evict(pool, past)
        slot = pool.take(object_id, by_store=by_store)
        slot.past = past
        return slot

    def fill(self, slot: Slot, *, held: bool) -> None:
        """The slot's bytes are whole. Unless *held*, the caller pins it or calls :meth:`settle`."""
        slot.step(SlotStep.FILL)
        object_id = slot.object
        if object_id is None:
            unreachable("a filled slot has no object", slot=slot.ref)
        old = self.objects.get(object_id)
        if not held:
            self.objects.setdefault(object_id, slot)
            return
        slot.held = True
        slot.uses = 1
        if old is not None and old.cached:
            self._take_from_cache(old)
            self.objects[object_id] = slot
            old.step(SlotStep.DROP)
        self.objects[object_id] = slot
        self.index.stays(object_id, self.actions)

    # ------------------------------------------------------------ slots are used

    def pin(self, job: LoadJob, index: int, slot: Slot) -> None:
        """Answer that index with *slot*."""
        if slot.cached:
            self.counts["cache_hits"] += 1
            self._take_from_cache(slot)
        if slot.unread:
            self.counts["preload_hits"] += 1
            slot.unread = False
        slot.pin()
        slot.uses += 1
        if slot.loose:
            self._recount(slot)
        job.pinned[index] = slot
        self.actions.append(SendReady(client=job.client.client, job=job.job, index=index, slot=slot.ref))

    def unpin(self, slot: Slot) -> None:
        """A client ended its copy out of *slot*."""
        slot.unpin()
        self.settle(slot)

    def release_hold(self, slot: Slot, *, lost: bool) -> None:
        """The object is published, or (*lost*) its key will not be: it may go."""
        slot.held = False
        slot.lost = lost
        slot.pool.end_store_hold(slot)
        self._may_go(slot)
        self.settle(slot)

    def admit(self, slot: Slot) -> None:
        """An admission protects that object."""
        if slot.cached:
            self._take_from_cache(slot)
        slot.admitted = True
        self._recount(slot)
        if slot.object is not None:
            self.index.stays(slot.object, self.actions)

    def dismiss(self, slot: Slot) -> None:
        """No admission protects it any more: it may go."""
        slot.admitted = False
        self._may_go(slot)
        self.settle(slot)

    def _may_go(self, slot: Slot) -> None:
        """Where the cache will not keep a slot's object, it is not told to stay because somebody still reads it."""
        if slot.held or slot.admitted or slot.object is None or self.objects.get(slot.object) is not slot:
            return
        if slot.lost or slot.pool.cache is None:
            self.index.goes(slot.object, self.actions)

    def _recount(self, slot: Slot) -> None:
        loose = slot.admitted and not (slot.pins or slot.held or slot.ghosts or slot.home.recalled)
        if loose != slot.loose:
            slot.loose = loose
            slot.pool.loose += 1 if loose else -1

    def settle(self, slot: Slot) -> None:
        """Keep a resident slot that nobody needs as cache, or let it go."""
        object_id = slot.object
        if slot.admitted or slot.loose:
            self._recount(slot)
        if slot.pins or slot.held or slot.admitted or object_id is None:
            return
        if self.objects.get(object_id) is slot:
            if self._keep(slot, object_id):
                return
            del self.objects[object_id]
            self.index.goes(object_id, self.actions)
        self.counts["evicted_before_use"] += slot.unread
        slot.step(SlotStep.ABANDON if slot.ghosts else SlotStep.DROP)

    # ------------------------------------------------------------ cache

    def _keep(self, slot: Slot, object_id: ObjectId) -> bool:
        pool, cache = slot.pool, slot.pool.cache
        if cache is None or slot.ghosts or slot.lost or slot.home.recalled or not pool.cache_room():
            return False
        if object_id.key.startswith(TRIAL_KEY):  # a round trip has to reach the device
            return False
        if self.index.namespaces[object_id.namespace].retired:
            return False
        while len(cache) >= pool.cache_room():
            self._evict(pool, slot.past)
        cache.add(object_id, often=slot.uses > 1 or slot.past is not Past.UNKNOWN)
        slot.cached = True
        self.index.stays(object_id, self.actions)
        return True

    def _take_from_cache(self, slot: Slot) -> None:
        cache = slot.pool.cache
        if cache is not None and slot.object is not None:
            cache.take(slot.object)
        slot.cached = False

    def _evict(self, pool: SlotPool, past: Past) -> None:
        """Drop the idle objects of the policy's victim's key, of all ranks."""
        if pool.cache is None:
            unreachable("no cache to take a slot from", slot_bytes=pool.slot_bytes)
        namespace, key, _ = pool.cache.victim(past)
        for rank in range(self.index.namespaces[namespace].rank_count):
            slot = self.objects.get(ObjectId(namespace, key, rank))
            if slot is not None and slot.cached:
                self._drop(slot)

    def _drop(self, slot: Slot) -> None:
        cache, object_id = slot.pool.cache, slot.object
        if cache is None or object_id is None:
            unreachable("a slot is dropped that is not cached", slot=slot.ref)
        self.counts["cache_evictions"] += 1
        self.counts["evicted_before_use"] += slot.unread
        cache.drop(object_id)
        slot.cached = False
        del self.objects[object_id]
        self.index.goes(object_id, self.actions)
        slot.step(SlotStep.DROP)

    def leave_segment(self, home: Segment) -> None:
        """That segment is recalled: cache leaves it."""
        for slot in home.slots:
            self._recount(slot)
            if slot.cached:
                self._drop(slot)

    def retire(self, namespace: int) -> None:
        """That namespace's keys go, and its idle objects: nobody may ask for them any more."""
        self.index.retire(namespace)
        for slot in [slot for object_id, slot in self.objects.items() if object_id.namespace == namespace]:
            if slot.cached:
                self._drop(slot)

    def make_way(self, pool: SlotPool) -> None:
        """Cache leaves the slots that are reserved, and the floor."""
        while pool.cached() and (len(pool.free) < pool.reserved or pool.cached() > pool.cache_room()):
            self._evict(pool, Past.UNKNOWN)

    # ------------------------------------------------------------ clients depart

    def haunt(self, client: Client, slot: Slot) -> None:
        """*client* left with its pin on, or its fill into, *slot*: it waits for proof."""
        client.ghosts.append(slot)
        slot.ghosts += 1
        if slot.state is SlotState.FILLING:
            slot.step(SlotStep.ABANDON)
        else:
            slot.unpin()
            self.settle(slot)

    def exorcise(self, client: Client) -> None:
        """No copy of *client* runs any more."""
        for slot in client.ghosts:
            slot.ghosts -= 1
            self._recount(slot)
            if slot.state is SlotState.QUARANTINED and slot.ghosts == 0:
                slot.step(SlotStep.PROVE)
        client.ghosts.clear()

    # ------------------------------------------------------------ looks

    def validate(self, slots: Iterable[Slot]) -> None:
        """Check that every resident object's slot holds it, that what stays is found, and is told to stay."""
        for slot in slots:
            if slot.object is not None and (slot.held or slot.cached or slot.admitted):
                invariant(self.objects.get(slot.object) is slot, "an object that stays is not found", slot=slot.ref)
                mask = self.index.namespaces[slot.object.namespace].staying.get(slot.object.key, 0)
                invariant(bool(mask >> slot.object.rank & 1), "an object stays and is not counted", slot=slot.ref)
        for object_id, slot in self.objects.items():
            invariant(slot.object == object_id, "slot holds another object", slot=slot.ref, object=object_id)
            invariant(slot.state is SlotState.RESIDENT, "resident object's slot is not", slot=slot.ref)
        for space in self.index.namespaces.values():
            for key, mask in space.staying.items():
                for rank in range(space.rank_count):
                    found = self.objects.get(ObjectId(space.namespace, key, rank))
                    invariant(not mask >> rank & 1 or found is not None, "an absent object is told to stay", rank=rank)
                    if found is not None and mask >> rank & 1 and found.pool.cache is None:
                        invariant(
                            found.held or found.admitted, "an object is told to stay and does not", slot=found.ref
                        )
