r"""
A rank's stores: which objects are copied into which slots, so that every stored prefix is closed.

    ASKED -> GRANTED -> COPYING -> COPIED -> FILLED     COPIED: the bytes are whole, Filled not yet said
        \--------\---------\---------\---> DROPPED      EXISTS: needs no store
        \---> EXISTS

Theory. The first dropped object of a job, in prefix order over all devices, is its *cut*: nothing at or behind it is
filled, and no later job of that request is. An object is copied only when all before it are answered, said to be
filled only when all before it are, and a request's next job is copied only when the one before has ended. Since a
worker keeps a key only if every rank filled it, whichever rank cuts first closes the prefix for all of them.

What cuts: a worker drops a key, is lost, or does not answer in time; a copy fails; the engine flushes.
"""

import enum
from dataclasses import dataclass, field

from kvpool.core.rank_base import Ground, Job
from kvpool.core.rank_copies import Copies, Owner
from kvpool.core.rank_events import (
    JobKind,
    SendFilled,
    SendStore,
    SendStoreCancel,
    SlotCopy,
    StoreAnswered,
    StoreSubmitted,
)
from kvpool.errors import Code, invariant

#: Requests remembered as cut; the oldest is forgotten first (its engine finished it long ago).
CUT_REQUESTS_MAX = 4096


class StoreState(enum.IntEnum):
    """Where one object of a store is."""

    ASKED = 0
    GRANTED = 1
    COPYING = 2
    COPIED = 3
    FILLED = 4
    EXISTS = 5
    DROPPED = 6


_CLOSED = (StoreState.FILLED, StoreState.EXISTS, StoreState.DROPPED)
_UNLAUNCHED = (StoreState.ASKED, StoreState.GRANTED)
#: Given up without waiting for a copy.
_DROPPABLE = (StoreState.ASKED, StoreState.GRANTED, StoreState.COPIED)
#: A worker may answer for these; DROPPED: the answer crossed our cancel, which takes back whatever it grants.
_ANSWERABLE = (StoreState.ASKED, StoreState.DROPPED)


@dataclass(slots=True, kw_only=True, eq=False)
class _Store(Job):
    """
    A store.

    Attributes:
        cut: Nothing at or behind this index is filled; len(keys) while nothing was dropped.
        answered: All objects before this index are granted or exist, and were queued for copying.
        filled: All objects before this index are filled or exist.
    """

    request: str
    states: list[StoreState] = field(default_factory=list)
    cut: int = 0
    answered: int = 0
    filled: int = 0


