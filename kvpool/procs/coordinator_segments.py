"""
The pool's staging memory: segments made, shown to ranks, granted to workers, taken back.

Theory. `core/budget.py` decides; this runs its steps. A segment's memory is made and filled with
pages on a background thread, one segment after the other for each device, so that its pages lie
together. Made segments of a device are collected into *batches*, which the worker registers as one
ring: the first is small, so that a device is usable soon, later ones large, so that rings stay few.
A batch is shown to the ranks first (they map and pin it), then granted to the worker.

A segment that leaves goes the other way: recalled from the worker, shown down to the ranks, and
freed when all of them forgot it. A dead worker's segments wait for its `Quarantine` to end.

Where the machine has less memory than configured, what there is gets divided, health and the log
name the limit, and the rest is tried again every `RETRY_S`.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.core.budget import Budget, Create, DeviceShare, Pair, Recall
from kvpool.errors import HostError
from kvpool.io import shm
from kvpool.procs.coordinator_loop import Loop
from kvpool.wire.messages import (
    ResizeState,
    SegmentDown,
    SegmentGranted,
    SegmentRecalled,
    SegmentsGranted,
    SegmentUp,
    SlotsUsed,
)

#: A worker's batches: the first at most, later ones at most. One batch is one ring.
FIRST_BATCH_BYTES_MAX = 1 << 30
BATCH_BYTES_MAX = 8 << 30
#: Devices whose segments are filled with pages at the same time.
THREADS_MAX = 4
#: Part of the free memory that staging may take where there is less than configured.
MEMORY_SHARE_MAX = 0.8
RETRY_S = 30.0
#: Staging from which on progress is logged.
PROGRESS_BYTES_MIN = 8 << 30

log = logging.getLogger("kvpool.coordinator")


class Mapper(Protocol):
    """A rank, as staging sees it."""

    def send(self, message: SegmentUp | SegmentDown, fds: list[int] | tuple[()] = ()) -> None:
        """Tell it."""


class Holder(Protocol):
    """A device's running worker, as staging sees it."""

    def send(
        self, message: SegmentGranted | SegmentsGranted | SegmentRecalled, fds: list[int] | tuple[()] = ()
    ) -> None:
        """Tell it."""


@dataclass(slots=True)
class _Memory:
    """A segment's memory: its descriptor and which ranks map it."""

    fd: int
    mapped_by: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Making:
    """One device's segments under way: to be made, and made but not granted."""

    wanted: deque[Create] = field(default_factory=deque)
    running: Create | None = None
    batch: list[int] = field(default_factory=list)


