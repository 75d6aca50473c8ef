"""
The pool's processes: the real coordinator and the real I/O worker, each in turns.

What they have of the system is simulated (`sandbox`); beside that only a worker's directories are (`SimNamespaces`:
the walk over the files) and the room on its drive (`SimRoom`: removals on request).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from kvpool import config
from kvpool.core import layout
from kvpool.core import object_events as events
from kvpool.errors import Exit, PeerGone
from kvpool.io.engine import Engine
from kvpool.procs import scanner
from kvpool.procs.coordinator_loop import Loop
from kvpool.procs.coordinator_pool import Coordinator
from kvpool.procs.io_worker import CoordinatorGone, IoWorker
from kvpool.procs.worker_namespaces import Namespace, Namespaces, Scanned
from kvpool.wire import messages as wire

from .drive import Drive, DriveEngine
from .kernel import MS, US, Flag, Kernel, Process, Socket, check
from .memory import Leases
from .sandbox import Channel, Sock

#: Keys that one read of a simulated scan brings.
SCAN_KEYS = 8


def loop_turn(loop: Loop) -> int | None:
    """One turn of the coordinator's loop, as `Loop.run` makes it; return its exit code once it has one."""
    for fd, mask in loop._epoll.poll(0):
        callback = loop._callbacks.get(fd)
        if callback is not None:
            callback(mask)
    loop._run_due_timers()
    loop._run_soon()
    for at_end in loop._turn_end:
        at_end()
    return loop._exit_code


class CoordinatorProcess:
    """The pool's coordinator."""

    def __init__(self, kernel: Kernel, settings: config.Settings, *, validates: bool) -> None:
        self.process = Process(kernel, "coordinator")
        self._validates = validates
        self.coordinator: Coordinator = cast(Coordinator, None)
        self.process.turn = self._turn
        kernel.run_as(self.process, lambda: self._start(settings))
        self.process.wake(kernel.now_ns)

    def _start(self, settings: config.Settings) -> None:
        self.coordinator = Coordinator(settings, "{}", detached=False, worker_module="simulated")
        self.coordinator._workers.go_on()

    def _turn(self) -> None:
        loop = self.coordinator.loop
        exit_code = loop_turn(loop)
        if self._validates:
            self.validate()
        if exit_code is not None:
            self.process.die(exit_code)
            return
        due_ns = [when_ns for when_ns, _ in loop._timers.values()]
        if loop._soon:
            due_ns.append(self.process.kernel.now_ns + 10 * US)
        if due_ns:
            self.process.wake(min(due_ns))

    def validate(self) -> None:
        """Check every table of the coordinator."""
        coordinator = self.coordinator
        coordinator._directory.validate()
        coordinator._staging.budget.validate()
        if coordinator._preload.enabled:
            coordinator._preload._admission.validate()


@dataclass(slots=True)
class _Walk:
    namespace: int
    flag: Flag
    found: list[tuple[int, bytes]] = field(default_factory=list)


class SimNamespaces(Namespaces):
    """Directories are names; a scan brings a few keys at a time."""

    def __init__(self, drive: Drive, owner: Process) -> None:
        super().__init__(cast(Any, None), "simulated")
        self._drive = drive
        self._owner = owner
        self._walks: dict[int, _Walk] = {}
        self.failures = 0
        self.going = True

    def open(self, namespace: int, spec: wire.NamespaceSpec) -> int:
        """Start a walk over the files as they are from now on."""
        kernel = self._drive.kernel
        self._open[namespace] = Namespace(
            spec=spec,
            directories=[f"{spec.fingerprint}-{rank}" for rank in range(spec.rank_count)],
            fingerprint=bytes.fromhex(spec.fingerprint),
            payload_bytes={group.group: group.object_bytes for group in spec.groups},
        )
        walk = _Walk(namespace, Flag(kernel))
        for path in self._drive.files:
            directory, _, name = path.partition("/")
            if directory in self._open[namespace].directories:
                key = layout.maybe_key(name.rpartition("/")[2])
                check(key is not None, "a file has no key's name", path=path)
                walk.found.append((self._open[namespace].directories.index(directory), cast(bytes, key)))
        fd = kernel.open(walk.flag)
        self._walks[fd] = walk
        walk.flag.set(kernel.now_ns + self._drive.rng.randrange(1, 20) * MS)
        return fd

    def let_scans(self, going: bool) -> None:
        """Kept for a check; these walks cost nothing."""
        self.going = going

    def scan_fds(self) -> frozenset[int]:
        """Walks under way."""
        return frozenset(self._walks)

    def complete(self) -> bool:
        """No walk is under way."""
        return not self._walks

    def read_scan(self, fd: int) -> Scanned:
        """Return the next few keys."""
        walk, kernel = self._walks[fd], self._drive.kernel
        part, walk.found = walk.found[:SCAN_KEYS], walk.found[SCAN_KEYS:]
        by_rank: dict[int, list[bytes]] = {}
        for rank, key in part:
            by_rank.setdefault(rank, []).append(key)
        found = [scanner.Found(rank=rank, keys=keys) for rank, keys in by_rank.items()]
        if walk.found:
            walk.flag.set(kernel.now_ns + self._drive.rng.randrange(1, 5) * MS)
        else:
            del self._walks[fd]
            kernel.close(fd)
        return Scanned(namespace=walk.namespace, found=found, ended=not walk.found)

    def close(self) -> None:
        """Nothing to end."""


