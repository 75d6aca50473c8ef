"""
One schedule: a plan drawn from a seed, the machine it runs on, what happens to it, and the end.

Theory. Swarm testing: each seed draws which kinds of faults are on at all, how large everything is, and when what
happens, so that schedules differ in kind and rare combinations get their turn. After everything that happens the checks
run (`checks.py`); when the last request is over and a while has passed, nothing may be left waiting.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool import config
from kvpool.client import rank as rank_module
from kvpool.client.rank import JobEnded
from kvpool.core import layout
from kvpool.core.budget import slot_bytes_of
from kvpool.core.requests import Hit
from kvpool.errors import HostError
from kvpool.wire.messages import GroupSpec, NamespaceSpec

from . import checks
from .drive import Drive, DriveFaults
from .engines import EngineProcess, RankProcess, Request
from .kernel import MS, US, Kernel, Process, S, Socket, Violation, check
from .memory import Leases
from .pool import CoordinatorProcess, SimRoom, SimSnapshots, WorkerProcess
from .sandbox import Sandbox

#: Kinds of faults that a schedule may have.
FAULTS = (
    "worker_death", "coordinator_death", "engine_death", "open_errors", "read_errors", "corruption", "write_errors",
    "full", "stalls", "outage", "copy_errors", "slow_copies", "slow_messages", "slow_death", "evictions", "aborts",
    "resizes", "late_landing", "stopped",
)  # fmt: skip
#: What must not make any load fail.
HARMLESS = frozenset(
    {"slow_messages", "slow_copies", "slow_death", "late_landing", "stopped", "aborts", "evictions", "resizes"}
)
#: A death that waits for its moment comes after so long in any case.
MOMENT_NS = 100 * MS
EVENTS_MAX = 400_000


@dataclass(slots=True)
class Plan:
    """What a seed says of its schedule."""

    seed: int
    faults: frozenset[str] = frozenset()
    devices: int = 1
    iodepth: int = 3
    latency_us: float = 100.0
    bytes_per_s: float = 1e9
    ranks: int = 1
    object_bytes: list[int] = field(default_factory=lambda: [4096])
    engines: int = 1
    namespaces: int = 1
    slots: int = 16
    cache: str = "off"
    preload: bool = False
    lookahead: int = 4
    requests: int = 12
    chunks_max: int = 6
    conversations: int = 4
    span_ms: int = 300
    warm: float = 0.0
    compute_ms: int = 20
    running_max: int = 3
    copy_us: int = 500
    copy_errors: float = 0.0
    slow_death: bool = False
    load_deadline_s: float = 5.0
    store_deadline_s: float = 0.3
    fill_deadline_s: float = 2.0
    operation_deadline_s: float = 1.0
    breaker_failures: int = 5

    @classmethod
    def drawn(cls, seed: int, always: frozenset[str] = frozenset()) -> "Plan":
        """Draw one; *always*: kinds of faults that are on in any case."""
        rng = random.Random(seed)
        quiet = rng.random() < 0.2
        faults = frozenset() if quiet else frozenset(kind for kind in FAULTS if rng.random() < 0.25)
        if rng.random() < 0.15:
            faults &= HARMLESS
        faults |= always
        return cls(
            seed=seed, faults=faults, devices=rng.choice([1, 1, 2, 3]), iodepth=rng.choice([1, 2, 2, 3, 4, 6]),
            latency_us=rng.choice([100, 1000, 5000]), bytes_per_s=rng.choice([1e9, 2e7, 5e6]),
            ranks=rng.choice([1, 1, 2]), object_bytes=rng.choice([[4096], [4096], [4096, 12288]]),
            engines=rng.choice([1, 1, 2]), namespaces=rng.choice([1, 2]),
            slots=rng.choice([4, 6, 8, 10, 12, 16, 24, 40]),
            cache=rng.choice(["off", "lru", "arc"]), preload=rng.random() < 0.6, lookahead=rng.randint(1, 6),
            warm=rng.choice([0.0, 0.5, 1.0]), requests=rng.randint(4, 16), chunks_max=rng.choice([1, 3, 5, 8, 12]),
            conversations=rng.randint(1, 5), running_max=rng.randint(1, 4), compute_ms=rng.choice([2, 20, 60]),
            span_ms=rng.choice([20, 50, 200, 600]) + (2000 if "coordinator_death" in faults else 0),
            copy_us=60_000 if {"slow_copies", "slow_death"} & faults else 500, slow_death="slow_death" in faults,
            copy_errors=0.05 if "copy_errors" in faults else 0.0,
            load_deadline_s=rng.choice([1.0, 5.0]) if faults - HARMLESS else 20.0,
            store_deadline_s=rng.choice([0.05, 0.3]), fill_deadline_s=rng.choice([0.2, 2.0]),
            breaker_failures=rng.choice([1, 3, 5]),
            operation_deadline_s=rng.choice([0.3, 1.0]) if faults - HARMLESS else 10.0,
        )  # fmt: skip

    @property
    def harmless(self) -> bool:
        """Whether no load may fail."""
        return self.faults <= HARMLESS

    def spec(self, number: int) -> NamespaceSpec:
        """Return a namespace."""
        return NamespaceSpec(
            fingerprint=f"{number:064x}", model_name=f"model-{number}", block_size=16, blocks_per_file=1, tp=self.ranks,
            pp=1, pcp=1, dtype="float16", rank_count=self.ranks, identity={},
            groups=[GroupSpec(group=group, object_bytes=size) for group, size in enumerate(self.object_bytes)],
        )  # fmt: skip

    def settings(self) -> config.Settings:
        """Return the pool's configuration."""
        slot_bytes = sum(map(slot_bytes_of, self.object_bytes))
        return config.Settings(
            pool=config.PoolSettings(
                run_dir="/simulated", staging_bytes=self.devices * self.slots * slot_bytes,
                load_deadline_s=self.load_deadline_s, store_deadline_s=self.store_deadline_s,
                fill_deadline_s=self.fill_deadline_s, operation_deadline_s=self.operation_deadline_s,
                breaker_failures=self.breaker_failures, breaker_retry_s=0.1, enable_preload=self.preload,
                preload_lookahead_requests=self.lookahead,
                preload_expiry_s=2.0, staging_cache=self.cache,
            ),
            device=[
                config.DeviceSettings(
                    name=f"drive{number}", path=f"/simulated/{number}", iodepth=self.iodepth,
                    open_lookahead=self.iodepth, writes_beside_loads=1,
                )
                for number in range(self.devices)
            ],
        )  # fmt: skip


