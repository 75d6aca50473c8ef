"""
What moves an object's bytes between a staging slot and the engine's memory, as the rank client sees it.

Covers: the interface, and two copiers without a GPU: one that touches nothing (measuring the pool alone) and one
over plain memory (tests, examples). Those for vLLM's KV tensors are in `kvpool_vllm`.

Theory. A launch may return before its copies are done; its ticket tells. Ticket order is launch order. A copier is
driven by the client's thread; `attach` and `detach` come from another thread, never for a segment with copies in
flight, and `wait` may come from the engine's thread.
"""

import mmap
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Copy(NamedTuple):
    """One object: its slot starts at *offset* of *segment*; *place* is what the engine gave with it, opaque here."""

    segment: int
    offset: int
    place: object


class Copier(Protocol):
    """What a rank client asks of a copier. Raising from `load` or `store` promises that no copy of it runs."""

    def attach(self, segment: int, memory: mmap.mmap) -> None:
        """Get a mapped segment ready (pin it). May be slow. Where pinning fails, copies are slower, no more."""

    def detach(self, segment: int) -> None:
        """Forget a segment: afterwards nothing refers to its mapping. May be slow."""

    def load(self, copies: Sequence[Copy]) -> object:
        """Launch slot -> place for all *copies*; return the ticket."""

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        """Launch place -> slot for all *copies*, ordered after the event *after*; return the ticket."""

    def ended(self, ticket: object) -> bool:
        """Tell whether that launch is done; never blocks. Raises if it failed."""

    def wait(self, ticket: object) -> None:
        """Block until that launch is done. Raises if it failed."""

    def close(self) -> None:
        """Free what the copier holds; no copy is in flight and no segment attached."""


class NullCopier:
    """Copies nothing: for measuring the pool without the cost of copies."""

    def attach(self, segment: int, memory: mmap.mmap) -> None:
        """Nothing to get ready."""

    def detach(self, segment: int) -> None:
        """Nothing to forget."""

    def load(self, copies: Sequence[Copy]) -> object:
        """Done at once."""
        return None

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        """Done at once; the slots keep whatever bytes they have."""
        return None

    def ended(self, ticket: object) -> bool:
        """Always."""
        return True

    def wait(self, ticket: object) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to free."""


class MemoryCopier:
    """Copies between slots and memoryviews: *place* is a contiguous view, its length the bytes to copy."""

    def __init__(self) -> None:
        self._segments: dict[int, memoryview] = {}

    def attach(self, segment: int, memory: mmap.mmap) -> None:
        """Keep a view of the mapping."""
        self._segments[segment] = memoryview(memory)

    def detach(self, segment: int) -> None:
        """Let go of the view."""
        self._segments.pop(segment).release()

    def load(self, copies: Sequence[Copy]) -> object:
        """Copy slots to their places, now."""
        for copy in copies:
            place = _view(copy.place)
            place[:] = self._segments[copy.segment][copy.offset : copy.offset + len(place)]
        return None

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        """Copy places to their slots, now; there is no stream to order against."""
        for copy in copies:
            place = _view(copy.place)
            self._segments[copy.segment][copy.offset : copy.offset + len(place)] = place
        return None

    def ended(self, ticket: object) -> bool:
        """Always."""
        return True

    def wait(self, ticket: object) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to free."""


def _view(place: object) -> memoryview:
    if not isinstance(place, memoryview):
        raise TypeError(f"a place of MemoryCopier is a memoryview, not {type(place).__name__}")
    return place.cast("B")
