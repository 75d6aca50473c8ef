"""
The kill matrix: each process of a pool and of an engine killed with SIGKILL in each phase, with real processes.

Theory. A `World` is a pool that its clients start, two engines (each a rank and a scheduler, every one a process of its
own), and objects whose bytes are known. Engine `a` is brought into a phase, and one process is killed: the coordinator,
an I/O worker, the rank, or rank and scheduler at once ("engine"). Engine `b` loads and stores all the while. A phase
that shows in the workers' facts is waited for, with drives made slow so that it lasts; then comes a random moment, from
the cell's seed, which is all there is where a phase cannot be seen from outside.

After each kill: every job ends in time, every byte that was loaded is the right one, what was on the drives before is
served again and new objects are stored and served, by themselves. When a world ends, its next start leaves no temporary
file, and every file on its drives is whole.

Does not cover: engines with a model (`tests/e2e`).
"""

import contextlib
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvpool.cli.devices import Device
from kvpool.cli.fsck_cmd import Checker
from kvpool.client import admin
from kvpool.config import DeviceSettings, PoolSettings, Settings, to_json
from kvpool.core import layout
from kvpool.errors import KvpoolError
from kvpool.health import facts
from kvpool.io.files import LEFTOVER_AGE_S
from kvpool.procs.io_worker import FAULTS_VARIABLE
from tests.process.pool_harness import MIB, ROOT

VICTIMS = ("coordinator", "worker", "rank", "engine")
#: The pool's deadline for loads, and how long after it a job may end on a busy machine.
LOAD_DEADLINE_S = 4.0
JOB_S = LOAD_DEADLINE_S + 12.0
#: Time until a pool serves again by itself.
RECOVERY_S = 40.0
PHASE_S = 20.0
#: What the drives do while they are slow.
SLOW_BYTES_PER_S = 2 * MIB
#: Objects that are on the drives before each cell.
BASE = range(32)
#: Objects that a cell moves.
MOVED = 24
STAGING_BYTES = 24 * MIB
CAPACITY_BYTES = 8 * MIB

Row = dict[str, Any]


class MatrixError(AssertionError):
    """A promise was broken; says which."""


class SlowByFaults:
    """Drives that are slow while a file exists: reads and writes are made late (`kvpool/io/faults.py`)."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "slow"
        settings = {
            "read_bytes_per_s": SLOW_BYTES_PER_S, "write_bytes_per_s": SLOW_BYTES_PER_S, "while_exists": str(self._file)
        }  # fmt: skip
        self.environment = {FAULTS_VARIABLE: json.dumps(settings)}

    def on(self) -> None:
        self._file.touch()

    def off(self) -> None:
        self._file.unlink(missing_ok=True)


class Client:
    """A client process (`kill_client`), and what it said last."""

    def __init__(self, role: str, engine: str, config_json: str, environment: dict[str, str], log: Any) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.process.kill_client", role, engine, config_json],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=ROOT,
        )  # fmt: skip
        assert self.popen.stdout is not None
        os.set_blocking(self.popen.stdout.fileno(), False)
        self.state: dict[str, Any] = {"up": False}
        self._buffer = b""

    def say(self, **command: Any) -> None:
        """Send a command; one that died hears nothing."""
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.write(json.dumps(command).encode() + b"\n")
            self.popen.stdin.flush()

    def read(self) -> list[dict[str, Any]]:
        """Return what it said since."""
        assert self.popen.stdout is not None
        *lines, self._buffer = (self._buffer + (self.popen.stdout.read() or b"")).split(b"\n")
        events = [json.loads(line) for line in lines]
        for event in events:
            self.state = event.get("state", self.state)
        return events

    def end(self, *, kill: bool) -> None:
        """End it, and wait until it has."""
        if kill:
            self.popen.kill()
        assert self.popen.stdin is not None and self.popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        try:
            self.popen.wait(20)
        except subprocess.TimeoutExpired as error:
            self.popen.kill()
            self.popen.wait()
            raise MatrixError(f"client {self.popen.args} did not end") from error
        finally:
            self.popen.stdout.close()


@dataclass(slots=True)
class Engine:
    """
    Two clients, their jobs, and what their weights are.

    Attributes:
        jobs: Those not ended: number -> when submitted.
        ended: The ends of jobs that somebody waits for.
    """

    name: str
    rank: Client
    scheduler: Client
    version: int = 0
    jobs: dict[int, float] = field(default_factory=dict)
    ended: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        """Both are in a pool, in an epoch."""
        return bool(self.rank.state["up"] and self.scheduler.state["up"] and self.scheduler.state["epoch"] >= 0)


@dataclass(frozen=True, slots=True)
class Cell:
    """Who is killed in which phase, and the seed of the moment."""

    victim: str
    phase: str
    seed: int

    def __str__(self) -> str:
        return f"{self.victim} killed while {self.phase}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a cell: the fact that showed its phase, failed objects, seconds until the pool served again."""

    cell: Cell
    seen: str
    failed: int
    recovered_s: float


