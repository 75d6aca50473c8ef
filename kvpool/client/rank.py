"""
The rank client: moves KV between the engine's memory and the pool's staging, in the background of one vLLM rank.

Theory. All decisions are in `core/rank_jobs.py`; this is its shell. One daemon thread sleeps in epoll over the
coordinator's socket, one socket per I/O worker, an eventfd (the engine submitted something, a background thread has
a result) and a timer (0.5 ms while copies run, since a GPU event cannot be waited on in epoll; else the next
deadline). It never spins. Segments are mapped and pinned, and a missing pool is started, on short-lived threads;
`client/link.py` is the connection.

The engine's threads only append to a queue and write the eventfd (`submit_*`), or pop a queue (`take_ended`).
`flush` is the exception: it takes the lock under which the thread works (held for microseconds, or for the launch
of one batch), lets the table give up what is not launched, and waits for launched copies without the lock.

Whatever goes wrong ends jobs as failed or dropped. A bug (InvariantError) or an unknown error disables the client:
it is logged once, every job still ends, the engine goes on without a pool.
"""

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import kvpool
from kvpool.client.copier import Copier, Copy
from kvpool.client.launch import ClientConfig
from kvpool.client.link import PoolLink
from kvpool.client.round_trip import FAILED, JOB_S, NOT_YET, OFF, Outcome, RoundTrip, TrialMemory
from kvpool.client.segments import SegmentMapper
from kvpool.core import rank_events as ev
from kvpool.core.rank_jobs import RankJobs
from kvpool.errors import Code, InvariantError
from kvpool.io.timer import Timer
from kvpool.wire import messages as msg
from kvpool.wire.codec import split

log = logging.getLogger(__name__)

#: While copies run, how often they are looked at.
COPY_CHECK_NS = 500_000
#: Time for the threads to end at `close`.
CLOSE_S = 10.0


class JobObject(NamedTuple):
    """One object of a job: its key, the device that has it or shall have it, and the copier's end of its copy."""

    key: bytes
    device: int
    place: object


LoadObject = JobObject
StoreObject = JobObject


@dataclass(frozen=True, slots=True)
class JobEnded:
    """
    The one end of a job.

    Attributes:
        job: The number it was submitted under.
        kind: "load" or "store".
        objects: How many it had.
        failed: (index into the objects, why) for those not loaded, or not kept.
        bytes: Payload of the others.
        seconds: From submission to end.
    """

    job: int
    kind: str
    failed: tuple[tuple[int, Code], ...]
    bytes: int
    seconds: float
    objects: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Submission:
    """A job as the engine gave it; *request* is None for loads."""

    job: int
    wire: int
    request: str | None
    objects: Sequence[JobObject]
    after: object | None
    submitted_ns: int
    epoch: int | None = None

    @property
    def kind(self) -> ev.JobKind:
        return ev.JobKind.LOAD if self.request is None else ev.JobKind.STORE


@dataclass(slots=True)
class _Trial:
    """
    The round trip at start. Its jobs have negative numbers, and nobody takes their ends but it.

    Attributes:
        memory: Makes its memory; None once it has begun, or where there is none.
        ends, moved: Ends of its jobs, and that there is one.
    """

    memory: Callable[[], TrialMemory] | None
    outcome: Outcome
    trip: RoundTrip | None = None
    last_job: int = 0
    ends: dict[int, JobEnded] = field(default_factory=dict)
    moved: threading.Event = field(default_factory=threading.Event)


