"""
What must hold after everything that happens, at quiet moments, and at the end of a schedule.

What tables check of themselves (`validate`) runs where they are driven (`pool.py`, `engines.py`), what may touch a slot
in `memory.py`. Here is what is true between processes, and over time.
"""

from typing import TYPE_CHECKING

from kvpool.client.rank import JobEnded
from kvpool.core.admission import Phase
from kvpool.core.budget import State
from kvpool.core.slots import SlotState
from kvpool.errors import Code

from .kernel import S, check

if TYPE_CHECKING:
    from .engines import RankProcess, Request
    from .pool import CoordinatorProcess, SimWorker, WorkerProcess
    from .world import World

#: Checks over all processes run after every so many events, and at the end.
EVERY = 8


def after_each(world: "World") -> None:
    """Run after everything that happened."""
    if world.kernel.happened % EVERY == 0:
        jobs_in_time(world)
        budget_adds_up(world)
        admissions_whole(world)


def job_ended(world: "World", rank: "RankProcess", request: "Request", ended: JobEnded) -> None:
    """Where nothing goes wrong, no load fails, but at once where its rank has not met the device's worker yet."""
    if ended.kind != "load" or not world.plan.harmless:
        return
    allowed = set()
    if "aborts" in world.plan.faults:
        allowed.add(Code.CANCELLED)
    if "evictions" in world.plan.faults:
        allowed.add(Code.MISSING)
    if ended.job in rank.client.early:
        allowed.add(Code.WORKER_LOST)
        world.count("loads_before_their_worker")
    codes = {code for _, code in ended.failed} - allowed
    check(not codes, "a load failed though nothing went wrong", codes=codes, request=request.name, job=ended.job)


def jobs_in_time(world: "World") -> None:
    """No job of a living rank is past the time at which it must have ended."""
    now_ns = world.kernel.now_ns
    for engine in world.engines.values():
        for rank in engine.ranks:
            if rank.process.alive:
                late = [job for job, due_ns in rank.due_ns.items() if due_ns < now_ns]
                check(not late, "a job is past its deadline", jobs=late, rank=rank.process.name)


def budget_adds_up(world: "World") -> None:
    """Staging that exists is staging that was divided, and not more than was allowed."""
    found = world.coordinator
    if found is None or not found.process.alive:
        return
    staging = found.coordinator._staging
    budget = staging.budget
    there = sum(len(memory) for memory in world.sandbox.memories)
    check(there <= world.staging_bytes_max, "more staging than allowed", there=there, allowed=world.staging_bytes_max)
    divided = sum(segment.segment_bytes for segment in budget.segments.values())
    check(there <= divided, "staging that belongs to no segment", there=there, divided=divided)
    check(budget.free_bytes == budget.total_bytes - divided, "free staging is miscounted", free=budget.free_bytes)
    for number in staging._memories:
        check(number in budget.segments, "memory of a segment that is gone", segment=number)


def admissions_whole(world: "World") -> None:
    """Where nothing is under way, coordinator and workers agree on every admission."""
    found = world.coordinator
    if found is None or not found.process.alive or not found.coordinator._preload.enabled:
        return
    workers = quiet_workers(world, found)
    if workers is None:
        return
    known = found.coordinator._preload._admission._admissions
    for number, admission in known.items():
        for device in admission.keys.keys() & workers.keys():
            theirs = workers[device]._table._preloads.admissions.get(number)
            if admission.phase is Phase.ASKED:
                check(device in admission.awaited or theirs is not None, "an answered admission is gone", number=number)
                continue
            check(theirs is not None, "a committed admission is not whole", number=number, lacks=device)
            if theirs is not None:
                check(theirs.committed, "a committed admission is not committed", number=number, device=device)
                check(theirs.landed == (device not in admission.awaited), "landed and not told", number=number)
    for device, worker in workers.items():
        for number in worker._table._preloads.admissions:
            there = number in known and device in known[number].keys
            check(there, "a part of an admission outlives it", number=number, device=device)


def quiet_workers(world: "World", found: "CoordinatorProcess") -> "dict[int, SimWorker] | None":
    """Return the ready workers by device if nothing is under way between any of them and the coordinator."""
    ready: dict[int, SimWorker] = {}
    for device, run in found.coordinator._workers.running.items():
        process = world.kernel.processes[run.popen.pid]
        worker = next(worker for worker in world.workers if worker.process is process)
        if not run.ready or not process.alive or worker.worker is None or run.peer.gone:
            return None
        end = run.peer._channel._file()
        if not end.quiet or end.peer is None or not end.peer.quiet or found.coordinator.loop._soon:
            return None
        ready[device] = worker.worker
    return ready


def at_the_end(world: "World") -> None:
    """When the last request is over and a while has passed, nobody waits for anything."""
    jobs_in_time(world)
    budget_adds_up(world)
    admissions_whole(world)
    for worker in world.workers:
        if worker.process.alive and worker.worker is not None:
            _worker_idle(world, worker)
    found = world.coordinator
    if found is not None and found.process.alive:
        states = [segment.state for segment in found.coordinator._staging.budget.segments.values()]
        check(State.QUARANTINED not in states, "a dead worker's segment is never proven", states=states)
        check(State.RECALLED not in states and State.CLOSING not in states, "a segment never leaves", states=states)
        check(not found.coordinator._directory._probes, "a probe is never answered")
        check(not found.coordinator._clients.unproven, "a dead rank is never proven")
    check(len(world.leases) == 0 or found is None or not _leases_left(world), "a slot is promised for ever")


def _worker_idle(world: "World", worker: "WorkerProcess") -> None:
    if worker.worker is None:
        return
    table = worker.worker._table
    facts = table.statistics()
    for name in ("loads_waiting", "opens_queued", "opens_inflight", "reads_inflight", "keys_filling", "offers"):
        check(facts[name] == 0, "something waits though nobody asks", what=name, count=facts[name])
    if worker.worker._breaker.healthy and not facts["device_full"]:
        check(facts["writes_queued"] == 0, "a filled object is never written", count=facts["writes_queued"])
        check(facts["writes_inflight"] == 0, "a write never ends", count=facts["writes_inflight"])
    check(facts["clients_unproven"] == 0, "a departed rank is never proven", seconds=world.kernel.now_ns / S)
    for state in (SlotState.FILLING, SlotState.QUARANTINED):
        check(facts[f"slots_{state.value}"] == 0, "a slot never comes back", state=state.value)


def _leases_left(world: "World") -> list[object]:
    """Promises to ranks that live, of workers that live."""
    generations = {
        (worker.device, worker.worker._generation)
        for worker in world.workers
        if worker.process.alive and worker.worker is not None
    }
    return [lease for lease, (_, _, generation) in world.leases._held.items() if (lease[2], generation) in generations]
