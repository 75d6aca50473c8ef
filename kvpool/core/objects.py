"""
The I/O worker's object table: the one door to everything that a device's worker decides.

Theory. The shell (`procs/io_worker.py`) tells facts, :meth:`ObjectTable.handle` returns what to do
about them. An event first changes what it is about, then the pumps run: stores are decided, reads
started, files opened, preloads read where no load is in the way, writes started, as far as slots and
depth allow. So every freed slot and every ended operation is used at once, by whoever has the best
right to it, and no event needs to know who waits. The costs of an event do not grow with what is
waiting.

    key_index.py     which keys the device has            loads.py         waiters, opens, reads
    slots.py         states and pools of slots            stores.py        offers, decisions, fills
    residency.py     which object is in which slot        writes.py        publishing
    clients.py       ranks, their jobs, their caps        preloads.py      admissions, reads ahead
    cache.py         what idle objects stay               drive.py         the device's depth

A message that no honest peer sends raises ProtocolError before anything is changed: the shell
closes that peer. An event that the shell or the coordinator cannot have sent raises InvariantError.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from kvpool.core.clients import Client
from kvpool.core.drive import Drive
from kvpool.core.key_index import KeyIndex, Namespace
from kvpool.core.loads import Loads
from kvpool.core.object_events import (
    Action,
    ClientJoined,
    ClientLeft,
    ClientProven,
    DeviceChanged,
    DrainStarted,
    Dropped,
    Event,
    FileForgotten,
    FileOpened,
    FileRead,
    KeysCondemned,
    KeysFound,
    KeysRemembered,
    KeysRemoved,
    KeysUnseen,
    LoadCancelled,
    LoadWanted,
    NamespaceAdded,
    NamespaceRetired,
    ObjectId,
    ObjectPublished,
    PreloadAsked,
    PreloadCommitted,
    PreloadWithdrawn,
    RemoveKey,
    ReturnSegment,
    SegmentAdded,
    SegmentRecalled,
    SlotsFilled,
    SlotsReleased,
    StoreCancelled,
    StoreWanted,
    TableSettings,
    TimePassed,
)
from kvpool.core.preloads import Preloads
from kvpool.core.reads import Read
from kvpool.core.residency import Residency, policy_named
from kvpool.core.slots import Segment, SlotPool, SlotState
from kvpool.core.stores import Stores
from kvpool.core.writes import Writes
from kvpool.errors import Code, ProtocolError, invariant, unreachable

#: Counters that statistics() always has; `loads_failed_<code>` come beside them when they happen.
COUNTERS = (
    "loads_wanted", "loads_ready", "loads_resident", "loads_older", "loads_failed", "loads_parked", "reads",
    "read_bytes", "read_errors", "corrupt",
    "stores_wanted", "keys_granted", "keys_existing", "keys_dropped", "keys_filled", "keys_stored", "keys_lost",
    *(f"keys_dropped_{why}" for why in Dropped),
    "keys_removed", "fills_late", "writes", "write_bytes", "write_errors", "writes_no_space", "ops_late",
    "foreign_ranks_found", "cache_hits", "cache_evictions", "evicted_before_use",
    "preloads_asked", "preloads_reserved", "preloads_landed", "preloads_revoked",
    "preloads_withdrawn", "preloads_given_up", "preload_reads", "preload_hits",
)  # fmt: skip


class ObjectTable:
    """
    All decisions of one device's I/O worker.

    Attributes:
        pools: Slots by size.
        clients: Attached ranks, and departed ones that are not proven gone, by number.
        draining: Nothing new is taken.
        healthy: False while the device is given up.
        late_reads, late_writes: Operations that passed their deadline so far.
    """

    def __init__(self, settings: TableSettings) -> None:
        self.settings = settings
        self.pools: dict[int, SlotPool] = {}
        self.clients: dict[int, Client] = {}
        self.draining = False
        self.healthy = True
        self.late_reads = self.late_writes = 0
        self._actions: list[Action] = []
        self._emptied: list[Segment] = []
        self._segments: dict[int, Segment] = {}
        self._now_ns = 0
        self._counts: dict[str, int] = defaultdict(int, dict.fromkeys(COUNTERS, 0))
        self._index = KeyIndex()
        self._residency = Residency(self._actions, self._counts, self._index)
        self._drive = Drive(settings.iodepth, settings.writes_inflight_beside_loads, settings.op_deadline_ns)
        self._loads = Loads(
            open_lookahead=settings.open_lookahead, deadline_ns=settings.load_deadline_ns,
            patience_ns=settings.load_patience_ns, index=self._index, residency=self._residency, drive=self._drive,
            actions=self._actions, counts=self._counts,
        )  # fmt: skip
        self._writes = Writes(
            full_backoff_ns=settings.device_full_backoff_ns, index=self._index, residency=self._residency,
            drive=self._drive, actions=self._actions, counts=self._counts,
        )  # fmt: skip
        self._stores = Stores(
            store_deadline_ns=settings.store_deadline_ns, fill_deadline_ns=settings.fill_deadline_ns,
            index=self._index, residency=self._residency, loads=self._loads, writes=self._writes,
            actions=self._actions, counts=self._counts,
        )  # fmt: skip
        self._preloads = Preloads(
            index=self._index, residency=self._residency, drive=self._drive, loads=self._loads, stores=self._stores,
            actions=self._actions, counts=self._counts,
        )  # fmt: skip
        self._loads.stores, self._loads.preloads = self._stores, self._preloads
        self._deadlines = (
            self._loads.deadlines, self._loads.patience, self._stores.decide_deadlines, self._stores.fill_deadlines,
            self._stores.offer_deadlines, self._drive.deadlines,
        )  # fmt: skip
        self._look_again_ns = 0
        self._handlers = self._event_handlers()

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """
        Take in one event and return what to do about it, in this order.

        Args:
            now_ns: Monotonic time, nanoseconds; a value below an earlier one counts as that.

        Raises:
            ProtocolError: The client's message makes no sense; nothing was changed.
            InvariantError: The event cannot be, or the table is wrong: end the worker.
        """
        self._now_ns = now_ns = max(now_ns, self._now_ns)
        if now_ns >= self._look_again_ns:
            self._expire(now_ns)
        try:
            self._handlers[type(event)](event)
        finally:
            # Also after a ProtocolError: what the time changed has its actions, returned by the next call.
            self._pump(now_ns)
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def next_deadline_ns(self) -> int | None:
        """Return when TimePassed must be told at the latest; None while nothing waits for time."""
        return min((due_ns for queue in self._deadlines if (due_ns := queue.next_ns()) is not None), default=None)

    def drained(self) -> bool:
        """Return whether no object is being written, waits to be written, or may still be filled."""
        return not self._writes.queue and self._drive.writes == 0 and not self._stores.filling

    # ------------------------------------------------------------ events

    def _event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return who takes in which event; the argument is of that type."""
        return {
            FileOpened: lambda event: self._loads.file_opened(event.op, event.error),
            FileRead: lambda event: self._loads.file_read(event.op, event.error),
            ObjectPublished: lambda event: self._writes.published(event.op, event.error, self._now_ns),
            LoadWanted: self._load_wanted,
            LoadCancelled: lambda event: self._loads.cancel(self._client(event.client), event.job),
            SlotsReleased: lambda event: self._loads.release(self._client(event.client), event.job, event.indices),
            StoreWanted: self._store_wanted,
            SlotsFilled: lambda event: self._stores.fill(self._client(event.client), event.job, event.indices),
            StoreCancelled: lambda event: self._stores.cancel(self._client(event.client), event.job, event.indices),
            KeysFound: self._keys_found,
            KeysRemembered: lambda event: self._index.remember(
                self._index.namespaces[event.namespace], event.keys, event.masks, self._actions
            ),
            KeysUnseen: lambda event: self._index.forget_unseen(
                self._index.namespaces[event.namespace], event.keys, self._actions
            ),
            KeysCondemned: self._keys_condemned,
            KeysRemoved: self._keys_removed,
            FileForgotten: self._file_forgotten,
            NamespaceRetired: lambda event: self._residency.retire(event.namespace),
            NamespaceAdded: self._namespace_added,
            SegmentAdded: self._segment_added,
            SegmentRecalled: self._segment_recalled,
            ClientJoined: self._client_joined,
            ClientLeft: lambda event: self._client_left(event.client),
            ClientProven: self._client_proven,
            DeviceChanged: self._device_changed,
            DrainStarted: self._drain_started,
            PreloadAsked: lambda event: self._preloads.ask(event, self.pools),
            PreloadCommitted: lambda event: self._preloads.commit(event.admission),
            PreloadWithdrawn: lambda event: self._preloads.withdraw(event.admission),
            TimePassed: lambda _event: None,
        }

    def _namespace_added(self, event: NamespaceAdded) -> None:
        self._index.add_namespace(event.namespace, event.rank_count, event.slot_bytes)
        for size in event.slot_bytes.values():
            self._pool(size)

    def _segment_added(self, event: SegmentAdded) -> None:
        invariant(event.segment not in self._segments, "a segment was granted twice", segment=event.segment)
        self._segments[event.segment] = self._pool(event.slot_bytes).add_segment(event.segment, event.slot_count)
        self._caps_changed()

    def _client_proven(self, event: ClientProven) -> None:
        self._client_left(event.client)
        client = self.clients.pop(event.client, None)
        if client is not None:
            self._residency.exorcise(client)

    def _drain_started(self, _event: DrainStarted) -> None:
        self.draining = True
        self._stores.refusing, self._preloads.accepting = Dropped.DRAINING, False

    def _device_changed(self, event: DeviceChanged) -> None:
        self.healthy = event.healthy
        if not self.draining:
            self._stores.refusing = event.refusing if event.healthy else Dropped.DEVICE
        self._preloads.accepting = event.healthy and not self.draining
        if not event.healthy:
            self._loads.fail_reads([client for client in self.clients.values() if not client.left], Code.READ_ERROR)

    def _store_wanted(self, event: StoreWanted) -> None:
        self._stores.want(self._client(event.client), event, self.pools, self._now_ns)

    def _load_wanted(self, event: LoadWanted) -> None:
        client = self._client(event.client)
        if self.draining:
            self._loads.refuse(event, Code.REFUSED)
        elif not self.healthy:
            self._loads.refuse(event, Code.READ_ERROR)
        else:
            self._loads.want(client, event, self.pools, self._now_ns)

    def _keys_found(self, event: KeysFound) -> None:
        space = self._index.namespaces.get(event.namespace)
        if space is None:
            unreachable("files found of an unknown namespace", namespace=event.namespace)
        if event.rank >= space.rank_count:
            self._counts["foreign_ranks_found"] += 1
            return
        for key in event.keys:
            if key not in space.removing:
                self._index.add(ObjectId(event.namespace, key, event.rank), self._actions)

    def _keys_condemned(self, event: KeysCondemned) -> None:
        space = self._index.namespaces[event.namespace]
        for key in event.keys:
            if key not in space.removing and not self._in_use(space, key):
                self._index.condemn(space, key, self._actions)
                self._actions.append(RemoveKey(namespace=event.namespace, key=key))

    def _in_use(self, space: Namespace, key: bytes) -> bool:
        """Whether some rank's object of *key* is being filled, written, read, pinned or admitted; cached is not."""
        if (space.namespace, key) in self._stores.filling:
            return True
        for rank in range(space.rank_count):
            object_id = ObjectId(space.namespace, key, rank)
            slot = self._residency.objects.get(object_id)
            wanted = object_id in self._loads.reads or object_id in self._preloads.demands
            if wanted or (slot is not None and not slot.cached):
                return True
        return False

    def _keys_removed(self, event: KeysRemoved) -> None:
        self._index.namespaces[event.namespace].removing.difference_update(event.keys)
        self._counts["keys_removed"] += len(event.keys)

    def _file_forgotten(self, event: FileForgotten) -> None:
        if self._index.has(event.object):
            self._index.remove(event.object, self._actions)

    def _segment_recalled(self, event: SegmentRecalled) -> None:
        home = self._segments.get(event.segment)
        if home is None:
            unreachable("a segment was recalled that is not ours", segment=event.segment)
        if not home.recalled:
            home.pool.recall_segment(home)
            self._residency.leave_segment(home)
            self._preloads.shrink(home.pool)

    def _client_joined(self, event: ClientJoined) -> None:
        invariant(event.client not in self.clients, "a client joined twice", client=event.client)
        space = self._index.namespaces.get(event.namespace)
        if space is None:
            unreachable("a client of an unknown namespace joined", client=event.client, namespace=event.namespace)
        invariant(0 <= event.rank < space.rank_count, "a client of a rank that is not one joined", rank=event.rank)
        client = Client(event.client, event.engine, space, event.rank, self.settings.client_share)
        self.clients[event.client] = client
        for size in set(space.slot_bytes.values()):
            engines = self.pools[size].engines
            engines[client.engine] = engines.get(client.engine, 0) + 1

    def _client_left(self, number: int) -> None:
        client = self.clients.get(number)
        if client is None or client.left:
            return
        client.left = True
        self._loads.leave(client)
        self._stores.leave(client)
        client.used.clear()
        for size in set(client.space.slot_bytes.values()):
            engines = self.pools[size].engines
            engines[client.engine] -= 1
            if engines[client.engine] == 0:
                del engines[client.engine]
        if not client.ghosts:
            del self.clients[number]
        self._caps_changed()

    # ------------------------------------------------------------ helpers

    def _client(self, number: int) -> Client:
        client = self.clients.get(number)
        if client is None or client.left:
            raise ProtocolError("not an attached client", client=number)
        return client

    def _pool(self, slot_bytes: int) -> SlotPool:
        pool = self.pools.get(slot_bytes)
        if pool is None:
            pool = self.pools[slot_bytes] = SlotPool(
                slot_bytes, self.settings.iodepth, self._emptied, policy_named(self.settings.staging_cache)
            )
            self._loads.add_pool(pool)
            self._stores.add_pool(pool)
        return pool

    def _caps_changed(self) -> None:
        self._loads.relieve_all([client for client in self.clients.values() if not client.left])

    def _expire(self, now_ns: int) -> None:
        for operation in self._drive.late(now_ns):
            self._counts["ops_late"] += 1
            if isinstance(operation, Read):
                self.late_reads += 1
                self._loads.read_late(operation)
            else:
                self.late_writes += 1
        self._loads.expire(now_ns)
        self._stores.expire(now_ns)
        # What starts to wait from now on has at least the shortest period.
        soonest_ns = now_ns + min(queue.period_ns for queue in self._deadlines)
        next_ns = self.next_deadline_ns()
        self._look_again_ns = soonest_ns if next_ns is None else min(soonest_ns, next_ns)

    def _pump(self, now_ns: int) -> None:
        self._stores.pump(now_ns)
        self._loads.pump(now_ns)
        if self._preloads.ready or self._preloads.opened:
            self._preloads.pump(now_ns)
        if self._writes.queue:
            self._writes.pump(now_ns)
        for home in self._emptied:
            del self._segments[home.segment]
            self._actions.append(ReturnSegment(segment=home.segment))
        self._emptied.clear()

    # ------------------------------------------------------------ looks

    def is_being_stored(self, object_id: ObjectId) -> bool:
        """Whether that object's bytes are being filled in, on some rank, or written, or wait for that."""
        if (object_id.namespace, object_id.key) in self._stores.filling:
            return True
        slot = self._residency.objects.get(object_id)
        return slot is not None and slot.held

    def index_of(self, namespace: int) -> Namespace | None:
        """Return what is known of a namespace's keys, to look at only."""
        return self._index.namespaces.get(namespace)

    def load_backlog_bytes(self) -> int:
        """Return the bytes that loads still wait for; what is being read counts as the largest size in use."""
        lanes = self._loads.lanes
        waiting = sum((len(lane.queued) + lane.places) * lane.pool.slot_bytes for lane in lanes)
        return waiting + self._drive.reads * max((lane.pool.slot_bytes for lane in lanes), default=0)

    @property
    def reads_queued(self) -> bool:
        """An open file waits for its read, or the depth is taken, by reads mostly."""
        drive = self._drive
        return self._loads.opened > 0 or (drive.reads + drive.writes >= drive.iodepth and drive.reads > drive.writes)

    def bytes_now(self) -> tuple[int, int, int, int, int, int]:
        """
        Return bytes of staging: granted, of whole objects, of those pinned, kept for waiting requests.

        And of payload since the start: read, published.
        """
        total = resident = pinned = admitted = 0
        for pool in self.pools.values():
            total += pool.total * pool.slot_bytes
            resident += pool.resident * pool.slot_bytes
            pinned += pool.pinned * pool.slot_bytes
            admitted += pool.admitted * pool.slot_bytes
        return total, resident, pinned, admitted, self._counts["read_bytes"], self._counts["write_bytes"]

    def statistics(self) -> dict[str, int]:
        """Return counters since the start, and what is waiting, in flight and in which state now."""
        states: Counter[SlotState] = Counter()
        for home in self._segments.values():
            states.update(slot.state for slot in home.slots)
        lanes = self._loads.lanes
        return {
            **self._counts,
            **{f"slots_{state.value}": states[state] for state in SlotState},
            "slots_pinned": sum(pool.pinned for pool in self.pools.values()),
            "slots_cached": sum(pool.cached() for pool in self.pools.values()),
            "slots_reserved": sum(pool.reserved for pool in self.pools.values()),
            "slots_admitted": sum(pool.admitted for pool in self.pools.values()),
            "admissions": len(self._preloads.admissions),
            "slots_by_store": sum(pool.store_held for pool in self.pools.values()),
            "loads_waiting": sum(len(job.waiting) for client in self.clients.values() for job in client.loads.values()),
            "opens_queued": sum(len(lane.queued) for lane in lanes),
            "opens_inflight": self._loads.opening + self._preloads.opening,
            "files_open": self._loads.opened + len(self._preloads.opened),
            "reads_inflight": self._drive.reads,
            "writes_queued": len(self._writes.queue),
            "writes_inflight": self._drive.writes,
            "keys_filling": len(self._stores.filling),
            "offers": len(self._stores.offers),
            "clients": sum(not client.left for client in self.clients.values()),
            "clients_unproven": sum(client.left for client in self.clients.values()),
            "keys": sum(len(space.masks) for space in self._index.namespaces.values()),
            "device_full": int(self._now_ns < self._writes.full_until_ns),
        }

    def validate(self) -> None:
        """Check every invariant; raises InvariantError. For tests: it looks at everything."""
        for pool in self.pools.values():
            pool.validate()
        self._index.validate()
        self._residency.validate(slot for home in self._segments.values() for slot in home.slots)
        self._drive.validate()
        self._loads.validate()
        self._stores.validate()
        self._writes.validate()
        self._preloads.validate()
        for client in self.clients.values():
            client.validate()
        invariant(not self._emptied, "an empty recalled segment was not returned")
