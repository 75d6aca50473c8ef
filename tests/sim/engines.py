"""
Simulated vLLM engines: the real scheduler client and the real rank clients, with requests that come, load, store, end.

Theory. An engine takes steps while it has requests. In a step it looks at the waiting requests in order and starts
those whose keys' answers are known, up to its number of running ones: a request with a stored beginning loads it on
every rank, then computes, then stores what was missing. Requests belong to conversations whose keys they share.

Each rank is a process of its own; its copies take a while, and go on for a while when it is killed, until it is gone.
Every job is accounted for: submitted once, ended once on every living rank, in time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvpool.client.copier import Copier, Copy
from kvpool.client.launch import ClientConfig
from kvpool.client.link import LOAD_MARGIN_S, STORE_MARGIN_S
from kvpool.client.rank import JobEnded, JobObject, RankClient
from kvpool.client.scheduler import SchedulerClient
from kvpool.core import rank_events as ev
from kvpool.core.requests import Hit, Later
from kvpool.core.trailer import Expected
from kvpool.errors import Code
from kvpool.wire.messages import NamespaceSpec

from .kernel import MS, US, Kernel, Process, S, check
from .memory import Leases, Memory, Who

CONFIG = ClientConfig(run_dir="/simulated")


@dataclass(slots=True)
class _Ticket:
    """One launched batch of copies."""

    copies: list[tuple[Memory, int, Who, object]]
    load: bool
    over: bool = False
    failed: bool = False


class SimCopier(Copier):
    """Copies that take time, and check what they find."""

    def __init__(self, kernel: Kernel, process: Process, rng: random.Random, *, copy_us: int, errors: float) -> None:
        self._kernel, self._process, self._rng = kernel, process, rng
        self._copy_us, self._errors = copy_us, errors
        self._memories: dict[int, Memory] = {}
        self._running: list[_Ticket] = []
        self._copy = 0
        process.at_exit.append(self._cut_off)

    def attach(self, segment: int, memory: Any) -> None:
        """Reach it."""
        check(segment not in self._memories, "a segment is attached twice", segment=segment)
        self._memories[segment] = memory

    def detach(self, segment: int) -> None:
        """Reach it no more."""
        memory = self._memories.pop(segment)
        used = any(part[0] is memory for ticket in self._running for part in ticket.copies)
        check(not used, "a segment is unmapped that a copy touches", segment=segment)

    def load(self, copies: Sequence[Copy]) -> object:
        """Slot to engine."""
        return self._launch(copies, load=True)

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        """Engine to slot."""
        return self._launch(copies, load=False)

    def ended(self, ticket: object) -> bool:
        """Whether it is over; raises where it failed."""
        found = cast(_Ticket, ticket)
        if found.over and found.failed:
            raise RuntimeError("simulated failure of a copy")
        return found.over

    def wait(self, ticket: object) -> None:
        """The waiting engine sees it end at once."""
        self._end(cast(_Ticket, ticket))
        self.ended(ticket)

    def close(self) -> None:
        """Nothing to free."""

    def _launch(self, copies: Sequence[Copy], *, load: bool) -> _Ticket:
        parts: list[tuple[Memory, int, Who, object]] = []
        for copy in copies:
            self._copy += 1
            parts.append(
                (self._memories[copy.segment], copy.offset, ("rank", self._process.pid, self._copy), copy.place)
            )
        ticket = _Ticket(parts, load, failed=self._rng.random() < self._errors)
        for memory, offset, who, tag in parts:
            if load:
                memory.begin_read(offset, who, tag)
            else:
                memory.begin_write(offset, who)
        self._running.append(ticket)
        self._kernel.after(self._rng.randrange(1, self._copy_us) * US, lambda: self._end(ticket))
        return ticket

    def running(self) -> int:
        """Batches under way."""
        return len(self._running)

    def _end(self, ticket: _Ticket, *, whole: bool = True) -> None:
        if ticket.over or (whole and not self._process.alive):
            return  # of a killed process what runs goes on until it is gone
        ticket.over = True
        self._running.remove(ticket)
        for memory, offset, who, tag in ticket.copies:
            if ticket.load:
                memory.end_read(offset, who)
            else:
                memory.end_write(offset, who, tag if whole and not ticket.failed else ("half of", tag))

    def _cut_off(self) -> None:
        for ticket in list(self._running):
            self._end(ticket, whole=False)


class SimRank(RankClient):
    """The rank client, with each of its words about slots noted."""

    def __init__(self, *arguments: Any, leases: Leases, pid: int, validates: bool, **named: Any) -> None:
        self._leases, self._pid, self._validates = leases, pid, validates
        #: Load jobs with objects on a device whose worker this rank had not heard of yet.
        self.early: set[int] = set()
        self.introduced: set[int] = set()
        super().__init__(*arguments, **named)

    def _feed(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerJoined(device=device):
                self.introduced.add(device)
            case ev.LoadSubmitted(job=job, devices=devices) if not {*devices} <= self.introduced:
                self.early.add(job)
        super()._feed(event)
        if self._validates and not self._feeding:
            self._table.validate()

    def _do(self, action: ev.Action) -> None:
        match action:
            case ev.SendRelease() | ev.SendFilled() | ev.SendStoreCancel():
                may_come = isinstance(action, ev.SendStoreCancel)
                for index in action.indices:
                    self._leases.end((self._pid, action.wire, action.device, index), may_come=may_come)
            case ev.TellCopiesEnded(device=device, generation=generation):
                self._leases.end_of_rank(self._pid, device, generation)
        super()._do(action)


class RankProcess:
    """One rank of an engine."""

    def __init__(self, engine: "EngineProcess", rank: int) -> None:
        self.world, self.engine, self.rank = engine.world, engine, rank
        kernel = self.world.kernel
        self.process = Process(kernel, f"rank {rank} of {engine.name}")
        self.copier = SimCopier(
            kernel, self.process, self.world.rng, copy_us=self.world.plan.copy_us, errors=self.world.plan.copy_errors
        )
        self.process.at_exit.append(lambda: self.world.leases.end_of_rank(self.process.pid))
        #: (job, kind) -> by when it must have ended.
        self.due_ns: dict[tuple[int, str], int] = {}
        self.stopped_ns = 0
        self.client: SimRank = cast(SimRank, None)
        self.process.turn = self._turn
        kernel.run_as(self.process, self._start)

    def _start(self) -> None:
        self.client = SimRank(
            CONFIG, self.engine.spec, engine=self.engine.name, rank=self.rank, copier=self.copier,
            leases=self.world.leases, pid=self.process.pid, validates=self.world.validates,
        )  # fmt: skip

    def _turn(self) -> None:
        client = self.client
        client._turn({fd for fd, _ in client._epoll.poll()})
        check(not client._disabled, "a rank was disabled by an error")
        self.take_ended()

    def take_ended(self) -> None:
        """Hand what ended to the engine, once each."""
        for ended in self.client.take_ended():
            due_ns = self.due_ns.pop((ended.job, ended.kind), None)
            check(due_ns is not None, "a job ended twice, or was never submitted", job=ended.job, rank=self.rank)
            self.engine.job_ended(self.rank, ended)

    def submit(self, job: int, request: str, objects: list[JobObject], *, load: bool) -> None:
        """Submit a job, as the engine's worker does."""
        if not self.process.alive:
            return
        pool = self.world.settings.pool
        limit_s = pool.load_deadline_s + LOAD_MARGIN_S if load else pool.store_deadline_s + STORE_MARGIN_S
        slack_ns = self.world.plan.copy_us * US * 4 + 50 * MS + self.stopped_ns
        waits = [due - self.world.kernel.now_ns for (_, kind), due in self.due_ns.items() if kind == "store"]
        behind_ns = 0 if load else max([0, *waits])
        self.due_ns[job, "load" if load else "store"] = (
            self.world.kernel.now_ns + int(limit_s * S) + slack_ns + max(0, behind_ns)
        )
        if load:
            self.world.kernel.run_as(self.process, lambda: self.client.submit_load(job, objects))
        else:
            self.world.kernel.run_as(self.process, lambda: self.client.submit_store(job, request, objects, None))

    def stop(self, for_ns: int) -> None:
        """It is stopped for a while; so long it cannot be expected to end anything."""
        self.process.stopped_until_ns = self.world.kernel.now_ns + for_ns
        self.due_ns = {job: due_ns + for_ns for job, due_ns in self.due_ns.items()}
        self.stopped_ns += for_ns

    def flush(self, jobs: list[int]) -> None:
        """The engine's model thread waits for these jobs."""
        if not self.process.alive:
            return

        def run() -> None:
            self.client.flush(jobs)
            check(not self.client._disabled, "a rank was disabled by an error")
            self.take_ended()
            for job in jobs:
                check((job, "load") not in self.due_ns, "a flushed load did not end", job=job)

        self.world.kernel.run_as(self.process, run)


