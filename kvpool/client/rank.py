r"""
The rank client: moves KV between the engine's memory and the pool's staging, in the background of one vLLM rank.

Theory. All decisions are in `core/rank_jobs.py`; this is its shell. One daemon thread sleeps in epoll over the
coordinator's socket, one socket per I/O worker, an eventfd (the engine submitted something, a background thread has
a result) and a timer (0.5 ms while copies run, since a GPU event cannot be waited on in epoll; else the next
deadline). It never spins. Segments are mapped and pinned, and a missing pool is started, on short-lived threads.

The engine's threads only append to a queue and write the eventfd (`submit_*`), or pop a queue (`take_ended`).
`flush` is the exception: it takes the lock under which the thread works (held for microseconds, or for the launch
of one batch), lets the table give up what is not launched, and waits for launched copies without the lock.

Life of the connection:

    IDLE -> CONNECTING -> GREETING -> JOINED -> LEAVING -> IDLE     LEAVING: the pool is lost; copies end, segments
      \_____ back-off 0.2 s to 5 s _____/                           are unmapped, and only then a new one is greeted

Whatever goes wrong ends jobs as failed or dropped. A bug (InvariantError) or an unknown error disables the client:
it is logged once, every job still ends, the engine goes on without a pool.
"""

import contextlib
import enum
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import kvpool
from kvpool.client.copier import Copier, Copy
from kvpool.client.launch import ClientConfig, connect_pool, ensure_pool
from kvpool.client.segments import Mapped, SegmentMapper
from kvpool.core import rank_events as ev
from kvpool.core.rank_jobs import RankJobs
from kvpool.errors import Code, HostError, InvariantError, KvpoolError, PeerGone, PoolUnavailable, ProtocolError
from kvpool.io import channel
from kvpool.io.channel import Channel
from kvpool.io.timer import Timer
from kvpool.wire import messages as msg
from kvpool.wire.codec import split

log = logging.getLogger(__name__)

#: What the rank adds to the pool's deadlines before it gives up by itself.
LOAD_MARGIN_S = 2.0
STORE_MARGIN_S = 0.5
#: While copies run, how often they are looked at.
COPY_CHECK_NS = 500_000
#: Back-off between attempts to reach a pool.
RETRY_S_MIN = 0.2
RETRY_S_MAX = 5.0
#: Back-off between attempts to start a pool, where starting fails.
START_RETRY_S_MIN = 1.0
START_RETRY_S_MAX = 60.0
#: Time for a coordinator to answer a Hello.
GREETING_S = 5.0
#: A worker that hung up without word of it from the coordinator: time until this rank attaches anew.
ORPHAN_S = 10.0
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

    @property
    def kind(self) -> ev.JobKind:
        return ev.JobKind.LOAD if self.request is None else ev.JobKind.STORE


class _Phase(enum.Enum):
    """Life of the connection; see the module."""

    IDLE = "idle"
    CONNECTING = "connecting"
    GREETING = "greeting"
    JOINED = "joined"
    LEAVING = "leaving"


class _SegmentState(enum.Enum):
    """What this rank is doing with a segment; LEAVING: unmap it (or it is being unmapped)."""

    MAPPING = "mapping"
    MAPPED = "mapped"
    UNMAPPABLE = "unmappable"
    LEAVING = "leaving"


@dataclass(slots=True)
class _Worker:
    """A connected I/O worker."""

    channel: Channel
    generation: int


