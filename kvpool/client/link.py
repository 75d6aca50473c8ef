r"""
The rank client's link to a pool: one socket to the coordinator, one to each I/O worker, and the pool's segments.

Theory. Life of the link:

    IDLE -> CONNECTING -> GREETING -> JOINED -> LEAVING -> IDLE
      \_____ back-off 0.2 s to 5 s _____/

LEAVING: the pool is lost; copies end and segments are unmapped, and only then a new one is greeted, so that there
is never twice the staging. A pool that is missing is started on a thread of its own (that takes seconds), where the
configuration allows it and ever more rarely where it fails.

The link turns what peers say into events for the table of jobs, and knows nothing of jobs. It is driven by the
client's thread, under the client's lock: `turn` for what became readable and what is due, `flush` for what is to be
sent. A worker that hangs up is lost; if the coordinator does not say so soon, the link is made anew.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvpool.client.launch import GREETING_S, RETRY_S_MAX, RETRY_S_MIN, ClientConfig, connect_pool, ensure_pool
from kvpool.client.segments import Mapped, SegmentMapper
from kvpool.core import rank_events as ev
from kvpool.errors import HostError, KvpoolError, PeerGone, PoolUnavailable, ProtocolError
from kvpool.io import channel
from kvpool.io.channel import Channel
from kvpool.wire import messages as msg

log = logging.getLogger(__name__)

#: What the rank adds to the pool's deadlines before it gives up by itself.
LOAD_MARGIN_S = 2.0
STORE_MARGIN_S = 0.5
#: Back-off between attempts to start a pool, where starting fails.
START_RETRY_S_MIN = 1.0
START_RETRY_S_MAX = 60.0
#: A worker that hung up without word of it from the coordinator: time until this rank attaches anew.
ORPHAN_S = 10.0


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


class PoolLink:
    """
    See the module.

    Args:
        config: Where the pool is, and whether to start one.
        hello: The greeting.
        mapper: Maps segments; its results wake the client.
        epoll: Where the link's sockets are watched.
        tell: Takes each event for the table of jobs.
        facts: What this client tells about itself.
        wake: Wakes the client's thread, from any thread.
    """

    def __init__(
        self,
        config: ClientConfig,
        hello: msg.Hello,
        mapper: SegmentMapper,
        epoll: select.epoll,
        *,
        tell: Callable[[ev.Event], None],
        facts: Callable[[], dict[str, str | int | float | bool]],
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._hello = hello
        self._mapper = mapper
        self._epoll = epoll
        self._feed = tell
        self._facts = facts
        self._wake = wake
        self._phase = _Phase.IDLE
        #: When the phase's time is over (IDLE: next attempt; GREETING: given up).
        self._phase_until_ns: int | None = 0
        self._retry_s = RETRY_S_MIN
        self._start_retry_s = START_RETRY_S_MIN
        self._start_after_ns = 0
        self._coordinator: Channel | None = None
        self._welcome: msg.Welcome | None = None
        self._workers: dict[int, _Worker] = {}
        #: Devices whose worker hung up without word of it from the coordinator, and since when.
        self._orphans_ns: dict[int, int] = {}
        self._segments: dict[int, _SegmentState] = {}
        #: What the starting thread brought.
        self._connected: deque[socket.socket | KvpoolError] = deque()
        #: The trouble said last: one line for each change.
        self._trouble = ""
        self._interest: dict[int, int] = {}
        #: Set while a pool and all its workers can be used.
        self.all_up = threading.Event()

    # ------------------------------------------------------------ the client's side

    @property
    def joined(self) -> bool:
        """A pool has welcomed this rank."""
        return self._phase is _Phase.JOINED

    @property
    def welcome(self) -> msg.Welcome | None:
        """What the pool that has welcomed this rank said."""
        return self._welcome

    @property
    def epoch(self) -> int | None:
        """Epoch of the namespace in the pool that has welcomed this rank."""
        return self._welcome.epoch if self._welcome is not None else None

    @property
    def segments_mapped(self) -> int:
        """Segments that copies can reach."""
        return list(self._segments.values()).count(_SegmentState.MAPPED)

    def turn(self, ready: set[int], *, copies_run: bool) -> None:
        """Take in what became readable and what the background threads brought; do what is due."""
        self._take_segments()
        self._take_connection()
        if self._coordinator is not None and self._coordinator.fileno() in ready:
            self._read_coordinator(self._coordinator)
        for device, worker in list(self._workers.items()):
            if worker.channel.fileno() in ready:
                self._read_worker(device, worker)
        self._keep_connection(copies_run)

    def due_ns(self) -> int | None:
        """Return when `turn` is needed although nothing became readable."""
        due = [since_ns + int(ORPHAN_S * 1e9) for since_ns in self._orphans_ns.values()]
        if self._phase_until_ns is not None:
            due.append(self._phase_until_ns)
        return min(due, default=None)

    def send(self, device: int, messages: Iterable[msg.Message]) -> None:
        """Send to a device's worker, if it is there; one that cannot be sent to is lost."""
        worker = self._workers.get(device)
        if worker is None:
            return
        try:
            for message in messages:
                worker.channel.send(message)
        except (PeerGone, ProtocolError, HostError) as error:
            self._lose_worker(device, str(error))

    def say(self, message: msg.Message) -> None:
        """Send to the coordinator, if it is there."""
        if self._coordinator is None:
            return
        try:
            self._coordinator.send(message)
        except (PeerGone, ProtocolError, HostError) as error:
            log.warning("kvpool cannot be told: %s", error)  # its hang-up is read in the next round

    def drop_worker(self, device: int, why: str) -> None:
        """Leave a worker that does not speak as agreed; the table counts it as lost already."""
        log.error("kvpool I/O worker of %s is left: %s", self._device_name(device), why)
        self._close_worker(device)
        self._orphans_ns[device] = time.monotonic_ns()

    def unmap(self, segment: int) -> None:
        """Unmap a segment that no copy touches, then tell the coordinator."""
        self._segments[segment] = _SegmentState.LEAVING
        self._mapper.unmap(segment)

    def flush(self) -> None:
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

    def close(self, timeout_s: float) -> None:
        """Unmap everything and hang up; no copy runs any more."""
        self.all_up.clear()
        self._phase, self._phase_until_ns = _Phase.LEAVING, None
        for segment in list(self._segments):
            self._mapper.unmap(segment)
        self._mapper.join(timeout_s)
        for device in list(self._workers):
            self._close_worker(device)
        if self._coordinator is not None:
            self._unwatch(self._coordinator)
            self._coordinator = None
        for result in self._connected:
            if isinstance(result, socket.socket):
                result.close()
        self._connected.clear()

    # ------------------------------------------------------------ connection

    def _keep_connection(self, copies_run: bool) -> None:
        """Do what the phase's time says: attempt, give up a greeting, attach anew past an orphaned worker."""
        now_ns = time.monotonic_ns()
        if self._phase is _Phase.LEAVING and not copies_run and not self._segments:
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
        self.say(self._hello)

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
                self.say(msg.Report(report=report, facts=self._facts()))

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
        self.all_up.clear()
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
            self.all_up.set()

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
            self.all_up.clear()
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
                self.say(msg.SegmentForgotten(segment=result.segment))
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