class World:
    """
    See the module.

    Args:
        directory: For the run directory and logs, and for the drives' directories unless *roots* is where they are.
        capacity_bytes: Bounds each drive; 0: not at all.
        slow: What slows the drives; see `SlowByFaults`.
        cache: The pool's staging_cache.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int = 0,
        slow: Any = None,
        roots: Path | None = None,
        cache: str = "off",
    ) -> None:
        self.directory = directory
        self.slow = slow or SlowByFaults(directory)
        roots = roots or directory
        self.device_paths = [roots / "d0", roots / "d1"]
        for path in self.device_paths:
            path.mkdir(mode=0o700, exist_ok=True)
        self.bounded = bool(capacity_bytes)
        pool = PoolSettings(
            run_dir=str(directory / "run"), staging_bytes=STAGING_BYTES, idle_exit_s=0.2,
            load_deadline_s=LOAD_DEADLINE_S, store_deadline_s=1.0, fill_deadline_s=LOAD_DEADLINE_S,
            operation_deadline_s=LOAD_DEADLINE_S,
            answer_deadline_s=5.0, staging_cache=cache,
        )  # fmt: skip
        devices = [
            DeviceSettings(
                name=path.name, path=str(path), iodepth=4, open_lookahead=8, capacity_bytes=capacity_bytes,
                high_watermark=0.8, low_watermark=0.5,
            )
            for path in self.device_paths
        ]  # fmt: skip
        self.run_dir = pool.run_dir
        self._config_json = to_json(Settings(pool=pool, device=devices))
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.slow.environment}
        self._log = open(directory / "clients.log", "ab")  # noqa: SIM115 - closed in close()
        self._job = 0
        self._number = 1000
        self.failed = 0
        self._threads: list[threading.Thread] = []
        #: Coordinators seen, to end those that outlive a failed run.
        self._coordinators: dict[int, psutil.Process] = {}
        self.engines = {name: Engine(name, *self._start_clients(name)) for name in ("a", "b")}
        self.a, self.b = self.engines["a"], self.engines["b"]

    def _start_clients(self, name: str) -> tuple[Client, Client]:
        return self._start("rank", name), self._start("scheduler", name)

    def _start(self, role: str, name: str) -> Client:
        return Client(role, name, self._config_json, self._environment, self._log)

    # ------------------------------------------------------------ events and facts

    def pump(self, wait_s: float = 0.01) -> None:
        """Take in what clients say; a wrong byte, or a job without an end, ends the run."""
        with selectors.DefaultSelector() as selector:
            for engine in self.engines.values():
                for client in (engine.rank, engine.scheduler):
                    selector.register(client.popen.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            selector.select(wait_s)
        now = time.monotonic()
        for engine in self.engines.values():
            engine.scheduler.read()
            for event in engine.rank.read():
                self._take_end(engine, event)
            late = [job for job, since in engine.jobs.items() if now - since > JOB_S]
            if late:
                raise MatrixError(f"jobs {late} of engine {engine.name} did not end in {JOB_S:g} s")

    def _take_end(self, engine: Engine, event: dict[str, Any]) -> None:
        if "job" not in event:
            return
        if event["wrong"]:
            raise MatrixError(f"engine {engine.name} got wrong bytes for objects {event['wrong']}")
        if engine.jobs.pop(event["job"], None) is None:
            raise MatrixError(f"job {event['job']} of engine {engine.name} ended twice, or was never begun")
        self.failed += len(event["failed"])
        engine.ended[event["job"]] = event

    def wait(self, fact: Callable[[], Any], wait_s: float, what: str) -> Any:
        """Pump until *fact*; return it."""
        deadline = time.monotonic() + wait_s
        while not (found := fact()):
            if time.monotonic() > deadline:
                raise MatrixError(f"not within {wait_s:g} s: {what}; {self._told_briefly()}")
            self.pump()
        return found

    def rest(self, seconds: float) -> None:
        """Pump for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.pump(left)

    def health(self) -> tuple[Row, list[Row]]:
        """Return the pool's facts and rows; nothing where no pool answers."""
        try:
            told = admin.health(self.run_dir, timeout_s=5.0)
        except KvpoolError:
            return {}, []
        for row in told.rows:
            if row.get(facts.ROLE) == facts.COORDINATOR and row[facts.PID] not in self._coordinators:
                with contextlib.suppress(psutil.Error):
                    self._coordinators[row[facts.PID]] = psutil.Process(row[facts.PID])
        return dict(told.pool), list(told.rows)

    def workers(self) -> list[Row]:
        """Return the rows of the I/O workers."""
        return [row for row in self.health()[1] if row.get(facts.ROLE) == facts.IO_WORKER]

    def told(self, *names: str) -> float:
        """Return facts of the I/O workers, summed."""
        return sum(float(row.get(name, 0)) for row in self.workers() for name in names)

    def _told_briefly(self) -> str:
        states = {name: (engine.rank.state, engine.scheduler.state) for name, engine in self.engines.items()}
        rows = [
            {name: row.get(name) for name in ("state", "slots_free", "slots_quarantined", "breaker", "storing")}
            for row in self.workers()
        ]
        return f"clients {states}, workers {rows}"

    # ------------------------------------------------------------ jobs

    def fresh(self, count: int = MOVED) -> list[int]:
        """Return numbers of objects that were never stored."""
        self._number += count
        return list(range(self._number - count, self._number))

    def submit(self, engine: Engine, kind: str, numbers: Iterable[int]) -> int:
        """Begin a job; return its number."""
        self._job += 1
        engine.jobs[self._job] = time.monotonic()
        engine.rank.say(
            do=kind, job=self._job, numbers=list(numbers), version=engine.version,
            epoch=engine.scheduler.state.get("epoch", -1),
        )  # fmt: skip
        return self._job

    def end_of(self, engine: Engine, job: int) -> dict[str, Any]:
        """Wait for a job's end."""
        self.wait(lambda: job in engine.ended, JOB_S + 5, f"end of job {job}")
        return engine.ended.pop(job)

    def keep_busy(self) -> None:
        """Let engine b load and store, unless it does."""
        if not self.b.jobs and self.b.up:
            self.submit(self.b, "load", BASE)
            self.submit(self.b, "store", self.fresh(4))

    def serves(self, engine: Engine, numbers: Iterable[int]) -> None:
        """Wait until all these objects are loaded, without one failure."""
        wanted = list(numbers)
        self.wait(
            lambda: engine.up and not self.end_of(engine, self.submit(engine, "load", wanted))["failed"],
            RECOVERY_S, f"loads of what engine {engine.name} stored",
        )  # fmt: skip

    def stores(self, engine: Engine, numbers: Callable[[], Iterable[int]]) -> None:
        """Wait until objects are stored and loaded, without one failure; *numbers* gives others each time."""

        def works() -> bool:
            wanted = list(numbers())
            if not engine.up or self.end_of(engine, self.submit(engine, "store", wanted))["failed"]:
                return False
            return not self.end_of(engine, self.submit(engine, "load", wanted))["failed"]

        self.wait(works, RECOVERY_S, f"stores and loads of new objects of engine {engine.name}")

    def prepare(self) -> None:
        """Store the base, and wait until it is on the drives."""
        before = self.told(facts.STORES)
        self.stores(self.a, lambda: BASE)
        self.wait(lambda: self.told(facts.STORES) - before >= len(BASE) or not self._unwritten(), PHASE_S, "the base")

    def _unwritten(self) -> float:
        return self.told(facts.QUEUE_STORE, facts.IN_FLIGHT_WRITES, facts.SLOTS_FILLING)

    # ------------------------------------------------------------ one cell

    def run(self, cell: Cell) -> Outcome:
        """Run one cell; raises MatrixError, with the cell's name, where a promise is broken."""
        try:
            return self._run(cell)
        except MatrixError as error:
            raise MatrixError(f"{cell}: {error}") from error
        finally:
            self.slow.off()

    def _run(self, cell: Cell) -> Outcome:
        chance = random.Random(f"{cell.victim} {cell.phase} {cell.seed}")
        self.a.ended.clear()
        self.b.ended.clear()
        self.failed = 0
        self.wait(lambda: self.a.up and self.b.up, RECOVERY_S, "both engines in the pool")
        self.keep_busy()
        phase = PHASES[cell.phase]
        moved = self.fresh() if phase.stores else list(BASE)
        seen, pid = phase.reach(self, moved, chance)
        self.rest(chance.uniform(0, phase.window_s))
        self._kill(cell.victim, pid, chance)
        killed = time.monotonic()
        self.rest(chance.uniform(0, 0.2))
        self.slow.off()
        self.a.rank.say(do="pause", seconds=0)
        self._recover(cell, moved)
        return Outcome(cell, seen, self.failed, time.monotonic() - killed)

    def _kill(self, victim: str, worker_pid: int, chance: random.Random) -> None:
        if victim == "worker":
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker_pid, signal.SIGKILL)
        elif victim == "coordinator":
            list(self._coordinators.values())[-1].kill()
        else:
            clients = [self.a.rank] if victim == "rank" else [self.a.rank, self.a.scheduler]
            chance.shuffle(clients)
            for client in clients:
                client.popen.kill()
            self._replace(victim)

    def _replace(self, victim: str) -> None:
        """Start what was killed of engine a anew; the dead one's jobs are nobody's."""
        self.a.rank.end(kill=True)
        self.a.rank = self._start("rank", "a")
        self.a.jobs.clear()
        if victim == "engine":
            self.a.scheduler.end(kill=True)
            self.a.scheduler = self._start("scheduler", "a")

    def _recover(self, cell: Cell, moved: list[int]) -> None:
        self.wait(lambda: not self.a.jobs and not self.b.jobs, JOB_S + 5, "every job's end")
        if cell.phase == "resetting":
            for engine in (self.a, self.b):
                self.reset(engine)
        self.stores(self.a, lambda: self.fresh(4))
        self.stores(self.b, lambda: self.fresh(4))
        if cell.phase == "resetting":
            self.prepare()
        if not self.bounded:
            self.serves(self.a, BASE)
            self.serves(self.b, BASE)
        self.end_of(self.b, self.submit(self.b, "load", moved))  # what there is of it is right
        quarantined = self.wait(
            lambda: all(not row.get(facts.SLOTS_QUARANTINED) for row in self.workers()), PHASE_S, "proof for all slots"
        )
        assert quarantined
        for thread in self._threads:
            thread.join(PHASE_S)
        self._threads.clear()

    def reset(self, engine: Engine) -> None:
        """The weights of *engine* change, until the pool knows."""
        engine.version = max(other.version for other in self.engines.values()) + (engine is self.a)
        engine.scheduler.state["epoch"] = -1
        engine.scheduler.say(do="reset")
        self.wait(lambda: engine.up, RECOVERY_S, f"reset of engine {engine.name}")

    def begin_resize(self, chance: random.Random) -> None:
        """Change the size of staging, in the background."""
        size = chance.choice((8, 12, 32, 40)) * MIB

        def change() -> None:
            with contextlib.suppress(KvpoolError):
                admin.resize(self.run_dir, size, timeout_s=PHASE_S, told=lambda _: None)

        self._threads.append(threading.Thread(target=change, daemon=True))
        self._threads[-1].start()

    # ------------------------------------------------------------ the end

    def finish(self) -> None:
        """End the pool, start it once more, and look at what is left on the drives."""
        self._end_pool(kill=False)
        old = time.time() - 2 * LEFTOVER_AGE_S
        for path in self._temporaries():
            os.utime(path, (old, old))
        self.engines = {name: Engine(name, *self._start_clients(name)) for name in ("a",)}
        self.wait(lambda: self.engines["a"].up, RECOVERY_S, "the next start")
        self.wait(lambda: [row[facts.INDEX_COMPLETE] for row in self.workers()] == [True, True], PHASE_S, "the scan")
        self._end_pool(kill=False)
        if left := self._temporaries():
            raise MatrixError(f"temporary files are left after the next start: {left}")
        for path in self.device_paths:
            problems = Checker(Device(path.name, str(path), None), repair=False).run(hidden=True).problems
            if problems:
                raise MatrixError(f"files that are not whole: {problems}")

    def _temporaries(self) -> list[Path]:
        return [
            path for root in self.device_paths for path in root.rglob("*")
            if layout.is_temporary(path.name) or (path.parent.name == "epochs" and path.name.startswith("."))
        ]  # fmt: skip

    def _end_pool(self, *, kill: bool) -> None:
        self.health()
        for engine in self.engines.values():
            for client in (engine.rank, engine.scheduler):
                client.end(kill=kill)
        self.engines.clear()
        _, alive = psutil.wait_procs(self._coordinators.values(), timeout=20)
        self._coordinators.clear()
        for process in alive:
            process.kill()
        if alive and not kill:
            raise MatrixError("the pool did not end after its last client")

    def close(self) -> None:
        """Leave no process."""
        self.slow.off()
        self._end_pool(kill=True)
        self._log.close()