class World:
    """See the module."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.validates = True
        self.rng = random.Random(plan.seed * 7919 + 1)
        self.kernel = Kernel(self.rng)
        self.settings = plan.settings()
        self.leases = Leases()
        self.sandbox = Sandbox(self.kernel, self._spawn_worker, SimRoom, SimSnapshots)
        self.sandbox.greets = lambda process: self.leases.end_of_rank(process.pid)
        self.drives = [self._drive() for _ in range(plan.devices)]
        self.workers: list[WorkerProcess] = []
        self.coordinator: CoordinatorProcess | None = None
        self.engines: dict[str, EngineProcess] = {}
        self.staging_bytes_max = self.settings.pool.staging_bytes
        self.arrivals_left = 0
        self.counts: dict[str, int] = {}
        #: Class, or "request" -> (request, how long it waited), as they ended.
        self.waits: dict[str, list[tuple[str, int]]] = {}
        #: Deaths that wait for their moment: (until when, whether it has come, what happens).
        self._armed: list[tuple[int, Callable[[], bool], Callable[[], None]]] = []
        if "slow_messages" in plan.faults:
            self.kernel.delay_us_max = 5_000

    def _drive(self) -> Drive:
        on = self.plan.faults
        faults = DriveFaults(
            open_errors=0.05 * ("open_errors" in on), read_errors=0.05 * ("read_errors" in on),
            corruption=0.1 * ("corruption" in on), write_errors=0.1 * ("write_errors" in on),
            full=0.1 * ("full" in on), stalls=0.05 * ("stalls" in on),
            stall_ns=int(self.plan.operation_deadline_s * S), late_ns=2500 * MS * ("late_landing" in on),
        )  # fmt: skip
        return Drive(
            kernel=self.kernel, rng=self.rng, faults=faults, latency_us=self.plan.latency_us,
            bytes_per_s=self.plan.bytes_per_s,
        )  # fmt: skip

    def count(self, name: str, by: int = 1) -> None:
        """Count something worth telling."""
        self.counts[name] = self.counts.get(name, 0) + by

    # ---------------------------------------------------------------- processes

    def _spawn_worker(self, control: Socket) -> Process:
        worker = WorkerProcess(self.kernel, control, self)
        self.workers.append(worker)
        return worker.process

    def start_coordinator(self) -> None:
        """A pool comes up; memory of an earlier one is not its concern."""
        self.sandbox.memories.clear()
        self.staging_bytes_max = self.settings.pool.staging_bytes
        self.coordinator = CoordinatorProcess(self.kernel, self.settings, validates=self.validates)

    def start_engine(self, name: str) -> None:
        """An engine comes up."""
        number = int(name.rpartition("-")[2]) % self.plan.namespaces
        self.engines[name] = EngineProcess(self, name, self.plan.spec(number))

    # ---------------------------------------------------------------- the schedule

    def run(self) -> "World":
        """Run it to its end; raises Violation, with the command that repeats it."""
        interval_ns = rank_module.COPY_CHECK_NS
        rank_module.COPY_CHECK_NS = 2 * MS
        try:
            with self.sandbox.installed():
                self.start_coordinator()
                for number in range(self.plan.engines):
                    self.start_engine(f"engine-{number}")
                self.draw()
                self.kernel.after_each = self._after_each
                self._run_until_over()
                self._settle()
                checks.at_the_end(self)
        finally:
            rank_module.COPY_CHECK_NS = interval_ns
        return self

    def _after_each(self) -> None:
        if self.validates:
            checks.after_each(self)
        for armed in [one for one in self._armed if one[0] <= self.kernel.now_ns or one[1]()]:
            self._armed.remove(armed)
            armed[2]()

    def _run_until_over(self) -> None:
        while self.arrivals_left or any(engine.alive and self._busy(engine) for engine in self.engines.values()):
            check(self.kernel.happened < EVENTS_MAX, "it never ends", seconds=self.kernel.now_ns / S)
            check(self.kernel.step(), "somebody waits and nothing will happen")

    def _busy(self, engine: EngineProcess) -> bool:
        return bool(engine.requests) or any(rank.due_ns for rank in engine.ranks)

    def _settle(self) -> None:
        """Let what goes on behind the last request end: writes, proofs, deadlines."""
        plan = self.plan
        wait_s = 4 + plan.fill_deadline_s + plan.store_deadline_s + 4 * plan.operation_deadline_s
        self.kernel.at(until_ns := self.kernel.now_ns + int(wait_s * S), lambda: None)
        while self.kernel.now_ns < until_ns:
            check(self.kernel.happened < EVENTS_MAX, "it never settles", seconds=self.kernel.now_ns / S)
            self.kernel.step()

    def draw(self) -> None:
        """Say what will come: requests and faults."""
        self._draw_requests()
        self._draw_faults()

    def _draw_requests(self) -> None:
        rng, plan = self.rng, self.plan
        length = dict.fromkeys(range(plan.conversations), 1)
        self._warm()
        first_ns = self.kernel.now_ns + 100 * MS
        names = sorted(self.engines)
        times = sorted(first_ns + rng.randrange(plan.span_ms * MS) for _ in range(plan.requests))
        for number, at_ns in enumerate(times):
            conversation = int(plan.conversations * rng.random() ** 2)
            length[conversation] = min(plan.chunks_max, length[conversation] + rng.randint(0, 3))
            chunks = [chunk_name(conversation, position) for position in range(rng.randint(1, length[conversation]))]
            request = Request(f"request-{number}", chunks, priority=rng.choice([0, 0, 0, 1]))
            self.expect(at_ns, rng.choice(names), request)

    def expect(self, at_ns: int, name: str, request: Request) -> None:
        """A request is to come to that engine."""
        self.arrivals_left += 1
        self.kernel.at(at_ns, lambda: self._arrive(name, request))

    def _warm(self) -> None:
        """Some of the conversations' objects are on the drives from an earlier life of the pool."""
        for name in sorted(self.engines) if self.plan.warm else []:
            engine = self.engines[name]
            for conversation in range(self.plan.conversations):
                for position in range(self.plan.chunks_max):
                    if self.rng.random() < self.plan.warm:
                        self.put(engine, chunk_name(conversation, position), self.rng.choice(self.drives))

    def put(self, engine: EngineProcess, chunk: bytes, drive: Drive) -> None:
        """An object of every rank is on *drive*."""
        for key in engine.keys([chunk]):
            for rank in range(engine.spec.rank_count):
                path = layout.object_path(f"{engine.spec.fingerprint}-{rank}", key)
                drive.files[path] = engine.tag(key, rank)

    def _arrive(self, name: str, request: Request) -> None:
        self.arrivals_left -= 1
        engine = self.engines[name]
        engine.arrive(request)
        if "aborts" in self.plan.faults and self.rng.random() < 0.3:
            self.kernel.after(self.rng.randrange(1, 40) * MS, lambda: engine.abort(request))

    def _draw_faults(self) -> None:
        kinds: dict[str, Callable[[], None]] = {
            "worker_death": self._kill_worker, "coordinator_death": self._kill_coordinator,
            "engine_death": self._kill_engine, "outage": self._fail_drive, "evictions": self._evict,
            "resizes": self._resize, "stopped": self._stop,
        }  # fmt: skip
        for kind, happens in kinds.items():
            if kind in self.plan.faults:
                for _ in range(self.rng.randint(1, 4 if kind in ("evictions", "resizes") else 2)):
                    self.kernel.after((100 + self.rng.randrange(self.plan.span_ms + 200)) * MS, happens)

    def _at_moment(self, moments: dict[str, Callable[[], bool]], happens: Callable[[], None]) -> None:
        """Let it happen in one of these phases of somebody's work, drawn, or some time."""
        moment = self.rng.choice([*moments.values(), lambda: True])
        self._armed.append((self.kernel.now_ns + MOMENT_NS, moment, happens))

    def _kill_worker(self) -> None:
        running = [worker for worker in self.workers if worker.process.alive and worker.engine is not None]
        if not running:
            return
        worker = self.rng.choice(running)
        engine = worker.engine
        if engine is None:
            return

        def promised() -> bool:
            return any(lease[2] == worker.device for lease in self.leases.held())

        phases = {
            "opening": lambda: engine.in_flight() > len(engine.kernel_ops), "reading": lambda: engine.drive.reading > 0,
            "writing": lambda: engine.drive.writing > 0, "promised": promised,
        }  # fmt: skip
        self._at_moment(phases, lambda: worker.process.die(-9, linger_ns=self.kernel.delay_ns()))

    def _kill_coordinator(self) -> None:
        def kill() -> None:
            found = self.coordinator
            if found is not None and found.process.alive:
                found.process.die(-9)
                self.kernel.after(self.rng.randrange(1, 500) * MS, self.start_coordinator)

        phases = {
            "transferring": lambda: any(drive.reading or drive.writing for drive in self.drives),
            "promised": lambda: len(self.leases) > 0,
        }  # fmt: skip
        self._at_moment(phases, kill)

    def _kill_engine(self) -> None:
        name = self.rng.choice(sorted(self.engines))

        def kill() -> None:
            engine = self.engines[name]
            if engine.alive:
                engine.kill()
                self.kernel.after(self.rng.randrange(1, 300) * MS, lambda: self.start_engine(name))

        phases = {
            "loading": lambda: any(request.state == "loading" for request in self.engines[name].requests),
            "copying": lambda: any(rank.copier.running() for rank in self.engines[name].ranks),
            "promised": lambda: any(
                lease[0] == rank.process.pid for lease in self.leases.held() for rank in self.engines[name].ranks
            ),
        }  # fmt: skip
        self._at_moment(phases, kill)

    def _fail_drive(self) -> None:
        self.rng.choice(self.drives).failing_until_ns = self.kernel.now_ns + self.rng.randrange(50, 500) * MS

    def _stop(self) -> None:
        """Some process is stopped for a while."""
        ranks = [rank for name in sorted(self.engines) for rank in self.engines[name].ranks if rank.process.alive]
        workers = [worker.process for worker in self.workers if worker.process.alive]
        for_ns = self.rng.randrange(5, 600) * MS
        if ranks and self.rng.random() < 0.6:
            self.rng.choice(ranks).stop(for_ns)
        elif workers:
            self.rng.choice(workers).stopped_until_ns = self.kernel.now_ns + for_ns

    def _evict(self) -> None:
        for worker in self.workers:
            worker.condemn()

    def _resize(self) -> None:
        found = self.coordinator
        if found is None or not found.process.alive:
            return
        staging_bytes = int(self.settings.pool.staging_bytes * self.rng.choice([0.5, 0.8, 1.0, 1.5]))

        def resize() -> None:
            try:
                found.coordinator._staging.resize(staging_bytes)
            except HostError:
                return  # less than the open namespaces need
            self.staging_bytes_max = max(self.staging_bytes_max, staging_bytes)

        self.kernel.run_as(found.process, resize)
        found.process.wake(self.kernel.now_ns + US)

    # ---------------------------------------------------------------- what engines tell

    def started(self, request: Request, hits: list[Hit]) -> None:
        """A request runs, with so many hits."""
        self.count("requests_started")
        self.count("keys_wanted", len(request.chunks) * len(self.plan.object_bytes))
        self.count("hits", len(hits))
        self.count("hits_resident", sum(hit.resident for hit in hits))

    def loaded(self, request: Request) -> None:
        """A request has what it loads, if anything, on all ranks."""
        self.waits.setdefault("request", []).append((request.name, self.kernel.now_ns - request.arrived_ns))
        if request.loaded:
            self.count("loads_failed" if request.failed else "loads")

    def ended(self, rank: RankProcess, request: Request, ended: JobEnded) -> None:
        """A job ended on a rank."""
        checks.job_ended(self, rank, request, ended)
        self.waits.setdefault(ended.kind, []).append((request.name, int(ended.seconds * S)))
        self.count(f"{ended.kind}_objects", ended.objects)
        self.count(f"{ended.kind}_objects_failed", len(ended.failed))


def chunk_name(conversation: int, position: int) -> bytes:
    """Return the hash of a conversation's chunk."""
    return conversation.to_bytes(2, "big") + position.to_bytes(6, "big")


def run_seed(seed: int, always: frozenset[str] = frozenset()) -> World:
    """Run a seed's schedule; a violation names the command that repeats it."""
    plan = Plan.drawn(seed, always)
    world = World(plan)
    try:
        return world.run()
    except (Exception, Violation) as error:
        when = f"at {world.kernel.now_ns / S:.6f} s, event {world.kernel.happened}"
        story = f"seed {seed} {when}, faults: {', '.join(sorted(plan.faults)) or 'none'}"
        raise Violation(f"{error!r}\n{story}\nrepeat: python -m tests.sim {seed}") from error
