"""
A rank's load and store jobs: what to ask the workers, what to copy when, and when a job has ended.

Theory. A job is a list of objects, each on one device; each object walks through a small table of states, and the
job ends when none of its objects is open any more. Whatever happens (a worker or the pool is lost, a deadline
passes, the engine flushes), every object still reaches a closed state, so every job ends exactly once.

    rank_loads    objects out of slots, and their table of states
    rank_stores   objects into slots, in prefix order, and theirs
    rank_copies   what launched copies touch: nothing may be done to them but to wait for their end
    rank_base     the pool, its workers and segments, and the answers that gather

Sends are gathered per worker and job, copies per direction, and leave at RoundEnded: one message and one launch for
all that was ready. Slots in a segment that is not mapped yet wait for SegmentMapped, bounded by the job's deadline.

Does not cover: sockets, mapping, the copies themselves (`client/rank.py`), how lists are split into messages.
"""

from collections.abc import Iterable

from kvpool.core.rank_base import COUNTERS, Ground
from kvpool.core.rank_copies import Copies
from kvpool.core.rank_events import (
    Action,
    CopiesEnded,
    DropWorker,
    Event,
    JobKind,
    JobsFlushed,
    LoadsFailed,
    LoadSubmitted,
    PoolEvent,
    PoolJoined,
    PoolLost,
    RoundEnded,
    SegmentMapped,
    SegmentRecalled,
    SegmentUnmappable,
    SlotsReady,
    StoreAnswered,
    StoreSubmitted,
    TimePassed,
    WorkerJoined,
    WorkerLost,
)
from kvpool.core.rank_loads import Loads
from kvpool.core.rank_stores import Stores
from kvpool.errors import Code, invariant


class RankJobs:
    """The table of one rank's jobs. One door: :meth:`handle`."""

    def __init__(self) -> None:
        self._ground = Ground()
        self._copies = Copies(self._ground)
        self._loads = Loads(self._ground, self._copies)
        self._stores = Stores(self._ground, self._copies)

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take one fact; return what has to be done, in order."""
        match event:
            case SlotsReady() | LoadsFailed() | StoreAnswered():
                self._answered(event)
            case CopiesEnded():
                self._copies_ended(event)
            case RoundEnded():
                self._loads.launch()
                self._stores.launch()
                self._ground.send_gathered()
            case LoadSubmitted():
                self._loads.submitted(event, now_ns)
            case StoreSubmitted():
                self._stores.submitted(event, now_ns)
            case TimePassed():
                self._loads.expire(now_ns)
                self._stores.expire(now_ns)
            case JobsFlushed(jobs=jobs):
                self._loads.flush(jobs)
                self._stores.flush(jobs)
            case _:
                self._pool_changed(event)
        return self._ground.take_actions()

    def next_deadline_ns(self) -> int | None:
        """Return when TimePassed is due next; None: nothing waits for time."""
        first = (self._loads.next_deadline_ns(), self._stores.next_deadline_ns())
        return min((deadline_ns for deadline_ns in first if deadline_ns is not None), default=None)

    def tickets_of(self, jobs: Iterable[int]) -> list[int]:
        """Return the batches that copy for any of *jobs*."""
        wanted = frozenset(jobs)
        return self._copies.tickets_of(self._loads.wires_of(wanted) | self._stores.wires_of(wanted))

    @property
    def copies_in_flight(self) -> int:
        """Objects being copied now."""
        return len(self._copies)

    @property
    def job_count(self) -> int:
        """Jobs that have not ended."""
        return len(self._loads) + len(self._stores)

    def statistics(self) -> dict[str, int]:
        """Return counters since the start, and how much is open now."""
        return {
            "jobs": self.job_count,
            "copies_in_flight": self.copies_in_flight,
            "requests_cut": self._stores.requests_cut,
            **{name: self._ground.counts[name] for name in COUNTERS},
        }

    def validate(self) -> None:
        """Check every invariant of the theories of the parts, and between them."""
        self._copies.validate()
        self._loads.validate()
        self._stores.validate()
        copying = self._loads.copying() | self._stores.copying()
        invariant(copying == self._copies.copying(), "states and copies disagree")

    # ------------------------------------------------------------ workers' answers, ends of copies

    def _answered(self, event: SlotsReady | LoadsFailed | StoreAnswered) -> None:
        if event.device not in self._ground.workers:
            return  # read before its socket was closed; its worker counts as lost
        match event:
            case SlotsReady():
                why = self._loads.ready(event)
            case LoadsFailed():
                why = self._loads.failed(event)
            case StoreAnswered():
                why = self._stores.answered(event)
        if why is not None:
            self._ground.counts["workers_dropped"] += 1
            self._ground.act(DropWorker(device=event.device, why=why))
            self._worker_lost(event.device, self._ground.workers[event.device])

    def _copies_ended(self, event: CopiesEnded) -> None:
        batch = self._copies.end(event.ticket)
        jobs = self._loads if batch.kind is JobKind.LOAD else self._stores
        for copy, owner in zip(batch.copies, batch.owners, strict=True):
            jobs.copied(copy, owner, failed=event.failed)
        self._copies.let_go()

    # ------------------------------------------------------------ pool, workers, segments

    def _pool_changed(self, event: PoolEvent) -> None:
        match event:
            case PoolJoined():
                self._ground.pool = event
            case PoolLost():
                self._pool_lost()
            case WorkerJoined(device=device, generation=generation):
                if device in self._ground.workers:
                    self._worker_lost(device, self._ground.workers[device])
                self._ground.workers[device] = generation
            case WorkerLost(device=device, generation=generation):
                self._worker_lost(device, generation)
            case SegmentMapped(segment=segment):
                self._ground.segments.add(segment)
                self._loads.segment_mapped(segment)
                self._stores.segment_mapped()
            case SegmentUnmappable(segment=segment):
                self._ground.segments_unmappable.add(segment)
                self._abandon(segment, Code.COPY_ERROR)
            case SegmentRecalled(segment=segment):
                self._ground.segments_unmappable.discard(segment)
                self._ground.segments.discard(segment)
                self._abandon(segment, Code.CANCELLED)
                self._copies.segment_leaves(segment)
                self._copies.let_go()

    def _pool_lost(self) -> None:
        ground = self._ground
        ground.pool = None
        for device in list(ground.workers):
            ground.lose_worker(device)
            self._give_up(device)
        self._loads.pool_lost()
        self._copies.pool_departs()
        for segment in ground.segments:
            self._copies.segment_leaves(segment)
        ground.segments.clear()
        ground.segments_unmappable.clear()
        self._copies.let_go()

    def _worker_lost(self, device: int, generation: int) -> None:
        """Told of a former one: say again that no copy touches its slots, as soon as that is true."""
        if self._ground.workers.get(device) == generation:
            self._ground.lose_worker(device)
            self._give_up(device)
        self._copies.worker_departs((device, generation))
        self._copies.let_go()

    def _give_up(self, device: int) -> None:
        self._loads.worker_lost(device)
        self._stores.worker_lost(device)

    def _abandon(self, segment: int, code: Code) -> None:
        self._loads.segment_abandoned(segment, code)
        self._stores.segment_abandoned(segment, code)