# ---------------------------------------------------------------- phases


@dataclass(frozen=True, slots=True)
class Phase:
    """
    A phase of a pool's work.

    Attributes:
        reach: Brings engine a into it with these objects; returns what was seen, and the pid of a worker that is in it.
        stores: It moves new objects; else those of the base.
        window_s: It lasts about so long: the kill falls anywhere in it.
    """

    reach: Callable[[World, list[int], random.Random], tuple[str, int]]
    stores: bool
    window_s: float


PHASES: dict[str, Phase] = {}


def phase(name: str, *, stores: bool, window_s: float) -> Callable[[Any], Any]:
    """Register a phase."""

    def register(reach: Any) -> Any:
        PHASES[name] = Phase(reach, stores, window_s)
        return reach

    return register


def _until(world: World, *names: str, more_than: float = 0) -> tuple[str, int]:
    """Wait until some worker tells these facts, all above *more_than*; return them and its pid."""

    def found() -> Row | None:
        world.keep_busy()
        return next((row for row in world.workers() if all(row.get(name, 0) > more_than for name in names)), None)

    row = world.wait(found, PHASE_S, f"a worker with {names}")
    return " ".join(f"{name}={row[name]:g}" for name in names), row[facts.PID]


def _some_worker(world: World, chance: random.Random) -> int:
    rows = world.wait(world.workers, PHASE_S, "a worker")
    return int(chance.choice(rows)[facts.PID])


