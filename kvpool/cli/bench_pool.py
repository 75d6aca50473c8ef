"""
A pool of one's own for measuring: started in a temporary place, watched, driven by a client process, ended.

Covers: the pool's settings, its processes and their CPU time, the client process (`bench_rank`), and the watch, which
attaches as an engine's scheduler would and so hears from the index when an object is stored. All of it leaves
nothing behind, whatever happens: the pool ends with its last client even if this process is killed.
Does not cover: what is measured (`bench_cmd`), the work (`bench_work`).
"""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

import kvpool
from kvpool.cli.bench_rank import ENGINE
from kvpool.cli.bench_work import Work
from kvpool.client import admin
from kvpool.client.launch import LOG_NAME, ClientConfig, ensure_pool
from kvpool.config import DeviceSettings, PoolSettings, Settings
from kvpool.errors import PeerGone, PoolUnavailable
from kvpool.health import facts, process_facts
from kvpool.health.checks import number
from kvpool.health.facts import Facts
from kvpool.io.channel import Channel
from kvpool.wire.codec import split
from kvpool.wire.messages import (
    PROTOCOL_VERSION,
    STORED,
    Announce,
    CoordinatorToClient,
    Hello,
    KeysChanged,
    KeyState,
    Refused,
    Report,
    ReportWanted,
    Status,
    Welcome,
)

#: Longest wait for an answer of the client process, and for a message of the pool.
ANSWER_TIMEOUT_S = 300.0
#: A phase in which nothing happens for this long has failed.
STALL_S = 60.0
#: How often the workers are asked for their slots at start.
STAGED_EVERY_S = 0.05
#: Longest wait for the pool to end after it was asked to.
END_TIMEOUT_S = 60.0

POOL_ROLES = (facts.COORDINATOR, facts.IO_WORKER)

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """
    How the pool is set up.

    Attributes:
        paths: One directory per device; they exist and are this bench's own.
    """

    paths: Sequence[str]
    queue_depth: int
    staging_bytes: int
    verify: bool

    def settings(self, run_dir: str) -> Settings:
        """Return the pool's settings. Deadlines are long: a slow drive is measured, not given up."""
        devices = [
            DeviceSettings(name=f"bench{index}", path=path, iodepth=self.queue_depth, open_lookahead=self.queue_depth)
            for index, path in enumerate(self.paths)
        ]
        pool = PoolSettings(
            run_dir=run_dir,
            staging_bytes=self.staging_bytes,
            load_deadline_s=STALL_S,
            store_deadline_s=STALL_S,
            operation_deadline_s=STALL_S,
            verify=self.verify,
        )
        return Settings(pool=pool, device=devices)


def staging_for(work: Work, queue_depth: int) -> int:
    """
    Return staging enough for twice the queue depth on each device: one half with the drive, one with the client.

    More objects than that stream through it.
    """
    return work.devices * max(128 << 20, (2 * queue_depth + 8) * work.slot_bytes)


# ---------------------------------------------------------------- processes


def family(pids: Sequence[int]) -> list[int]:
    """Return these processes and their living descendants, each once."""
    found = dict.fromkeys(pids)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.update(dict.fromkeys(child.pid for child in psutil.Process(pid).children(recursive=True)))
    return list(found)


def cpu_seconds(pids: Sequence[int]) -> float:
    """Return CPU seconds of these processes, their living descendants, and the children they have reaped."""
    total = 0.0
    for pid in family(pids):
        total += process_facts.cpu_seconds(pid) or 0.0
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.children_user + times.children_system
    return total