class Stores:
    """See the module. A method that takes a worker's answer returns what is wrong with it, or None."""

    def __init__(self, ground: Ground, copies: Copies) -> None:
        self._ground = ground
        self._copies = copies
        self._jobs: dict[int, _Store] = {}
        #: Open stores of each request, oldest first; only the first may copy.
        self._by_request: dict[str, list[int]] = {}
        self._cut_requests: dict[str, None] = {}
        #: Per job, the objects to launch at the end of the round.
        self._queue: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Stores that have not ended."""
        return len(self._jobs)

    @property
    def requests_cut(self) -> int:
        """Requests remembered as cut."""
        return len(self._cut_requests)

    def submitted(self, event: StoreSubmitted, now_ns: int) -> None:
        """Offer the keys to the workers; drop at once what no worker can be asked for, and what comes behind it."""
        pool = self._ground.pool
        store = _Store(
            job=event.job,
            wire=event.wire,
            keys=event.keys,
            devices=event.devices,
            deadline_ns=now_ns + (pool.store_deadline_ns if pool else 0),
            request=event.request,
            cut=len(event.keys),
        )
        store.states = [StoreState.ASKED] * len(store.keys)
        self._jobs[store.wire] = store
        self._by_request.setdefault(store.request, []).append(store.wire)
        self._ground.counts["stores_submitted"] += 1
        for device, indices in store.parts.items():
            if device in self._ground.workers:
                keys = [store.keys[index] for index in indices]
                self._ground.act(SendStore(device=device, wire=store.wire, job=store.job, keys=keys))
        lost = [indices[0] for device, indices in store.parts.items() if device not in self._ground.workers]
        # A cut request's keys are offered and taken back, so that the workers do not keep them for the other ranks.
        if store.request in self._cut_requests:
            self._cut(store, 0, Code.WORKER_LOST if 0 in lost else Code.CANCELLED)
        elif lost:
            self._cut(store, min(lost), Code.WORKER_LOST)
        self._end_if_closed(store)

    def answered(self, event: StoreAnswered) -> str | None:
        """Take a worker's decisions: copy what they allow, cut where they drop."""
        store = self._jobs.get(event.wire)
        if store is None:
            return None  # crossed our StoreCancel, which takes back whatever this grants
        indices = [*(grant.index for grant in event.slots), *event.exist, *event.dropped]
        if not store.may_answer(event.device, indices, store.states, _ANSWERABLE):
            return "StoreAnswer for an object that was not offered"
        part = store.parts[event.device]
        for index in [part[wire_index] for wire_index in event.exist]:
            if store.states[index] is StoreState.ASKED:
                store.states[index] = StoreState.EXISTS
                store.open -= 1
                self._ground.counts["objects_existed"] += 1
        for grant in event.slots:
            index = part[grant.index]
            if store.states[index] is StoreState.ASKED:
                store.states[index] = StoreState.GRANTED
                store.slots[index] = (grant.segment, grant.offset)
        dropped = [part[wire_index] for wire_index in event.dropped]
        for index in dropped:
            self._drop(store, index, Code.NO_SLOT, tell=False)
        unusable = [index for index, slot in store.slots.items() if slot[0] in self._ground.segments_unmappable]
        if dropped or unusable:
            self._cut(store, min([*dropped, *unusable]), Code.COPY_ERROR)
        self._advance(store)
        self._end_if_closed(store)
        return None

    def launch(self) -> None:
        """Launch all that is queued, one batch for each job."""
        queue, self._queue = self._queue, {}
        for wire, indices in queue.items():
            store = self._jobs.get(wire)
            granted = [index for index in indices if store is not None and store.states[index] is StoreState.GRANTED]
            if store is not None and granted:
                for index in granted:
                    store.states[index] = StoreState.COPYING
                self._copies.launch_store([SlotCopy(wire, index, *store.slots[index]) for index in granted], store)

    def copied(self, copy: SlotCopy, owner: Owner, *, failed: bool) -> None:
        """One copy has ended: its object is filled if all before it are, dropped if the store was cut meanwhile."""
        store, index = self._jobs[copy.wire], copy.object_index
        store.states[index] = StoreState.COPIED
        if failed and index < store.cut:
            self._cut(store, index, Code.COPY_ERROR)
        elif index >= store.cut:
            tell = self._ground.workers.get(owner[0]) == owner[1]
            self._drop(store, index, store.codes.get(index, Code.CANCELLED), tell=tell)
        self._fill(store)
        self._end_if_closed(store)

    def worker_lost(self, device: int) -> None:
        """Cut every store at its first object of that device that is not closed."""
        for store in list(self._jobs.values()):
            part = store.parts.get(device, ())
            first = next((index for index in part if store.states[index] not in _CLOSED), None)
            if first is not None:
                self._cut(store, first, Code.WORKER_LOST)
                self._end_if_closed(store)

    def segment_mapped(self) -> None:
        """Copy what waited for a segment."""
        for wires in list(self._by_request.values()):
            self._advance(self._jobs[wires[0]])

    def segment_abandoned(self, segment: int, code: Code) -> None:
        """Cut every store at its first object that is granted a slot there and not launched."""
        for store in list(self._jobs.values()):
            there = [index for index, slot in store.slots.items() if slot[0] == segment]
            granted = [index for index in there if store.states[index] is StoreState.GRANTED]
            if granted:
                self._cut(store, min(granted), code)
                self._end_if_closed(store)

    def expire(self, now_ns: int) -> None:
        """Cut stores past their deadline at what is not launched; they expire in the order they came."""
        for store in list(self._jobs.values()):
            if store.deadline_ns > now_ns:
                break
            if not store.expired:
                store.expired = True
                self._cut_unlaunched(store, Code.DEADLINE)

    def flush(self, jobs: frozenset[int]) -> None:
        """Cut these stores at what is not launched. Launched copies end them."""
        for store in [store for store in self._jobs.values() if store.job in jobs]:
            self._cut_unlaunched(store, Code.CANCELLED)

    def next_deadline_ns(self) -> int | None:
        """Return when `expire` is due next."""
        return next((store.deadline_ns for store in self._jobs.values() if not store.expired), None)

    def wires_of(self, jobs: frozenset[int]) -> set[int]:
        """Return the wire numbers of these jobs."""
        return {store.wire for store in self._jobs.values() if store.job in jobs}

    def copying(self) -> set[tuple[int, int]]:
        """Return (wire, index) of every object whose state is COPYING."""
        return {
            (store.wire, index)
            for store in self._jobs.values()
            for index, state in enumerate(store.states)
            if state is StoreState.COPYING
        }

    def validate(self) -> None:
        """Check that states, slots and counts of every store agree, and that nothing is filled behind a hole."""
        queued = sorted(wire for wires in self._by_request.values() for wire in wires)
        invariant(queued == sorted(self._jobs), "stores and their requests disagree")
        with_slot = (StoreState.GRANTED, StoreState.COPYING, StoreState.COPIED)
        for store in self._jobs.values():
            open_count = sum(state not in _CLOSED for state in store.states)
            invariant(store.open == open_count, "open objects of a store miscounted", wire=store.wire)
            invariant(store.open > 0, "a closed store was not ended", wire=store.wire)
            held = {index for index, state in enumerate(store.states) if state in with_slot}
            invariant(set(store.slots) == held, "slots of a store disagree with its states", wire=store.wire)
            self._validate_order(store)

    def _validate_order(self, store: _Store) -> None:
        hole = False
        for index, state in enumerate(store.states):
            if state is StoreState.FILLED:
                invariant(not hole, "a store was filled behind a hole", wire=store.wire, index=index)
            hole |= state not in (StoreState.FILLED, StoreState.EXISTS)
            if state in _UNLAUNCHED:
                known = store.devices[index] in self._ground.workers
                invariant(known, "a store waits for a lost worker", wire=store.wire)
                invariant(index < store.cut, "a store waits behind its cut", wire=store.wire, index=index)

    # ------------------------------------------------------------ inside

    def _advance(self, store: _Store) -> None:
        """Queue what may be copied now: granted, mapped, all before it answered, the request's earlier jobs ended."""
        if self._by_request[store.request][0] != store.wire:
            return
        while store.answered < store.cut:
            index = store.answered
            if store.states[index] is StoreState.GRANTED and store.slots[index][0] in self._ground.segments:
                self._queue.setdefault(store.wire, []).append(index)
            elif store.states[index] is not StoreState.EXISTS:
                break
            store.answered += 1
        self._fill(store)

    def _fill(self, store: _Store) -> None:
        """Say Filled of what is copied, in prefix order."""
        while store.filled < store.cut:
            index = store.filled
            if store.states[index] is StoreState.COPIED:
                self._ground.gather(SendFilled, store.devices[index], store.wire, store.positions[index])
                del store.slots[index]
                store.states[index] = StoreState.FILLED
                store.open -= 1
                self._ground.counts["objects_filled"] += 1
            elif store.states[index] is not StoreState.EXISTS:
                break
            store.filled += 1

    def _cut(self, store: _Store, index: int, code: Code) -> None:
        """Give up *index* and what comes behind it, in this job and in the later ones of its request."""
        self._cut_job(store, index, code)
        self._cut_requests.pop(store.request, None)
        self._cut_requests[store.request] = None
        if len(self._cut_requests) > CUT_REQUESTS_MAX:
            del self._cut_requests[next(iter(self._cut_requests))]
        waiting = self._by_request[store.request]
        for wire in waiting[waiting.index(store.wire) + 1 :]:
            self._cut_job(self._jobs[wire], 0, Code.CANCELLED)
            self._end_if_closed(self._jobs[wire])

    def _cut_job(self, store: _Store, index: int, code: Code) -> None:
        store.cut = min(store.cut, index)
        for later in range(index, len(store.keys)):
            if store.states[later] is StoreState.COPYING:
                store.codes.setdefault(later, code)
            else:
                self._drop(store, later, code if later == index else Code.CANCELLED)

    def _cut_unlaunched(self, store: _Store, code: Code) -> None:
        first = next((index for index, state in enumerate(store.states) if state in _UNLAUNCHED), None)
        if first is not None:
            self._cut(store, first, code)
        self._end_if_closed(store)

    def _drop(self, store: _Store, index: int, code: Code, *, tell: bool = True) -> None:
        """Close an object that no copy touches; *tell* its worker."""
        if store.states[index] not in _DROPPABLE:
            return
        if tell:
            self._ground.gather(SendStoreCancel, store.devices[index], store.wire, store.positions[index])
        store.slots.pop(index, None)
        store.states[index] = StoreState.DROPPED
        store.codes[index] = code
        store.open -= 1
        self._ground.counts["objects_dropped"] += 1

    def _end_if_closed(self, store: _Store) -> None:
        if store.open or self._jobs.pop(store.wire, None) is None:
            return
        self._ground.end(store, JobKind.STORE)
        waiting = self._by_request[store.request]
        waiting.remove(store.wire)
        if waiting:
            self._advance(self._jobs[waiting[0]])
        else:
            del self._by_request[store.request]
