"""
Loads: what each waiting object waits for, and which file is opened and read next.

Theory. An index of a load job becomes a *waiter*. A waiter waits for one of: a resident slot (then
it is answered at once), a read of its object that somebody already wants (it joins), a store whose
ranks are filling the object (it joins), or a read of its own. One object is read once, however many
jobs, ranks and engines want it.

Opens run ahead of reads, bounded apart, so that metadata latency costs neither a slot nor depth. A
size without free slots keeps only its share of that bound: what it opened beyond is given back when
another size needs the place. A read takes its slot last, when a slot and a place in the drive's depth
are both there; nothing else is held while waiting, so no load waits for a slot that only its own
later part could free, and a load larger than staging streams through. Clients take turns.

A read past its deadline fails its waiters and is forgotten: no new waiter joins it. Its slot stays
filling until it ends.
"""

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvpool.core.clients import Client, LoadJob, Waiter
from kvpool.core.deadlines import Deadlines
from kvpool.core.drive import Drive
from kvpool.core.key_index import KeyIndex
from kvpool.core.object_events import (
    Action,
    CloseFile,
    LoadWanted,
    ObjectId,
    OpenFile,
    ReadFile,
    SendLoadFailed,
    SetAside,
)
from kvpool.core.reads import Lane, Phase, Read
from kvpool.core.residency import Residency
from kvpool.core.slots import Slot, SlotPool, SlotStep
from kvpool.errors import Code, ProtocolError, invariant

if TYPE_CHECKING:
    from kvpool.core.preloads import Preloads
    from kvpool.core.stores import Stores


