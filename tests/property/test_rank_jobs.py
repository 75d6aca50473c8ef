"""
Properties of a rank's job table: whatever happens, in whatever order, jobs end once and slots are safe.

A driver plays the workers, the copier and the engine at random, and keeps its own books of what it is owed.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.core import rank_events as ev
from kvpool.core.rank_jobs import RankJobs
from kvpool.errors import Code
from kvpool.wire.messages import ObjectFailed, SlotGrant

DEVICES = 2
SEGMENTS = 3
LOAD_DEADLINE_NS, STORE_DEADLINE_NS = 1000, 100


def key_of(number: int) -> bytes:
    return number.to_bytes(36, "big")


class RankMachine(RuleBasedStateMachine):
    """One rank against workers that answer anything they may."""

    @initialize()
    def start(self) -> None:
        self.table = RankJobs()
        self.now_ns = 0
        self.joined = False
        self.workers: dict[int, int] = {}
        self.generation_next = 1
        self.mapped: set[int] = set()
        self.recalled: set[int] = set()
        #: Jobs submitted and not ended: wire -> (job, kind).
        self.open: dict[int, tuple[int, ev.JobKind]] = {}
        self.flushed_wires: set[int] = set()
        self.job_next = 1
        #: Asked of a worker and not answered yet: (device, generation, wire) -> wire indices.
        self.asked: dict[tuple[int, int, int], set[int]] = {}
        self.kinds: dict[int, ev.JobKind] = {}
        #: Slots handed out and not given back: (device, generation, wire, wire index).
        self.owed: set[tuple[int, int, int, int]] = set()
        #: Store asks taken back: a grant that crosses is not owed.
        self.taken_back: set[tuple[int, int, int, int]] = set()
        self.tickets: dict[int, list[ev.SlotCopy]] = {}
        self.ticket_owner: dict[int, Counter[tuple[int, int]]] = {}
        self.place: dict[tuple[int, int], tuple[int, int]] = {}

    # ------------------------------------------------------------ driving

    def tell(self, event: ev.Event) -> None:
        for action in self.table.handle(event, now_ns=self.now_ns):
            self.take(action)

    def take(self, action: ev.Action) -> None:
        match action:
            case ev.SendLoad(device=device, wire=wire, keys=keys) | ev.SendStore(device=device, wire=wire, keys=keys):
                self.asked[device, self.workers[device], wire] = set(range(len(keys)))
            case ev.SendRelease(device=device, wire=wire, indices=indices):
                for index in indices:
                    self.owed.remove((device, self.workers[device], wire, index))
            case ev.SendFilled(device=device, wire=wire, indices=indices):
                for index in indices:
                    self.owed.remove((device, self.workers[device], wire, index))
            case ev.SendStoreCancel(device=device, wire=wire, indices=indices):
                for index in indices:
                    self.owed.discard((device, self.workers[device], wire, index))
                    self.taken_back.add((device, self.workers[device], wire, index))
            case ev.LaunchLoad(ticket=ticket, copies=copies) | ev.LaunchStore(ticket=ticket, copies=copies):
                assert {copy.segment for copy in copies} <= self.mapped
                assert not {copy.wire for copy in copies} & self.flushed_wires
                self.tickets[ticket] = copies
                devices = [self.place[copy.wire, copy.object_index][0] for copy in copies]
                self.ticket_owner[ticket] = Counter((device, self.workers[device]) for device in devices)
            case ev.EndJob(job=job, wire=wire, kind=kind):
                assert self.open.pop(wire) == (job, kind)
                assert not any(copy.wire == wire for copies in self.tickets.values() for copy in copies)
            case ev.TellCopiesEnded(device=device, generation=generation):
                assert not any(owners[device, generation] for owners in self.ticket_owner.values())
                assert self.workers.get(device) != generation
            case ev.UnmapSegment(segment=segment):
                assert not any(copy.segment == segment for copies in self.tickets.values() for copy in copies)
                self.mapped.discard(segment)
                self.recalled.discard(segment)
            case ev.DropWorker():
                raise AssertionError("these workers speak as agreed")

    def answerable(self, kind: ev.JobKind) -> list[tuple[int, int]]:
        """Asks that a living worker has not fully answered."""
        return [
            (device, wire)
            for (device, generation, wire), indices in self.asked.items()
            if indices and self.workers.get(device) == generation and self.kinds[wire] is kind
        ]

    # ------------------------------------------------------------ rules

    @rule()
    def pool_joins(self) -> None:
        if not self.joined and not self.mapped and not self.tickets:
            self.joined = True
            joined = ev.PoolJoined(load_deadline_ns=LOAD_DEADLINE_NS, store_deadline_ns=STORE_DEADLINE_NS)
            self.tell(joined)

    @precondition(lambda self: self.joined)
    @rule(device=st.integers(0, DEVICES - 1))
    def worker_joins(self, device: int) -> None:
        generation, self.generation_next = self.generation_next, self.generation_next + 1
        if device in self.workers:
            self.worker_leaves(device)
        self.workers[device] = generation
        self.tell(ev.WorkerJoined(device=device, generation=generation))

    @rule(device=st.integers(0, DEVICES - 1))
    def worker_leaves(self, device: int) -> None:
        if device in self.workers:
            generation = self.workers.pop(device)
            self.tell(ev.WorkerLost(device=device, generation=generation))

    @precondition(lambda self: self.joined)
    @rule(segment=st.integers(0, SEGMENTS - 1))
    def segment_is_mapped(self, segment: int) -> None:
        if segment not in self.mapped:
            self.mapped.add(segment)
            self.tell(ev.SegmentMapped(segment=segment))

    @rule(segment=st.integers(0, SEGMENTS - 1))
    def segment_is_recalled(self, segment: int) -> None:
        if segment in self.mapped and segment not in self.recalled:
            self.recalled.add(segment)
            self.tell(ev.SegmentRecalled(segment=segment))

    @rule(devices=st.lists(st.integers(0, DEVICES - 1), max_size=5))
    def load_is_submitted(self, devices: list[int]) -> None:
        wire = self.new_job(ev.JobKind.LOAD, devices)
        keys = [key_of(index) for index in range(len(devices))]
        self.tell(ev.LoadSubmitted(job=wire, wire=wire, keys=keys, devices=devices))

    @rule(devices=st.lists(st.integers(0, DEVICES - 1), max_size=5), request=st.sampled_from("abc"))
    def store_is_submitted(self, devices: list[int], request: str) -> None:
        wire = self.new_job(ev.JobKind.STORE, devices)
        keys = [key_of(index) for index in range(len(devices))]
        self.tell(ev.StoreSubmitted(job=wire, wire=wire, request=request, keys=keys, devices=devices))

    def new_job(self, kind: ev.JobKind, devices: Sequence[int]) -> int:
        wire, self.job_next = self.job_next, self.job_next + 1
        self.open[wire] = (wire, kind)
        self.kinds[wire] = kind
        seen: Counter[int] = Counter()
        for index, device in enumerate(devices):
            self.place[wire, index] = (device, seen[device])
            seen[device] += 1
        return wire

    @precondition(lambda self: self.answerable(ev.JobKind.LOAD))
    @rule(data=st.data())
    def worker_answers_a_load(self, data: st.DataObject) -> None:
        device, wire = data.draw(st.sampled_from(self.answerable(ev.JobKind.LOAD)))
        generation = self.workers[device]
        left = self.asked[device, generation, wire]
        chosen = data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        left -= set(chosen)
        if data.draw(st.integers(0, 3)):
            slots = [SlotGrant(index, data.draw(st.integers(0, SEGMENTS - 1)), index) for index in chosen]
            self.owed |= {(device, generation, wire, index) for index in chosen}
            self.tell(ev.SlotsReady(device=device, wire=wire, slots=slots))
        else:
            failed = [ObjectFailed(index, int(Code.READ_ERROR)) for index in chosen]
            self.tell(ev.LoadsFailed(device=device, wire=wire, objects=failed))

    @precondition(lambda self: self.answerable(ev.JobKind.STORE))
    @rule(data=st.data())
    def worker_answers_a_store(self, data: st.DataObject) -> None:
        device, wire = data.draw(st.sampled_from(self.answerable(ev.JobKind.STORE)))
        generation = self.workers[device]
        left = self.asked[device, generation, wire]
        slots, exist, dropped = [], [], []
        for index in data.draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True)):
            left.discard(index)
            answer = data.draw(st.sampled_from(["slot", "slot", "slot", "exist", "drop"]))
            if answer == "slot":
                slots.append(SlotGrant(index, data.draw(st.integers(0, SEGMENTS - 1)), index))
                name = (device, generation, wire, index)
                if name not in self.taken_back:
                    self.owed.add(name)
            else:
                (exist if answer == "exist" else dropped).append(index)
        self.tell(ev.StoreAnswered(device=device, wire=wire, slots=slots, exist=exist, dropped=dropped))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), failed=st.sampled_from([False, False, False, True]))
    def copies_end(self, data: st.DataObject, failed: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        del self.tickets[ticket], self.ticket_owner[ticket]
        self.tell(ev.CopiesEnded(ticket=ticket, failed=failed))

    @rule()
    def round_ends(self) -> None:
        self.tell(ev.RoundEnded())

    @rule(passed_ns=st.sampled_from([1, STORE_DEADLINE_NS, LOAD_DEADLINE_NS]))
    def time_passes(self, passed_ns: int) -> None:
        self.now_ns += passed_ns
        self.tell(ev.TimePassed())
        deadline_ns = self.table.next_deadline_ns()
        assert deadline_ns is None or deadline_ns > self.now_ns

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def engine_flushes(self, data: st.DataObject) -> None:
        wires = data.draw(st.lists(st.sampled_from(sorted(self.open)), min_size=1, unique=True))
        self.flushed_wires |= set(wires)
        self.tell(ev.JobsFlushed(jobs=frozenset(wires) | {10**9}))
        for ticket in self.table.tickets_of(wires):
            del self.tickets[ticket], self.ticket_owner[ticket]
            self.tell(ev.CopiesEnded(ticket=ticket))
        assert not self.open.keys() & set(wires)

    @rule()
    def pool_is_lost(self) -> None:
        if self.joined:
            self.joined = False
            self.workers.clear()
            self.tell(ev.PoolLost())
            copying = {copy.wire for copies in self.tickets.values() for copy in copies}
            assert self.open.keys() == copying

    # ------------------------------------------------------------ what must hold

    @invariant()
    def table_is_valid(self) -> None:
        if hasattr(self, "table"):
            self.table.validate()
            assert self.table.job_count == len(self.open)
            assert self.table.copies_in_flight == sum(len(copies) for copies in self.tickets.values())

    def teardown(self) -> None:
        """Once every worker answered and every copy ended, nothing is open and every slot was given back."""
        if not hasattr(self, "table"):
            return
        if self.joined:
            for segment in range(SEGMENTS):
                self.segment_is_mapped(segment)
        for _ in range(50):
            self.tell(ev.RoundEnded())
            for ticket in list(self.tickets):
                del self.tickets[ticket], self.ticket_owner[ticket]
                self.tell(ev.CopiesEnded(ticket=ticket))
            for device, wire in self.answerable(ev.JobKind.LOAD):
                slots = [SlotGrant(index, 0, index) for index in self.asked[device, self.workers[device], wire]]
                self.asked[device, self.workers[device], wire] = set()
                self.owed |= {(device, self.workers[device], wire, slot.index) for slot in slots}
                self.tell(ev.SlotsReady(device=device, wire=wire, slots=slots))
            for device, wire in self.answerable(ev.JobKind.STORE):
                indices = sorted(self.asked[device, self.workers[device], wire])
                self.asked[device, self.workers[device], wire] = set()
                self.tell(ev.StoreAnswered(device=device, wire=wire, exist=indices))
        self.time_passes(LOAD_DEADLINE_NS)
        self.tell(ev.RoundEnded())
        self.table.validate()
        assert {} == self.open
        assert set() == {owed for owed in self.owed if self.workers.get(owed[0]) == owed[1]}


PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
RankMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, phases=PHASES)
TestRankJobsKeepTheirPromises = RankMachine.TestCase


# ---------------------------------------------------------------- prefixes over two ranks and two devices


CHUNKS = 12


class TwoRanks:
    """
    Two ranks' tables against two devices, for one request whose chunk n lies on device n % 2.

    Each worker decides a key once for both ranks; a key is stored if both said Filled and none cancelled. Answers
    and ends of copies wait in `todo` until the test lets them happen.
    """

    def __init__(self, jobs: list[tuple[int, int]], refused: set[int], copies_failing: set[tuple[int, int]]) -> None:
        self.jobs, self.refused, self.copies_failing = jobs, refused, copies_failing
        self.tables = [RankJobs(), RankJobs()]
        self.submitted = [0, 0]
        self.decisions: dict[int, bool] = {}
        self.filled: dict[int, set[int]] = {}
        self.cancelled: set[int] = set()
        self.todo: list[Callable[[], None]] = []
        for rank in (0, 1):
            self.tell(rank, ev.PoolJoined(load_deadline_ns=100, store_deadline_ns=100))
            self.tell(rank, ev.WorkerJoined(device=0, generation=1))
            self.tell(rank, ev.WorkerJoined(device=1, generation=1))
            self.tell(rank, ev.SegmentMapped(segment=0))

    def tell(self, rank: int, event: ev.Event) -> None:
        for action in self.tables[rank].handle(event, now_ns=0):
            match action:
                case ev.SendStore(device=device, wire=wire):
                    self.todo.append(partial(self.answer, rank, device, wire))
                case ev.LaunchStore(ticket=ticket, copies=copies, wire=wire):
                    chunks = {(rank, self.jobs[wire - 1][0] + copy.object_index) for copy in copies}
                    ended = ev.CopiesEnded(ticket=ticket, failed=bool(chunks & self.copies_failing))
                    self.todo.append(partial(self.tell, rank, ended))
                case ev.SendFilled(device=device, wire=wire, indices=indices):
                    for index in indices:
                        self.filled.setdefault(self.chunks(device, wire)[index], set()).add(rank)
                case ev.SendStoreCancel(device=device, wire=wire, indices=indices):
                    self.cancelled |= {self.chunks(device, wire)[index] for index in indices}
        self.tables[rank].validate()

    def chunks(self, device: int, wire: int) -> list[int]:
        return [chunk for chunk in range(*self.jobs[wire - 1]) if chunk % 2 == device]

    def submit(self, rank: int) -> None:
        chunks = range(*self.jobs[self.submitted[rank]])
        self.submitted[rank] += 1
        wire = self.submitted[rank]
        keys, devices = [key_of(chunk) for chunk in chunks], [chunk % 2 for chunk in chunks]
        self.tell(rank, ev.StoreSubmitted(job=wire, wire=wire, request="r", keys=keys, devices=devices))

    def flush(self, rank: int, wire: int) -> None:
        self.tell(rank, ev.JobsFlushed(jobs=frozenset([wire])))

    def answer(self, rank: int, device: int, wire: int) -> None:
        slots, dropped = [], []
        for index, chunk in enumerate(self.chunks(device, wire)):
            granted = chunk not in self.refused and chunk not in self.cancelled
            if self.decisions.setdefault(chunk, granted):
                slots.append(SlotGrant(index, 0, 0))
            else:
                dropped.append(index)
        self.tell(rank, ev.StoreAnswered(device=device, wire=wire, slots=slots, dropped=dropped))

    def stored(self) -> set[int]:
        return {chunk for chunk, ranks in self.filled.items() if ranks == {0, 1}} - self.cancelled


@settings(max_examples=100, deadline=None, phases=PHASES)
@given(data=st.data())
def test_every_stored_prefix_has_no_hole(data: st.DataObject) -> None:
    """Refusals, failed copies and flushes at random, in any order over ranks, devices and jobs."""
    bounds = sorted({0, CHUNKS, *data.draw(st.sets(st.integers(1, CHUNKS - 1), max_size=3))})
    refused = data.draw(st.sets(st.integers(0, CHUNKS - 1), max_size=2))
    copies_failing = data.draw(st.sets(st.tuples(st.integers(0, 1), st.integers(0, CHUNKS - 1)), max_size=1))
    ranks = TwoRanks(list(pairwise(bounds)), refused, copies_failing)
    flush = data.draw(st.none() | st.tuples(st.integers(0, 1), st.integers(1, len(ranks.jobs))))
    while ranks.todo or min(ranks.submitted) < len(ranks.jobs):
        steps = [*ranks.todo]
        steps += [partial(ranks.submit, rank) for rank in (0, 1) if ranks.submitted[rank] < len(ranks.jobs)]
        chosen = data.draw(st.integers(0, len(steps) - 1))
        if chosen < len(ranks.todo):
            del ranks.todo[chosen]
        steps[chosen]()
        if flush is not None and data.draw(st.integers(0, 4)) == 0:
            ranks.flush(*flush)
        for rank in (0, 1):
            if data.draw(st.booleans()) or not ranks.todo:
                ranks.tell(rank, ev.RoundEnded())
    stored = ranks.stored()
    assert set(range(len(stored))) == stored
    if not refused and not copies_failing and flush is None:
        assert set(range(CHUNKS)) == stored
