"""The object table under random interleavings; `object_world.py` says what is checked after each step."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvpool.core.object_events import (
    DeviceChanged,
    Dropped,
    LoadWanted,
    ObjectId,
    SlotsFilled,
    SlotsReleased,
    StoreWanted,
    TableSettings,
    TimePassed,
)
from kvpool.errors import Code, ProtocolError
from tests.property.object_world import CORRUPT, ENGINES, LIVE, NAMESPACES, SETTINGS, Rank, World, key_of

picks = st.integers(min_value=0, max_value=2**16)
numbers = st.lists(st.integers(min_value=0, max_value=7), min_size=1, max_size=6)
groups = st.sampled_from([0, 0, 0, 1])


def keys_for(engine: str, chosen: list[int], group: int) -> list[bytes]:
    sizes = NAMESPACES[ENGINES[engine]][1]
    return [key_of(number, group if group in sizes else 0) for number in chosen]


class ObjectTableMachine(RuleBasedStateMachine):
    """Everything that may happen to a table, in any order."""

    def __init__(self, table_settings: TableSettings = SETTINGS, slots: int = 6) -> None:
        super().__init__()
        self.world = World(table_settings)
        self.world.add_segment(8192, slots)
        self.world.add_segment(4096, slots - 2)
        for rank in (0, 1):
            self.world.join("a", rank)

    def pick_rank(self, pick: int) -> Rank:
        live = self.world.live()
        return live[pick % len(live)]

    @rule(engine=st.sampled_from(sorted(ENGINES)), rank=st.integers(min_value=0, max_value=1))
    def join(self, engine: str, rank: int) -> None:
        if len(self.world.live()) < 5:
            self.world.join(engine, rank % NAMESPACES[ENGINES[engine]][0])

    @precondition(lambda self: self.world.live())
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        self.world.leave(self.pick_rank(pick))

    @precondition(lambda self: any(rank.left for rank in self.world.ranks.values()))
    @rule(pick=picks)
    def prove(self, pick: int) -> None:
        departed = [rank for rank in self.world.ranks.values() if rank.left]
        self.world.prove(departed[pick % len(departed)])

    @precondition(lambda self: self.world.live())
    @rule(pick=picks)
    def prove_before_leaving(self, pick: int) -> None:
        if pick % 4 == 0:
            self.world.prove(self.pick_rank(pick))

    @rule(size=st.sampled_from([8192, 4096]), count=st.integers(min_value=4, max_value=6))
    def add_segment(self, size: int, count: int) -> None:
        if len(self.world.segments) < 4:
            self.world.add_segment(size, count)

    @precondition(lambda self: len(self.world.segments) > len(self.world.recalled))
    @rule(pick=picks)
    def recall(self, pick: int) -> None:
        ours = [segment for segment in self.world.segments if segment not in self.world.recalled]
        self.world.recall(ours[pick % len(ours)])

    @precondition(lambda self: self.world.live())
    @rule(pick=picks, chosen=numbers, group=groups, extend=st.booleans())
    def load(self, pick: int, chosen: list[int], group: int, extend: bool) -> None:
        rank = self.pick_rank(pick)
        jobs = [job for job, kind in rank.jobs.items() if kind == "load"]
        self.world.load(rank, keys_for(rank.engine, chosen, group), jobs[pick % len(jobs)] if extend and jobs else None)

    @precondition(lambda self: any(rank.jobs for rank in self.world.live()))
    @rule(pick=picks)
    def cancel_load(self, pick: int) -> None:
        rank = self.pick_rank(pick)
        jobs = [job for job, kind in rank.jobs.items() if kind == "load"]
        if jobs:
            self.world.cancel_load(rank, jobs[pick % len(jobs)])

    @precondition(lambda self: any(rank.pinned for rank in self.world.live()))
    @rule(pick=picks, all_of_job=st.booleans())
    def release(self, pick: int, all_of_job: bool) -> None:
        pinned = [(rank, job, index) for rank in self.world.live() for job, index in rank.pinned]
        rank, job, index = pinned[pick % len(pinned)]
        self.world.release(rank, job, [i for j, i in rank.pinned if j == job] if all_of_job else [index])

    @rule(engine=st.sampled_from(sorted(ENGINES)), chosen=numbers, group=groups)
    def offer(self, engine: str, chosen: list[int], group: int) -> None:
        offer = self.world.offer(engine, keys_for(engine, list(dict.fromkeys(chosen)), group))
        for rank in self.world.live():
            if rank.engine == engine:
                self.world.ask_store(rank, offer)
                return

    @precondition(lambda self: self.world.offers and self.world.live())
    @rule(pick=picks)
    def ask_store(self, pick: int) -> None:
        asks = [
            (rank, offer)
            for rank in self.world.live()
            for offer in self.world.offers
            if offer.engine == rank.engine and rank.client not in offer.asked_by
        ]
        if asks:
            self.world.ask_store(*asks[pick % len(asks)])

    @precondition(lambda self: any(rank.granted for rank in self.world.live()))
    @rule(pick=picks, all_of_job=st.booleans())
    def fill(self, pick: int, all_of_job: bool) -> None:
        granted = [(rank, job, index) for rank in self.world.live() for job, index in rank.granted]
        rank, job, index = granted[pick % len(granted)]
        self.world.fill(rank, job, [i for j, i in rank.granted if j == job] if all_of_job else [index])

    @precondition(lambda self: any("store" in rank.jobs.values() for rank in self.world.live()))
    @rule(pick=picks, indices=st.lists(st.integers(min_value=0, max_value=6), max_size=4))
    def cancel_store(self, pick: int, indices: list[int]) -> None:
        jobs = [(rank, job) for rank in self.world.live() for job, kind in rank.jobs.items() if kind == "store"]
        unanswered = {(client, job) for (client, job, _), status in self.world.status.items() if status == "asked"}
        open_jobs = [(rank, job) for rank, job in jobs if (rank.client, job) in unanswered]
        rank, job = (open_jobs or jobs)[pick % len(open_jobs or jobs)]
        self.world.cancel_store(rank, job, indices)

    @precondition(lambda self: self.world.opening)
    @rule(pick=picks, error=st.sampled_from([None, None, None, Code.READ_ERROR]))
    def end_open(self, pick: int, error: Code | None) -> None:
        self.world.end_open(sorted(self.world.opening)[pick % len(self.world.opening)], error)

    @precondition(lambda self: self.world.reading)
    @rule(pick=picks, error=st.sampled_from([None, None, None, Code.READ_ERROR]))
    def end_read(self, pick: int, error: Code | None) -> None:
        self.world.end_read(sorted(self.world.reading)[pick % len(self.world.reading)], error)

    @precondition(lambda self: self.world.publishing)
    @rule(pick=picks, error=st.sampled_from([None, None, None, None, Code.WRITE_ERROR, Code.DEVICE_FULL]))
    def end_publish(self, pick: int, error: Code | None) -> None:
        self.world.end_publish(sorted(self.world.publishing)[pick % len(self.world.publishing)], error)

    @rule(chosen=numbers, group=groups, damage=st.sampled_from(["write", "write", "corrupt", "remove"]))
    def change_files(self, chosen: list[int], group: int, damage: str) -> None:
        for key in keys_for("a", chosen, group):
            for object_id in (ObjectId(1, key, rank) for rank in range(2)):
                if damage == "write":
                    self.world.files[object_id] = object_id
                elif damage == "corrupt" and object_id in self.world.files:
                    self.world.files[object_id] = CORRUPT
                elif damage == "remove":
                    self.world.files.pop(object_id, None)

    @rule(chosen=numbers, group=groups)
    def find_files(self, chosen: list[int], group: int) -> None:
        objects = [ObjectId(1, key, rank) for key in keys_for("a", chosen, group) for rank in range(2)]
        self.world.find_files([object_id for object_id in objects if object_id in self.world.files])

    @rule(chosen=numbers, group=groups)
    def condemn(self, chosen: list[int], group: int) -> None:
        self.world.condemn(1, keys_for("a", list(dict.fromkeys(chosen)), group))

    @precondition(lambda self: self.world.removing)
    @rule(pick=picks, removed=st.sampled_from([True, True, False]))
    def end_removal(self, pick: int, removed: bool) -> None:
        removing = self.world.removing
        self.world.end_removal(*removing[pick % len(removing)], removed=removed)

    @rule(healthy=st.sampled_from([True, True, False]), storing=st.sampled_from([True, True, False]))
    def change_device(self, healthy: bool, storing: bool) -> None:
        self.world.do(DeviceChanged(healthy=healthy, refusing=None if storing else Dropped.ROOM))

    @rule(nanoseconds=st.sampled_from([1, 10, 60, 150, 400]))
    def pass_time(self, nanoseconds: int) -> None:
        self.world.pass_time(nanoseconds)

    @rule(rare=st.integers(min_value=0, max_value=9))
    def pass_much_time(self, rare: int) -> None:
        if rare == 0:
            self.world.pass_time(1_000_001)

    @precondition(lambda self: self.world.live() and self.world.table.healthy)
    @rule(pick=picks)
    def nonsense(self, pick: int) -> None:
        """A message that no honest peer sends is refused and changes nothing."""
        world, rank = self.world, self.pick_rank(pick)
        world.do(TimePassed())
        before = world.table.statistics()
        for event in nonsense_of(rank):
            with pytest.raises(ProtocolError):
                world.table.handle(event, now_ns=world.now_ns)
            assert world.table.statistics() == before
            world.table.validate()

    @rule(engine=st.sampled_from(["a", "a", "c"]), chosen=numbers, group=groups, priority=st.sampled_from([0, 0, 1]))
    def admit(self, engine: str, chosen: list[int], group: int, priority: int) -> None:
        self.world.admit(ENGINES[engine], keys_for(engine, chosen[:3], group), priority)

    @precondition(lambda self: any(a.state == "reserved" for a in self.world.admissions.values()))
    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        reserved = [a for a in self.world.admissions.values() if a.state == "reserved"]
        self.world.commit(reserved[pick % len(reserved)])

    @precondition(lambda self: self.world.admissions)
    @rule(pick=picks)
    def withdraw(self, pick: int) -> None:
        admissions = list(self.world.admissions.values())
        live = [a for a in admissions if a.state in LIVE]
        self.world.withdraw(live[pick % len(live)] if live and pick % 8 else admissions[pick % len(admissions)])

    @precondition(lambda self: self.world.live() and any(a.state in LIVE for a in self.world.admissions.values()))
    @rule(pick=picks)
    def load_admitted(self, pick: int) -> None:
        """A request starts whose objects are read ahead."""
        rank = self.pick_rank(pick)
        admitted = [a for a in self.world.admissions.values() if a.state in LIVE]
        objects = admitted[pick % len(admitted)].objects
        keys = [o.key for o in objects if (o.namespace, o.rank) == (rank.namespace, rank.rank)]
        if keys:
            self.world.load(rank, keys)

    def teardown(self) -> None:
        self.world.settle()


def nonsense_of(rank: Rank) -> list[object]:
    client = rank.client
    events: list[object] = [
        LoadWanted(client=10**6, job=1, first=0, keys=[key_of(1)]),
        LoadWanted(client=client, job=10**6, first=0, keys=[key_of(1), key_of(1, group=9)]),
        LoadWanted(client=client, job=10**6, first=0, keys=[b"\0\0\0\0"]),
        StoreWanted(client=client, job=10**6, store=10**6, first=0, keys=[key_of(2), key_of(2)]),
        StoreWanted(client=client, job=10**6, store=10**6, first=0, keys=[key_of(2, group=9)]),
        SlotsReleased(client=client, job=10**6, indices=[0]),
        SlotsFilled(client=client, job=10**6, indices=[0]),
    ]
    for job, index in list(rank.pinned)[:1]:
        events.append(SlotsReleased(client=client, job=job, indices=[index, index]))
        events.append(SlotsReleased(client=client, job=job, indices=[index, 10**6]))
        events.append(SlotsFilled(client=client, job=job, indices=[index]))
        events.append(LoadWanted(client=client, job=job, first=index, keys=[key_of(1)]))
    for job, index in list(rank.granted)[:1]:
        events.append(SlotsFilled(client=client, job=job, indices=[index, index]))
        events.append(SlotsFilled(client=client, job=job, indices=[index, 10**6]))
        events.append(SlotsReleased(client=client, job=job, indices=[index]))
        events.append(StoreWanted(client=client, job=job, store=10**6, first=index, keys=[key_of(1)]))
    return events


class RoomyMachine(ObjectTableMachine):
    """The same with slots above the floor, so that preloads get some."""

    def __init__(self) -> None:
        super().__init__(replace(SETTINGS, iodepth=2), slots=13)


class LruMachine(ObjectTableMachine):
    """The same with a cache."""

    def __init__(self) -> None:
        super().__init__(replace(SETTINGS, iodepth=2, staging_cache="lru"), slots=11)


class ArcMachine(ObjectTableMachine):
    """The same with the other policy."""

    def __init__(self) -> None:
        super().__init__(replace(SETTINGS, iodepth=2, staging_cache="arc"), slots=11)


TestObjectTable = ObjectTableMachine.TestCase
TestObjectTableRoomy = RoomyMachine.TestCase
TestObjectTableLru = LruMachine.TestCase
TestObjectTableArc = ArcMachine.TestCase
for case, examples in (
    (TestObjectTable, 40), (TestObjectTableRoomy, 30), (TestObjectTableLru, 20), (TestObjectTableArc, 20),
):  # fmt: skip
    case.settings = settings(
        max_examples=examples, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