class Loads:
    """
    All loads of one device.

    Attributes:
        reads: The read that new waiters of an object join; not those that are past their deadline.
        lanes: One per slot size, in turns.
        open_lookahead: Opens in flight plus files opened and not yet read, at most; at least one per slot size.
        queued, opening, opened: Reads in these phases, over all lanes.
        relieved: Clients with parked waiters that use less now.
        preload_reads: How many of *reads* are the preloads'.
        stores, preloads: Set by the table.
        counts: Counters, shared with the table.
    """

    stores: "Stores"
    preloads: "Preloads"

    def __init__(
        self, *, open_lookahead: int, deadline_ns: int, patience_ns: int, index: KeyIndex, residency: Residency,
        drive: Drive, actions: list[Action], counts: dict[str, int],
    ) -> None:  # fmt: skip
        self.open_lookahead = open_lookahead
        self.index = index
        self.residency = residency
        self.drive = drive
        self.actions = actions
        self.counts = counts
        self.reads: dict[ObjectId, Read] = {}
        self.lanes: deque[Lane] = deque()
        self.lane_of: dict[SlotPool, Lane] = {}
        self.deadlines: Deadlines[Waiter] = Deadlines(deadline_ns, lambda waiter, due_ns: waiter.due_ns == due_ns)
        self.patience: Deadlines[Lane] = Deadlines(patience_ns, lambda lane, due_ns: lane.due_ns == due_ns)
        self.queued = self.opening = self.opened = 0
        self.relieved: list[tuple[Client, SlotPool]] = []
        self.preload_reads = 0

    def add_pool(self, pool: SlotPool) -> None:
        """Serve that slot size too."""
        lane = Lane(pool)
        self.lanes.append(lane)
        self.lane_of[pool] = lane

    # ------------------------------------------------------------ waiters come

    def want(self, client: Client, event: LoadWanted, pools: dict[int, SlotPool], now_ns: int) -> None:
        """Ask for objects of *client*; raises ProtocolError before anything changes."""
        space, job_number, first, keys = client.space, event.job, event.first, event.keys
        sizes = [space.size_of(key) for key in keys]
        job = client.loads.get(job_number)
        if job is not None and first < job.end:
            raise ProtocolError("index of a load job asked for twice", job=job_number, index=first)
        if not keys:
            return
        if job is None:
            job = client.loads[job_number] = LoadJob(client, job_number)
        job.end = first + len(keys)
        self.counts["loads_wanted"] += len(keys)
        waiters = [
            Waiter(job, first + offset, ObjectId(space.namespace, key, client.rank), pools[size])
            for offset, (key, size) in enumerate(zip(keys, sizes, strict=True))
        ]
        for waiter in waiters:
            waiter.due_ns = self.deadlines.start(waiter, now_ns)
            job.waiting[waiter.index] = waiter
        for waiter in waiters:
            self.place(waiter)

    def refuse(self, event: LoadWanted, code: Code) -> None:
        """Answer all of them with *code*."""
        self.counts["loads_failed"] += len(event.keys)
        self.actions.extend(
            SendLoadFailed(client=event.client, job=event.job, index=event.first + offset, code=code)
            for offset in range(len(event.keys))
        )

    def place(self, waiter: Waiter) -> None:
        """Answer *waiter*, or let it wait for what will bring its object."""
        slot = self.residency.objects.get(waiter.object)
        if slot is not None:
            if self.count(waiter):
                self.counts["loads_resident"] += 1
                self.serve(waiter, slot)
            return
        read = self.reads.get(waiter.object)
        if read is None:
            if self.stores.join(waiter):
                return
            if self.index.is_removing(waiter.object):
                self.fail(waiter, Code.MISSING)
                return
            read = Read(object=waiter.object, pool=waiter.pool, owner=waiter.job.client.client)
            self.reads[waiter.object] = read
            self.lane_of[waiter.pool].queued.push(read.owner, read)
            self.queued += 1
            self.preloads.adopt(self.preloads.demands.get(waiter.object), read)
        elif read.phase is Phase.READING and not self.count(waiter):
            return
        if read.preload:
            self.preloads.hand_over(read)
        waiter.place = read
        read.waiters[waiter] = None

    def count(self, waiter: Waiter) -> bool:
        """Count a slot as used for *waiter*; at its client's cap park it and return False."""
        if waiter.counted:
            return True
        client = waiter.job.client
        if client.capped(waiter.pool):
            self.counts["loads_parked"] += 1
            client.park(waiter)
            return False
        waiter.counted = True
        client.begin_use(waiter.pool)
        return True

    # ------------------------------------------------------------ waiters go

    def serve(self, waiter: Waiter, slot: Slot) -> None:
        """Answer a counted waiter; it is where it waited no more."""
        job = waiter.job
        del job.waiting[waiter.index]
        waiter.due_ns = 0
        waiter.place = None
        self.counts["loads_ready"] += 1
        if waiter.object.key not in self.index.namespaces[waiter.object.namespace].young:
            self.counts["loads_older"] += 1
        self.residency.pin(job, waiter.index, slot)

    def fail(self, waiter: Waiter, code: Code) -> None:
        """Answer a waiter that was taken from where it waited: its object will not come."""
        self._forget(waiter)
        self.counts["loads_failed"] += 1
        self.counts[f"loads_failed_{code.name.lower()}"] += 1
        job = waiter.job
        self.actions.append(SendLoadFailed(client=job.client.client, job=job.job, index=waiter.index, code=code))

    def _forget(self, waiter: Waiter) -> None:
        job = waiter.job
        del job.waiting[waiter.index]
        waiter.due_ns = 0
        if waiter.counted:
            waiter.counted = False
            self.end_use(job.client, waiter.pool)
        job.maybe_forget()

    def end_use(self, client: Client, pool: SlotPool) -> None:
        """*client* uses one slot less; its parked waiters may go on."""
        client.end_use(pool)
        if client.parked.get(pool):
            self.relieved.append((client, pool))

    def _detach(self, waiter: Waiter) -> None:
        """Take *waiter* from where it waits; what nobody waits for any more is not started."""
        place = waiter.place
        waiter.place = None
        if place is None:
            del waiter.job.client.parked[waiter.pool][waiter]
            return
        del place.waiters[waiter]
        if isinstance(place, Read) and not place.waiters:
            self._unwanted(place)

    def _unwanted(self, read: Read) -> None:
        lane = self.lane_of[read.pool]
        if read.preload:
            if read.phase is Phase.OPENED:
                self.preloads.close(read)
        elif read.phase is Phase.QUEUED:
            lane.queued.discard(read.owner, read)
            self.queued -= 1
            del self.reads[read.object]
            self.preloads.unread(read)
        elif read.phase is Phase.OPENED:
            self._take_opened(lane, read)
            self.close(read)
            self.preloads.unread(read)
        elif read.demand is not None:
            self.preloads.take_over(read)

    def add_opened(self, read: Read) -> None:
        """*read* waits for a slot and depth."""
        lane = self.lane_of[read.pool]
        read.phase = Phase.OPENED
        lane.opened[read] = None
        lane.pool.wanted = len(lane.opened)
        self.opened += 1

    def _take_opened(self, lane: Lane, read: Read) -> None:
        """*read* waits for them no more."""
        del lane.opened[read]
        lane.pool.wanted = len(lane.opened)
        self.opened -= 1
        if not lane.opened:
            lane.end_wait()

    def close(self, read: Read) -> None:
        """Give back a file that is open."""
        self.actions.append(CloseFile(op=read.op))
        self.end(read)

    def end(self, read: Read) -> None:
        """The read is over."""
        self.drive.end(read)
        self._unlist(read)

    def _unlist(self, read: Read) -> None:
        """Nobody joins that read any more."""
        if self.reads.get(read.object) is read:
            del self.reads[read.object]
            self.preload_reads -= read.preload

    def cancel(self, client: Client, job_number: int) -> None:
        """What is not answered of that job is not wanted any more, and gets no answer. An ended job has nothing."""
        job = client.loads.get(job_number)
        if job is not None:
            self._cancel(job)

    def _cancel(self, job: LoadJob) -> None:
        for waiter in list(job.waiting.values()):
            self._detach(waiter)
            self._forget(waiter)

    def release(self, client: Client, job_number: int, indices: list[int]) -> None:
        """Copies out of these slots have ended; raises ProtocolError before anything changes."""
        job = client.loads.get(job_number)
        if job is None or len(set(indices)) != len(indices) or not all(index in job.pinned for index in indices):
            raise ProtocolError("released a slot that it does not hold", client=client.client, job=job_number)
        for index in indices:
            slot = job.pinned.pop(index)
            pool = slot.pool
            self.residency.unpin(slot)
            self.end_use(client, pool)
        job.maybe_forget()

    def leave(self, client: Client) -> None:
        """*client* departed: nothing is answered, its pins wait for proof."""
        for job in list(client.loads.values()):
            self._cancel(job)
            for slot in job.pinned.values():
                self.residency.haunt(client, slot)
            job.pinned.clear()
        client.loads.clear()
        client.parked.clear()

    def expire(self, now_ns: int) -> None:
        """Fail the waiters that are past their deadline; notice who has waited long enough for a slot."""
        for lane in self.patience.expired(now_ns):
            lane.due_ns = 0
            lane.impatient = True
        for waiter in self.deadlines.expired(now_ns):
            self._detach(waiter)
            self.fail(waiter, Code.DEADLINE)

    def fail_reads(self, clients: Iterable[Client], code: Code) -> None:
        """Fail every waiter that a read, or its turn for one, would have to serve; a store may still serve its own."""
        for client in clients:
            for job in list(client.loads.values()):
                for waiter in list(job.waiting.values()):
                    if waiter.place is None or isinstance(waiter.place, Read):
                        self._detach(waiter)
                        self.fail(waiter, code)

    # ------------------------------------------------------------ reads run

    def pump(self, now_ns: int) -> None:
        """Start what may start now."""
        if self.relieved:
            self._unpark()
        if self.preloads.opened and self.active():
            self.preloads.give_back()
        if self.opened and self.drive.may_read():
            self._start_reads(now_ns)
        if self.queued and (len(self.lanes) > 1 or self.opening + self.opened < self.open_lookahead):
            self._start_opens(now_ns)
        self.drive.loads = self.active()

    def active(self) -> int:
        """Return how many objects loads wait for, open or read, by reads."""
        return len(self.reads) - self.preload_reads

    def _unpark(self) -> None:
        relieved, self.relieved = self.relieved, []
        for client, pool in relieved:
            parked = client.parked.get(pool)
            while parked and not client.capped(pool):
                waiter, _ = parked.popitem(last=False)
                self.count(waiter)
                self.place(waiter)

    def relieve_all(self, clients: list[Client]) -> None:
        """Caps may have changed: look at every parked waiter's client again."""
        self.relieved.extend((client, pool) for client in clients for pool, parked in client.parked.items() if parked)

    def _start_reads(self, now_ns: int) -> None:
        lanes = self.lanes
        idle = 0
        while idle < len(lanes) and self.drive.may_read():
            lane = lanes[0]
            lanes.rotate(-1)
            read = self._next_to_read(lane, now_ns) if lane.opened else None
            if read is not None:
                idle = 0
                self._start_read(lane, read, now_ns)
            else:
                idle += 1

    def _next_to_read(self, lane: Lane, now_ns: int) -> Read | None:
        """Return who reads next: the first, with a spare slot or an admission's; else the first with one reserved."""
        first, pool = next(iter(lane.opened)), lane.pool
        if pool.free_for_loads() or pool.admitted == 0:
            return first if pool.free_for_loads() else None
        if lane.impatient:
            return first if self.preloads.make_room(pool, len(lane.opened)) else None
        for read in lane.opened:
            if read.demand is not None and read.demand.reserved:
                return read
        if lane.due_ns == 0:
            lane.due_ns = self.patience.start(lane, now_ns)
        return None

    def _start_read(self, lane: Lane, read: Read, now_ns: int) -> None:
        self._take_opened(lane, read)
        for waiter in list(read.waiters):
            if not self.count(waiter):
                del read.waiters[waiter]
        if not read.waiters:
            self.close(read)
            self.preloads.unread(read)
            return
        lane.end_wait()
        self.preloads.take_reservation(read)
        read.phase = Phase.READING
        read.slot = self.residency.take(lane.pool, read.object, by_store=False)
        self.drive.reads += 1
        self.drive.resume(read, now_ns)
        self.actions.append(ReadFile(op=read.op, object=read.object, slot=read.slot.ref))

    def _start_opens(self, now_ns: int) -> None:
        lanes = self.lanes
        active = sum(bool(lane.queued or lane.places) for lane in lanes)
        places_max = max(self.open_lookahead, active)
        share = places_max // max(1, active)
        idle = 0
        while idle < len(lanes):
            lane = lanes[0]
            lanes.rotate(-1)
            idle += 1
            if not lane.queued or lane.places >= max(share, lane.pool.spare()):
                continue
            full = self.preloads.places() >= places_max
            if full and (lane.places >= share or not self._give_back_one(share)):
                continue
            idle = 0
            self._start_open(lane, now_ns)

    def _give_back_one(self, share: int) -> bool:
        """Close a file of a size that has more than its share open and no slot to read it into; it is opened again."""
        for lane in self.lanes:
            if lane.opened and lane.places > share and not lane.pool.spare():
                read = next(reversed(lane.opened))
                self._take_opened(lane, read)
                self.actions.append(CloseFile(op=read.op))
                self.drive.end(read)
                read.phase = Phase.QUEUED
                lane.queued.push_first(read.owner, read)
                self.queued += 1
                return True
        return False

    def _start_open(self, lane: Lane, now_ns: int) -> None:
        read = lane.queued.pop()
        read.phase = Phase.OPENING
        lane.opening += 1
        self.opening += 1
        self.queued -= 1
        op = self.drive.begin(read, now_ns)
        self.actions.append(OpenFile(op=op, object=read.object))

    # ------------------------------------------------------------ reads end

    def file_opened(self, op: int, error: Code | None) -> None:
        """An OpenFile ended."""
        read = self.drive.find(op, Read)
        invariant(read.phase is Phase.OPENING, "opened a file that was not to be opened", op=op)
        if read.preload:
            self.preloads.opening -= 1
        else:
            self.lane_of[read.pool].opening -= 1
            self.opening -= 1
        self.drive.pause(read)
        if error is not None:
            self._failed(read, error)
            return
        self.index.add(read.object, self.actions)
        if read.waiters:
            self.add_opened(read)
        elif read.preload:
            self.preloads.file_opened(read)
        else:
            self.close(read)

    def file_read(self, op: int, error: Code | None) -> None:
        """A ReadFile ended."""
        read = self.drive.find(op, Read)
        slot = read.slot
        if slot is None:
            invariant(False, "read a file that was not to be read", op=op)
            return
        self.drive.reads -= 1
        read.slot = None
        if error is not None:
            slot.step(SlotStep.SPOIL)
            self._failed(read, error)
            return
        self.counts["reads"] += 1
        self.counts["read_bytes"] += read.pool.slot_bytes
        self.end(read)
        self.residency.fill(slot, held=False)
        if read.demand is not None:
            slot.unread = read.preload
            self.preloads.arrived(slot)
        for waiter in read.waiters:
            self.serve(waiter, slot)
        read.waiters.clear()
        demand = self.preloads.demands.get(read.object)
        awaited = read.object in self.reads or (demand is not None and demand.slot is None)
        if awaited and self.residency.objects.get(read.object) is slot:
            # This one was late, and another began since, or is to begin: who waits for that one has the bytes now.
            self.object_stored(slot)
        self.residency.settle(slot)

    def _failed(self, read: Read, error: Code) -> None:
        self.counts["read_errors"] += 1
        if error is Code.CORRUPT:
            self.counts["corrupt"] += 1
            self.actions.append(SetAside(object=read.object))
        if error in (Code.CORRUPT, Code.MISSING):
            self.index.remove(read.object, self.actions)
        self.end(read)
        self.preloads.give_up(read)
        self._fail_waiters(read, error)

    def _fail_waiters(self, read: Read, error: Code) -> None:
        waiters = list(read.waiters)
        read.waiters.clear()
        for waiter in waiters:
            waiter.place = None
            self.fail(waiter, error)

    def read_late(self, read: Read) -> None:
        """An open or a read is past its deadline: its waiters fail, itself stays in flight."""
        self._unlist(read)
        self.preloads.give_up(read)
        self._fail_waiters(read, Code.DEADLINE)

    def object_stored(self, slot: Slot) -> None:
        """A store, or a read that was late, made that object resident: whoever waits for a read of it has it now."""
        self.preloads.arrived(slot)
        read = self.reads.get(slot.object) if slot.object is not None else None
        if read is None:
            return
        waiters = list(read.waiters)
        read.waiters.clear()
        self._unwanted(read)
        for waiter in waiters:
            waiter.place = None
            self.place(waiter)

    # ------------------------------------------------------------ looks

    def validate(self) -> None:
        """Check that queues, phases and bounds agree."""
        places = sum(lane.places for lane in self.lanes)
        invariant(places <= max(self.open_lookahead, len(self.lanes)), "more opens than the look-ahead", places=places)
        for lane in self.lanes:
            for read in lane.queued:
                invariant(read.phase is Phase.QUEUED, "queued read in another phase", phase=read.phase.value)
                invariant(self.reads.get(read.object) is read, "queued read cannot be joined", object=read.object)
            for read in lane.opened:
                invariant(read.phase is Phase.OPENED, "opened read in another phase", phase=read.phase.value)
            for read in (*lane.queued, *lane.opened):
                invariant(bool(read.waiters), "a read nobody wants is not given back", object=read.object)
        running = [read for read in self.drive.ops.values() if isinstance(read, Read)]
        reading = sum(read.phase is Phase.READING for read in running)
        opening = sum(read.phase is Phase.OPENING and not read.preload for read in running)
        invariant(reading == self.drive.reads, "drive miscounts reads", reads=self.drive.reads)
        invariant(opening == sum(lane.opening for lane in self.lanes), "lanes miscount opens", opening=opening)
        invariant(opening == self.opening, "opens are miscounted", opening=opening, counted=self.opening)
        invariant(self.queued == sum(len(lane.queued) for lane in self.lanes), "queued reads are miscounted")
        invariant(self.opened == sum(len(lane.opened) for lane in self.lanes), "opened reads are miscounted")
        for object_id, read in self.reads.items():
            invariant(read.object == object_id, "read of another object", object=object_id)
            for waiter in read.waiters:
                invariant(waiter.place is read, "waiter waits elsewhere", object=object_id)
                reserved = waiter.counted or read.phase is not Phase.READING
                invariant(reserved, "a slot is read for a waiter that does not count it", object=object_id)
