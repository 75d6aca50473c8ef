r"""
A rank's load and store jobs: what to ask the workers, what to copy when, and when a job has ended.

Theory. A job is a list of objects, each on one device; each object walks through a small table of states, and the
job ends when none of its objects is open any more. Whatever happens (a worker or the pool is lost, a deadline
passes, the engine flushes), every object still reaches a closed state, so every job ends exactly once.

    load:   WANTED -> HELD -> COPYING -> LANDED        HELD: the slot is pinned for us, the copy not launched
               \-------\---------\----> FAILED
    store:  ASKED -> GRANTED -> COPYING -> COPIED -> FILLED     COPIED: the bytes are whole, Filled not yet said
               \--------\---------\---------\---> DROPPED       EXISTS: needs no store
               \---> EXISTS

Nothing may be done to a launched copy but to wait for its end. So COPYING is left only by CopiesEnded, an object
that is given up meanwhile is closed there, and what asks "does anything still touch this slot, this segment, this
worker's memory?" counts copies, not jobs.

Stores keep prefixes closed. The first dropped object of a job, in prefix order over all devices, is its *cut*:
nothing at or behind it is filled, and no later job of that request is. An object is copied only when all before it
are answered, said to be filled only when all before it are, and a request's next job is copied only when the one
before has ended. Since a worker keeps a key only if every rank filled it, whichever rank cuts first closes the
prefix for all. Objects that exist already count as kept.

Sends are gathered per (worker, job), copies per direction, and leave at RoundEnded: one message and one launch for
all that was ready. Slots in a segment that is not mapped yet wait for SegmentMapped, bounded by the job's deadline.

Does not cover: sockets, mapping, the copies themselves (`client/rank.py`), how lists are split into messages.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpool.core.rank_events import (
    Action,
    CopiesEnded,
    DropWorker,
    EndJob,
    Event,
    JobKind,
    JobsFlushed,
    LaunchLoad,
    LaunchStore,
    LoadsFailed,
    LoadSubmitted,
    PoolEvent,
    PoolJoined,
    PoolLost,
    RoundEnded,
    SegmentMapped,
    SegmentRecalled,
    SegmentUnmappable,
    SendFilled,
    SendLoad,
    SendLoadCancel,
    SendRelease,
    SendStore,
    SendStoreCancel,
    SlotCopy,
    SlotsReady,
    StoreAnswered,
    StoreSubmitted,
    TellCopiesEnded,
    TimePassed,
    UnmapSegment,
    WorkerJoined,
    WorkerLost,
)
from kvpool.errors import Code, invariant
from kvpool.wire.messages import SlotGrant

#: Requests remembered as cut; the oldest is forgotten first (its engine finished it long ago).
CUT_REQUESTS_MAX = 4096

#: What is counted since the start.
COUNTERS = (
    "loads_submitted", "loads_ended", "objects_loaded", "objects_failed",
    "stores_submitted", "stores_ended", "objects_filled", "objects_existed", "objects_dropped", "workers_dropped",
)  # fmt: skip

_CODES = frozenset(int(code) for code in Code)


class LoadState(enum.IntEnum):
    """Where one object of a load is."""

    WANTED = 0
    HELD = 1
    COPYING = 2
    LANDED = 3
    FAILED = 4


class StoreState(enum.IntEnum):
    """Where one object of a store is."""

    ASKED = 0
    GRANTED = 1
    COPYING = 2
    COPIED = 3
    FILLED = 4
    EXISTS = 5
    DROPPED = 6


_LOAD_CLOSED = (LoadState.LANDED, LoadState.FAILED)
_STORE_CLOSED = (StoreState.FILLED, StoreState.EXISTS, StoreState.DROPPED)
_UNLAUNCHED = (StoreState.ASKED, StoreState.GRANTED)


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """
    What loads and stores have in common.

    Attributes:
        job, wire: The caller's number, and ours on the wire.
        devices: Device of each object.
        parts: Per device, the indices of its objects: the wire index counts this list.
        positions: Wire index of each object.
        slots: (segment, offset) of the objects that have a slot now.
        codes: Why objects failed or were dropped.
        open: Objects that are not in a closed state.
        expired: The deadline was acted upon.
    """

    job: int
    wire: int
    keys: Sequence[bytes]
    devices: Sequence[int]
    deadline_ns: int
    parts: dict[int, list[int]] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    codes: dict[int, Code] = field(default_factory=dict)
    open: int = 0
    expired: bool = False

    def __post_init__(self) -> None:
        self.open = len(self.keys)
        for index, device in enumerate(self.devices):
            part = self.parts.setdefault(device, [])
            self.positions.append(len(part))
            part.append(index)


@dataclass(slots=True, kw_only=True, eq=False)
class _Load(_Job):
    """A load; *flushed*: all of it counts as failed, what landed too."""

    states: list[LoadState] = field(default_factory=list)
    flushed: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Store(_Job):
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


@dataclass(slots=True)
class _Batch:
    """Copies launched together; *owners* are (device, worker generation) of each slot."""

    kind: JobKind
    copies: list[SlotCopy]
    owners: list[tuple[int, int]]


class RankJobs:
    """The table of one rank's jobs. One door: :meth:`handle`."""

    def __init__(self) -> None:
        #: Set between PoolJoined and PoolLost.
        self._pool: PoolJoined | None = None
        #: Workers that can be talked to: device -> generation.
        self._workers: dict[int, int] = {}
        #: Lost workers whose slots copies still touch.
        self._departing: set[tuple[int, int]] = set()
        self._segments: set[int] = set()
        self._segments_unmappable: set[int] = set()
        #: Segments to unmap as soon as no copy touches them.
        self._segments_leaving: set[int] = set()
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        #: Open stores of each request, oldest first; only the first may copy.
        self._request_stores: dict[str, list[int]] = {}
        self._cut_requests: dict[str, None] = {}
        #: HELD objects to launch at the end of the round, and those that wait for their segment.
        self._load_queue: list[tuple[int, int]] = []
        self._load_parked: dict[int, list[tuple[int, int]]] = {}
        self._store_queue: dict[int, list[int]] = {}
        self._batches: dict[int, _Batch] = {}
        self._owner_copies: Counter[tuple[int, int]] = Counter()
        self._segment_copies: Counter[int] = Counter()
        #: Gathered for the end of the round: (message, device, wire) -> wire indices.
        self._gathered: dict[tuple[type[SendRelease | SendFilled | SendStoreCancel], int, int], list[int]] = {}
        self._actions: list[Action] = []
        self._ticket_next = 1
        self._counts: Counter[str] = Counter()

    # ------------------------------------------------------------ door

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one fact; return what has to be done, in order."""
        if isinstance(event, SlotsReady | LoadsFailed | StoreAnswered) and event.device not in self._workers:
            return []  # read before its socket was closed; its worker counts as lost
        match event:
            case LoadSubmitted() | SlotsReady() | LoadsFailed():
                self._handle_load(event, now_ns)
            case StoreSubmitted():
                self._store_submitted(event, now_ns)
            case StoreAnswered():
                self._store_answered(event)
            case CopiesEnded():
                self._copies_ended(event)
            case RoundEnded():
                self._end_round()
            case TimePassed():
                self._expire(now_ns)
            case JobsFlushed():
                self._flush(event.jobs)
            case _:
                self._handle_pool(event)
        actions, self._actions = self._actions, []
        return actions

    def _handle_load(self, event: LoadSubmitted | SlotsReady | LoadsFailed, now_ns: int) -> None:
        match event:
            case LoadSubmitted():
                self._load_submitted(event, now_ns)
            case SlotsReady():
                self._slots_ready(event)
            case LoadsFailed():
                self._loads_failed(event)

    def _handle_pool(self, event: PoolEvent) -> None:
        match event:
            case PoolJoined():
                self._pool = event
            case PoolLost():
                self._pool_lost()
            case WorkerJoined():
                self._worker_joined(event)
            case WorkerLost():
                self._worker_lost(event.device, event.generation)
            case SegmentMapped():
                self._segment_mapped(event.segment)
            case SegmentUnmappable():
                self._segment_unmappable(event.segment)
            case SegmentRecalled():
                self._segment_recalled(event.segment)

    def next_deadline_ns(self) -> int | None:
        """Return when TimePassed is due next; None: nothing waits for time. Jobs of a kind expire as they came."""
        first = [
            next((job.deadline_ns for job in jobs.values() if not job.expired), None)
            for jobs in (self._loads, self._stores)
        ]
        return min((deadline for deadline in first if deadline is not None), default=None)

    def tickets_of(self, jobs: Iterable[int]) -> list[int]:
        """Return the batches that copy for any of *jobs*."""
        wanted = set(jobs)
        wires = {job.wire for job in self._jobs() if job.job in wanted}
        return [ticket for ticket, batch in self._batches.items() if any(copy.wire in wires for copy in batch.copies)]

    @property
    def copies_in_flight(self) -> int:
        """Objects being copied now."""
        return self._owner_copies.total()

    @property
    def job_count(self) -> int:
        """Jobs that have not ended."""
        return len(self._loads) + len(self._stores)

    def statistics(self) -> dict[str, int]:
        """Return counters since the start, and how much is open now."""
        return {
            "jobs": self.job_count,
            "copies_in_flight": self.copies_in_flight,
            "requests_cut": len(self._cut_requests),
            **{name: self._counts[name] for name in COUNTERS},
        }

    # ------------------------------------------------------------ loads

    def _load_submitted(self, event: LoadSubmitted, now_ns: int) -> None:
        deadline_ns = now_ns + (self._pool.load_deadline_ns if self._pool else 0)
        load = _Load(job=event.job, wire=event.wire, keys=event.keys, devices=event.devices, deadline_ns=deadline_ns)
        load.states = [LoadState.WANTED] * len(load.keys)
        self._loads[load.wire] = load
        self._counts["loads_submitted"] += 1
        for device, indices in load.parts.items():
            if device in self._workers:
                keys = [load.keys[index] for index in indices]
                self._actions.append(SendLoad(device=device, wire=load.wire, keys=keys))
            else:
                self._fail(load, indices, Code.WORKER_LOST)
        self._end_load_if_closed(load)

    def _slots_ready(self, event: SlotsReady) -> None:
        load = self._loads.get(event.wire)
        if load is None:
            # Crossed our LoadCancel, or the end of the job: nobody wants it, the pin is given back.
            for grant in event.slots:
                self._gather(SendRelease, event.device, event.wire, grant.index)
            return
        part = load.parts.get(event.device, [])
        wanted = (LoadState.WANTED, LoadState.FAILED)
        for grant in event.slots:
            if not 0 <= grant.index < len(part) or load.states[part[grant.index]] not in wanted:
                self._drop_worker(event.device, "Ready for an object that was not asked for")
                return
        for grant in event.slots:
            self._hold(load, part[grant.index], grant)
        self._end_load_if_closed(load)

    def _hold(self, load: _Load, index: int, grant: SlotGrant) -> None:
        device = load.devices[index]
        if load.states[index] is LoadState.FAILED:
            self._gather(SendRelease, device, load.wire, grant.index)
            return
        load.states[index] = LoadState.HELD
        load.slots[index] = (grant.segment, grant.offset)
        if grant.segment in self._segments:
            self._load_queue.append((load.wire, index))
        elif grant.segment in self._segments_unmappable:
            self._fail(load, [index], Code.COPY_ERROR)
        else:
            self._load_parked.setdefault(grant.segment, []).append((load.wire, index))

    def _loads_failed(self, event: LoadsFailed) -> None:
        load = self._loads.get(event.wire)
        if load is None:
            return
        part = load.parts.get(event.device, [])
        open_or_failed = (LoadState.WANTED, LoadState.FAILED)
        for failed in event.objects:
            known = 0 <= failed.index < len(part) and load.states[part[failed.index]] in open_or_failed
            if not known or failed.code not in _CODES:
                self._drop_worker(event.device, "LoadFailed for an object that was not asked for")
                return
        for failed in event.objects:
            self._fail(load, [part[failed.index]], Code(failed.code), cancel=False)
        self._end_load_if_closed(load)

    def _fail(self, load: _Load, indices: Iterable[int], code: Code, *, cancel: bool = True) -> None:
        """Close what is not launched of *indices*; *cancel*: the worker does not know yet that it is not wanted."""
        cancel_devices: set[int] = set()
        for index in indices:
            state, device = load.states[index], load.devices[index]
            if state is LoadState.HELD:
                del load.slots[index]
                self._gather(SendRelease, device, load.wire, load.positions[index])
            elif state is LoadState.WANTED:
                cancel_devices.add(device)
            else:
                continue
            self._close_failed(load, index, code)
        if cancel:
            for device in sorted(cancel_devices & self._workers.keys()):
                self._actions.append(SendLoadCancel(device=device, wire=load.wire))

    def _close_failed(self, load: _Load, index: int, code: Code) -> None:
        load.states[index] = LoadState.FAILED
        load.codes[index] = code
        load.open -= 1
        self._counts["objects_failed"] += 1

    def _load_copy_ended(self, copy: SlotCopy, owner: tuple[int, int], *, failed: bool) -> None:
        load = self._loads[copy.wire]
        del load.slots[copy.object_index]
        if self._workers.get(owner[0]) == owner[1]:
            self._gather(SendRelease, owner[0], copy.wire, load.positions[copy.object_index])
        if failed or load.flushed:
            self._close_failed(load, copy.object_index, Code.COPY_ERROR if failed else Code.CANCELLED)
        else:
            load.states[copy.object_index] = LoadState.LANDED
            load.open -= 1
            self._counts["objects_loaded"] += 1
        self._end_load_if_closed(load)

    def _flush_load(self, load: _Load) -> None:
        load.flushed = True
        for index, state in enumerate(load.states):
            if state is LoadState.LANDED:
                load.states[index] = LoadState.FAILED
                load.codes[index] = Code.CANCELLED
        self._fail(load, range(len(load.keys)), Code.CANCELLED)
        self._end_load_if_closed(load)

    def _end_load_if_closed(self, load: _Load) -> None:
        if load.open == 0 and self._loads.pop(load.wire, None) is not None:
            self._end(load, JobKind.LOAD)

    # ------------------------------------------------------------ stores

    def _store_submitted(self, event: StoreSubmitted, now_ns: int) -> None:
        store = _Store(
            job=event.job,
            wire=event.wire,
            keys=event.keys,
            devices=event.devices,
            deadline_ns=now_ns + (self._pool.store_deadline_ns if self._pool else 0),
            request=event.request,
            cut=len(event.keys),
        )
        store.states = [StoreState.ASKED] * len(store.keys)
        self._stores[store.wire] = store
        self._request_stores.setdefault(store.request, []).append(store.wire)
        self._counts["stores_submitted"] += 1
        for device, indices in store.parts.items():
            if device in self._workers:
                keys = [store.keys[index] for index in indices]
                self._actions.append(SendStore(device=device, wire=store.wire, job=store.job, keys=keys))
        # A cut request's keys are offered and taken back, so that the workers do not keep them for the other ranks.
        if store.request in self._cut_requests:
            self._cut(store, 0, Code.CANCELLED)
        lost = [indices[0] for device, indices in store.parts.items() if device not in self._workers]
        if lost:
            self._cut(store, min(lost), Code.WORKER_LOST)
        self._end_store_if_closed(store)

    def _store_answered(self, event: StoreAnswered) -> None:
        store = self._stores.get(event.wire)
        if store is None:
            return  # crossed our StoreCancel, which took back whatever this grants
        part = store.parts.get(event.device, [])
        answered = (StoreState.ASKED, StoreState.DROPPED)
        for wire_index in [*(grant.index for grant in event.slots), *event.exist, *event.dropped]:
            if not 0 <= wire_index < len(part) or store.states[part[wire_index]] not in answered:
                self._drop_worker(event.device, "StoreAnswer for an object that was not offered")
                return
        for wire_index in event.exist:
            if store.states[part[wire_index]] is StoreState.ASKED:
                store.states[part[wire_index]] = StoreState.EXISTS
                store.open -= 1
                self._counts["objects_existed"] += 1
        for grant in event.slots:
            if store.states[part[grant.index]] is StoreState.ASKED:
                store.states[part[grant.index]] = StoreState.GRANTED
                store.slots[part[grant.index]] = (grant.segment, grant.offset)
        dropped = [part[wire_index] for wire_index in event.dropped]
        for index in dropped:
            self._drop(store, index, Code.NO_SLOT, tell=False)
        unusable = [index for index, slot in store.slots.items() if slot[0] in self._segments_unmappable]
        if dropped or unusable:
            self._cut(store, min([*dropped, *unusable]), Code.COPY_ERROR)
        self._advance(store)
        self._end_store_if_closed(store)

    def _advance(self, store: _Store) -> None:
        """Queue what may be copied now: granted, mapped, all before it answered, the request's earlier jobs ended."""
        if self._request_stores[store.request][0] != store.wire:
            return
        while store.answered < store.cut:
            index = store.answered
            if store.states[index] is StoreState.GRANTED and store.slots[index][0] in self._segments:
                self._store_queue.setdefault(store.wire, []).append(index)
            elif store.states[index] is not StoreState.EXISTS:
                break
            store.answered += 1
        self._fill(store)

    def _fill(self, store: _Store) -> None:
        """Say Filled of what is copied, in prefix order."""
        while store.filled < store.cut:
            index = store.filled
            if store.states[index] is StoreState.COPIED:
                self._gather(SendFilled, store.devices[index], store.wire, store.positions[index])
                del store.slots[index]
                store.states[index] = StoreState.FILLED
                store.open -= 1
                self._counts["objects_filled"] += 1
            elif store.states[index] is not StoreState.EXISTS:
                break
            store.filled += 1

    def _cut(self, store: _Store, index: int, code: Code) -> None:
        """Give up *index* and what comes behind it, in this job and in the later ones of its request."""
        store.cut = min(store.cut, index)
        for later in range(index, len(store.keys)):
            if store.states[later] is StoreState.COPYING:
                store.codes.setdefault(later, code)
            else:
                self._drop(store, later, code if later == index else Code.CANCELLED)
        self._cut_requests.pop(store.request, None)
        self._cut_requests[store.request] = None
        if len(self._cut_requests) > CUT_REQUESTS_MAX:
            del self._cut_requests[next(iter(self._cut_requests))]
        behind = self._request_stores[store.request]
        for wire in behind[behind.index(store.wire) + 1 :]:
            later_store = self._stores[wire]
            if later_store.cut > 0:
                later_store.cut = 0
                for later in range(len(later_store.keys)):
                    self._drop(later_store, later, Code.CANCELLED)
                self._end_store_if_closed(later_store)

    def _drop(self, store: _Store, index: int, code: Code, *, tell: bool = True) -> None:
        """Close an object that no copy touches; *tell* its worker."""
        if store.states[index] not in (StoreState.ASKED, StoreState.GRANTED, StoreState.COPIED):
            return
        if tell:
            self._gather(SendStoreCancel, store.devices[index], store.wire, store.positions[index])
        store.slots.pop(index, None)
        store.states[index] = StoreState.DROPPED
        store.codes[index] = code
        store.open -= 1
        self._counts["objects_dropped"] += 1

    def _cut_unlaunched(self, store: _Store, code: Code) -> None:
        first = next((index for index, state in enumerate(store.states) if state in _UNLAUNCHED), None)
        if first is not None:
            self._cut(store, first, code)
        self._end_store_if_closed(store)

    def _store_copy_ended(self, copy: SlotCopy, owner: tuple[int, int], *, failed: bool) -> None:
        store, index = self._stores[copy.wire], copy.object_index
        store.states[index] = StoreState.COPIED
        if failed and index < store.cut:
            self._cut(store, index, Code.COPY_ERROR)
        elif index >= store.cut:
            tell = self._workers.get(owner[0]) == owner[1]
            self._drop(store, index, store.codes.get(index, Code.CANCELLED), tell=tell)
        self._fill(store)
        self._end_store_if_closed(store)

    def _end_store_if_closed(self, store: _Store) -> None:
        if store.open or self._stores.pop(store.wire, None) is None:
            return
        self._end(store, JobKind.STORE)
        waiting = self._request_stores[store.request]
        waiting.remove(store.wire)
        if waiting:
            self._advance(self._stores[waiting[0]])
        else:
            del self._request_stores[store.request]

    # ------------------------------------------------------------ copies

    def _end_round(self) -> None:
        self._launch_loads()
        self._launch_stores()
        gathered, self._gathered = self._gathered, {}
        for (message, device, wire), indices in gathered.items():
            self._actions.append(message(device=device, wire=wire, indices=indices))

    def _launch_loads(self) -> None:
        queue, self._load_queue = self._load_queue, []
        copies: list[SlotCopy] = []
        for wire, index in queue:
            load = self._loads.get(wire)
            if load is not None and load.states[index] is LoadState.HELD:
                load.states[index] = LoadState.COPYING
                copies.append(SlotCopy(wire, index, *load.slots[index]))
        if copies:
            owners = [self._owner(self._loads[copy.wire], copy.object_index) for copy in copies]
            ticket = self._new_ticket(_Batch(JobKind.LOAD, copies, owners))
            self._actions.append(LaunchLoad(ticket=ticket, copies=copies))

    def _launch_stores(self) -> None:
        queue, self._store_queue = self._store_queue, {}
        for wire, indices in queue.items():
            store = self._stores.get(wire)
            if store is None:
                continue
            granted = [index for index in indices if store.states[index] is StoreState.GRANTED]
            if not granted:
                continue
            for index in granted:
                store.states[index] = StoreState.COPYING
            copies = [SlotCopy(wire, index, *store.slots[index]) for index in granted]
            owners = [self._owner(store, index) for index in granted]
            ticket = self._new_ticket(_Batch(JobKind.STORE, copies, owners))
            self._actions.append(LaunchStore(ticket=ticket, wire=wire, copies=copies))

    def _copies_ended(self, event: CopiesEnded) -> None:
        invariant(event.ticket in self._batches, "copies ended twice, or were never launched", ticket=event.ticket)
        batch = self._batches.pop(event.ticket)
        for copy, owner in zip(batch.copies, batch.owners, strict=True):
            self._owner_copies[owner] -= 1
            self._segment_copies[copy.segment] -= 1
            if batch.kind is JobKind.LOAD:
                self._load_copy_ended(copy, owner, failed=event.failed)
            else:
                self._store_copy_ended(copy, owner, failed=event.failed)
        self._owner_copies += Counter()
        self._segment_copies += Counter()
        self._tell_departed()
        self._unmap_unused()

    def _owner(self, job: _Job, index: int) -> tuple[int, int]:
        device = job.devices[index]
        return device, self._workers[device]

    def _new_ticket(self, batch: _Batch) -> int:
        ticket = self._ticket_next
        self._ticket_next += 1
        self._batches[ticket] = batch
        self._owner_copies.update(batch.owners)
        self._segment_copies.update(copy.segment for copy in batch.copies)
        return ticket

    # ------------------------------------------------------------ pool, workers, segments

    def _pool_lost(self) -> None:
        self._pool = None
        for device in list(self._workers):
            self._worker_lost(device, self._workers[device])
        self._departing.clear()
        self._actions = [action for action in self._actions if not isinstance(action, TellCopiesEnded)]
        self._gathered.clear()
        self._segments_leaving |= self._segments
        self._segments.clear()
        self._segments_unmappable.clear()
        self._unmap_unused()

    def _worker_joined(self, event: WorkerJoined) -> None:
        if event.device in self._workers:
            self._worker_lost(event.device, self._workers[event.device])
        self._workers[event.device] = event.generation

    def _worker_lost(self, device: int, generation: int) -> None:
        if self._workers.get(device) == generation:
            del self._workers[device]
            self._gathered = {key: indices for key, indices in self._gathered.items() if key[1] != device}
            for load in list(self._loads.values()):
                self._fail(load, load.parts.get(device, ()), Code.WORKER_LOST)
                self._end_load_if_closed(load)
            for store in list(self._stores.values()):
                part = store.parts.get(device, ())
                open_index = next((index for index in part if store.states[index] not in _STORE_CLOSED), None)
                if open_index is not None:
                    self._cut(store, open_index, Code.WORKER_LOST)
                    self._end_store_if_closed(store)
        self._departing.add((device, generation))
        self._tell_departed()

    def _tell_departed(self) -> None:
        for device, generation in sorted(self._departing):
            if not self._owner_copies[device, generation]:
                self._departing.discard((device, generation))
                self._actions.append(TellCopiesEnded(device=device, generation=generation))

    def _drop_worker(self, device: int, why: str) -> None:
        self._counts["workers_dropped"] += 1
        self._actions.append(DropWorker(device=device, why=why))
        self._worker_lost(device, self._workers[device])

    def _segment_mapped(self, segment: int) -> None:
        self._segments.add(segment)
        self._load_queue.extend(self._load_parked.pop(segment, ()))
        for wires in list(self._request_stores.values()):
            self._advance(self._stores[wires[0]])

    def _segment_unmappable(self, segment: int) -> None:
        self._segments_unmappable.add(segment)
        self._abandon_segment(segment, Code.COPY_ERROR)

    def _segment_recalled(self, segment: int) -> None:
        self._segments_unmappable.discard(segment)
        self._segments.discard(segment)
        self._abandon_segment(segment, Code.CANCELLED)
        self._segments_leaving.add(segment)
        self._unmap_unused()

    def _abandon_segment(self, segment: int, code: Code) -> None:
        """Give up what has a slot in *segment* and is not launched."""
        self._load_parked.pop(segment, None)
        for load in list(self._loads.values()):
            held = [index for index, slot in load.slots.items() if slot[0] == segment]
            self._fail(load, held, code)
            self._end_load_if_closed(load)
        for store in list(self._stores.values()):
            granted = [
                index
                for index, slot in store.slots.items()
                if slot[0] == segment and store.states[index] is StoreState.GRANTED
            ]
            if granted:
                self._cut(store, min(granted), code)
                self._end_store_if_closed(store)

    def _unmap_unused(self) -> None:
        for segment in sorted(self._segments_leaving):
            if not self._segment_copies[segment]:
                self._segments_leaving.discard(segment)
                self._actions.append(UnmapSegment(segment=segment))

    # ------------------------------------------------------------ time and flush

    def _expire(self, now_ns: int) -> None:
        for load in list(self._loads.values()):
            if load.deadline_ns > now_ns:
                break
            if not load.expired:
                load.expired = True
                self._fail(load, range(len(load.keys)), Code.DEADLINE)
                self._end_load_if_closed(load)
        for store in list(self._stores.values()):
            if store.deadline_ns > now_ns:
                break
            if not store.expired:
                store.expired = True
                self._cut_unlaunched(store, Code.DEADLINE)

    def _flush(self, jobs: frozenset[int]) -> None:
        for load in [load for load in self._loads.values() if load.job in jobs]:
            self._flush_load(load)
        for store in [store for store in self._stores.values() if store.job in jobs]:
            self._cut_unlaunched(store, Code.CANCELLED)

    # ------------------------------------------------------------ small things

    def _jobs(self) -> Iterable[_Job]:
        yield from self._loads.values()
        yield from self._stores.values()

    def _gather(
        self, message: type[SendRelease | SendFilled | SendStoreCancel], device: int, wire: int, wire_index: int
    ) -> None:
        if device in self._workers:
            self._gathered.setdefault((message, device, wire), []).append(wire_index)

    def _end(self, job: _Job, kind: JobKind) -> None:
        failed = tuple(sorted(job.codes.items()))
        self._counts[f"{kind}s_ended"] += 1
        self._actions.append(EndJob(job=job.job, kind=kind, wire=job.wire, failed=failed))

    # ------------------------------------------------------------ invariants

    def validate(self) -> None:
        """Check every invariant of the theory above."""
        copying: Counter[tuple[int, int]] = Counter()
        segments: Counter[int] = Counter()
        owners: Counter[tuple[int, int]] = Counter()
        for batch in self._batches.values():
            copying.update((copy.wire, copy.object_index) for copy in batch.copies)
            segments.update(copy.segment for copy in batch.copies)
            owners.update(batch.owners)
        invariant(copying.total() == len(copying), "an object is copied twice at once")
        invariant(segments == self._segment_copies, "copies per segment are miscounted")
        invariant(owners == self._owner_copies, "copies per worker are miscounted")
        states: defaultdict[int, set[int]] = defaultdict(set)
        for load in self._loads.values():
            self._validate_load(load, states[load.wire])
        for store in self._stores.values():
            self._validate_store(store, states[store.wire])
        invariant({(w, i) for w, indices in states.items() for i in indices} == set(copying), "copies without a job")
        queued = sorted(wire for wires in self._request_stores.values() for wire in wires)
        invariant(queued == sorted(self._stores), "stores and their requests disagree")
        invariant(not (self._segments & self._segments_leaving), "a segment is used and leaving")

    def _validate_load(self, load: _Load, copying: set[int]) -> None:
        invariant(load.open == sum(state not in _LOAD_CLOSED for state in load.states), "open loads miscounted")
        invariant(load.open > 0, "a closed load was not ended", wire=load.wire)
        with_slot = {i for i, state in enumerate(load.states) if state in (LoadState.HELD, LoadState.COPYING)}
        invariant(set(load.slots) == with_slot, "slots of a load disagree with its states", wire=load.wire)
        copying.update(i for i, state in enumerate(load.states) if state is LoadState.COPYING)
        for index, state in enumerate(load.states):
            if state in (LoadState.WANTED, LoadState.HELD):
                invariant(load.devices[index] in self._workers, "a load waits for a lost worker", wire=load.wire)
                invariant(not load.flushed and not load.expired, "a flushed or expired load waits", wire=load.wire)

    def _validate_store(self, store: _Store, copying: set[int]) -> None:
        invariant(store.open == sum(state not in _STORE_CLOSED for state in store.states), "open stores miscounted")
        invariant(store.open > 0, "a closed store was not ended", wire=store.wire)
        with_slot = (StoreState.GRANTED, StoreState.COPYING, StoreState.COPIED)
        held = {i for i, state in enumerate(store.states) if state in with_slot}
        invariant(set(store.slots) == held, "slots of a store disagree with its states", wire=store.wire)
        copying.update(i for i, state in enumerate(store.states) if state is StoreState.COPYING)
        unfilled = False
        for index, state in enumerate(store.states):
            if state is StoreState.FILLED:
                invariant(not unfilled, "a store was filled behind a hole", wire=store.wire, index=index)
            unfilled |= state not in (StoreState.FILLED, StoreState.EXISTS)
            if state in _UNLAUNCHED:
                invariant(store.devices[index] in self._workers, "a store waits for a lost worker", wire=store.wire)
                invariant(index < store.cut, "a store waits behind its cut", wire=store.wire, index=index)