@phase("opening", stores=False, window_s=0.03)
def _opening(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    """Files are opened ahead of slow reads; or, half of the time, at a random moment of fast ones."""
    if chance.random() < 0.5:
        pid = _some_worker(world, chance)
        world.submit(world.a, "load", moved)
        return "at random", pid
    world.slow.on()
    world.submit(world.a, "load", moved)
    return _until(world, facts.IN_FLIGHT_OPENS)


@phase("reading", stores=False, window_s=0.2)
def _reading(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    world.slow.on()
    world.submit(world.a, "load", moved)
    return _until(world, facts.IN_FLIGHT_READS)


@phase("resident and pinned", stores=False, window_s=0.3)
def _resident(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    world.a.rank.say(do="pause", seconds=0.6)
    world.submit(world.a, "load", moved)
    return _until(world, facts.SLOTS_PINNED)


@phase("copying", stores=True, window_s=0.3)
def _copying(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    world.a.rank.say(do="pause", seconds=0.6)
    world.submit(world.a, "store", moved)
    world.wait(lambda: world.a.rank.state.get("copying"), PHASE_S, "a copy")
    return _until(world, facts.SLOTS_FILLING)


@phase("filled", stores=True, window_s=0.05)
def _filled(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    world.slow.on()
    world.submit(world.a, "store", moved)
    world.wait(lambda: not world.a.jobs, JOB_S, "the store's end for the engine")
    return _until(world, facts.QUEUE_STORE)


@phase("writing", stores=True, window_s=0.2)
def _writing(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    world.slow.on()
    world.submit(world.a, "store", moved)
    return _until(world, facts.IN_FLIGHT_WRITES)


@phase("linking", stores=True, window_s=0.03)
def _linking(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    """One object after the other is named within milliseconds: at a random moment."""
    pid = _some_worker(world, chance)
    job = world.submit(world.a, "store", moved)
    world.wait(lambda: job not in world.a.jobs, JOB_S, "the store's end for the engine")
    return "at random", pid


@phase("evicting", stores=True, window_s=0.05)
def _evicting(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    """More is stored than the drives may hold."""
    before = {row[facts.PID]: row.get(facts.EVICTED_KEYS, 0) for row in world.workers()}

    def found() -> Row | None:
        if not world.a.jobs:
            world.submit(world.a, "store", world.fresh())
        return next(
            (row for row in world.workers() if row.get(facts.EVICTED_KEYS, 0) > before.get(row[facts.PID], 0)), None
        )

    row = world.wait(found, 2 * PHASE_S, "evictions")
    return f"{facts.EVICTED_KEYS}={row[facts.EVICTED_KEYS]:g}", row[facts.PID]


@phase("resizing", stores=True, window_s=0.2)
def _resizing(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    pid = _some_worker(world, chance)
    world.submit(world.a, "store", moved)
    world.begin_resize(chance)
    return "at random", pid


@phase("resetting", stores=True, window_s=0.05)
def _resetting(world: World, moved: list[int], chance: random.Random) -> tuple[str, int]:
    pid = _some_worker(world, chance)
    world.submit(world.a, "store", moved)
    world.a.version += 1
    world.a.scheduler.state["epoch"] = -1
    world.a.scheduler.say(do="reset")
    return "at random", pid


#: The one phase that needs drives with a bound.
BOUNDED = ("evicting",)


def cells(seed: int, *, bounded: bool) -> list[Cell]:
    """Return the cells that run in one world, a coordinator's death after each round of the others."""
    return [
        Cell(victim, name, seed)
        for name in PHASES
        if (name in BOUNDED) == bounded
        for victim in ("worker", "rank", "engine", "coordinator")
    ]
