"""
Copies between staging slots and KV tensors in main memory: for vLLM on CPUs.

The copies run where they are launched, on the rank client's thread, with the interpreter lock released.
There is nothing to order against: vLLM's CPU steps have ended when a job is submitted.
"""

import ctypes
import mmap
from collections.abc import Sequence

from kvpool.client.copier import Copy
from kvpool_vllm.places import Int64s
from kvpool_vllm.staging import StagingMap

_memmove = ctypes.CDLL(None).memmove  # unlike ctypes.memmove it releases the interpreter lock
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


class CpuCopier:
    """See `kvpool.client.copier.Copier`."""

    def __init__(self) -> None:
        self._staging = StagingMap()

    def mark(self) -> object | None:
        """Return what copies have to wait for: nothing."""
        return None

    def give_back(self, event: object | None) -> None:
        """Nothing was handed out."""

    def attach(self, segment: int, memory: mmap.mmap) -> None:
        """Note where the segment is."""
        self._staging.attach(segment, memory)

    def detach(self, segment: int) -> None:
        """Forget the segment."""
        self._staging.detach(segment)

    def load(self, copies: Sequence[Copy]) -> object:
        """Copy slots to the KV cache, now."""
        runs = self._staging.runs_of(copies)
        _move(runs.cache, runs.staging, runs.sizes)
        return None

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        """Copy the KV cache to slots, now."""
        self._staging.zero_gaps(copies)
        runs = self._staging.runs_of(copies)
        _move(runs.staging, runs.cache, runs.sizes)
        return None

    def ended(self, ticket: object) -> bool:
        """Always."""
        return True

    def wait(self, ticket: object) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to free."""


def _move(targets: Int64s, sources: Int64s, sizes: Int64s) -> None:
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        _memmove(target, source, size)
