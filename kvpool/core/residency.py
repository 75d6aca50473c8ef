"""
Which object's bytes are in which slot, and until when.

Theory. A resident object is pinned by every Ready that is not released, and held while it is to be
published or kept as cache. When the last of these ends, the cache policy says whether it stays; if
not, its slot is free, or quarantined where a departed client may still be reading it. `objects`
names the slot that new loads get; an older slot with the same object (a read that a store overtook)
serves its pins and goes.

The bytes of a resident slot never change, so a departed reader does not keep anybody else from
using them; it only keeps the slot from being filled anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.core.clients import Client, LoadJob
from kvpool.core.object_events import Action, ObjectId, SendReady
from kvpool.core.slots import Slot, SlotState, SlotStep
from kvpool.errors import invariant


class Cache(Protocol):
    """Decides what stays in staging although nobody wants it now."""

    def keeps(self, object_id: ObjectId) -> bool:
        """Return whether that unpinned, published object stays."""
        ...


class CacheOff:
    """Nothing stays: an unpinned, published object's slot is free at once."""

    def keeps(self, object_id: ObjectId) -> bool:
        """Never."""
        return False


@dataclass(slots=True, eq=False)
class Residency:
    """The resident objects of one device. Answers are appended to *actions*."""

    actions: list[Action]
    cache: Cache = field(default_factory=CacheOff)
    objects: dict[ObjectId, Slot] = field(default_factory=dict)

    def fill(self, slot: Slot, *, held: bool) -> None:
        """The slot's bytes are whole. Unless *held*, the caller pins it or calls :meth:`settle`."""
        slot.step(SlotStep.FILL)
        slot.held = held
        invariant(slot.object is not None, "a filled slot has no object", slot=slot.ref)
        if slot.object is not None and (held or slot.object not in self.objects):
            self.objects[slot.object] = slot

    def pin(self, job: LoadJob, index: int, slot: Slot) -> None:
        """Answer that index with *slot*."""
        slot.pins += 1
        job.pinned[index] = slot
        self.actions.append(SendReady(client=job.client.client, job=job.job, index=index, slot=slot.ref))

    def unpin(self, slot: Slot) -> None:
        """A client ended its copy out of *slot*."""
        slot.pins -= 1
        self.settle(slot)

    def release_hold(self, slot: Slot) -> None:
        """The object is published, or will not be: it may go."""
        slot.held = False
        slot.pool.end_store_hold(slot)
        self.settle(slot)

    def settle(self, slot: Slot) -> None:
        """Let a resident slot go if nobody needs its bytes."""
        if slot.pins or slot.held or slot.object is None:
            return
        mine = self.objects.get(slot.object) is slot
        if mine and not slot.ghosts and self.cache.keeps(slot.object):
            slot.held = True
            return
        if mine:
            del self.objects[slot.object]
        slot.step(SlotStep.ABANDON if slot.ghosts else SlotStep.DROP)

    def haunt(self, client: Client, slot: Slot) -> None:
        """*client* left with its pin on, or its fill into, *slot*: it waits for proof."""
        client.ghosts.append(slot)
        slot.ghosts += 1
        if slot.state is SlotState.FILLING:
            slot.step(SlotStep.ABANDON)
        else:
            slot.pins -= 1
            self.settle(slot)

    def exorcise(self, client: Client) -> None:
        """No copy of *client* runs any more."""
        for slot in client.ghosts:
            slot.ghosts -= 1
            if slot.state is SlotState.QUARANTINED and slot.ghosts == 0:
                slot.step(SlotStep.PROVE)
        client.ghosts.clear()

    def validate(self, slots: Iterable[Slot]) -> None:
        """Check that every resident object's slot holds it, and that what is held is found."""
        for slot in slots:
            if slot.held and slot.object is not None:
                invariant(self.objects.get(slot.object) is slot, "a held object is not found", slot=slot.ref)
        for object_id, slot in self.objects.items():
            invariant(slot.object == object_id, "slot holds another object", slot=slot.ref, object=object_id)
            invariant(slot.state is SlotState.RESIDENT, "resident object's slot is not", slot=slot.ref)
