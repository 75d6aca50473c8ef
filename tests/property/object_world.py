"""
A world around an object table: drives, ranks, files and slot contents, modelled without any of the table's code.

The world carries out the table's actions and checks each: a slot is handed out only when nobody may still
write to it or read from it, a Ready slot holds the bytes of the object that was asked for, each asked index
is answered at most once and never after it was taken back, each operation ends once, what the table tells of
keys is what it believes. Bytes are modelled by the ObjectId whose bytes they are, or TORN.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from kvpool.core.object_events import (
    Action,
    ClientJoined,
    ClientLeft,
    ClientProven,
    CloseFile,
    DeviceChanged,
    DrainStarted,
    Event,
    FileOpened,
    FileRead,
    KeysCondemned,
    KeysFound,
    KeysRemoved,
    LoadCancelled,
    LoadWanted,
    NamespaceAdded,
    ObjectId,
    ObjectPublished,
    OpenFile,
    PreloadAsked,
    PreloadCommitted,
    PreloadWithdrawn,
    PublishObject,
    ReadFile,
    RemoveKey,
    ReturnSegment,
    SegmentAdded,
    SegmentRecalled,
    SendDropped,
    SendExists,
    SendGranted,
    SendLoadFailed,
    SendPreloadAnswer,
    SendPreloadLanded,
    SendPreloadRevoked,
    SendReady,
    SetAside,
    SlotRef,
    SlotsFilled,
    SlotsReleased,
    StoreCancelled,
    StoreWanted,
    TableSettings,
    TellKey,
    TellStoreEnded,
    TimePassed,
)
from kvpool.core.objects import ObjectTable
from kvpool.errors import Code
from kvpool.wire.messages import RESIDENT, STORED

TORN = "torn"
#: States of an admission that has its slots.
LIVE = ("reserved", "committed", "landed")
CORRUPT = "corrupt"

SETTINGS = TableSettings(
    iodepth=3, open_lookahead=3, writes_inflight_beside_loads=1, client_share=0.5, load_deadline_ns=1_000_000,
    load_patience_ns=40, store_deadline_ns=100, fill_deadline_ns=500, op_deadline_ns=300, device_full_backoff_ns=200,
)  # fmt: skip

#: namespace -> (rank_count, slot_bytes by group)
NAMESPACES = {1: (2, {0: 8192, 1: 4096}), 2: (1, {0: 8192})}
#: engine -> namespace
ENGINES = {"a": 1, "b": 1, "c": 2}


def key_of(number: int, group: int = 0) -> bytes:
    """Return a key of that group."""
    return number.to_bytes(8, "big") + group.to_bytes(4, "big")


@dataclass
class Rank:
    """One attached or departed client, with what it asked for and holds."""

    client: int
    engine: str
    rank: int
    left: bool = False
    next_job: int = 1
    keys: dict[tuple[int, int], bytes] = field(default_factory=dict)
    pinned: dict[tuple[int, int], SlotRef] = field(default_factory=dict)
    granted: dict[tuple[int, int], SlotRef] = field(default_factory=dict)
    jobs: dict[int, str] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)

    @property
    def namespace(self) -> int:
        """The engine's namespace."""
        return ENGINES[self.engine]

    def object_of(self, job: int, index: int) -> ObjectId:
        """Return the object behind an index of a job."""
        return ObjectId(self.namespace, self.keys[job, index], self.rank)


@dataclass
class Offer:
    """Keys that all ranks of an engine offer under one store number."""

    engine: str
    store: int
    keys: list[bytes]
    asked_by: set[int] = field(default_factory=set)


@dataclass
class Admission:
    """Keys that the coordinator wants to be read ahead; *failed* are objects whose open, read or store failed since."""

    admission: int
    objects: list[ObjectId]
    place: tuple[int, int, int]
    state: str = "asked"
    failed: set[ObjectId] = field(default_factory=set)