class SimSnapshots:
    """None is ever written."""

    def __init__(self, *_what: object, **_how: object) -> None:
        """Nothing to keep."""

    def fds(self) -> frozenset[int]:
        """None."""
        return frozenset()

    def due_ns(self) -> None:
        """Nothing is due."""

    def look(self, _now_ns: int) -> None:
        """Nothing to write."""

    def opened(self, _namespace: int) -> None:
        """Not kept."""

    def retired(self, _namespace: int) -> None:
        """Not kept."""

    def finish(self) -> None:
        """Nothing to write."""

    def close(self) -> None:
        """Nothing to end."""


class SimRoom:
    """Always room; keys are removed when the schedule says so."""

    refusing = None
    stores_on = True
    walking = False
    going = True

    def let_scan(self, going: bool) -> None:
        """Kept for a check; nothing walks."""
        self.going = going

    def __init__(self, _device: object, namespaces: SimNamespaces, *, tell: Callable[[events.Event], None], watch: Any):
        self._namespaces = namespaces
        self._tell = tell
        self._kernel = namespaces._drive.kernel
        self._done: list[tuple[int, bytes]] = []
        self._flag = Flag(self._kernel)
        self._fd = self._kernel.open(self._flag)
        watch(self._fd)

    def fds(self) -> frozenset[int]:
        """Readable when keys were removed."""
        return frozenset({self._fd})

    def due_ns(self) -> None:
        """Nothing is due."""

    def on_ready(self, _fd: int) -> None:
        """Removals ended."""
        self._flag.since_ns = None
        done, self._done = self._done, []
        for namespace, key in done:
            self._tell(events.KeysRemoved(namespace=namespace, keys=[key]))

    def look(self, _now_ns: int) -> None:
        """Nothing to make room for."""

    def published(self, *_what: object) -> None:
        """Not counted."""

    def said_full(self) -> None:
        """Not remembered."""

    def used(self, _namespace: int, _rank: int, _keys: list[bytes]) -> None:
        """Not remembered."""

    def remove(self, namespace: int, key: bytes) -> None:
        """Remove every rank's file of *key*, soon."""

        def removed() -> None:
            for rank in range(self._namespaces.rank_count(namespace)):
                self._namespaces._drive.files.pop(self._namespaces.path(events.ObjectId(namespace, key, rank)), None)
            self._done.append((namespace, key))
            self._flag.set(self._kernel.now_ns)

        self._kernel.after(self._kernel.rng.randrange(1, 3000) * US, removed)

    def facts(self) -> dict[str, int]:
        """Nothing to tell."""
        return {}

    def close(self) -> None:
        """Nothing to end."""