class RankClient:
    """
    One rank's side of the pool. Starts its thread at once; connects, and starts a pool if need be, in the background.

    Args:
        config: Where the pool is, and whether to start one.
        namespace: What this engine stores.
        engine: Identifies the engine; the same on all its ranks and its scheduler.
        rank: 0 .. namespace.rank_count - 1.
        copier: Moves the bytes; the client's from now on.
        trial_memory: Makes the memory for the round trip at start; None: there is none.
    """

    def __init__(
        self,
        config: ClientConfig,
        namespace: msg.NamespaceSpec,
        *,
        engine: str,
        rank: int,
        copier: Copier,
        trial_memory: Callable[[], TrialMemory] | None = None,
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._engine = engine
        self._rank = rank
        self._copier = copier
        self._object_bytes = {group.group: group.object_bytes for group in namespace.groups}
        #: Guards all below, except the two queues.
        self._lock = threading.Lock()
        self._inbox: deque[_Submission] = deque()
        self._ended: deque[JobEnded] = deque()
        #: Payload bytes brought to the engine, and taken from it, since the start.
        self._served_bytes = self._kept_bytes = 0
        self._wire_next = 1
        self._wire_lock = threading.Lock()
        self._table = RankJobs()
        self._pending: deque[ev.Event] = deque()
        self._feeding = False
        self._jobs: dict[int, _Submission] = {}
        self._trial = _Trial(trial_memory, outcome=Outcome(OFF if trial_memory is None else NOT_YET))
        #: Launched batches: the table's ticket -> the copier's.
        self._tickets: dict[int, object] = {}
        self._closing = False
        self._disabled = False
        self._over = False
        self._started_ns = time.monotonic_ns()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = Timer()
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._timer.fileno(), select.EPOLLIN)
        self._link = PoolLink(
            config,
            self._hello(),
            SegmentMapper(copier, self._wake),
            self._epoll,
            tell=self._feed,
            facts=self._facts,
            wake=self._wake,
        )
        self._thread = threading.Thread(target=self._run, name="kvpool-rank", daemon=True)
        self._thread.start()
        self._wake()

    def _hello(self) -> msg.Hello:
        return msg.Hello(
            protocol=msg.PROTOCOL_VERSION,
            version=kvpool.__version__,
            role="rank",
            engine=self._engine,
            rank=self._rank,
            pid=os.getpid(),
            namespace=self._namespace,
            weight=self._config.weight,
        )

    # ------------------------------------------------------------ the engine's side

    def submit_load(self, job: int, objects: Sequence[LoadObject], *, epoch: int | None = None) -> None:
        """
        Load *objects* to their places. Never blocks, never raises; ended by one JobEnded.

        Args:
            epoch: The scheduler's; in a pool where another one counts, all of them fail. None: whichever counts.
        """
        self._submit(job, None, objects, None, epoch)

    def submit_store(
        self, job: int, request: str, objects: Sequence[StoreObject], after: object | None, *, epoch: int | None = None
    ) -> None:
        """
        Offer *objects* of *request*, in prefix order, for storing. Never blocks, never raises; ended by one JobEnded.

        Args:
            job: The same on all ranks of the engine for the same objects.
            after: What the copies have to be ordered after, for the copier.
            epoch: As for a load; in another one all of them are dropped.
        """
        self._submit(job, request, objects, after, epoch)

    def take_ended(self) -> list[JobEnded]:
        """Return the jobs that ended since the last call; never blocks."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def flush(self, jobs: Iterable[int]) -> None:
        """
        End *jobs* now: on return nothing of kvpool touches their places, and their JobEnded can be taken.

        Stores not launched are dropped, loads fail (also those that ended and were not taken yet); launched copies
        are waited for. Unknown numbers are ignored. Never raises.
        """
        wanted = frozenset(jobs)
        try:
            self._flush(wanted)
        except Exception as error:  # noqa: BLE001 - border: the engine's model thread must go on
            with self._lock:
                self._disable(error)
        with self._lock:
            if self._disabled:
                self._end_service()
            self._fail_ended_loads(wanted)
        self._wake()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until the pool and all its I/O workers can be used; tell whether that came. For tests and the bench."""
        return self._link.all_up.wait(timeout_s)

    @property
    def connected(self) -> bool:
        """A pool has welcomed this rank."""
        return self._link.joined

    def facts(self) -> dict[str, str | int | float | bool]:
        """Return what this client tells about itself for health."""
        with self._lock:
            return self._facts()

    def close(self) -> None:
        """End all jobs, wait for launched copies, let go of staging and sockets. Never raises."""
        with self._lock:
            self._closing = True
            if self._trial.trip is not None:
                self._trial.trip.stop()
        self._wake()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.error("kvpool rank client does not end: copies still run after %.0f s", CLOSE_S)

    def _flush(self, wanted: frozenset[int]) -> None:
        with self._lock:
            if self._disabled or self._over:
                return
            self._take_submissions()
            self._feed(ev.JobsFlushed(jobs=wanted))
            waiting = [(ticket, self._tickets[ticket]) for ticket in self._table.tickets_of(wanted)]
        ended = [(ticket, self._wait_failed(theirs)) for ticket, theirs in waiting]
        with self._lock:
            for ticket, failed in ended:
                if ticket in self._tickets:
                    del self._tickets[ticket]
                    self._feed(ev.CopiesEnded(ticket=ticket, failed=failed))

    def _submit(
        self,
        job: int,
        request: str | None,
        objects: Sequence[JobObject],
        after: object | None,
        epoch: int | None,
    ) -> None:
        with self._wire_lock:
            wire = self._wire_next
            self._wire_next += 1
        self._inbox.append(
            _Submission(
                job=job,
                wire=wire,
                request=request,
                objects=objects,
                after=after,
                submitted_ns=time.monotonic_ns(),
                epoch=epoch,
            )
        )
        if self._over:
            with self._lock:
                self._end_all()
        else:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed: nobody sleeps there any more
            os.eventfd_write(self._wake_fd, 1)

    def _wait_failed(self, theirs: object) -> bool:
        """Wait for a launched batch; tell whether it failed."""
        try:
            self._copier.wait(theirs)
        except Exception:  # border: the copier is the engine's code
            log.exception("kvpool: copies failed, their objects are recomputed or not stored")
            return True
        return False

    def _fail_ended_loads(self, jobs: frozenset[int]) -> None:
        """What landed for a load that the engine flushes is stale, also if its end was not taken yet."""
        for _ in range(len(self._ended)):
            ended = self._ended.popleft()
            if ended.kind == ev.JobKind.LOAD and ended.job in jobs:
                codes = dict(ended.failed)
                failed = tuple((index, codes.get(index, Code.CANCELLED)) for index in range(ended.objects))
                ended = replace(ended, failed=failed, bytes=0)
            self._ended.append(ended)

    # ------------------------------------------------------------ the round trip at start

    def _maybe_begin_trial(self) -> None:
        """Once, as soon as the pool is there and wants it."""
        welcome = self._link.welcome
        if self._trial.memory is None or welcome is None:
            return
        if not (self._link.all_up.is_set() and self._link.segments_mapped):
            return
        memory, self._trial.memory = self._trial.memory, None
        if not welcome.settings.self_test:
            self._trial.outcome = Outcome(OFF)
            return
        self._trial.trip = RoundTrip(
            memory, self._move, engine=self._engine, rank=self._rank, devices=welcome.devices, ended=self._end_trial
        )

    def _move(self, kind: str, key: bytes, device: int, place: object) -> Code | None:
        """Store or load one object of the trial; blocks its thread."""
        self._trial.last_job -= 1
        job, objects = self._trial.last_job, [JobObject(key, device, place)]
        self._trial.moved.clear()
        if kind == "store":
            self.submit_store(job, f"round trip {-job} of {self._engine}", objects, None)
        else:
            self.submit_load(job, objects)
        if not self._trial.moved.wait(JOB_S):
            self.flush([job])  # its copies have ended then, and its memory may go
        ended = self._trial.ends.pop(job, None)
        if ended is None:
            return Code.DEADLINE
        return ended.failed[0][1] if ended.failed else None

    def _end_trial(self, outcome: Outcome) -> None:
        with self._lock:
            self._trial.outcome = outcome

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while True:
                ready = self._epoll.poll()
                with self._lock:
                    if self._closing or self._disabled:
                        break
                    self._turn({fd for fd, _ in ready})
        except Exception as error:  # noqa: BLE001 - border: this thread lives in the engine's process
            with self._lock:
                self._disable(error)
        with self._lock:
            self._end_service()
            self._release()

    def _turn(self, ready: set[int]) -> None:
        """One round: take in all that is there, decide, send and launch, set the alarm for the next one."""
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        if self._timer.fileno() in ready:
            self._timer.clear()
        self._link.turn(ready, copies_run=bool(self._tickets))
        self._take_submissions()
        self._keep_deadlines()
        self._take_copies()
        self._maybe_begin_trial()
        self._feed(ev.RoundEnded())
        while self._take_copies():
            self._feed(ev.RoundEnded())
        self._link.flush()
        self._arm_timer()

    def _feed(self, event: ev.Event) -> None:
        """Tell the table, do what it asks for, and tell it what came of that."""
        self._pending.append(event)
        if self._feeding:
            return  # called from an action: the loop below takes it
        self._feeding = True
        while self._pending:
            for action in self._table.handle(self._pending.popleft(), now_ns=time.monotonic_ns()):
                self._do(action)
        self._feeding = False

    def _take_submissions(self) -> None:
        while self._inbox:
            job = self._inbox.popleft()
            if job.epoch is not None and job.epoch != self._link.epoch:
                self._end_job(job, tuple((index, Code.EPOCH) for index in range(len(job.objects))))
                continue
            if self._trial.outcome.word == FAILED and job.job >= 0:
                self._end_job(job, tuple((index, Code.REFUSED) for index in range(len(job.objects))))
                continue
            self._jobs[job.wire] = job
            keys = [item.key for item in job.objects]
            devices = [item.device for item in job.objects]
            if job.request is None:
                self._feed(ev.LoadSubmitted(job=job.job, wire=job.wire, keys=keys, devices=devices))
            else:
                self._feed(
                    ev.StoreSubmitted(job=job.job, wire=job.wire, request=job.request, keys=keys, devices=devices)
                )

    def _take_copies(self) -> bool:
        """Look at the launched copies; tell whether any ended."""
        looked_at = [(ticket, self._ended_failed(theirs)) for ticket, theirs in self._tickets.items()]
        ended = [(ticket, failed) for ticket, failed in looked_at if failed is not None]
        for ticket, failed in ended:
            del self._tickets[ticket]
            self._feed(ev.CopiesEnded(ticket=ticket, failed=failed))
        return bool(ended)

    def _ended_failed(self, theirs: object) -> bool | None:
        """None: still running; else whether the batch failed."""
        try:
            return False if self._copier.ended(theirs) else None
        except Exception:  # border: the copier is the engine's code
            log.exception("kvpool: copies failed, their objects are recomputed or not stored")
            return True

    def _keep_deadlines(self) -> None:
        deadline_ns = self._table.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= time.monotonic_ns():
            self._feed(ev.TimePassed())

    def _arm_timer(self) -> None:
        now_ns = time.monotonic_ns()
        due = [self._table.next_deadline_ns(), self._link.due_ns()]
        if self._tickets:
            due.append(now_ns + COPY_CHECK_NS)
        first_ns = min((at_ns for at_ns in due if at_ns is not None), default=None)
        self._timer.arm(None if first_ns is None else first_ns - now_ns)

    # ------------------------------------------------------------ doing what the table asks for

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.LaunchLoad() | ev.LaunchStore():
                self._launch(action)
            case ev.EndJob():
                self._end_job(self._jobs.pop(action.wire), action.failed)
            case ev.TellCopiesEnded(device=device, generation=generation):
                self._link.say(msg.CopiesEnded(device=device, worker_generation=generation))
            case ev.UnmapSegment(segment=segment):
                self._link.unmap(segment)
            case ev.DropWorker(device=device, why=why):
                self._link.drop_worker(device, why)
            case _:
                self._link.send(action.device, _messages(action))

    def _launch(self, action: ev.LaunchLoad | ev.LaunchStore) -> None:
        copies = [
            Copy(copy.segment, copy.offset, self._jobs[copy.wire].objects[copy.object_index].place)
            for copy in action.copies
        ]
        try:
            if isinstance(action, ev.LaunchLoad):
                self._tickets[action.ticket] = self._copier.load(copies)
            else:
                self._tickets[action.ticket] = self._copier.store(copies, self._jobs[action.wire].after)
        except Exception:  # border: the copier is the engine's code
            log.exception("kvpool: copies cannot be launched, their objects are recomputed or not stored")
            self._feed(ev.CopiesEnded(ticket=action.ticket, failed=True))

    def _end_job(self, job: _Submission, failed: tuple[tuple[int, Code], ...]) -> None:
        lost = {index for index, _ in failed}
        seconds = (time.monotonic_ns() - job.submitted_ns) / 1e9
        if job.job < 0:
            self._trial.ends[job.job] = JobEnded(job.job, job.kind.value, failed, 0, seconds, len(job.objects))
            self._trial.moved.set()
            return
        ended_bytes = sum(self._bytes_of(item.key) for index, item in enumerate(job.objects) if index not in lost)
        if job.request is None:
            self._served_bytes += ended_bytes
        else:
            self._kept_bytes += ended_bytes
        self._ended.append(JobEnded(job.job, job.kind.value, failed, ended_bytes, seconds, len(job.objects)))

    def _bytes_of(self, key: bytes) -> int:
        """Payload bytes of an object: the last four bytes of a key are its KV group."""
        if len(self._object_bytes) == 1:
            return next(iter(self._object_bytes.values()))
        return self._object_bytes.get(int.from_bytes(key[-4:], "big"), 0)

    # ------------------------------------------------------------ end

    def _disable(self, error: BaseException) -> None:
        """A bug, or worse: say it once, and go on without a pool."""
        if not self._disabled:
            self._disabled = True
            story = {**self._facts(), **self._table.statistics()}
            kind = "a bug in kvpool" if isinstance(error, InvariantError) else "an unexpected error"
            log.error("kvpool is disabled in this process by %s; %r", kind, story, exc_info=error)
            self._wake()

    def _end_service(self) -> None:
        """Wait for launched copies, then end every job; whoever comes first does it, on any thread."""
        if self._over:
            return
        for theirs in self._tickets.values():
            self._wait_failed(theirs)
        self._tickets.clear()
        self._over = True
        self._end_all()

    def _release(self) -> None:
        """Let go of staging, sockets and the rest; no copy runs any more, and nothing else is done on this thread."""
        self._link.close(CLOSE_S)
        self._epoll.close()
        self._timer.close()
        os.close(self._wake_fd)
        try:
            self._copier.close()
        except Exception:  # border: the copier is the engine's code
            log.exception("kvpool: the copier cannot be closed, its memory stays until the process ends")

    def _end_all(self) -> None:
        """End every job that the table did not end."""
        while self._inbox:
            job = self._inbox.popleft()
            self._jobs[job.wire] = job
        for job in self._jobs.values():
            self._end_job(job, tuple((index, Code.CANCELLED) for index in range(len(job.objects))))
        self._jobs.clear()

    def _facts(self) -> dict[str, str | int | float | bool]:
        return {
            "role": "rank",
            "pid": os.getpid(),
            "state": "down" if self._disabled else "running" if self._link.joined else "starting",
            "engine": self._engine,
            "rank": self._rank,
            "model": self._namespace.model_name,
            "uptime_s": (time.monotonic_ns() - self._started_ns) / 1e9,
            "bytes_served": self._served_bytes,
            "bytes_kept": self._kept_bytes,
            "segments_mapped": self._link.segments_mapped,
            "self_test": self._trial.outcome.word,
            "self_test_why": self._trial.outcome.why,
            **self._table.statistics(),
        }


def _messages(
    action: ev.SendLoad | ev.SendLoadCancel | ev.SendRelease | ev.SendStore | ev.SendFilled | ev.SendStoreCancel,
) -> Iterable[msg.Message]:
    """Cut an action's list into messages."""
    match action:
        case ev.SendLoad(wire=wire, keys=keys):
            return [msg.Load(job=wire, first=first, keys=part) for first, part in split(keys)]
        case ev.SendStore(wire=wire, keys=keys):
            return [msg.Store(job=wire, store=action.job, first=first, keys=part) for first, part in split(keys)]
        case ev.SendRelease(wire=wire, indices=indices):
            return [msg.Release(job=wire, indices=part) for _, part in split(indices)]
        case ev.SendFilled(wire=wire, indices=indices):
            return [msg.Filled(job=wire, indices=part) for _, part in split(indices)]
        case ev.SendStoreCancel(wire=wire, indices=indices):
            return [msg.StoreCancel(job=wire, indices=part) for _, part in split(indices)]
        case ev.SendLoadCancel(wire=wire):
            return [msg.LoadCancel(job=wire)]
