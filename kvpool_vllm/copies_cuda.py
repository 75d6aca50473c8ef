"""
Copies between staging slots and KV tensors on a GPU.

Theory. One stream for each direction; a launch is one `swap_blocks_batch` over all pieces of all its
objects, between two waits: before it the stream waits for the events that the places carry (recorded on
the compute stream when the job was submitted: the step that wrote the KV, or that zeroed the load's
target blocks), behind it an event is recorded, which is the ticket's end. So a store never reads KV that
is not written, and a load is not reported before its bytes are there.

Segments are pinned so that the copy engines reach them by themselves. Pinning can fail (limits, containers);
then copies are slower and a warning says so, and the driver's error is consumed, or the next kernel would report it.

Events and index arrays are pooled and never freed while the process serves, and no object here calls CUDA
when it is collected: a destructor may run on any thread, without the right device, while CUDA shuts down.
"""

import mmap
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary
from vllm.logger import init_logger

from kvpool.client.copier import Copy
from kvpool_vllm.places import Runs
from kvpool_vllm.staging import StagingMap

logger = init_logger(f"vllm.{__name__}")

#: Largest piece registered in one call: drivers fail above 512 GiB, and the error shows up elsewhere.
PIN_BYTES_MAX = 64 << 30
#: Every event ever made, as many as were in use at once: none is collected, as that would call CUDA.
_KEPT: list[Any] = []


class Ticket:
    """One launch: over when *event* has passed, then None. *keep* must live until then."""

    __slots__ = ("event", "keep")

    def __init__(self, event: Any | None, keep: object) -> None:
        self.event = event
        self.keep = keep


class CudaCopier:
    """See `kvpool.client.copier.Copier`. Construct it on the model's thread, with the right device current."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._staging = StagingMap()
        self._pinned: dict[int, list[int]] = {}
        self._runtime = CudaRTLibrary()
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._events: list[Any] = []
        self._load_stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._store_stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pin_warned = False

    # ------------------------------------------------------------ order against the model

    def mark(self) -> Any:
        """Record on the current stream, and return, what copies submitted now have to wait for."""
        self._enter()
        event = self._event()
        event.record()
        return event

    def _enter(self) -> None:
        """CUDA's current device is a property of the thread."""
        if not getattr(self._threads, "ready", False):
            torch.cuda.set_device(self._device)
            self._threads.ready = True

    def _event(self) -> Any:
        with self._lock:
            if self._events:
                return self._events.pop()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            _KEPT.append(event)
        return event

    # ------------------------------------------------------------ segments

    def attach(self, segment: int, memory: mmap.mmap) -> None:
        """Pin a mapped segment."""
        self._enter()
        address, size = self._staging.attach(segment, memory)
        self._pinned[segment] = self._pin(address, size)

    def _pin(self, address: int, size: int) -> list[int]:
        """Register a range in pieces; return their addresses, none if one of them failed."""
        pieces: list[int] = []
        for start in range(address, address + size, PIN_BYTES_MAX):
            piece = min(PIN_BYTES_MAX, address + size - start)
            result = self._runtime.cudaHostRegister(start, piece, 0)
            if result != 0:
                self._runtime.cudaGetLastError()
                self._unpin(pieces)
                self._warn_pin(result, size)
                return []
            pieces.append(start)
        return pieces

    def _warn_pin(self, result: int, size: int) -> None:
        if not self._pin_warned:
            self._pin_warned = True
            logger.warning(
                "kvpool: pinning %d MiB of staging failed (CUDA error %d); copies work, but slower", size >> 20, result
            )

    def _unpin(self, pieces: Iterable[int]) -> None:
        for address in pieces:
            result = self._runtime.cudaHostUnregister(address)
            if result != 0:
                self._runtime.cudaGetLastError()
                logger.warning("kvpool: unpinning staging failed (CUDA error %d)", result)

    def detach(self, segment: int) -> None:
        """Unpin a segment and forget it."""
        self._enter()
        self._unpin(self._pinned.pop(segment, []))
        self._staging.detach(segment)

    # ------------------------------------------------------------ copies

    def load(self, copies: Sequence[Copy]) -> object:
        """Launch slots -> KV cache."""
        self._enter()
        slots = self._staging.slots_of(copies)
        after = {id(place.after): place.after for _, place in slots if place.after is not None}
        runs = self._staging.runs_of(copies)
        return self._launch(self._load_stream, after.values(), runs.staging, runs.cache, runs, any_order=True)

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        """Launch KV cache -> slots, behind *after*."""
        self._enter()
        self._staging.zero_gaps(copies)
        runs = self._staging.runs_of(copies)
        waits = () if after is None else (after,)
        return self._launch(self._store_stream, waits, runs.cache, runs.staging, runs, any_order=False)

    def _launch(
        self, stream: Any, waits: Iterable[Any], sources: Any, targets: Any, runs: Runs, *, any_order: bool
    ) -> Ticket:
        """
        Launch one batch on *stream*.

        *any_order*: the driver may read sources before the stream gets there. Right for slots, which nobody
        writes now; wrong for the KV cache, which the compute stream still writes.
        """
        arrays = tuple(torch.from_numpy(array) for array in (sources, targets, runs.sizes))
        event = self._event()
        with torch.cuda.stream(stream):
            for wait in waits:
                stream.wait_event(wait)
            try:
                if len(runs.sizes):
                    ops.swap_blocks_batch(arrays[0], arrays[1], arrays[2], is_src_access_order_any=any_order)
            except BaseException:  # also KeyboardInterrupt: it goes on, but not before the copies have ended
                stream.synchronize()  # part of the batch may run; the caller is promised that nothing does
                raise
            event.record(stream)
        return Ticket(event, arrays)

    def ended(self, ticket: object) -> bool:
        """Tell whether the launch is done."""
        launch = _ticket(ticket)
        if launch.event is None:
            return True
        self._enter()
        if not launch.event.query():
            return False
        self.give_back(launch.event)
        launch.event = launch.keep = None
        return True

    def wait(self, ticket: object) -> None:
        """Block until the launch is done."""
        self._enter()
        event = _ticket(ticket).event
        if event is not None:
            event.synchronize()

    def give_back(self, event: object | None) -> None:
        """Take back an event of :meth:`mark` that no copy needs any more."""
        if event is not None:
            with self._lock:
                self._events.append(event)

    def close(self) -> None:
        """Unpin what is still attached."""
        self._enter()
        for segment in self._staging.segments():
            self.detach(segment)


def _ticket(ticket: object) -> Ticket:
    if not isinstance(ticket, Ticket):
        raise TypeError(f"not a ticket of this copier: {type(ticket).__name__}")
    return ticket