class SimWorker(IoWorker):
    """The worker, with each of its promises noted and its table checked after every event."""

    def __init__(self, *arguments: Any, world: Any, generation: int) -> None:
        self._leases: Leases = world.leases
        self._kernel: Kernel = world.kernel
        self._waits: dict[str, list[tuple[str, int]]] = world.waits
        self._validates: bool = world.validates
        self._asked_ns: dict[int, int] = {}
        self._generation = generation
        self._pids: dict[int, int] = {}
        super().__init__(*arguments)

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.PreloadAsked):
            self._asked_ns[event.admission] = self._kernel.now_ns
        super()._handle(event)
        # Mostly nothing has happened when only time has passed.
        if self._validates and not isinstance(event, events.TimePassed):
            self._table.validate()

    def _join(self, message: wire.ClientJoined, fd: int) -> None:
        self._pids[message.client] = message.pid
        super()._join(message, fd)

    def _hears(self, client: int) -> bool:
        """Whether that rank may still read what it is sent."""
        channel = cast(Channel, self._ranks.get(client))
        peer = channel._file().peer if channel is not None and channel.fileno() >= 0 else None
        return peer is not None and peer.holders > 0

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.SendReady() | events.SendGranted() if self._hears(action.client):
                memory, offset = cast(DriveEngine, self._engine).slot(action.slot)
                lease = (self._pids[action.client], action.job, self._setup.device, action.index)
                fill = isinstance(action, events.SendGranted)
                self._leases.promise(lease, memory, offset, self._generation, fill=fill)
            case events.SendPreloadLanded(admission=admission):
                waited_ns = self._kernel.now_ns - self._asked_ns.pop(admission)
                self._waits.setdefault("preload", []).append((str(admission), waited_ns))
        super()._perform(action)


class WorkerProcess:
    """One run of a device's I/O worker."""

    def __init__(self, kernel: Kernel, control: Socket, world: Any) -> None:
        self.process = Process(kernel, "worker")
        self._world = world
        self.worker: SimWorker | None = None
        self.engine: DriveEngine | None = None
        self.device = -1
        self._control = Channel(Sock(kernel, kernel.open(control, self.process)), wire.CoordinatorToWorker)
        self.process.turn = self._turn
        kernel.after(kernel.rng.randrange(1, 30) * MS, lambda: self.process.wake(kernel.now_ns))

    def _turn(self) -> None:
        try:
            if self.worker is None:
                self._boot()
            else:
                self._serve(self.worker)
        except (CoordinatorGone, PeerGone):
            self.process.die(Exit.COORDINATOR_GONE)

    def _boot(self) -> None:
        received = self._control.receive(1)
        if not received:
            return
        setup = cast(wire.WorkerSetup, received[0][0])
        self.device = setup.device
        settings = self._world.settings
        self.engine = DriveEngine(self._world.drives[setup.device], self.process)
        namespaces = SimNamespaces(self._world.drives[setup.device], self.process)
        self.worker = SimWorker(
            self._control, setup, settings, cast(Engine, self.engine), namespaces,
            world=self._world, generation=setup.worker_generation,
        )  # fmt: skip
        self._control.send(
            wire.WorkerReady(worker_generation=setup.worker_generation, io_mode="simulated", pid=self.process.pid),
            [self.engine.take_ring_pipe()],
        )
        self._serve(self.worker)

    def _serve(self, worker: SimWorker) -> None:
        """One pass, as `IoWorker.run` makes it."""
        if worker._draining and worker._table.drained():
            self.process.die(Exit.OK)
            return
        worker._sleep()
        worker._handle(events.TimePassed())
        worker._look_after_device()
        worker._flush()
        check(
            worker._namespaces.going == worker._room.going == worker._scans._pace.going  # type: ignore[attr-defined]
            and not (worker._backlog_bytes() and worker._room.going and not worker._scans._pace.in_turn),  # type: ignore[attr-defined]
            "folders are walked while a load waits",
        )
        if self._world.validates and self.process.kernel.rng.random() < 0.2:
            worker._table.validate()
        timeout_s = worker._timeout_s()
        if timeout_s is not None:
            self.process.wake(self.process.kernel.now_ns + max(10 * US, int(timeout_s * 1e9)))

    def statistics(self) -> dict[str, int]:
        """Return what its table counted."""
        return self.worker._table.statistics() if self.worker is not None else {}

    def condemn(self) -> None:
        """Let a few keys that nobody uses go."""
        if self.process.alive and self.worker is not None:
            worker = self.worker
            for namespace, space in worker._table._index.namespaces.items():
                keys = [key for key in space.masks if self.process.kernel.rng.random() < 0.3][:4]
                if keys:
                    self.process.kernel.run_as(
                        self.process,
                        lambda namespace=namespace, keys=keys: worker._handle(  # type: ignore[misc]
                            events.KeysCondemned(namespace=namespace, keys=keys)
                        ),
                    )
            self.process.wake(self.process.kernel.now_ns)
