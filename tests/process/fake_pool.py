"""
A pool in one thread, for tests of the clients: real sockets, real shared memory, objects kept in slots for ever.

It speaks the whole protocol of a coordinator and of one I/O worker per device towards clients, decides stores once
for all ranks, and does what a test tells it: refuse keys, hold answers back, lose a worker, vanish, come back.
"""

import contextlib
import mmap
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvpool.errors import Code, PeerGone, ProtocolError
from kvpool.io import channel, shm
from kvpool.io.channel import Channel
from kvpool.wire import messages as msg

SLOT_BYTES = 8192


@dataclass
class _Client:
    """An attached client, and its sockets to the workers."""

    number: int
    hello: msg.Hello
    channel: Channel
    workers: dict[int, Channel] = field(default_factory=dict)


@dataclass
class _Decision:
    """A store of one key, decided for all ranks: slots by rank, or None for dropped."""

    slots: dict[int, tuple[int, int]] | None
    filled: set[int] = field(default_factory=set)


class FakePool:
    """
    See the module.

    Args:
        run_dir: Where `pool.sock` is made.
        devices: How many.
        slots: Of the one segment per device.
        ranks: Ranks of the engine.
    """

    def __init__(self, run_dir: str, *, devices: int = 1, slots: int = 64, ranks: int = 1) -> None:
        self.run_dir = run_dir
        self.devices, self.slots, self.ranks = devices, slots, ranks
        self.load_deadline_s, self.store_deadline_s = 2.0, 0.3
        #: Told by tests, read by the pool's thread.
        self.refuse: Callable[[bytes], bool] = lambda key: False
        self.hold_loads = self.hold_stores = self.hold_statuses = False
        self.refuse_hello = ""
        #: What arrived, in order: (who, message).
        self.heard: list[tuple[str, msg.Message]] = []
        self.objects: dict[tuple[bytes, int], tuple[int, int]] = {}
        self.generation = 0
        self._segments: dict[int, tuple[int, int, mmap.mmap]] = {}
        self._calls: deque[tuple[Callable[[], None], threading.Event]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self.start()

    # ------------------------------------------------------------ the test's side

    def start(self) -> None:
        """Listen (again), with empty staging and new generations."""
        self.generation += 1
        self.objects.clear()
        self._clients: dict[int, _Client] = {}
        self._greeting: list[Channel] = []
        self._decisions: dict[tuple[str, int, bytes], _Decision] = {}
        self._jobs: dict[tuple[int, int, int], list[bytes]] = {}
        self._store_of: dict[tuple[int, int, int], int] = {}
        self._free: dict[int, deque[tuple[int, int]]] = {}
        self._worker_generations = dict.fromkeys(range(self.devices), 100 * self.generation)
        for device in range(self.devices):
            size = self.slots * SLOT_BYTES
            fd = shm.create_segment(size)
            self._segments[device] = (fd, size, shm.map_segment(fd, size))
            self._free[device] = deque((device, slot * SLOT_BYTES) for slot in range(self.slots))
        self._stop = False
        self._listener = channel.listen(os.path.join(self.run_dir, "pool.sock"))
        self._thread = threading.Thread(target=self._run, name="fake-pool", daemon=True)
        self._thread.start()

    def vanish(self) -> None:
        """End as a killed coordinator does: every socket hangs up, nobody listens."""
        self._stop = True
        os.eventfd_write(self._wake, 1)
        assert self._thread is not None
        self._thread.join()
        for client in self._clients.values():
            self._drop(client)
        for peer in self._greeting:
            peer.close()
        self._listener.close()
        os.unlink(os.path.join(self.run_dir, "pool.sock"))
        for fd, _, memory in self._segments.values():
            os.close(fd)
            memory.close()
        self._segments.clear()

    def close(self) -> None:
        """End for good."""
        self.vanish()
        os.close(self._wake)

    def call(self, what: Callable[[], None]) -> None:
        """Run *what* on the pool's thread; return when done."""
        done = threading.Event()
        self._calls.append((what, done))
        os.eventfd_write(self._wake, 1)
        assert done.wait(5)

    def worker_hangs_up(self, device: int, *, told: bool = True, back: bool = True) -> None:
        """End one device's worker; *told*: the coordinator says so; *back*: a new one comes up."""
        self.call(lambda: self._worker_hangs_up(device, told=told, back=back))

    def slot_bytes(self, segment: int, offset: int, count: int) -> bytes:
        """Return bytes of a slot."""
        return bytes(self._segments[segment][2][offset : offset + count])

    def alter(self, key: bytes, rank: int = 0) -> None:
        """Change one stored byte."""
        segment, offset = self.objects[key, rank]
        self._segments[segment][2][offset] ^= 0xFF

    def free_slots(self) -> int:
        """Slots that hold nothing."""
        return sum(len(free) for free in self._free.values())

    def recall(self, segment: int) -> None:
        """Ask all ranks to unmap a segment."""
        self.call(lambda: self._recall(segment))

    def add_segment(self, segment: int) -> None:
        """Make one more segment, and tell the ranks."""
        self.call(lambda: self._add_segment(segment))

    def send_nonsense(self, device: int) -> None:
        """Let a worker answer for an object that was not asked for."""
        ready = msg.Ready(job=1, slots=[msg.SlotGrant(1000, 0, 0)])
        self.call(lambda: self._ranks()[0].workers[device].send(ready))

    def kinds_heard(self, who: str) -> list[str]:
        """Names of the messages that came from *who*."""
        return [type(message).__name__ for name, message in list(self.heard) if name == who]

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._stop:
            poll = select.poll()
            handlers: dict[int, Callable[[], None]] = {
                self._wake: self._take_calls,
                self._listener.fileno(): self._accept,
            }
            channels: dict[int, Channel] = {}
            for peer in self._greeting:
                channels[peer.fileno()] = peer
                handlers[peer.fileno()] = partial(self._greet, peer)
            for client in self._clients.values():
                channels[client.channel.fileno()] = client.channel
                handlers[client.channel.fileno()] = partial(self._read_client, client)
                for device, worker in client.workers.items():
                    channels[worker.fileno()] = worker
                    handlers[worker.fileno()] = partial(self._read_worker, client, device)
            for fd in handlers:
                wants_write = fd in channels and channels[fd].wants_write
                poll.register(fd, select.POLLIN | (select.POLLOUT if wants_write else 0))
            for fd, _ in poll.poll():
                handlers[fd]()
            for peer in channels.values():
                if peer.fileno() >= 0:
                    with contextlib.suppress(PeerGone):
                        peer.flush()

    def _take_calls(self) -> None:
        os.eventfd_read(self._wake)
        while self._calls:
            what, done = self._calls.popleft()
            what()
            done.set()

    def _accept(self) -> None:
        sock = channel.accept(self._listener)
        if sock is not None:
            self._greeting.append(Channel(sock, msg.ClientToCoordinator))

    def _greet(self, peer: Channel) -> None:
        try:
            received = peer.receive()
        except (PeerGone, ProtocolError):
            self._greeting.remove(peer)
            peer.close()
            return
        for message, _ in received:
            assert isinstance(message, msg.Hello)
            self._greeting.remove(peer)
            if self.refuse_hello:
                peer.send(msg.Refused(code=12, message=self.refuse_hello))
                peer.close()
                continue
            client = _Client(len(self._clients) + 1, message, peer)
            self._clients[client.number] = client
            settings = msg.ClientSettings(
                load_deadline_s=self.load_deadline_s, store_deadline_s=self.store_deadline_s, defer_backlog_s=1.0
            )
            peer.send(
                msg.Welcome(
                    generation=self.generation,
                    client=client.number,
                    namespace=1,
                    devices=[f"nvme{device}" for device in range(self.devices)],
                    device_weights=[1] * self.devices,
                    settings=settings,
                )
            )
            if message.role == "rank":
                for device in range(self.devices):
                    self._connect_worker(client, device)
                self._send_segments(client)

    def _send_segments(self, client: _Client) -> None:
        for segment, (fd, size, _) in self._segments.items():
            client.channel.send(msg.SegmentUp(segment=segment, segment_bytes=size), (fd,))

    def _add_segment(self, segment: int) -> None:
        size = 4 * SLOT_BYTES
        fd = shm.create_segment(size)
        self._segments[segment] = (fd, size, shm.map_segment(fd, size))
        for client in self._ranks():
            client.channel.send(msg.SegmentUp(segment=segment, segment_bytes=size), (fd,))

    def _recall(self, segment: int) -> None:
        for client in self._ranks():
            client.channel.send(msg.SegmentDown(segment=segment))

    def _ranks(self) -> list[_Client]:
        return [client for client in self._clients.values() if client.hello.role == "rank"]

    def _schedulers(self) -> list[_Client]:
        return [client for client in self._clients.values() if client.hello.role == "scheduler"]

    def _connect_worker(self, client: _Client, device: int) -> None:
        ours, theirs = channel.pair()
        client.workers[device] = Channel(ours, msg.RankToWorker)
        up = msg.WorkerUp(device=device, worker_generation=self._worker_generations[device])
        client.channel.send(up, (theirs.fileno(),))
        theirs.close()

    def _worker_hangs_up(self, device: int, *, told: bool, back: bool) -> None:
        for client in self._ranks():
            client.workers.pop(device).close()
            if told:
                generation = self._worker_generations[device]
                client.channel.send(msg.WorkerDown(device=device, worker_generation=generation))
        self._worker_generations[device] += 1
        if back:
            for client in self._ranks():
                self._connect_worker(client, device)

    def _drop(self, client: _Client) -> None:
        client.channel.close()
        for worker in client.workers.values():
            worker.close()

    def _read_client(self, client: _Client) -> None:
        try:
            received = client.channel.receive()
        except (PeerGone, ProtocolError):
            self._drop(client)
            self._clients.pop(client.number, None)
            return
        for message, _ in received:
            self.heard.append((client.hello.role, message))
            if isinstance(message, msg.Announce) and not self.hold_statuses:
                self.answer(client, message)

    def answer(self, client: _Client, message: msg.Announce) -> None:
        """Answer an Announce from what is stored."""
        flags = bytes(self._flags(key) for key in message.keys)
        devices = bytes(self._device(key) for key in message.keys)
        client.channel.send(msg.Status(request=message.request, first=message.first, flags=flags, devices=devices))

    def _flags(self, key: bytes) -> int:
        whole = all((key, rank) in self.objects for rank in range(self.ranks))
        return (msg.STORED | msg.RESIDENT) if whole else 0

    def _device(self, key: bytes) -> int:
        return self.objects[key, 0][0] if self._flags(key) else 255

    def _read_worker(self, client: _Client, device: int) -> None:
        worker = client.workers.get(device)
        if worker is None:
            return
        try:
            received = worker.receive()
        except (PeerGone, ProtocolError):
            client.workers.pop(device).close()
            return
        for message, _ in received:
            self.heard.append((f"rank{client.hello.rank}", message))
            self._work(client, device, worker, message)

    def _work(self, client: _Client, device: int, worker: Channel, message: msg.Message) -> None:
        rank = client.hello.rank
        match message:
            case msg.Load(job=job, first=first, keys=keys) if not self.hold_loads:
                found = [(first + i, self.objects.get((key, rank))) for i, key in enumerate(keys)]
                slots = [msg.SlotGrant(index, *slot) for index, slot in found if slot is not None]
                failed = [msg.ObjectFailed(index, int(Code.MISSING)) for index, slot in found if slot is None]
                if slots:
                    worker.send(msg.Ready(job=job, slots=slots))
                if failed:
                    worker.send(msg.LoadFailed(job=job, objects=failed))
            case msg.Store(job=job, store=store, first=first, keys=keys):
                self._jobs.setdefault((client.number, device, job), []).extend(keys)
                self._store_of[client.number, device, job] = store
                if not self.hold_stores:
                    self._answer_store(client, device, worker, message)
            case msg.Filled(job=job, indices=indices):
                for index in indices:
                    self._filled(client, device, job, index)
            case msg.StoreCancel(job=job, indices=indices):
                for index in indices:
                    self._cancelled(client, device, job, index)

    def _answer_store(self, client: _Client, device: int, worker: Channel, message: msg.Store) -> None:
        rank, slots, exist, dropped = client.hello.rank, [], [], []
        for index, key in enumerate(message.keys, message.first):
            if (key, rank) in self.objects:
                exist.append(index)
                continue
            name = (client.hello.engine, message.store, key)
            if name not in self._decisions:
                refused = self.refuse(key) or len(self._free[device]) < self.ranks
                reserved = None if refused else {r: self._free[device].popleft() for r in range(self.ranks)}
                self._decisions[name] = _Decision(reserved)
            decided = self._decisions[name].slots
            if decided is None:
                dropped.append(index)
            else:
                slots.append(msg.SlotGrant(index, *decided[rank]))
        worker.send(msg.StoreAnswer(job=message.job, slots=slots, exist=exist, dropped=dropped))

    def _decision(self, client: _Client, device: int, job: int, index: int) -> tuple[bytes, _Decision | None]:
        key = self._jobs[client.number, device, job][index]
        store = self._store_of[client.number, device, job]
        return key, self._decisions.get((client.hello.engine, store, key))

    def _filled(self, client: _Client, device: int, job: int, index: int) -> None:
        key, decision = self._decision(client, device, job, index)
        if decision is None or decision.slots is None:
            return
        decision.filled.add(client.hello.rank)
        if len(decision.filled) == self.ranks:
            for rank, slot in decision.slots.items():
                self.objects[key, rank] = slot
            self._tell_schedulers(key, kept=True)

    def _cancelled(self, client: _Client, device: int, job: int, index: int) -> None:
        key, decision = self._decision(client, device, job, index)
        if decision is not None and decision.slots is not None:
            self._free[device].extend(decision.slots.values())
            decision.slots = None
        self._tell_schedulers(key, kept=False)

    def _tell_schedulers(self, key: bytes, *, kept: bool) -> None:
        for client in self._schedulers():
            ended = msg.StoresEnded(kept=[key] if kept else [], dropped=[] if kept else [key])
            client.channel.send(ended)
            state = msg.KeyState(key, self._flags(key), self._device(key))
            client.channel.send(msg.KeysChanged(entries=[state]))
