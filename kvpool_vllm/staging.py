"""
Addresses of mapped staging segments, and the zeroing of what a store leaves unwritten in a slot.

What both copy back ends share. Does not pin or copy.
"""

import ctypes
import mmap
import threading
from collections.abc import Sequence

from kvpool.client.copier import Copy
from kvpool.errors import invariant
from kvpool_vllm.places import Place, Runs, gaps_of, runs_of


class StagingMap:
    """Segments attached now: number -> (address, bytes). Safe to use from the client's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, tuple[int, int]] = {}

    def attach(self, segment: int, memory: mmap.mmap) -> tuple[int, int]:
        """Note the address and size of a mapping and return them. No reference to *memory* is kept."""
        buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
        found = ctypes.addressof(buffer), len(memory)
        del buffer
        with self._lock:
            self._segments[segment] = found
        return found

    def detach(self, segment: int) -> tuple[int, int] | None:
        """Forget a segment; return what :meth:`attach` did."""
        with self._lock:
            return self._segments.pop(segment, None)

    def segments(self) -> tuple[int, ...]:
        """Return the attached segments' numbers."""
        with self._lock:
            return tuple(self._segments)

    def slots_of(self, copies: Sequence[Copy]) -> list[tuple[int, Place]]:
        """Return the slot address and place of each copy; refuses what lies outside its segment."""
        return [(self._address(copy), _place(copy)) for copy in copies]

    def _address(self, copy: Copy) -> int:
        with self._lock:
            base, size = self._segments[copy.segment]
        end = copy.offset + _place(copy).layout.object_bytes
        invariant(0 <= copy.offset and end <= size, "slot lies in its segment", offset=copy.offset, end=end, size=size)
        return base + copy.offset

    def runs_of(self, copies: Sequence[Copy]) -> Runs:
        """Return the pieces to copy for *copies*."""
        return runs_of(self.slots_of(copies))

    def zero_gaps(self, copies: Sequence[Copy]) -> None:
        """Zero what a store of *copies* will not write: it still holds another request's bytes."""
        for address, place in self.slots_of(copies):
            for offset, size in gaps_of(place):
                ctypes.memset(address + offset, 0, size)


def _place(copy: Copy) -> Place:
    place = copy.place
    if not isinstance(place, Place):
        raise TypeError(f"a place of vLLM's KV cache is a Place, not {type(place).__name__}")
    return place