class Staging:
    """
    See the module.

    Args:
        staging_bytes: As configured.
        devices: In index order.
        granted: Called with a device that got segments.
    """

    def __init__(
        self,
        loop: Loop,
        staging_bytes: int,
        devices: list[DeviceShare],
        granted: Callable[[int], None] = lambda _device: None,
    ) -> None:
        self._loop = loop
        self._granted = granted
        self._configured_bytes = staging_bytes
        #: Why staging is smaller than configured, and the number to set; empty when it is not.
        self.advice = ""
        self.budget = Budget(staging_bytes, devices)
        self._memories: dict[int, _Memory] = {}
        self._making = [_Making() for _ in devices]
        self._mappers: dict[int, Mapper] = {}
        self._holders: dict[int, Holder] = {}
        self._threads = ThreadPoolExecutor(min(THREADS_MAX, len(devices)), thread_name_prefix="kvpool-prefault")
        self._closing = False
        #: What the threads have made and the loop has not taken.
        self._come: deque[tuple[Create, int | HostError | None]] = deque()
        self._announced_bytes = 0
        self._limit_to_machine()

    # ---------------------------------------------------------------- namespaces

    def open_namespace(self, namespace: int, rank_count: int, object_bytes: list[int], *, weight: int = 1) -> None:
        """
        Divide staging anew with this namespace in it.

        Raises:
            HostError: It does not fit; names the number needed.
        """
        self.budget.open_namespace(namespace, rank_count, object_bytes, weight=weight)
        self._go_on()

    def close_namespace(self, namespace: int) -> None:
        """Nobody uses this namespace now: others may have its memory when they need it."""
        self.budget.close_namespace(namespace)

    # ---------------------------------------------------------------- ranks

    def rank_joined(self, client: int, mapper: Mapper) -> None:
        """Show a new rank every segment that is in use."""
        self._mappers[client] = mapper
        for number in sorted(self._memories):
            if not self.budget.is_closing(number):
                self._show(number, client, mapper)

    def rank_left(self, client: int) -> None:
        """A rank's socket closed: show it nothing more. What it mapped stays so until `rank_proven`."""
        self._mappers.pop(client, None)

    def rank_proven(self, client: int) -> None:
        """A departed rank maps nothing any more."""
        for number in list(self._memories):
            self.forgotten(client, number)

    def forgotten(self, client: int, segment: int) -> None:
        """A rank does not map that segment any more."""
        memory = self._memories.get(segment)
        if memory is not None and client in memory.mapped_by:
            memory.mapped_by.discard(client)
            self._free_if_unmapped(segment)

    # ---------------------------------------------------------------- workers

    def worker_up(self, device: int, holder: Holder) -> None:
        """A device's worker is ready: grant it what is made for it."""
        self._holders[device] = holder
        self._grant(device)
        self._go_on()

    def worker_down(self, device: int) -> list[int]:
        """A device's worker ended: return the segments that stay quarantined until `proven`."""
        self._holders.pop(device, None)
        held = self.budget.worker_down(device, time.monotonic_ns())
        self._go_on()
        return held

    def proven(self, segments: list[int]) -> None:
        """Neither a ring nor a rank can touch these quarantined segments any more."""
        again, close = self.budget.proven(segments)
        for number in again:
            self._made(self.budget.segments[number].pair.device, number)
        for number in close:
            self._take_down(number)
        self._go_on()

    def returned(self, segment: int) -> None:
        """A worker gave a recalled segment back."""
        if self.budget.returned(segment):
            self._take_down(segment)

    # ---------------------------------------------------------------- making segments

    def _go_on(self) -> None:
        """Run the budget's next steps."""
        steps, wake_ns = self.budget.plan(time.monotonic_ns())
        for step in steps:
            if isinstance(step, Recall):
                self._recall(step)
        creates = [step for step in steps if isinstance(step, Create)]
        for create in _interleaved(creates):
            self._making[create.pair.device].wanted.append(create)
        for device in range(len(self._making)):
            self._make_next(device)
        self._loop.set_timer("staging", wake_ns, self._go_on)

    def _recall(self, step: Recall) -> None:
        holder = self._holders.get(step.device)
        if holder is not None:
            log.info("taking segment %d back from device %d for another use", step.segment, step.device)
            holder.send(SegmentRecalled(segment=step.segment))

    def _make_next(self, device: int) -> None:
        making = self._making[device]
        if making.running is not None or not making.wanted or self._closing:
            return
        create = making.running = making.wanted.popleft()
        self._threads.submit(self._make, create).add_done_callback(self._raise_bug)

    def _raise_bug(self, ended: "Future[None]") -> None:
        if not ended.cancelled() and ended.exception() is not None:
            self._loop.soon(ended.result)

    def _make(self, create: Create) -> None:
        """Make its memory, on a thread. What comes while the pool closes is given back by :meth:`close`."""
        self._come.append((create, _make(create.segment_bytes, self._is_closing)))
        self._loop.soon(self._take)

    def _take(self) -> None:
        self._ended(*self._come.popleft())

    def _is_closing(self) -> bool:
        return self._closing

    def _ended(self, create: Create, made: "int | HostError | None") -> None:
        """A segment's memory is there (descriptor), is not to be had (error), or is not wanted any more."""
        device = create.pair.device
        making = self._making[device]
        making.running = None
        if self._closing or made is None:
            if isinstance(made, int):
                os.close(made)
            return
        if isinstance(made, HostError):
            self._lacks_memory(create, made)
            return
        self._memories[create.segment] = _Memory(made)
        self._made(device, create.segment)
        self._make_next(device)

    def _made(self, device: int, segment: int) -> None:
        """Add a segment to its device's batch; grant the batch when it is full or nothing follows soon."""
        making = self._making[device]
        making.batch.append(segment)
        batch_bytes = sum(self.budget.segments[number].segment_bytes for number in making.batch)
        next_bytes = making.wanted[0].segment_bytes if making.wanted else 0
        bytes_max = BATCH_BYTES_MAX if self.budget.has_granted(device) else FIRST_BATCH_BYTES_MAX
        if not making.wanted or batch_bytes + next_bytes > bytes_max:
            self._grant(device)

    def _grant(self, device: int) -> None:
        holder, making = self._holders.get(device), self._making[device]
        if holder is None or not making.batch:
            return
        batch, making.batch = making.batch, []
        for number in batch:
            for client, mapper in self._mappers.items():
                self._show(number, client, mapper)
        for number in batch:
            self.budget.created(number)
            segment = self.budget.segments[number]
            message = SegmentGranted(
                segment=number, segment_bytes=segment.segment_bytes, slot_bytes=segment.pair.slot_bytes
            )
            holder.send(message, [self._memories[number].fd])
        holder.send(SegmentsGranted(count=len(batch)))
        self._granted(device)
        self._tell_progress()
        self._loop.soon(self._go_on)  # the division may have changed while it was made: only now can it be recalled

    def _show(self, number: int, client: int, mapper: Mapper) -> None:
        memory = self._memories[number]
        if client not in memory.mapped_by:
            memory.mapped_by.add(client)
            segment_bytes = self.budget.segments[number].segment_bytes
            mapper.send(SegmentUp(segment=number, segment_bytes=segment_bytes), [memory.fd])

    def _tell_progress(self) -> None:
        ready = self.budget.statistics()["staging_granted_bytes"]
        if (
            self._configured_bytes >= PROGRESS_BYTES_MIN
            and ready - self._announced_bytes >= self._configured_bytes // 8
        ):
            self._announced_bytes = ready
            log.info("staging: %.1f of %.1f GiB ready", ready / 2**30, self._configured_bytes / 2**30)

    # ---------------------------------------------------------------- too little memory

    def _limit_to_machine(self) -> None:
        """Divide only what the machine has now; say so where that is less than configured."""
        try:
            shm.check_staging(self._configured_bytes)
        except HostError as error:
            possible = min(shm.shm_free_bytes(), int(shm.memory_available_bytes() * MEMORY_SHARE_MAX))
            self.budget.total_bytes = min(self._configured_bytes, possible)
            self._lacking(str(error))

    def _lacks_memory(self, create: Create, error: HostError) -> None:
        """Forget what was still to be made; go on with what there is, and try again later."""
        self.budget.creation_failed(create.segment)
        for making in self._making:
            while making.wanted:
                self.budget.creation_failed(making.wanted.popleft().segment)
        self.budget.total_bytes -= max(0, self.budget.free_bytes)
        self._lacking(str(error))
        self._go_on()
        self._grant_complete()

    def _grant_complete(self) -> None:
        """Grant the batches that nothing follows any more."""
        for device, making in enumerate(self._making):
            if making.running is None and not making.wanted:
                self._grant(device)

    def _lacking(self, advice: str) -> None:
        if not self.advice:
            log.warning("staging is smaller than configured: %s", advice)
        self.advice = advice
        self._loop.set_timer("staging-retry", time.monotonic_ns() + int(RETRY_S * 1e9), self._retry)

    def _retry(self) -> None:
        taken = self._configured_bytes - (self.budget.total_bytes - self.budget.free_bytes)
        try:
            shm.check_staging(max(0, taken))
        except HostError as error:
            self._lacking(str(error))
            return
        self.advice = ""
        self.budget.total_bytes = self._configured_bytes
        self._go_on()

    # ---------------------------------------------------------------- demand

    def used(self, device: int, sizes: list[SlotsUsed]) -> None:
        """A device's worker told how many of its slots are in use for more than cache, or waited for."""
        now_ns = time.monotonic_ns()
        for told in sizes:
            pair = Pair(device, told.slot_bytes)
            self.budget.lending.used(pair, (told.used + told.wanted) * told.slot_bytes, now_ns)
        self._divide_when_due(now_ns)

    def waiting(self, waiting: dict[tuple[int, int], int]) -> None:
        """Waiting requests were refused so many bytes, by device and slot size."""
        self.budget.lending.waiting({Pair(*pair): waiting_bytes for pair, waiting_bytes in waiting.items()})
        self._divide_when_due(time.monotonic_ns())

    def _divide_when_due(self, now_ns: int) -> None:
        """Divide again when loans may change, unless something else comes first."""
        due_ns = self.budget.lending.due_ns(now_ns)
        if due_ns is not None:
            self._loop.set_timer("lending", due_ns, self._go_on)

    # ---------------------------------------------------------------- live size

    def resize(self, staging_bytes: int) -> None:
        """
        Let staging have so many bytes from now on; segments come and go while it is used.

        Raises:
            HostError: The open namespaces need more, or the machine has less; names the limit and the number.
        """
        made_bytes = self.budget.total_bytes - self.budget.free_bytes
        if staging_bytes > self._configured_bytes:
            shm.check_staging(max(0, staging_bytes - made_bytes))
        self.budget.resize(staging_bytes)
        log.info("staging is to have %.2f GiB instead of %.2f", staging_bytes / 2**30, self._configured_bytes / 2**30)
        self._configured_bytes, self._announced_bytes, self.advice = staging_bytes, 0, ""
        self._loop.cancel_timer("staging-retry")
        for making in self._making:
            while making.wanted:  # divided anew
                self.budget.creation_failed(making.wanted.popleft().segment)
        self._go_on()
        self._grant_complete()

    def resize_state(self) -> ResizeState:
        """Tell how far the change has come."""
        return ResizeState(
            staging_bytes=self._configured_bytes,
            ready_bytes=self.budget.statistics()["staging_granted_bytes"],
            leaving_bytes=self.budget.leaving_bytes,
            done=self.budget.is_settled,
            advice=self.advice,
        )

    # ---------------------------------------------------------------- taking segments down

    def _take_down(self, number: int) -> None:
        for client in self._memories[number].mapped_by:
            mapper = self._mappers.get(client)
            if mapper is not None:
                mapper.send(SegmentDown(segment=number))
        self._free_if_unmapped(number)

    def _free_if_unmapped(self, number: int) -> None:
        memory = self._memories[number]
        if memory.mapped_by or not self.budget.is_closing(number):
            return
        del self._memories[number]
        # Freeing pages takes a while, and the worker may still map them: punch them out on a thread.
        segment_bytes = self.budget.segments[number].segment_bytes
        future = self._threads.submit(_free, memory.fd, segment_bytes)
        future.add_done_callback(lambda _: self._loop.soon(lambda: self._freed(number)))

    def _freed(self, number: int) -> None:
        self.budget.gone(number)
        self._go_on()

    def facts(self) -> dict[str, str | int | float | bool]:
        """Return staging's part of the pool's health."""
        numbers = self.budget.statistics()
        return {
            "staging_bytes": self._configured_bytes,
            "staging_ready_bytes": numbers["staging_granted_bytes"],
            "staging_leaving_bytes": self.budget.leaving_bytes,
            "staging_changing": not self.budget.is_settled,
            "segments": len(self._memories),
            "segments_quarantined": self.budget.quarantined_count,
            **({"staging_advice": self.advice} if self.advice else {}),
        }

    def close(self) -> None:
        """End the threads and give the memory back; peers keep their mappings."""
        self._closing = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        while self._come:
            self._take()
        for memory in self._memories.values():
            os.close(memory.fd)
        self._memories.clear()