class RankProcess:
    """The client process: asks it, one command at a time."""

    def __init__(self, run_dir: str, work: Work, staging_bytes: int, *, fill: bool) -> None:
        argv = [sys.executable, "-m", "kvpool.cli.bench_rank", run_dir, msgspec.json.encode(work).decode()]
        argv += [str(staging_bytes), "fill" if fill else "plain"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._partial = b""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with an answer."""
        return -1 if self._process.stdout is None else self._process.stdout.fileno()

    def command(self, do: str, **more: object) -> None:
        """Send one command."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            self._process.stdin.flush()

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield the answers that are there now; blocks only if none is."""
        data = os.read(self.fileno(), 1 << 20)
        if not data:
            raise PoolUnavailable("the bench's client process ended", exit_code=self._process.wait())
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def ask(self, do: str, **more: object) -> dict[str, Any]:
        """Send one command and return its answer."""
        self.command(do, **more)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next answer that ends a command."""
        while select.select([self], [], [], ANSWER_TIMEOUT_S)[0]:
            for answer in self.answers():
                if answer["done"]:
                    return answer
        raise PoolUnavailable("the bench's client process does not answer", waited_s=ANSWER_TIMEOUT_S)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Watch:
    """
    Hears from the pool's index, as a scheduler: which announced keys are stored, and when that was told.

    Attributes:
        stored_ns: Time (CLOCK_REALTIME) at which each key was first told as stored.
    """

    def __init__(self, config: ClientConfig, work: Work) -> None:
        self.stored_ns: dict[bytes, int] = {}
        self._keys: list[bytes] = []
        self._channel = Channel(ensure_pool(config), CoordinatorToClient)
        self._welcome: Welcome | None = None
        namespace = work.namespace()
        self._channel.send(
            Hello(
                protocol=PROTOCOL_VERSION,
                version=kvpool.__version__,
                role="scheduler",
                engine=ENGINE,
                rank=-1,
                pid=os.getpid(),
                namespace=namespace,
            )
        )
        while self._welcome is None:
            if not select.select([self], [], [], ANSWER_TIMEOUT_S)[0]:
                raise PoolUnavailable("the pool does not greet", waited_s=ANSWER_TIMEOUT_S)
            self.pump()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with a message."""
        return self._channel.fileno()

    def announce(self, keys: Sequence[bytes]) -> None:
        """Ask to be told about these keys."""
        self._keys = list(keys)
        parts = list(split(keys))
        for first, part in parts:
            more = first + len(part) < len(keys)
            self._channel.send(Announce(request="bench", first=first, keys=part, more=more))

    def pump(self) -> None:
        """Take in what the pool has said."""
        now = time.time_ns()
        try:
            messages = self._channel.receive()
            self._channel.flush()
        except PeerGone as error:
            raise PoolUnavailable("the pool ended", reason=str(error)) from error
        for message, _ in messages:
            if isinstance(message, KeysChanged):
                self._note(message.entries, now)
            elif isinstance(message, Status):
                entries = zip(self._keys[message.first :], message.flags, message.devices, strict=False)
                self._note([KeyState(key=key, flags=flags, device=device) for key, flags, device in entries], now)
            elif isinstance(message, Welcome):
                self._welcome = message
            elif isinstance(message, Refused):
                raise PoolUnavailable("the pool refuses the bench", reason=message.message)
            elif isinstance(message, ReportWanted):
                told: Facts = {facts.ROLE: facts.SCHEDULER_CLIENT, facts.PID: os.getpid(), facts.ENGINE: ENGINE}
                self._channel.send(Report(report=message.report, facts=told))

    def _note(self, entries: Sequence[KeyState], now_ns: int) -> None:
        for entry in entries:
            if entry.flags & STORED:
                self.stored_ns.setdefault(entry.key, now_ns)

    def close(self) -> None:
        """Leave the pool."""
        self._channel.close()


# ---------------------------------------------------------------- a pool and its client


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A phase as it was seen: the client's answer, when the index told each key, CPU of all processes."""

    answer: dict[str, Any]
    stored_ns: dict[bytes, int]
    cpu_s: float


class OwnPool:
    """
    One pool with its watch. Use as a context manager: it starts with the object and ends with the block.

    Attributes:
        watch: The scheduler's view of it.
        pids: The coordinator and the I/O workers.
    """

    def __init__(self, plan: Plan, work: Work) -> None:
        self._work = work
        self.run_dir = tempfile.mkdtemp(prefix="kvpool-bench-")
        self.pids: list[int] = []
        self._exit = contextlib.ExitStack()
        self._exit.callback(shutil.rmtree, self.run_dir, ignore_errors=True)
        with self._closing_on_error():
            config = ClientConfig(run_dir=self.run_dir, settings=plan.settings(self.run_dir), autostart=True)
            self.watch = Watch(config, work)
            self._exit.callback(self._end_pool)
            self._exit.callback(self.watch.close)
            self.pids = list(self.rows())

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._exit.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def rows(self) -> dict[int, Facts]:
        """Return what the pool's own processes say of themselves, by process id."""
        told = admin.health(self.run_dir).rows
        return {pid: row for row in told if row.get(facts.ROLE) in POOL_ROLES and (pid := _pid(row))}

    def wait_staged(self, mapped_bytes: int) -> None:
        """
        Return when the I/O workers use as much staging as the client has mapped.

        Asked for again and again, since a worker tells nobody when it has registered its memory.
        """
        slots = mapped_bytes // self._work.slot_bytes
        deadline = time.monotonic() + STALL_S
        while sum(number(row, facts.SLOTS_FREE) for row in self.worker_rows()) < slots:
            if time.monotonic() > deadline:
                raise PoolUnavailable("staging does not become ready", waited_s=STALL_S, log=self.log_tail())
            if select.select([self.watch], [], [], STAGED_EVERY_S)[0]:
                self.watch.pump()

    def worker_rows(self) -> list[Facts]:
        """Return the rows of the I/O workers."""
        return [row for row in self.rows().values() if row[facts.ROLE] == facts.IO_WORKER]

    def _end_pool(self) -> None:
        """Ask the pool to end and wait until its processes are gone."""
        pidfds = [fd for pid in self.pids if (fd := _pidfd(pid)) is not None]
        try:
            with contextlib.suppress(PoolUnavailable):
                admin.stop(self.run_dir)
            for pidfd in pidfds:
                if not select.select([pidfd], [], [], END_TIMEOUT_S)[0]:
                    raise PoolUnavailable("the pool does not end", waited_s=END_TIMEOUT_S, log=self.log_tail())
        finally:
            for pidfd in pidfds:
                os.close(pidfd)

    def log_tail(self) -> str:
        """Return the last words of the coordinator."""
        try:
            return Path(self.run_dir, LOG_NAME).read_text(errors="replace")[-2000:]
        except OSError:
            return ""


class DrivenPool(OwnPool):
    """A pool of one's own, and a client process that drives it."""

    def __init__(self, plan: Plan, work: Work, *, fill: bool) -> None:
        super().__init__(plan, work)
        with self._closing_on_error():
            self.rank = RankProcess(self.run_dir, work, plan.staging_bytes, fill=fill)
            self._exit.callback(self.rank.close)
            greeting = self.rank.answer()
            if not greeting["connected"]:
                raise PoolUnavailable("the client process found no pool, or not its staging", log=self.log_tail())
            self.wait_staged(greeting["mapped_bytes"])

    def timed(self, do: str, *, stored: int, progress: Progress) -> Timed:
        """
        Run one command of the client process, and return when it is done and *stored* keys are told as stored.

        Args:
            progress: Called with the bytes done so far.
        """
        pids = [*self.pids, self.rank.pid]
        cpu_before = cpu_seconds(pids)
        self.rank.command(do)
        answer: dict[str, Any] | None = None
        failed = 0
        while answer is None or len(self.watch.stored_ns) < stored - failed:
            both: list[RankProcess | Watch] = [self.rank, self.watch]
            ready, _, _ = select.select(both, [], [], STALL_S)
            if not ready:
                raise PoolUnavailable(f"nothing happened in {do}", waited_s=STALL_S, log=self.log_tail())
            if self.watch in ready:
                self.watch.pump()
                if stored:
                    progress(len(self.watch.stored_ns) * self._work.object_bytes)
            if self.rank in ready:
                for said in self.rank.answers():
                    if said["done"]:
                        answer, failed = said, len(said["failed"])
                    elif not stored:
                        progress(said["objects"] * self._work.object_bytes)
        cpu_s = cpu_seconds(pids) - cpu_before
        return Timed(answer=answer, stored_ns=dict(self.watch.stored_ns), cpu_s=cpu_s)


def _pid(row: Facts) -> int | None:
    pid = row.get(facts.PID)
    return pid if isinstance(pid, int) and pid > 0 else None


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