@dataclass(slots=True, eq=False)
class Request:
    """One request: its chunks in prefix order, each a key per KV group."""

    name: str
    chunks: list[bytes]
    priority: int = 0
    arrived_ns: int = 0
    started_ns: int = 0
    loaded: int = 0
    state: str = "waiting"
    awaiting: set[int] = field(default_factory=set)
    failed: bool = False
    load_job: int = 0
    store_job: int = 0


class EngineProcess:
    """An engine: the scheduler's process, and its ranks'."""

    def __init__(self, world: Any, name: str, spec: NamespaceSpec) -> None:
        self.world, self.name, self.spec = world, name, spec
        self.process = Process(world.kernel, f"scheduler of {name}")
        self.groups = [group.group for group in spec.groups]
        self.payload = {group.group: group.object_bytes for group in spec.groups}
        self.requests: list[Request] = []
        self.jobs: dict[int, Request] = {}
        self.next_job = 1
        self.client: SchedulerClient = cast(SchedulerClient, None)
        world.kernel.run_as(self.process, self._start)
        self.ranks = [RankProcess(self, rank) for rank in range(spec.rank_count)]

    @property
    def alive(self) -> bool:
        """All of its processes run."""
        return self.process.alive and all(rank.process.alive for rank in self.ranks)

    def _start(self) -> None:
        self.client = SchedulerClient(CONFIG, self.spec, engine=self.name)

    def kill(self) -> None:
        """All its processes are killed."""
        rng = self.world.rng
        self.process.die(-9)
        for rank in self.ranks:
            rank.process.die(-9, linger_ns=rng.randrange(1, 200) * MS if self.world.plan.slow_death else US)

    # ---------------------------------------------------------------- requests

    def arrive(self, request: Request) -> None:
        """A request comes."""
        if not self.process.alive:
            return
        request.arrived_ns = self.world.kernel.now_ns
        self.requests.append(request)
        self._as_me(lambda: self.client.announce(request.name, self.keys(request.chunks), request.priority))
        self.requests.sort(key=lambda one: (one.priority, one.arrived_ns))
        if len(self.requests) == 1:
            self._step_later()

    def abort(self, request: Request) -> None:
        """A request is cancelled by its user."""
        if request not in self.requests or not self.process.alive:
            return
        if request.state == "loading":
            for rank in self.ranks:
                rank.flush([request.load_job])
        self._finish(request)

    def keys(self, chunks: Sequence[bytes]) -> list[bytes]:
        """Return the keys of chunks, in order."""
        return [chunk + group.to_bytes(4, "big") for chunk in chunks for group in self.groups]

    def _step_later(self) -> None:
        self.world.kernel.after(self.world.rng.randrange(500, 4000) * US, lambda: self._as_me(self._step))

    def _as_me(self, call: Any) -> None:
        if self.process.alive:
            self.world.kernel.run_as(self.process, call)
            check(not self.client._disabled, "a scheduler was disabled by an error")

    def _step(self) -> None:
        self.client.pump()
        if self.world.validates:
            self.client._table.validate()
        running = sum(request.state != "waiting" for request in self.requests)
        for request in [one for one in self.requests if one.state == "waiting"]:
            if running >= self.world.plan.running_max:
                break
            running += self._maybe_start(request)
        if self.requests:
            self._step_later()

    def _maybe_start(self, request: Request) -> bool:
        hits: list[Hit] = []
        for chunk in request.chunks:
            found = [self.client.lookup(request.name, key) for key in self.keys([chunk])]
            if any(isinstance(one, Later) for one in found):
                return False
            if not all(isinstance(one, Hit) for one in found):
                break
            hits += [one for one in found if isinstance(one, Hit)]
        request.started_ns = self.world.kernel.now_ns
        request.loaded = len(hits) // len(self.groups)
        self.world.started(request, hits)
        if hits:
            self._load(request, [hit.device for hit in hits])
        else:
            self.world.loaded(request)
            self._compute(request)
        return True

    def _load(self, request: Request, devices: list[int]) -> None:
        request.state = "loading"
        request.load_job = self._job(request)
        keys = self.keys(request.chunks[: request.loaded])
        self._submit(request, request.load_job, list(zip(keys, devices, strict=True)), load=True)

    def _compute(self, request: Request) -> None:
        request.state = "computing"
        # Only now: what was read ahead for it is to stay until its load has landed.
        self._as_me(lambda: self.client.started(request.name))
        self.world.kernel.after(
            self.world.rng.randrange(1, self.world.plan.compute_ms) * MS,
            lambda: self._as_me(lambda: self._computed(request)),
        )

    def _computed(self, request: Request) -> None:
        if request not in self.requests:
            return
        self.client.pump()
        start = 0 if request.failed else request.loaded
        chunks = request.chunks[start:]
        if chunks and self.client.connected and not self.client.request_cut(request.name):
            keys = self.keys(chunks)
            first = request.chunks[0]
            devices = [
                self.client.place_store(request.name, key, start + number // len(self.groups), first)
                for number, key in enumerate(keys)
            ]
            request.store_job = self._job(request)
            self.client.store_offered(request.name, keys)
            self._submit(request, request.store_job, list(zip(keys, devices, strict=True)), load=False)
        self._finish(request)

    def _finish(self, request: Request) -> None:
        request.state = "done"
        self.requests.remove(request)
        self._as_me(lambda: self.client.withdraw(request.name))
        self._as_me(self.client.pump)

    def _job(self, request: Request) -> int:
        job = self.next_job
        self.next_job += 1
        self.jobs[job] = request
        return job

    def _submit(self, request: Request, job: int, objects: list[tuple[bytes, int]], *, load: bool) -> None:
        request.awaiting = {rank.rank for rank in self.ranks} if load else request.awaiting
        for rank in self.ranks:
            mine = [JobObject(key, device, self.tag(key, rank.rank)) for key, device in objects]
            self.world.kernel.after(
                self.world.kernel.delay_ns(),
                lambda rank=rank, mine=mine: rank.submit(job, request.name, mine, load=load),
            )

    def tag(self, key: bytes, rank: int) -> Expected:
        """Return what an object's bytes are."""
        return Expected(key, rank, bytes.fromhex(self.spec.fingerprint), self.payload[int.from_bytes(key[-4:], "big")])

    # ---------------------------------------------------------------- jobs

    def job_ended(self, rank: int, ended: JobEnded) -> None:
        """A rank's job ended."""
        request = self.jobs[ended.job]
        self.world.ended(self.ranks[rank], request, ended)
        if ended.kind != "load" or ended.job != request.load_job:
            return
        request.awaiting.discard(rank)
        request.failed |= bool(ended.failed)
        if not request.awaiting and request.state == "loading":
            self.world.loaded(request)
            self._compute(request)


__all__ = ["Code", "EngineProcess", "Request"]