def _make(segment_bytes: int, is_closing: Callable[[], bool]) -> "int | HostError | None":
    """Make one segment, on a thread. Returns its descriptor, why there is none, or None when the pool closes."""

    def go_on(_done_bytes: int) -> None:
        if is_closing():
            raise _NotWantedError

    fd = None
    try:
        fd = shm.create_segment(segment_bytes)
        shm.prefault(fd, segment_bytes, go_on)
    except (HostError, _NotWantedError) as error:
        if fd is not None:
            os.close(fd)
        return error if isinstance(error, HostError) else None
    return fd


class _NotWantedError(Exception):
    """The pool closes: stop filling pages."""


def _free(fd: int, segment_bytes: int) -> None:
    """Give a segment's pages back, also where somebody still maps it, and its descriptor."""
    try:
        shm.punch_out(fd, segment_bytes)
    finally:
        os.close(fd)


def _interleaved(creates: list[Create]) -> list[Create]:
    """Order segments so that every pair of a device gets its first before any gets its second."""
    seen: dict[object, int] = {}
    ordered = []
    for create in creates:
        seen[create.pair] = seen.get(create.pair, 0) + 1
        ordered.append((seen[create.pair], create.segment, create))
    return [create for _, _, create in sorted(ordered, key=lambda one: one[:2])]
