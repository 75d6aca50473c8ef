"""
Memory for a rank's round trip at its start: one object's worth, beside the KV cache and of its kind.

It has the layout of the first KV group's objects, in tensors of its own: a chunk of blocks whose bytes are a pattern.
On a GPU it is filled and compared on a stream of its own, so that the model's streams never wait for it.
"""

import contextlib
import hashlib

import numpy as np
import torch

from kvpool_vllm.places import GroupLayout, Place, TensorRef


class DeviceTrial:
    """
    See `kvpool.client.round_trip.TrialMemory`.

    Args:
        layout: Of the KV group's objects on this rank.
        device: Where the KV cache lies.
    """

    def __init__(self, layout: GroupLayout, device: torch.device) -> None:
        self.group = layout.group
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with self._beside():
            self._memory = torch.zeros(layout.filled_bytes, dtype=torch.uint8, device=device)
        refs, address = [], self._memory.data_ptr()
        for tensor in layout.tensors:
            refs.append(TensorRef(address, tensor.bytes, tensor.bytes))
            address += layout.blocks_per_chunk * tensor.bytes
        own = GroupLayout(layout.group, layout.blocks_per_chunk, layout.object_bytes, tuple(refs))
        self._place = Place(own, np.arange(layout.blocks_per_chunk, dtype=np.int64))
        self._end()

    def fill(self, seed: bytes) -> object:
        """Put the pattern there; return the place."""
        with self._beside():
            self._memory.copy_(torch.from_numpy(pattern(seed, len(self._memory))))
        self._end()
        return self._place

    def clear(self) -> None:
        """Put zeros there."""
        with self._beside():
            self._memory.zero_()
        self._end()

    def holds(self, seed: bytes) -> bool:
        """Compare."""
        with self._beside():
            found = self._memory.cpu().numpy()
        return bool(np.array_equal(found, pattern(seed, len(found))))

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _end(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def pattern(seed: bytes, size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return *size* bytes that differ with the seed and from word to word."""
    start, step = np.frombuffer(hashlib.sha256(seed).digest()[:16], dtype=np.uint64)
    with np.errstate(over="ignore"):
        words = start + np.arange(-(-size // 8), dtype=np.uint64) * (step | np.uint64(1))
    return words.view(np.uint8)[:size]