class World:
    """The table and everything around it."""

    def __init__(self, settings: TableSettings = SETTINGS) -> None:
        self.table = ObjectTable(settings)
        self.settings = settings
        self.now_ns = 1
        self.ranks: dict[int, Rank] = {}
        self.offers: list[Offer] = []
        self.admissions: dict[int, Admission] = {}
        self.segments: dict[int, tuple[int, int]] = {}
        self.recalled: set[int] = set()
        self.files: dict[ObjectId, object] = {}
        self.contents: dict[SlotRef, object] = {}
        self.writers: dict[SlotRef, set[object]] = defaultdict(set)
        self.readers: dict[SlotRef, set[object]] = defaultdict(set)
        self.opening: dict[int, ObjectId] = {}
        self.opened: dict[int, tuple[ObjectId, object]] = {}
        self.reading: dict[int, tuple[ObjectId, SlotRef, object]] = {}
        self.publishing: dict[int, tuple[ObjectId, SlotRef]] = {}
        self.status: dict[tuple[int, int, int], str] = {}
        self.flags: dict[tuple[int, bytes], int] = {}
        self.started: dict[int, int] = {}
        self.missing: set[ObjectId] = set()
        self.removing: list[tuple[int, bytes]] = []
        self.store_ends: dict[tuple[str, bytes], list[bool]] = defaultdict(list)
        self.answers: dict[str, int] = defaultdict(int)
        self.log: list[list[Action]] = []
        self.last_number = 0
        for namespace, (rank_count, slot_bytes) in NAMESPACES.items():
            self.do(NamespaceAdded(namespace=namespace, rank_count=rank_count, slot_bytes=slot_bytes))

    def number(self) -> int:
        """Return a number never returned before."""
        self.last_number += 1
        return self.last_number

    def do(self, event: Event) -> list[Action]:
        """Tell the table a fact, carry out what it asks for, check everything."""
        actions = self.table.handle(event, now_ns=self.now_ns)
        self.log.append(actions)
        for action in actions:
            self._apply(action)
        self.table.validate()
        self._check_bounds()
        self._check_told(actions)
        self._check_resident()
        self._check_preloads(event, actions)
        return actions

    # ------------------------------------------------------------ the table's actions

    def _apply(self, action: Action) -> None:
        self.answers[type(action).__name__] += 1
        match action:
            case OpenFile(op=op, object=object_id):
                self._new_op(op)
                self.opening[op] = object_id
                self.started[op] = self.now_ns
            case ReadFile(op=op, object=object_id, slot=slot):
                known, content = self.opened.pop(op)
                assert known == object_id
                assert slot.segment not in self.recalled, "a slot of a recalled segment"
                self._hand_out(slot, object_id)
                self.writers[slot].add(("kernel", op))
                self.reading[op] = (object_id, slot, content)
                self.started[op] = self.now_ns
            case CloseFile(op=op):
                del self.opened[op]
            case PublishObject(op=op, object=object_id, slot=slot):
                self._new_op(op)
                self._check_bytes(slot, object_id)
                self.readers[slot].add(("kernel", op))
                self.publishing[op] = (object_id, slot)
            case RemoveKey() | SetAside():
                self._file_goes(action)
            case SendReady(client=client, job=job, index=index, slot=slot):
                self._answered(client, job, index)
                rank = self.ranks[client]
                self._check_bytes(slot, rank.object_of(job, index))
                rank.pinned[job, index] = slot
                self.readers[slot].add((client, job, index))
            case SendGranted(client=client, job=job, index=index, slot=slot):
                self._answered(client, job, index)
                rank = self.ranks[client]
                self._hand_out(slot, rank.object_of(job, index))
                rank.granted[job, index] = slot
                self.writers[slot].add((client, job, index))
            case SendLoadFailed() | SendExists() | SendDropped():
                self._answered(action.client, action.job, action.index)
            case TellKey(namespace=namespace, key=key, flags=flags):
                self.flags[namespace, key] = flags
            case TellStoreEnded(engine=engine, key=key, kept=kept):
                assert kept == bool(self.flags.get((ENGINES[engine], key), 0))
                self.store_ends[engine, key].append(kept)
                if not self.flags.get((ENGINES[engine], key), 0) & RESIDENT:  # on disk at most: no store brings it
                    self._failed(*(ObjectId(ENGINES[engine], key, rank) for rank in range(2)))
            case ReturnSegment(segment=segment):
                self._segment_returned(segment)
            case SendPreloadAnswer() | SendPreloadLanded() | SendPreloadRevoked():
                self._admission_told(action)

    def _admission_told(self, action: SendPreloadAnswer | SendPreloadLanded | SendPreloadRevoked) -> None:
        admission = self.admissions[action.admission]
        match action:
            case SendPreloadAnswer(reserved=reserved):
                before, after = ("asked",), "reserved" if reserved else "refused"
            case SendPreloadLanded():
                before, after = ("committed",), "landed"
            case SendPreloadRevoked():
                before, after = LIVE, "revoked"
        assert admission.state in before, "an admission is told what cannot be"
        admission.state = after

    def _file_goes(self, action: RemoveKey | SetAside) -> None:
        """Nobody uses a removed key's files, and everybody has heard that they go."""
        if isinstance(action, SetAside):
            self.files.pop(action.object, None)
            return
        namespace, key = action.namespace, action.key
        self.removing.append((namespace, key))
        assert not self.flags.get((namespace, key), 0) & STORED, "a key goes that is told to be stored"
        assert self.removing.count((namespace, key)) == 1, "a key goes twice"
        pinned = {rank.object_of(job, index) for rank in self.live() for job, index in rank.pinned}
        written = {object_id for object_id, _ in self.publishing.values()}
        for number in range(NAMESPACES[namespace][0]):
            assert ObjectId(namespace, key, number) not in pinned | written, "a key goes that is in use"

    def _new_op(self, op: int) -> None:
        known = (self.opening, self.opened, self.reading, self.publishing)
        assert not any(op in ops for ops in known), "an operation's number is used twice"

    def _hand_out(self, slot: SlotRef, object_id: ObjectId) -> None:
        assert slot.segment in self.segments, "a slot of no segment"
        # A rank may get a slot of a recalled segment that was reserved for it before.
        namespace_sizes = NAMESPACES[object_id.namespace][1]
        assert self.segments[slot.segment][0] == namespace_sizes[object_id.key[-1]], "a slot of another size"
        assert not self.writers[slot], "a slot was handed out that somebody may still write to"
        assert not self.readers[slot], "a slot was handed out that somebody still reads from"
        self.contents[slot] = TORN

    def _check_bytes(self, slot: SlotRef, object_id: ObjectId) -> None:
        assert not self.writers[slot], "bytes were served that somebody may still write to"
        assert self.contents[slot] == object_id, "other bytes than the object's"

    def _answered(self, client: int, job: int, index: int) -> None:
        assert not self.ranks[client].left, "a departed client was answered"
        assert self.status[client, job, index] == "asked", "an index was answered that was not waiting"
        self.status[client, job, index] = "answered"

    def _segment_returned(self, segment: int) -> None:
        assert segment in self.recalled, "a segment was returned that was not recalled"
        _, count = self.segments.pop(segment)
        self.recalled.remove(segment)
        for slot in (SlotRef(segment, index) for index in range(count)):
            assert not self.writers[slot], "a segment was returned that somebody may still write to"
            assert not self.readers[slot], "a segment was returned that somebody still reads from"

    def _check_bounds(self) -> None:
        in_flight = len(self.reading) + len(self.publishing)
        assert in_flight <= self.settings.iodepth
        sizes = {size for _, slot_bytes in NAMESPACES.values() for size in slot_bytes.values()}
        assert len(self.opening) + len(self.opened) <= max(self.settings.open_lookahead, len(sizes))

    def _check_told(self, actions: list[Action]) -> None:
        """A key whose object was missing or not what was published is told to be not stored, at once."""
        gone = {a.object for a in actions if isinstance(a, SetAside)}
        assert [] == [o for o in gone if self.flags.get((o.namespace, o.key), 0) & STORED]

    def _check_resident(self) -> None:
        """A key that is told to be resident is in some slot, whole, for every rank."""
        whole = {content for slot, content in self.contents.items() if slot.segment in self.segments}
        for (namespace, key), flags in self.flags.items():
            if flags & RESIDENT:
                objects = {ObjectId(namespace, key, rank) for rank in range(NAMESPACES[namespace][0])}
                assert objects <= whole, "a key is told to be resident and is not"

    def _check_preloads(self, event: Event, actions: list[Action]) -> None:
        """Whole admissions, in their order, out of the way of loads, and taken by loads only."""
        asked = self._asked_objects()
        running = [
            *self.opening.values(), *(o for o, _ in self.opened.values()), *(o for o, _, _ in self.reading.values())
        ]  # fmt: skip
        if any(object_id in asked for object_id in running):
            ahead = [a.object for a in actions if isinstance(a, OpenFile | ReadFile) and a.object not in asked]
            assert ahead == [], "a preload began in the way of a load"
            assert {object_id for object_id, _ in self.opened.values()} <= asked, "an opened file was not given back"
        revoked = [a.admission for a in actions if isinstance(a, SendPreloadRevoked)]
        assert not revoked or asked or isinstance(event, SegmentRecalled), "taken by nobody with the right to"
        for op, object_id in (*self.opening.items(), *((op, o) for op, (o, _, _) in self.reading.items())):
            if self.now_ns - self.started[op] >= self.settings.op_deadline_ns:
                self._failed(object_id)
        live = [a for a in self.admissions.values() if a.state in LIVE and not a.failed.issuperset(a.objects)]
        last = max((a.place for a in live), default=None)
        assert not revoked or self._sizes_differ() or last is None or all(
            last < self.admissions[number].place for number in revoked
        ), "an admission was taken before one behind it"  # fmt: skip
        whole = {content for slot, content in self.contents.items() if slot.segment in self.segments}
        for admission in self.admissions.values():
            if admission.state == "landed":
                assert set(admission.objects) - admission.failed <= whole, "a landed object was lost"

    def _sizes_differ(self) -> bool:
        return len({o.key[-1] for a in self.admissions.values() for o in a.objects}) > 1

    def _asked_objects(self) -> set[ObjectId]:
        """Return what loads wait for, less what they wait for because their rank is at its cap."""
        asked = set()
        for (client, job, index), status in self.status.items():
            rank = self.ranks[client]
            if status == "asked" and rank.jobs[job] == "load":
                known = self.table.clients[client]
                parked = {(w.job.job, w.index) for queue in known.parked.values() for w in queue}
                if (job, index) not in parked:
                    asked.add(rank.object_of(job, index))
        return asked

    def _failed(self, *objects: ObjectId) -> None:
        for admission in self.admissions.values():
            admission.failed.update(set(objects) & set(admission.objects))

    # ------------------------------------------------------------ what ranks do

    def live(self) -> list[Rank]:
        """Return the attached ranks."""
        return [rank for rank in self.ranks.values() if not rank.left]

    def join(self, engine: str, rank: int) -> Rank:
        """Attach a rank."""
        joined = Rank(self.number(), engine, rank)
        self.ranks[joined.client] = joined
        self.do(ClientJoined(client=joined.client, engine=engine, namespace=joined.namespace, rank=rank))
        return joined

    def leave(self, rank: Rank) -> list[Action]:
        """Its socket closes; its copies go on."""
        self._departed(rank)
        return self.do(ClientLeft(client=rank.client))

    def _departed(self, rank: Rank) -> None:
        rank.left = True
        for (client, job, index), status in self.status.items():
            if client == rank.client and status == "asked":
                self.status[client, job, index] = "withdrawn"

    def prove(self, rank: Rank) -> list[Action]:
        """Its copies have ended, and perhaps the table hears that before it hears that the rank left."""
        if not rank.left:
            self._departed(rank)
        for users in (*self.writers.values(), *self.readers.values()):
            users -= {user for user in users if isinstance(user, tuple) and user[0] == rank.client}
        rank.pinned.clear()
        rank.granted.clear()
        return self.do(ClientProven(client=rank.client))

    def load(self, rank: Rank, keys: list[bytes], job: int | None = None) -> int:
        """Ask for objects, in a new job or as the next part of *job*."""
        job, first = self._ask(rank, "load", keys, job)
        self.do(LoadWanted(client=rank.client, job=job, first=first, keys=keys))
        return job

    def do_load(self, rank: Rank, keys: list[bytes]) -> list[Action]:
        """Ask for objects in a new job and return the actions."""
        job, first = self._ask(rank, "load", keys, None)
        return self.do(LoadWanted(client=rank.client, job=job, first=first, keys=keys))

    def _ask(self, rank: Rank, kind: str, keys: list[bytes], job: int | None) -> tuple[int, int]:
        if job is None:
            job, rank.next_job = rank.next_job, rank.next_job + 1
            rank.jobs[job] = kind
        first = rank.ends.get(job, 0)
        rank.ends[job] = first + len(keys)
        for index, key in enumerate(keys, first):
            rank.keys[job, index] = key
            self.status[rank.client, job, index] = "asked"
        return job, first

    def cancel_load(self, rank: Rank, job: int) -> list[Action]:
        """Take back what is not ready."""
        for (client, known, index), status in self.status.items():
            if (client, known, status) == (rank.client, job, "asked"):
                self.status[client, known, index] = "withdrawn"
        return self.do(LoadCancelled(client=rank.client, job=job))

    def release(self, rank: Rank, job: int, indices: list[int]) -> list[Action]:
        """End the copies out of these slots."""
        for index in indices:
            slot = rank.pinned.pop((job, index))
            assert self.contents[slot] == rank.object_of(job, index), "bytes changed while they were pinned"
            self.readers[slot].remove((rank.client, job, index))
        return self.do(SlotsReleased(client=rank.client, job=job, indices=indices))

    def offer(self, engine: str, keys: list[bytes]) -> Offer:
        """Decide, as an engine's scheduler does, to store *keys*."""
        made = Offer(engine, self.number(), keys)
        self.offers.append(made)
        return made

    def ask_store(self, rank: Rank, offer: Offer) -> int:
        """A rank asks for an offer's keys."""
        offer.asked_by.add(rank.client)
        job, first = self._ask(rank, "store", offer.keys, None)
        self.do(StoreWanted(client=rank.client, job=job, store=offer.store, first=first, keys=offer.keys))
        return job

    def fill(self, rank: Rank, job: int, indices: list[int]) -> list[Action]:
        """End the copies into these slots."""
        for index in indices:
            slot = rank.granted.pop((job, index))
            self.contents[slot] = rank.object_of(job, index)
            self.writers[slot].remove((rank.client, job, index))
        return self.do(SlotsFilled(client=rank.client, job=job, indices=indices))

    def cancel_store(self, rank: Rank, job: int, indices: list[int]) -> list[Action]:
        """Do not fill these; no copy into their slots runs."""
        for index in indices:
            if self.status.get((rank.client, job, index)) == "asked":
                self.status[rank.client, job, index] = "withdrawn"
            slot = rank.granted.pop((job, index), None)
            if slot is not None:
                self.writers[slot].remove((rank.client, job, index))
        return self.do(StoreCancelled(client=rank.client, job=job, indices=indices))

    # ------------------------------------------------------------ what the device and the coordinator do

    def admit(self, namespace: int, keys: list[bytes], priority: int = 0) -> Admission:
        """Ask for slots for these keys' objects."""
        number = self.number()
        rank_count, sizes = NAMESPACES[namespace]
        objects = [ObjectId(namespace, key, rank) for key in keys if key[-1] in sizes for rank in range(rank_count)]
        made = self.admissions[number] = Admission(number, objects, (priority, number, number))
        made.failed.update(o for o in objects if o in self.missing or (namespace, o.key) in self.removing)
        actions = self.do(
            PreloadAsked(admission=number, namespace=namespace, keys=keys, priority=priority, arrival=number)
        )
        assert 1 == sum(isinstance(action, SendPreloadAnswer) for action in actions)
        return made

    def commit(self, admission: Admission) -> list[Action]:
        """Every device has reserved; perhaps a load has taken it meanwhile."""
        if admission.state == "reserved":
            admission.state = "committed"
        return self.do(PreloadCommitted(admission=admission.admission))

    def withdraw(self, admission: Admission) -> list[Action]:
        """Nobody wants it any more; perhaps a load has taken it meanwhile."""
        admission.state = "withdrawn"
        return self.do(PreloadWithdrawn(admission=admission.admission))

    def add_segment(self, slot_bytes: int, slot_count: int) -> int:
        """Grant staging."""
        segment = self.number()
        self.segments[segment] = (slot_bytes, slot_count)
        self.do(SegmentAdded(segment=segment, slot_bytes=slot_bytes, slot_count=slot_count))
        return segment

    def recall(self, segment: int) -> list[Action]:
        """Want staging back."""
        self.recalled.add(segment)
        return self.do(SegmentRecalled(segment=segment))

    def end_open(self, op: int, error: Code | None = None) -> list[Action]:
        """An open ends; without a file it always ends with MISSING."""
        object_id = self.opening.pop(op)
        if error is None and object_id not in self.files:
            error = Code.MISSING
        if error is None:
            self.opened[op] = (object_id, self.files[object_id])
        else:
            self._failed(object_id)
        if error is Code.MISSING:
            self.missing.add(object_id)
        actions = self.do(FileOpened(op=op, error=error))
        assert error is not Code.MISSING or not self.flags[object_id.namespace, object_id.key] & STORED
        return actions

    def end_read(self, op: int, error: Code | None = None) -> list[Action]:
        """A read ends; other bytes than the object's always end it with CORRUPT."""
        object_id, slot, content = self.reading.pop(op)
        assert self.contents[slot] == TORN, "somebody else wrote to a slot while it was read into"
        self.writers[slot].remove(("kernel", op))
        if error is None and content != object_id:
            error = Code.CORRUPT
        if error is None:
            self.contents[slot] = content
        else:
            self._failed(object_id)
        if error is Code.CORRUPT:
            self.missing.add(object_id)
        return self.do(FileRead(op=op, error=error))

    def end_publish(self, op: int, error: Code | None = None) -> list[Action]:
        """A publish ends; a file that was there already stays as it is."""
        object_id, slot = self.publishing.pop(op)
        assert self.contents[slot] == object_id, "bytes changed while they were written"
        self.readers[slot].remove(("kernel", op))
        if error is None:
            self.files.setdefault(object_id, object_id)
            self.missing.discard(object_id)
        return self.do(ObjectPublished(op=op, error=error))

    def condemn(self, namespace: int, keys: list[bytes]) -> list[Action]:
        """There is no room for these keys."""
        return self.do(KeysCondemned(namespace=namespace, keys=keys))

    def end_removal(self, namespace: int, key: bytes, *, removed: bool = True) -> None:
        """A key's files are gone, or could not be removed."""
        self.removing.remove((namespace, key))
        objects = [ObjectId(namespace, key, rank) for rank in range(NAMESPACES[namespace][0])]
        for object_id in objects if removed else ():
            self.files.pop(object_id, None)
        self.do(KeysRemoved(namespace=namespace, keys=[key]))
        self.find_files([object_id for object_id in objects if object_id in self.files])

    def find_files(self, objects: list[ObjectId]) -> None:
        """The scan tells files; they may be gone again meanwhile."""
        for object_id in objects:
            if (object_id.namespace, object_id.key) not in self.removing:
                self.missing.discard(object_id)
            self.do(KeysFound(namespace=object_id.namespace, rank=object_id.rank, keys=[object_id.key]))

    def pass_time(self, nanoseconds: int) -> list[Action]:
        """Time goes on; the table looks at its deadlines."""
        self.now_ns += nanoseconds
        return self.do(TimePassed())

    def drain(self) -> None:
        """The pool is to end."""
        self.do(DrainStarted())

    # ------------------------------------------------------------ the end

    def quiesce(self) -> None:
        """Every peer and device does its duty until nothing moves any more."""
        moved = True
        while moved:
            moved = False
            for ops, end in (
                (self.opening, self.end_open), (self.reading, self.end_read), (self.publishing, self.end_publish)
            ):  # fmt: skip
                for op in list(ops):
                    end(op)
                    moved = True
            for namespace, key in list(self.removing):
                self.end_removal(namespace, key)
                moved = True
            for rank in self.live():
                for job, index in list(rank.pinned):
                    self.release(rank, job, [index])
                    moved = True
                for job, index in list(rank.granted):
                    self.fill(rank, job, [index])
                    moved = True

    def settle(self) -> None:
        """End everything and check that nothing is left: no wait, no slot in use, no unanswered index."""
        self.do(DeviceChanged(healthy=True))
        for rank in list(self.ranks.values()):
            if rank.left:
                self.prove(rank)
        self.quiesce()
        self.pass_time(self.settings.store_deadline_ns + 1)
        self.quiesce()
        self.pass_time(self.settings.fill_deadline_ns + 1)
        self.quiesce()
        waiting = [where for where, status in self.status.items() if status == "asked" and self._has_slots(where)]
        assert waiting == [], "a wait that nothing would have ended but its deadline"
        if not [status for status in self.status.values() if status == "asked"]:
            assert [] == [a for a in self.admissions.values() if a.state == "committed"], "a preload that never lands"
        for admission in list(self.admissions.values()):
            if admission.state in LIVE:
                self.withdraw(admission)
        self.pass_time(self.settings.load_deadline_ns + 1)
        self.pass_time(self.settings.fill_deadline_ns + self.settings.store_deadline_ns + 1)
        self._check_settled()
        self._check_hits()

    def _check_hits(self) -> None:
        """Load what is told to be resident: it is there without any I/O."""
        for (namespace, key), flags in list(self.flags.items()):
            if not flags & RESIDENT:
                continue
            engine = next(engine for engine, known in ENGINES.items() if known == namespace)
            for number in range(NAMESPACES[namespace][0]):
                rank = self.join(engine, number)
                assert ["SendReady"] == [type(action).__name__ for action in self.do_load(rank, [key])]
                self.release(rank, 1, [0])
                self.leave(rank)

    def _has_slots(self, where: tuple[int, int, int]) -> bool:
        client, job, index = where
        key = self.ranks[client].keys[job, index]
        size = NAMESPACES[self.ranks[client].namespace][1][key[-1]]
        return any(
            size == slot_bytes for segment, (slot_bytes, _) in self.segments.items() if segment not in self.recalled
        )

    def _check_settled(self) -> None:
        assert [where for where, status in self.status.items() if status == "asked"] == []
        statistics = self.table.statistics()
        for name in ("slots_filling", "slots_quarantined", "loads_waiting", "keys_filling"):
            assert statistics[name] == 0, name
        for name in ("admissions", "slots_admitted", "slots_reserved", "files_open", "opens_inflight"):
            assert statistics[name] == 0, name
        assert statistics["offers"] == 0
        cached = statistics["slots_cached"]
        assert statistics["slots_resident"] == cached
        assert statistics["slots_free"] + cached == sum(count for _, count in self.segments.values())
        assert cached == 0 or self.settings.staging_cache != "off"
        assert self.recalled == set()
        assert self.table.drained()
        assert self.table.next_deadline_ns() is None
        for namespace, space in self.table._index.namespaces.items():
            for key in {*space.masks, *(key for known, key in self.flags if known == namespace)}:
                assert self.flags.get((namespace, key), 0) == space.flags(key), "told other flags than it believes"
        for offer in self.offers:
            if offer.asked_by:
                missing = [key for key in offer.keys if not self.store_ends[offer.engine, key]]
                assert missing == [], "a store whose end nobody was told"