class RankClient:
    """
    One rank's side of the pool. Starts its thread at once; connects, and starts a pool if need be, in the background.

    Args:
        config: Where the pool is, and whether to start one.
        namespace: What this engine stores.
        engine: Identifies the engine; the same on all its ranks and its scheduler.
        rank: 0 .. namespace.rank_count - 1.
        copier: Moves the bytes; the client's from now on.
    """

    def __init__(
        self, config: ClientConfig, namespace: msg.NamespaceSpec, *, engine: str, rank: int, copier: Copier
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
        self._wire_next = 1
        self._wire_lock = threading.Lock()
        self._table = RankJobs()
        self._pending: deque[ev.Event] = deque()
        self._feeding = False
        self._jobs: dict[int, _Submission] = {}
        #: Launched batches: the table's ticket -> the copier's.
        self._tickets: dict[int, object] = {}
        self._phase = _Phase.IDLE
        self._retry_s = RETRY_S_MIN
        self._phase_until_ns: int | None = 0
        self._start_retry_s = START_RETRY_S_MIN
        self._start_after_ns = 0
        self._coordinator: Channel | None = None
        self._welcome: msg.Welcome | None = None
        self._workers: dict[int, _Worker] = {}
        self._orphans_ns: dict[int, int] = {}
        self._segments: dict[int, _SegmentState] = {}
        self._connected: deque[socket.socket | KvpoolError] = deque()
        self._trouble = ""
        self._closing = False
        self._disabled = False
        self._over = False
        self._started_ns = time.monotonic_ns()
        self._all_up = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = Timer()
        self._mapper = SegmentMapper(copier, self._wake)
        self._epoll = select.epoll()
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._timer.fileno(), select.EPOLLIN)
        self._interest: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="kvpool-rank", daemon=True)
        self._thread.start()
        self._wake()

    # ------------------------------------------------------------ the engine's side

    def submit_load(self, job: int, objects: Sequence[LoadObject]) -> None:
        """Load *objects* to their places. Never blocks, never raises; ended by one JobEnded."""
        self._submit(job, None, objects, None)

    def submit_store(self, job: int, request: str, objects: Sequence[StoreObject], after: object | None) -> None:
        """
        Offer *objects* of *request*, in prefix order, for storing. Never blocks, never raises; ended by one JobEnded.

        Args:
            job: The same on all ranks of the engine for the same objects.
            after: What the copies have to be ordered after, for the copier.
        """
        self._submit(job, request, objects, after)

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
        return self._all_up.wait(timeout_s)

    @property
    def connected(self) -> bool:
        """A pool has welcomed this rank."""
        return self._phase is _Phase.JOINED

    def facts(self) -> dict[str, str | int | float | bool]:
        """Return what this client tells about itself for health."""
        with self._lock:
            return self._facts()

    def close(self) -> None:
        """End all jobs, wait for launched copies, let go of staging and sockets. Never raises."""
        with self._lock:
            self._closing = True
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
    ) -> None:
        with self._wire_lock:
            wire = self._wire_next
            self._wire_next += 1
        self._inbox.append(
            _Submission(
                job=job, wire=wire, request=request, objects=objects, after=after, submitted_ns=time.monotonic_ns()
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
            log.exception("copies failed")
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
        self._take_segments()
        self._take_connection()
        if self._coordinator is not None and self._coordinator.fileno() in ready:
            self._read_coordinator(self._coordinator)
        for device, worker in list(self._workers.items()):
            if worker.channel.fileno() in ready:
                self._read_worker(device, worker)
        self._take_submissions()
        self._keep_connection()
        self._keep_deadlines()
        self._take_copies()
        self._feed(ev.RoundEnded())
        while self._take_copies():
            self._feed(ev.RoundEnded())
        self._write_channels()
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
            log.exception("copies failed")
            return True

    def _keep_deadlines(self) -> None:
        deadline_ns = self._table.next_deadline_ns()
        if deadline_ns is not None and deadline_ns <= time.monotonic_ns():
            self._feed(ev.TimePassed())

    def _arm_timer(self) -> None:
        now_ns = time.monotonic_ns()
        due = [self._table.next_deadline_ns(), self._phase_until_ns]
        due.extend(since_ns + int(ORPHAN_S * 1e9) for since_ns in self._orphans_ns.values())
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
                self._tell(msg.CopiesEnded(device=device, worker_generation=generation))
            case ev.UnmapSegment(segment=segment):
                self._segments[segment] = _SegmentState.LEAVING
                self._mapper.unmap(segment)
            case ev.DropWorker(device=device, why=why):
                log.error("kvpool I/O worker of %s is left: %s", self._device_name(device), why)
                self._close_worker(device)
                self._orphans_ns[device] = time.monotonic_ns()
            case _:
                self._send(action)

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
            log.exception("copies cannot be launched")
            self._feed(ev.CopiesEnded(ticket=action.ticket, failed=True))

    def _send(
        self,
        action: ev.SendLoad | ev.SendLoadCancel | ev.SendRelease | ev.SendStore | ev.SendFilled | ev.SendStoreCancel,
    ) -> None:
        worker = self._workers.get(action.device)
        if worker is None:
            return
        try:
            for message in _messages(action):
                worker.channel.send(message)
        except (PeerGone, ProtocolError, HostError) as error:
            self._lose_worker(action.device, str(error))

    def _tell(self, message: msg.Message) -> None:
        if self._coordinator is None:
            return
        try:
            self._coordinator.send(message)
        except (PeerGone, ProtocolError, HostError) as error:
            log.warning("kvpool cannot be told: %s", error)  # its hang-up is read in the next round

    def _end_job(self, job: _Submission, failed: tuple[tuple[int, Code], ...]) -> None:
        lost = {index for index, _ in failed}
        ended_bytes = sum(self._bytes_of(item.key) for index, item in enumerate(job.objects) if index not in lost)
        seconds = (time.monotonic_ns() - job.submitted_ns) / 1e9
        self._ended.append(JobEnded(job.job, job.kind.value, failed, ended_bytes, seconds, len(job.objects)))

    def _bytes_of(self, key: bytes) -> int:
        """Payload bytes of an object: the last four bytes of a key are its KV group."""
        if len(self._object_bytes) == 1:
            return next(iter(self._object_bytes.values()))
        return self._object_bytes.get(int.from_bytes(key[-4:], "big"), 0)

    # ------------------------------------------------------------ connection

    def _keep_connection(self) -> None:
        """Do what the phase's time says: attempt, give up a greeting, attach anew past an orphaned worker."""
        now_ns = time.monotonic_ns()
        if self._phase is _Phase.LEAVING and not self._tickets and not self._segments:
            self._phase, self._phase_until_ns = _Phase.IDLE, now_ns + int(self._retry_s * 1e9)
        if self._phase is _Phase.IDLE and self._phase_until_ns is not None and self._phase_until_ns <= now_ns:
            self._connect()
        elif self._phase is _Phase.GREETING and self._phase_until_ns is not None and self._phase_until_ns <= now_ns:
            self._lose_pool("it does not answer the greeting")
        elif any(since_ns + ORPHAN_S * 1e9 <= now_ns for since_ns in self._orphans_ns.values()):
            self._lose_pool("an I/O worker hung up without a word")

    def _connect(self) -> None:
        """Connect now where a pool listens; else let a thread start one."""
        self._retry_s = min(self._retry_s * 2, RETRY_S_MAX)
        self._phase, self._phase_until_ns = _Phase.CONNECTING, None
        try:
            self._greet(connect_pool(self._config.run_dir))
        except KvpoolError as error:
            may_start = self._config.autostart and time.monotonic_ns() >= self._start_after_ns
            if may_start and isinstance(error, PoolUnavailable):
                threading.Thread(target=self._start_pool, name="kvpool-start", daemon=True).start()
            else:
                self._not_connected(error)

    def _start_pool(self) -> None:
        """Run on a thread of its own: starting takes seconds."""
        try:
            self._connected.append(ensure_pool(self._config))
        except KvpoolError as error:
            self._connected.append(error)
        except OSError as error:
            self._connected.append(HostError("cannot start a pool", reason=str(error)))
        self._wake()

    def _take_connection(self) -> None:
        while self._connected:
            result = self._connected.popleft()
            if isinstance(result, socket.socket):
                self._greet(result)
            else:
                self._not_connected(result)
                self._start_after_ns = time.monotonic_ns() + int(self._start_retry_s * 1e9)
                self._start_retry_s = min(self._start_retry_s * 2, START_RETRY_S_MAX)

    def _not_connected(self, error: KvpoolError) -> None:
        if time.monotonic_ns() >= self._start_after_ns:  # else the reason is that of the failed start, said already
            self._say_trouble(f"kvpool: no pool, nothing is loaded or stored: {error}")
        self._phase, self._phase_until_ns = _Phase.IDLE, time.monotonic_ns() + int(self._retry_s * 1e9)

    def _greet(self, sock: socket.socket) -> None:
        self._coordinator = Channel(sock, msg.CoordinatorToClient)
        self._watch(self._coordinator)
        self._phase, self._phase_until_ns = _Phase.GREETING, time.monotonic_ns() + int(GREETING_S * 1e9)
        self._tell(
            msg.Hello(
                protocol=msg.PROTOCOL_VERSION,
                version=kvpool.__version__,
                role="rank",
                engine=self._engine,
                rank=self._rank,
                pid=os.getpid(),
                namespace=self._namespace,
            )
        )

    def _read_coordinator(self, coordinator: Channel) -> None:
        try:
            for message, fds in coordinator.receive():
                self._hear(message, fds)
        except (PeerGone, ProtocolError) as error:
            if self._coordinator is coordinator:
                self._lose_pool(str(error))

    def _hear(self, message: msg.Message, fds: list[int]) -> None:
        match message:
            case msg.Welcome():
                self._join(message)
            case msg.Refused():
                self._lose_pool(f"refused: {message.message} {message.context}")
            case _ if self._phase is not _Phase.JOINED:
                for fd in fds:
                    os.close(fd)
            case msg.WorkerUp():
                self._join_worker(message, fds[0])
            case msg.WorkerDown(device=device, worker_generation=generation):
                self._orphans_ns.pop(device, None)
                if device in self._workers and self._workers[device].generation == generation:
                    log.warning("kvpool I/O worker of %s is down", self._device_name(device))
                    self._close_worker(device)
                self._feed(ev.WorkerLost(device=device, generation=generation))
            case msg.SegmentUp(segment=segment):
                self._segments[segment] = _SegmentState.MAPPING
                self._mapper.map(segment, fds[0], message.segment_bytes)
            case msg.SegmentDown(segment=segment):
                self._leave_segment(segment)
            case msg.ReportWanted(report=report):
                self._tell(msg.Report(report=report, facts=self._facts()))

    def _join(self, welcome: msg.Welcome) -> None:
        self._welcome = welcome
        self._phase, self._phase_until_ns, self._retry_s = _Phase.JOINED, None, RETRY_S_MIN
        self._trouble, self._start_retry_s = "", START_RETRY_S_MIN
        log.info("kvpool: joined pool generation %d as client %d", welcome.generation, welcome.client)
        self._feed(
            ev.PoolJoined(
                load_deadline_ns=int((welcome.settings.load_deadline_s + LOAD_MARGIN_S) * 1e9),
                store_deadline_ns=int((welcome.settings.store_deadline_s + STORE_MARGIN_S) * 1e9),
            )
        )

    def _lose_pool(self, why: str) -> None:
        if self._phase in (_Phase.GREETING, _Phase.JOINED):
            self._say_trouble(f"kvpool: pool lost, nothing is loaded or stored until it is back: {why}")
        self._phase, self._phase_until_ns = _Phase.LEAVING, None
        self._all_up.clear()
        self._orphans_ns.clear()
        self._welcome = None
        if self._coordinator is not None:
            self._unwatch(self._coordinator)
            self._coordinator = None
        self._feed(ev.PoolLost())
        for device in list(self._workers):
            self._close_worker(device)
        for segment, state in list(self._segments.items()):
            if state is _SegmentState.UNMAPPABLE:
                del self._segments[segment]
            elif state is _SegmentState.MAPPING:
                self._leave_segment(segment)

    def _say_trouble(self, what: str) -> None:
        """One line for each change, not for each attempt."""
        if what != self._trouble:
            self._trouble = what
            log.warning("%s", what)

    # ------------------------------------------------------------ workers

    def _join_worker(self, message: msg.WorkerUp, fd: int) -> None:
        try:
            worker = _Worker(Channel(channel.adopt(fd), msg.WorkerToRank), message.worker_generation)
        except ProtocolError as error:
            log.error("kvpool I/O worker of %s cannot be used: %s", self._device_name(message.device), error)
            return
        self._close_worker(message.device)
        self._orphans_ns.pop(message.device, None)
        self._workers[message.device] = worker
        self._watch(worker.channel)
        self._feed(ev.WorkerJoined(device=message.device, generation=message.worker_generation))
        if self._welcome is not None and len(self._workers) == len(self._welcome.devices):
            self._all_up.set()

    def _read_worker(self, device: int, worker: _Worker) -> None:
        try:
            received = worker.channel.receive()
        except (PeerGone, ProtocolError) as error:
            if self._workers.get(device) is worker:
                self._lose_worker(device, str(error))
            return
        for message, _ in received:
            match message:
                case msg.Ready(job=wire, slots=slots):
                    self._feed(ev.SlotsReady(device=device, wire=wire, slots=slots))
                case msg.LoadFailed(job=wire, objects=objects):
                    self._feed(ev.LoadsFailed(device=device, wire=wire, objects=objects))
                case msg.StoreAnswer(job=wire):
                    self._feed(
                        ev.StoreAnswered(
                            device=device,
                            wire=wire,
                            slots=message.slots,
                            exist=message.exist,
                            dropped=message.dropped,
                        )
                    )

    def _lose_worker(self, device: int, why: str) -> None:
        """The socket to a worker ended. If the worker did too, the coordinator says so soon."""
        log.warning("kvpool I/O worker of %s is lost: %s", self._device_name(device), why)
        generation = self._workers[device].generation
        self._close_worker(device)
        self._orphans_ns[device] = time.monotonic_ns()
        self._feed(ev.WorkerLost(device=device, generation=generation))

    def _close_worker(self, device: int) -> None:
        worker = self._workers.pop(device, None)
        if worker is not None:
            self._all_up.clear()
            self._unwatch(worker.channel)

    def _device_name(self, device: int) -> str:
        names = self._welcome.devices if self._welcome is not None else []
        return names[device] if 0 <= device < len(names) else f"device {device}"

    # ------------------------------------------------------------ segments

    def _leave_segment(self, segment: int) -> None:
        """A segment has to go: at once if it is still being mapped, else when the table says that no copy uses it."""
        if self._segments.get(segment) is _SegmentState.MAPPING:
            self._segments[segment] = _SegmentState.LEAVING
            self._mapper.unmap(segment)
        else:
            self._feed(ev.SegmentRecalled(segment=segment))

    def _take_segments(self) -> None:
        for result in self._mapper.take_results():
            if not isinstance(result, Mapped):
                self._segments.pop(result.segment, None)
                self._tell(msg.SegmentForgotten(segment=result.segment))
            elif self._segments[result.segment] is _SegmentState.MAPPING:
                if result.ok:
                    self._segments[result.segment] = _SegmentState.MAPPED
                    self._feed(ev.SegmentMapped(segment=result.segment))
                else:
                    self._segments[result.segment] = _SegmentState.UNMAPPABLE
                    self._feed(ev.SegmentUnmappable(segment=result.segment))

    # ------------------------------------------------------------ epoll

    def _watch(self, peer: Channel) -> None:
        self._epoll.register(peer.fileno(), select.EPOLLIN)
        self._interest[peer.fileno()] = select.EPOLLIN

    def _unwatch(self, peer: Channel) -> None:
        self._interest.pop(peer.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(peer.fileno())
        peer.close()

    def _write_channels(self) -> None:
        """Send what waits, and wait for room where some is left."""
        peers = [worker.channel for worker in self._workers.values()]
        if self._coordinator is not None:
            peers.append(self._coordinator)
        for peer in peers:
            with contextlib.suppress(PeerGone):  # its hang-up is read in the next round
                peer.flush()
            interest = select.EPOLLIN | (select.EPOLLOUT if peer.wants_write else 0)
            if peer.fileno() in self._interest and self._interest[peer.fileno()] != interest:
                self._interest[peer.fileno()] = interest
                self._epoll.modify(peer.fileno(), interest)

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
        self._all_up.clear()
        self._phase = _Phase.LEAVING

    def _release(self) -> None:
        """Let go of staging, sockets and the rest; no copy runs any more, and nothing else is done on this thread."""
        for segment in list(self._segments):
            self._mapper.unmap(segment)
        self._mapper.join(CLOSE_S)
        for peer in [self._coordinator, *(worker.channel for worker in self._workers.values())]:
            if peer is not None:
                self._unwatch(peer)
        self._coordinator = None
        self._workers.clear()
        for result in self._connected:
            if isinstance(result, socket.socket):
                result.close()
        self._epoll.close()
        self._timer.close()
        os.close(self._wake_fd)
        try:
            self._copier.close()
        except Exception:  # border: the copier is the engine's code
            log.exception("copier cannot be closed")

    def _end_all(self) -> None:
        """End every job that the table did not end."""
        while self._inbox:
            job = self._inbox.popleft()
            self._jobs[job.wire] = job
        for job in self._jobs.values():
            self._end_job(job, tuple((index, Code.CANCELLED) for index in range(len(job.objects))))
        self._jobs.clear()

    def _facts(self) -> dict[str, str | int | float | bool]:
        states = list(self._segments.values())
        return {
            "role": "rank",
            "pid": os.getpid(),
            "state": "down" if self._disabled else "running" if self._phase is _Phase.JOINED else "starting",
            "engine": self._engine,
            "rank": self._rank,
            "model": self._namespace.model_name,
            "uptime_s": (time.monotonic_ns() - self._started_ns) / 1e9,
            "segments_mapped": states.count(_SegmentState.MAPPED),
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
