r"""
A rank's loads: which objects are copied out of which slots, and when a load has ended.

    WANTED -> HELD -> COPYING -> LANDED        HELD: the slot is pinned for us, the copy not launched
        \-------\---------\----> FAILED

What is not launched can fail at any time (the worker says so, it is lost, the deadline passes, the engine flushes);
what is launched lands or fails when its copy ends. A slot that was pinned for us is released exactly once: when its
copy ended, or when its object failed before. Slots in a segment that is not mapped yet wait for that.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool.core.rank_base import Ground, Job
from kvpool.core.rank_copies import Copies, Owner
from kvpool.core.rank_events import (
    JobKind,
    LoadsFailed,
    LoadSubmitted,
    SendLoad,
    SendLoadCancel,
    SendRelease,
    SlotCopy,
    SlotsReady,
)
from kvpool.errors import Code, invariant
from kvpool.wire.messages import SlotGrant

_CODES = frozenset(int(code) for code in Code)


class LoadState(enum.IntEnum):
    """Where one object of a load is."""

    WANTED = 0
    HELD = 1
    COPYING = 2
    LANDED = 3
    FAILED = 4


_CLOSED = (LoadState.LANDED, LoadState.FAILED)
#: A worker may answer for these; FAILED: the answer crossed our giving up.
_ANSWERABLE = (LoadState.WANTED, LoadState.FAILED)


@dataclass(slots=True, kw_only=True, eq=False)
class _Load(Job):
    """A load; *flushed*: all of it counts as failed, what landed too."""

    states: list[LoadState] = field(default_factory=list)
    flushed: bool = False


class Loads:
    """See the module. Methods that take a worker's answer return what is wrong with it, or None."""

    def __init__(self, ground: Ground, copies: Copies) -> None:
        self._ground = ground
        self._copies = copies
        self._jobs: dict[int, _Load] = {}
        #: HELD objects to launch at the end of the round, and those that wait for their segment.
        self._queue: list[tuple[int, int]] = []
        self._parked: dict[int, list[tuple[int, int]]] = {}

    def __len__(self) -> int:
        """Loads that have not ended."""
        return len(self._jobs)

    def submitted(self, event: LoadSubmitted, now_ns: int) -> None:
        """Ask the workers; fail at once what no worker can be asked for."""
        pool = self._ground.pool
        load = _Load(
            job=event.job,
            wire=event.wire,
            keys=event.keys,
            devices=event.devices,
            deadline_ns=now_ns + (pool.load_deadline_ns if pool else 0),
        )
        load.states = [LoadState.WANTED] * len(load.keys)
        self._jobs[load.wire] = load
        self._ground.counts["loads_submitted"] += 1
        for device, indices in load.parts.items():
            if device in self._ground.workers:
                keys = [load.keys[index] for index in indices]
                self._ground.act(SendLoad(device=device, wire=load.wire, keys=keys))
            else:
                self._fail(load, indices, Code.WORKER_LOST)
        self._end_if_closed(load)

    def ready(self, event: SlotsReady) -> str | None:
        """Hold the slots that are wanted, give back the others."""
        load = self._jobs.get(event.wire)
        if load is None:
            # Crossed our LoadCancel, or the end of the job: nobody wants it, the pin is given back.
            for grant in event.slots:
                self._ground.gather(SendRelease, event.device, event.wire, grant.index)
            return None
        if not load.may_answer(event.device, [grant.index for grant in event.slots], load.states, _ANSWERABLE):
            return "Ready for an object that was not asked for"
        part = load.parts[event.device]
        for grant in event.slots:
            self._hold(load, part[grant.index], grant)
        self._end_if_closed(load)
        return None

    def failed(self, event: LoadsFailed) -> str | None:
        """Close what the worker cannot bring."""
        load = self._jobs.get(event.wire)
        if load is None:
            return None
        if not load.may_answer(event.device, [one.index for one in event.objects], load.states, _ANSWERABLE):
            return "LoadFailed for an object that was not asked for"
        if not {one.code for one in event.objects} <= _CODES:
            return "LoadFailed with an unknown code"
        part = load.parts[event.device]
        for one in event.objects:
            self._fail(load, [part[one.index]], Code(one.code), cancel=False)
        self._end_if_closed(load)
        return None

    def launch(self) -> None:
        """Launch all that is held and mapped, as one batch."""
        queue, self._queue = self._queue, []
        copies: list[SlotCopy] = []
        jobs: list[Job] = []
        for wire, index in queue:
            load = self._jobs.get(wire)
            if load is not None and load.states[index] is LoadState.HELD:
                load.states[index] = LoadState.COPYING
                copies.append(SlotCopy(wire, index, *load.slots[index]))
                jobs.append(load)
        if copies:
            self._copies.launch_load(copies, jobs)

    def copied(self, copy: SlotCopy, owner: Owner, *, failed: bool) -> None:
        """One copy has ended: its slot is released, whatever became of the job."""
        load = self._jobs[copy.wire]
        del load.slots[copy.object_index]
        if self._ground.workers.get(owner[0]) == owner[1]:
            self._ground.gather(SendRelease, owner[0], copy.wire, load.positions[copy.object_index])
        if failed or load.flushed:
            self._close_failed(load, copy.object_index, Code.COPY_ERROR if failed else Code.CANCELLED)
        else:
            load.states[copy.object_index] = LoadState.LANDED
            load.open -= 1
            self._ground.counts["objects_loaded"] += 1
        self._end_if_closed(load)

    def worker_lost(self, device: int) -> None:
        """Fail what is not launched of that device."""
        for load in list(self._jobs.values()):
            self._fail(load, load.parts.get(device, ()), Code.WORKER_LOST)
            self._end_if_closed(load)

    def pool_lost(self) -> None:
        """No segment is waited for any more; the workers were lost before."""
        self._parked.clear()

    def segment_mapped(self, segment: int) -> None:
        """Queue what waited for it."""
        self._queue.extend(self._parked.pop(segment, ()))

    def segment_abandoned(self, segment: int, code: Code) -> None:
        """Fail what is held there and not launched."""
        self._parked.pop(segment, None)
        for load in list(self._jobs.values()):
            self._fail(load, [index for index, slot in load.slots.items() if slot[0] == segment], code)
            self._end_if_closed(load)

    def expire(self, now_ns: int) -> None:
        """Fail what is not launched of loads past their deadline; they expire in the order they came."""
        for load in list(self._jobs.values()):
            if load.deadline_ns > now_ns:
                break
            if not load.expired:
                load.expired = True
                self._fail(load, range(len(load.keys)), Code.DEADLINE)
                self._end_if_closed(load)

    def flush(self, jobs: frozenset[int]) -> None:
        """Fail these loads as a whole: what landed is stale. Launched copies end them."""
        for load in [load for load in self._jobs.values() if load.job in jobs]:
            load.flushed = True
            for index, state in enumerate(load.states):
                if state is LoadState.LANDED:
                    load.states[index] = LoadState.FAILED
                    load.codes[index] = Code.CANCELLED
            self._fail(load, range(len(load.keys)), Code.CANCELLED)
            self._end_if_closed(load)

    def next_deadline_ns(self) -> int | None:
        """Return when `expire` is due next."""
        return next((load.deadline_ns for load in self._jobs.values() if not load.expired), None)

    def wires_of(self, jobs: frozenset[int]) -> set[int]:
        """Return the wire numbers of these jobs."""
        return {load.wire for load in self._jobs.values() if load.job in jobs}

    def copying(self) -> set[tuple[int, int]]:
        """Return (wire, index) of every object whose state is COPYING."""
        return {
            (load.wire, index)
            for load in self._jobs.values()
            for index, state in enumerate(load.states)
            if state is LoadState.COPYING
        }

    def validate(self) -> None:
        """Check that states, slots and counts of every load agree."""
        for load in self._jobs.values():
            open_count = sum(state not in _CLOSED for state in load.states)
            invariant(load.open == open_count, "open objects of a load miscounted", wire=load.wire)
            invariant(load.open > 0, "a closed load was not ended", wire=load.wire)
            held = {i for i, state in enumerate(load.states) if state in (LoadState.HELD, LoadState.COPYING)}
            invariant(set(load.slots) == held, "slots of a load disagree with its states", wire=load.wire)
            for index, state in enumerate(load.states):
                if state in (LoadState.WANTED, LoadState.HELD):
                    known = load.devices[index] in self._ground.workers
                    invariant(known, "a load waits for a lost worker", wire=load.wire)
                    invariant(not (load.flushed or load.expired), "a load that was given up waits", wire=load.wire)

    # ------------------------------------------------------------ inside

    def _hold(self, load: _Load, index: int, grant: SlotGrant) -> None:
        if load.states[index] is LoadState.FAILED:
            self._ground.gather(SendRelease, load.devices[index], load.wire, grant.index)
            return
        load.states[index] = LoadState.HELD
        load.slots[index] = (grant.segment, grant.offset)
        if grant.segment in self._ground.segments:
            self._queue.append((load.wire, index))
        elif grant.segment in self._ground.segments_unmappable:
            self._fail(load, [index], Code.COPY_ERROR)
        else:
            self._parked.setdefault(grant.segment, []).append((load.wire, index))

    def _fail(self, load: _Load, indices: Iterable[int], code: Code, *, cancel: bool = True) -> None:
        """Close what is not launched of *indices*; *cancel*: the worker does not know yet that it is not wanted."""
        cancel_devices: set[int] = set()
        for index in indices:
            state, device = load.states[index], load.devices[index]
            if state is LoadState.HELD:
                del load.slots[index]
                self._ground.gather(SendRelease, device, load.wire, load.positions[index])
            elif state is LoadState.WANTED:
                cancel_devices.add(device)
            else:
                continue
            self._close_failed(load, index, code)
        if cancel:
            for device in sorted(cancel_devices & self._ground.workers.keys()):
                self._ground.act(SendLoadCancel(device=device, wire=load.wire))

    def _close_failed(self, load: _Load, index: int, code: Code) -> None:
        load.states[index] = LoadState.FAILED
        load.codes[index] = code
        load.open -= 1
        self._ground.counts["objects_failed"] += 1

    def _end_if_closed(self, load: _Load) -> None:
        if load.open == 0 and self._jobs.pop(load.wire, None) is not None:
            self._ground.end(load, JobKind.LOAD)
