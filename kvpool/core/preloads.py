"""
Preloads: objects of waiting requests are read ahead, in what room and time the loads and stores leave.

Theory. An admission is asked for as a whole: slots for all its objects that are not on their way to staging
are reserved, above the floor and out of what is free or cached, or none is. From then on its slots are its
own: the reservation is kept in free slots, landed objects are protected, and no store and no other admission
gets them. Once every device has reserved (the commit), objects are read in the order of admissions, and only
while no load waits, opens or reads here. When a load appears, files opened ahead are given back and their
objects wait again; reads under way finish.

Residency belongs to the object: two admissions share a read and a slot, a load joins a preload's read and a
preload a load's, and what a store is filling is waited for instead of read. A read with waiters is a load's,
with its place among the loads' reads, even if a preload began it; when its last waiter goes, it is the
preload's again.

Only a load may take what is admitted, and only when no load got a slot of that size for `load_patience_ns`:
beside what is admitted there are always enough slots for loads to stream through, unless a rank is slow to
release, or stores fill them. It takes from the last admission in order, and that one is then withdrawn as a
whole, here and, by SendPreloadRevoked, everywhere: a request with a hole waits for its reads anyway. Slots
being read into come back when their reads end; they are counted before a further admission is taken. The
other reason is a recalled segment whose slots are missed. A key whose files are being removed is not read.

What is withdrawn becomes cache, or its slots become free.
"""

from bisect import insort
from collections.abc import Iterable

from kvpool.core.demands import Admission, Demand, Place
from kvpool.core.drive import Drive
from kvpool.core.key_index import KeyIndex, Namespace
from kvpool.core.loads import Loads
from kvpool.core.object_events import (
    Action,
    CloseFile,
    ObjectId,
    OpenFile,
    PreloadAsked,
    ReadFile,
    SendPreloadAnswer,
    SendPreloadLanded,
    SendPreloadRevoked,
)
from kvpool.core.reads import Phase, Read
from kvpool.core.residency import Residency
from kvpool.core.slots import Slot, SlotPool
from kvpool.core.store_offers import StoreKey
from kvpool.core.stores import Stores
from kvpool.errors import ProtocolError, invariant, unreachable


class Preloads:
    """
    All preloads of one device.

    Attributes:
        admissions: By number, reserved or committed.
        demands: What they want, by object.
        order: The admissions in the scheduler's order.
        ready: Those of them that are committed and have something pending, in order.
        opened: Files opened ahead for them, oldest first.
        opening: Opens in flight for them.
        accepting: False while draining.
    """

    def __init__(
        self, *, index: KeyIndex, residency: Residency, drive: Drive, loads: Loads, stores: Stores,
        actions: list[Action], counts: dict[str, int],
    ) -> None:  # fmt: skip
        self.index = index
        self.residency = residency
        self.drive = drive
        self.loads = loads
        self.stores = stores
        self.actions = actions
        self.counts = counts
        self.admissions: dict[int, Admission] = {}
        self.demands: dict[ObjectId, Demand] = {}
        self.order: list[Admission] = []
        self.ready: list[Admission] = []
        self.opened: dict[Read, None] = {}
        self.opening = 0
        self.accepting = True

    # ------------------------------------------------------------ admissions come and go

    def ask(self, event: PreloadAsked, pools: dict[int, SlotPool]) -> None:
        """Reserve slots for all that is missing of these keys, or none, and answer."""
        invariant(event.admission not in self.admissions, "an admission was asked for twice", admission=event.admission)
        space = self.index.namespaces.get(event.namespace)
        if space is None:
            unreachable("an admission of an unknown namespace", namespace=event.namespace)
        self.counts["preloads_asked"] += 1
        wanted = dict(self._objects(space, event.keys, pools))
        fresh = [
            Demand(object_id, pool)
            for object_id, pool in wanted.items()
            if object_id not in self.demands and self._may_come(object_id)
        ]
        reserved = self.accepting and self._fits(fresh)
        if reserved:
            self.counts["preloads_reserved"] += 1
            self._admit(Place(event.priority, event.arrival, event.admission), wanted, fresh)
        self.actions.append(SendPreloadAnswer(admission=event.admission, reserved=reserved))

    def _objects(
        self, space: Namespace, keys: Iterable[bytes], pools: dict[int, SlotPool]
    ) -> Iterable[tuple[ObjectId, SlotPool]]:
        for key in keys:
            try:
                pool = pools[space.size_of(key)]
            except ProtocolError:
                continue  # An engine announced it that has no such group; the device has no such object.
            for rank in range(space.rank_count):
                yield ObjectId(space.namespace, key, rank), pool

    def _may_come(self, object_id: ObjectId) -> bool:
        """Return whether that object is in staging, or its file may be there."""
        gone = object_id in self.index.missing or self.index.is_removing(object_id)
        return not gone or object_id in self.residency.objects or self.stores.brings(object_id)

    def _fits(self, fresh: list[Demand]) -> bool:
        """Return whether there is room above the floor for all of these, and a slot for each that needs one."""
        wanted: dict[SlotPool, int] = {}
        needed: dict[SlotPool, int] = {}
        for demand in fresh:
            pool = demand.pool
            wanted[pool] = wanted.get(pool, 0) + 1
            slot = self.residency.objects.get(demand.object)
            if slot is not None:
                needed[pool] = needed.get(pool, 0) + slot.cached
            elif not self._comes(demand.object):
                needed[pool] = needed.get(pool, 0) + 1
        return all(
            pool.admitted + count <= pool.above_floor()
            and needed.get(pool, 0) <= max(0, pool.spare() - pool.saved - pool.wanted)
            for pool, count in wanted.items()
        )

    def _comes(self, object_id: ObjectId) -> bool:
        """Return whether that object is about to be in a slot that somebody has for it."""
        read = self.loads.reads.get(object_id)
        return self.stores.brings(object_id) or (read is not None and read.phase is Phase.READING)

    def _admit(self, place: Place, wanted: dict[ObjectId, SlotPool], fresh: list[Demand]) -> None:
        admission = self.admissions[place.admission] = Admission(place)
        insort(self.order, admission, key=lambda known: known.place)
        for demand in fresh:
            self.demands[demand.object] = demand
            demand.pool.admitted += 1
            slot = self.residency.objects.get(demand.object)
            if slot is not None:
                demand.slot = slot
                self.residency.admit(slot)
                continue
            if not self._comes(demand.object):
                demand.reserved = True
                demand.pool.reserved += 1
            self.adopt(demand, self.loads.reads.get(demand.object))
        for object_id in wanted:
            shared = self.demands.get(object_id)
            if shared is not None:
                admission.add(shared)
        for pool in admission.sizes:
            self.residency.make_way(pool)

    def commit(self, number: int) -> None:
        """That admission may be read. One that was revoked meanwhile is unknown."""
        admission = self.admissions.get(number)
        if admission is None or admission.committed:
            return
        admission.committed = True
        admission.pending.extend(admission.demands.values())
        self._list(admission)
        self._maybe_landed(admission)

    def withdraw(self, number: int) -> None:
        """Nobody wants that admission any more. One that was revoked meanwhile is unknown."""
        admission = self.admissions.get(number)
        if admission is not None:
            self.counts["preloads_withdrawn"] += 1
            self._withdraw(admission)

    def _withdraw(self, admission: Admission) -> None:
        del self.admissions[admission.place.admission]
        self.order.remove(admission)
        if admission.listed:
            self.ready.remove(admission)
        for demand in list(admission.demands.values()):
            admission.remove(demand)
            if not demand.admissions:
                self._forget(demand)

    def _forget(self, demand: Demand) -> None:
        """Nobody wants that object any more: what is under way for it goes back, what has landed is cache."""
        del self.demands[demand.object]
        demand.pool.admitted -= 1
        self._end_reservation(demand)
        read, slot = demand.read, demand.slot
        demand.read = demand.slot = None
        if read is not None:
            read.demand = None
            if read in self.opened:
                self.close(read)
        if slot is not None:
            self.residency.dismiss(slot)

    def _end_reservation(self, demand: Demand) -> None:
        if demand.reserved:
            demand.reserved = False
            demand.pool.reserved -= 1

    def _revoke(self, admission: Admission) -> None:
        self.counts["preloads_revoked"] += 1
        self.actions.append(SendPreloadRevoked(admission=admission.place.admission))
        self._withdraw(admission)

    # ------------------------------------------------------------ others take

    def make_room(self, pool: SlotPool, waiting: int) -> bool:
        """
        Take slots of that size from the last admissions in order, for loads.

        Args:
            waiting: Opened reads of loads that wait for such a slot.

        Returns:
            Whether a load can take a slot now.
        """
        while not pool.free_for_loads():
            readings = [read for read in self._readings() if read.pool is pool and not read.waiters]
            draining = sum(read.demand is None for read in readings)
            if draining >= waiting or not (pool.reserved or pool.loose or draining < len(readings)):
                return False
            self._revoke(next(admission for admission in reversed(self.order) if pool in admission.sizes))
        return True

    def _readings(self) -> Iterable[Read]:
        return (op for op in self.drive.ops.values() if isinstance(op, Read) and op.phase is Phase.READING)

    def shrink(self, pool: SlotPool) -> None:
        """Slots of that size were recalled: what does not fit any more is revoked, from the last in order."""
        while pool.admitted > pool.above_floor() or pool.spare() < 0:
            self._revoke(next(admission for admission in reversed(self.order) if pool in admission.sizes))
        self.residency.make_way(pool)

    # ------------------------------------------------------------ reads change hands

    def adopt(self, demand: Demand | None, read: Read | None) -> None:
        """A demand has a read from now on, whoever began it."""
        if demand is None or read is None:
            return
        demand.read = read
        read.demand = demand
        if not read.waiters and not read.preload and read.phase is not Phase.QUEUED:
            self.take_over(read)

    def take_over(self, read: Read) -> None:
        """That read, with the kernel, has no waiter any more: it is ours."""
        read.preload = True
        self.loads.preload_reads += 1
        if read.phase is Phase.OPENING:
            self.loads.lane_of[read.pool].opening -= 1
            self.loads.opening -= 1
            self.opening += 1

    def hand_over(self, read: Read) -> None:
        """A load wants the object of our read: it is the loads'."""
        read.preload = False
        self.loads.preload_reads -= 1
        if read.phase is Phase.OPENING:
            self.loads.lane_of[read.pool].opening += 1
            self.loads.opening += 1
            self.opening -= 1
        elif read.phase is Phase.OPENED:
            del self.opened[read]
            self.loads.add_opened(read)

    def unread(self, read: Read) -> None:
        """The loads' read is over before it took a slot: its object waits for a read of ours."""
        demand = read.demand
        if demand is not None:
            read.demand = demand.read = None
            self._requeue(demand)

    def take_reservation(self, read: Read) -> None:
        """The loads' or our *read* takes a slot now: the one that is reserved for its object, if any."""
        if read.demand is not None:
            self._end_reservation(read.demand)

    # ------------------------------------------------------------ objects come

    def arrived(self, slot: Slot) -> None:
        """That object is resident: read, or stored by all ranks."""
        demand = self.demands.get(slot.object) if slot.object is not None else None
        if demand is None:
            return
        self._end_reservation(demand)
        if demand.read is not None:
            demand.read.demand = None
            demand.read = None
        old, demand.slot = demand.slot, slot
        self.residency.admit(slot)
        if old is not None:
            self.residency.dismiss(old)
            return
        for admission in demand.admissions:
            admission.missing -= 1
            self._maybe_landed(admission)

    def give_up(self, read: Read) -> None:
        """That read will not bring its object."""
        if read.demand is not None:
            self._give_up(read.demand)

    def _give_up(self, demand: Demand) -> None:
        self.counts["preloads_given_up"] += 1
        for admission in list(demand.admissions):
            admission.remove(demand)
            self._maybe_landed(admission)
        self._forget(demand)

    def store_dropped(self, store_key: StoreKey) -> None:
        """A store that was to bring these objects will not: read them, if there are slots."""
        for rank in range(store_key.space.rank_count):
            demand = self.demands.get(store_key.object_of(rank))
            if demand is None or demand.slot is not None:
                continue
            if demand.read is not None and demand.read.phase is Phase.READING:
                continue
            if not demand.reserved and demand.pool.spare() > demand.pool.saved + demand.pool.wanted:
                demand.reserved = True
                demand.pool.reserved += 1
                self.residency.make_way(demand.pool)
            if not demand.reserved:
                self._give_up(demand)
            elif demand.read is None:
                self._requeue(demand)

    def _maybe_landed(self, admission: Admission) -> None:
        if admission.committed and not admission.missing and not admission.landed:
            admission.landed = True
            self.counts["preloads_landed"] += 1
            self.actions.append(SendPreloadLanded(admission=admission.place.admission))

    # ------------------------------------------------------------ reads run

    def pump(self, now_ns: int) -> None:
        """Start what may start now."""
        if self.drive.loads:
            return
        while self.opened and self.drive.may_preload():
            self._start_read(next(iter(self.opened)), now_ns)
        while self.ready and self.accepting and self.places() < self.loads.open_lookahead:
            demand = self._next()
            if demand is None:
                return
            self._start_open(demand, now_ns)

    def places(self) -> int:
        """Return how many places of the look-ahead are taken, by loads too."""
        return self.opening + len(self.opened) + self.loads.opening + self.loads.opened

    def _list(self, admission: Admission) -> None:
        if not admission.listed:
            admission.listed = True
            insort(self.ready, admission, key=lambda known: known.place)

    def _requeue(self, demand: Demand) -> None:
        for admission in demand.admissions:
            if admission.committed:
                admission.pending.appendleft(demand)
                self._list(admission)

    def _next(self) -> Demand | None:
        """Return the next demand to read, in order; what is on its way meanwhile, or will be stored, is passed over."""
        while self.ready:
            admission = self.ready[0]
            while admission.pending:
                demand = admission.pending.popleft()
                waits = demand.reserved and demand.read is None
                if waits and not self.stores.brings(demand.object):
                    return demand
            admission.listed = False
            self.ready.pop(0)
        return None

    def _start_open(self, demand: Demand, now_ns: int) -> None:
        read = Read(object=demand.object, pool=demand.pool, owner=0, phase=Phase.OPENING, preload=True, demand=demand)
        demand.read = read
        self.loads.reads[read.object] = read
        self.loads.preload_reads += 1
        self.opening += 1
        op = self.drive.begin(read, now_ns)
        self.actions.append(OpenFile(op=op, object=read.object))

    def _start_read(self, read: Read, now_ns: int) -> None:
        del self.opened[read]
        self.take_reservation(read)
        read.phase = Phase.READING
        read.slot = self.residency.take(read.pool, read.object, by_store=False)
        self.counts["preload_reads"] += 1
        self.drive.reads += 1
        self.drive.resume(read, now_ns)
        self.actions.append(ReadFile(op=read.op, object=read.object, slot=read.slot.ref))

    def file_opened(self, read: Read) -> None:
        """Our OpenFile ended well."""
        demand = read.demand
        if demand is None:
            self.loads.close(read)
        elif demand.committed and demand.reserved and not self.loads.active():
            read.phase = Phase.OPENED
            self.opened[read] = None
        else:
            self.loads.close(read)
            self.unread(read)

    def give_back(self) -> None:
        """A load appeared: close what is opened ahead; it waits for its turn again."""
        for read in reversed(list(self.opened)):
            self.close(read)
            self.unread(read)

    def close(self, read: Read) -> None:
        """Give back a file that was opened ahead."""
        del self.opened[read]
        self.actions.append(CloseFile(op=read.op))
        self.loads.end(read)

    # ------------------------------------------------------------ looks

    def validate(self) -> None:
        """Check that every admission is whole, and that demands, reservations, slots and reads agree."""
        reserved: dict[SlotPool, int] = {}
        admitted: dict[SlotPool, int] = {}
        for object_id, demand in self.demands.items():
            pool = demand.pool
            invariant(demand.object == object_id, "demand under another object", object=object_id)
            invariant(bool(demand.admissions), "a demand of nobody", object=object_id)
            for admission in demand.admissions:
                invariant(admission.demands.get(object_id) is demand, "an admission lacks its demand", object=object_id)
            reserved[pool] = reserved.get(pool, 0) + demand.reserved
            admitted[pool] = admitted.get(pool, 0) + 1
            self._validate_demand(demand)
        for pool in self.loads.lane_of:
            invariant(pool.reserved == reserved.get(pool, 0), "reserved slots are miscounted", reserved=pool.reserved)
            invariant(pool.admitted == admitted.get(pool, 0), "admitted slots are miscounted", admitted=pool.admitted)
        for number, admission in self.admissions.items():
            self._validate_admission(number, admission)
        invariant(
            self.order == sorted(self.admissions.values(), key=lambda known: known.place), "admissions misordered"
        )
        invariant(self.ready == [known for known in self.order if known.listed], "admissions wrongly listed")
        ours = [op for op in self.drive.ops.values() if isinstance(op, Read) and op.preload]
        opening = sum(read.phase is Phase.OPENING for read in ours)
        invariant(opening == self.opening, "preloads' opens are miscounted", opening=opening, counted=self.opening)
        invariant({read for read in ours if read.phase is Phase.OPENED} == set(self.opened), "opened ahead differs")
        listed = sum(read.preload for read in self.loads.reads.values())
        invariant(listed == self.loads.preload_reads, "preloads' reads are miscounted", listed=listed)

    def _validate_admission(self, number: int, admission: Admission) -> None:
        invariant(admission.place.admission == number, "admission under another number", admission=number)
        missing = sum(demand.slot is None for demand in admission.demands.values())
        invariant(admission.missing == missing, "admission miscounts what is missing", admission=number)
        invariant(admission.landed == (admission.committed and not missing), "landed and not told", admission=number)
        for object_id, demand in admission.demands.items():
            invariant(self.demands.get(object_id) is demand, "an admission is not whole", object=object_id)

    def _validate_demand(self, demand: Demand) -> None:
        read, slot = demand.read, demand.slot
        ways = (demand.reserved, slot is not None, read is not None and read.phase is Phase.READING)
        stored = self.stores.brings(demand.object)
        invariant(sum(ways) + (stored and not any(ways)) == 1, "a demand has not one slot", object=demand.object)
        if read is not None:
            invariant(read.demand is demand, "a demand's read is another's", object=demand.object)
            invariant(self.loads.reads.get(demand.object) is read, "a demand's read is late", object=demand.object)
        if slot is not None:
            invariant(slot.admitted, "a landed object is not protected", slot=slot.ref)
            invariant(self.residency.objects.get(demand.object) is slot, "a landed object is not found", slot=slot.ref)
