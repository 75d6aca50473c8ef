"""
Where the bytes of an object lie in the KV cache: pure arithmetic over numpy arrays.

Theory. An object holds one chunk of one KV group on one rank. Its payload is, for each tensor of
the group in order, the chunk's blocks in order:

    | tensor 0: block 0, block 1, ... | tensor 1: block 0, block 1, ... | ... | padding |

so the offset of (tensor, block position) in the slot is a constant of the group, and its address
in the KV cache is tensor address + block id * stride. A chunk of which only some blocks are at
hand (its head is on the GPU already, its end is not computed yet, or a sliding window has passed
over it) has the same layout with holes. At a load holes are left alone; at a store they are
*gaps*, which must be zeroed in the slot, since the slot last held another request's bytes.

A :class:`Place` is what travels with one object from submission to its copy; it holds block ids
only. The runs of bytes are computed where the copy is made, not on the model's thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.errors import invariant

Int64s = npt.NDArray[np.int64]
#: Block ids as vLLM gives them.
BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]

#: A block position of a chunk that is not part of a transfer.
ABSENT = -1
#: vLLM's null block: a placeholder in block tables, never holds a request's KV.
NULL_BLOCK = 0
#: Slots, hence payloads with their padding, are whole pages.
PAGE_BYTES = 4096


class TensorRef(NamedTuple):
    """One tensor of a KV group: block b's *bytes* bytes start at *address* + b * *stride*."""

    address: int
    stride: int
    bytes: int


@dataclass(frozen=True)
class GroupLayout:
    """
    Layout of the objects of one KV group on this rank.

    Attributes:
        group: Index of the group in vLLM, as in the key.
        blocks_per_chunk: Blocks of a whole chunk.
        object_bytes: Payload bytes of an object; at least what *tensors* fill.
        tensors: The group's tensors, in vLLM's order.
    """

    group: int
    blocks_per_chunk: int
    object_bytes: int
    tensors: tuple[TensorRef, ...]

    def __post_init__(self) -> None:
        invariant(self.filled_bytes <= self.object_bytes, "tensors fit the object", layout=self)

    @property
    def filled_bytes(self) -> int:
        """Bytes of an object that come from tensors; the rest is zero."""
        return self.blocks_per_chunk * sum(tensor.bytes for tensor in self.tensors)

    @cached_property
    def offsets(self) -> Int64s:
        """Offset in the slot of (tensor, block position): tensors x blocks_per_chunk."""
        sizes = np.array([tensor.bytes for tensor in self.tensors], dtype=np.int64)
        starts = np.concatenate(([0], np.cumsum(sizes * self.blocks_per_chunk)))[:-1]
        positions = np.arange(self.blocks_per_chunk, dtype=np.int64)
        return np.asarray(starts[:, None] + sizes[:, None] * positions[None, :], dtype=np.int64)

    @cached_property
    def columns(self) -> tuple[Int64s, Int64s, Int64s]:
        """Addresses, strides and bytes of the tensors."""
        table = np.array(self.tensors, dtype=np.int64).reshape(len(self.tensors), 3)
        return table[:, 0], table[:, 1], table[:, 2]


@dataclass(frozen=True, slots=True)
class Place:
    """
    The KV-cache side of one object's copy.

    Attributes:
        layout: Of the object's group.
        blocks: Block id per position of the chunk, ABSENT where there is none.
        after: What the copy has to wait for on the device (an event of the compute stream), or None.
    """

    layout: GroupLayout
    blocks: Int64s
    after: object | None = None


class Runs(NamedTuple):
    """Pieces to copy: n addresses in staging, n addresses in the KV cache, n sizes in bytes."""

    staging: Int64s
    cache: Int64s
    sizes: Int64s


def runs_of(slots: Sequence[tuple[int, Place]]) -> Runs:
    """
    Return the pieces that copy all these objects, neighbours merged.

    Args:
        slots: Per object, the address of its slot and its place.

    Returns:
        Runs; sizes are positive, their sum is what the present blocks hold.
    """
    by_layout: dict[int, list[tuple[int, Place]]] = {}
    for address, place in slots:
        by_layout.setdefault(id(place.layout), []).append((address, place))
    parts = [_runs_of_layout(same) for same in by_layout.values()]
    if not parts:
        return Runs(*(np.empty(0, np.int64) for _ in Runs._fields))
    return Runs(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _runs_of_layout(slots: list[tuple[int, Place]]) -> Runs:
    layout = slots[0][1].layout
    addresses, strides, bytes_ = layout.columns
    bases = np.array([address for address, _ in slots], dtype=np.int64)
    blocks = np.stack([place.blocks for _, place in slots])[:, None, :]
    shape = (len(slots), len(layout.tensors), layout.blocks_per_chunk)
    staging = bases[:, None, None] + layout.offsets[None, :, :]
    cache = addresses[None, :, None] + blocks * strides[None, :, None]
    sizes = np.broadcast_to(bytes_[None, :, None], shape)
    present = np.broadcast_to(blocks >= 0, shape)
    return _merge(staging[present], cache[present], sizes[present])


def _merge(staging: Int64s, cache: Int64s, sizes: Int64s) -> Runs:
    """Join pieces that follow one another on both sides."""
    if len(sizes) == 0:
        return Runs(staging, cache, sizes)
    joins = (staging[:-1] + sizes[:-1] == staging[1:]) & (cache[:-1] + sizes[:-1] == cache[1:])
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Runs(staging[heads], cache[heads], np.add.reduceat(sizes, heads))


def gaps_of(place: Place) -> list[tuple[int, int]]:
    """
    Return the (offset, bytes) of a slot that a store of *place* leaves unwritten, up to the end of its last page.

    They hold whatever the slot held before, and have to be zeroed before the slot counts as filled.
    """
    layout = place.layout
    gaps: list[tuple[int, int]] = []
    for position in np.flatnonzero(place.blocks < 0):
        column = layout.offsets[:, position].tolist()
        gaps.extend(zip(column, (tensor.bytes for tensor in layout.tensors), strict=True))
    end = -(-layout.object_bytes // PAGE_BYTES) * PAGE_BYTES
    if end > layout.filled_bytes:
        gaps.append((layout.filled_bytes, end - layout.filled_bytes))
    return gaps


class GeometryError(ValueError):
    """Blocks and keys of a transfer do not fit together: nothing of that group may be copied."""


def chunks_of_run(blocks: BlockIds, *, first_index: int, keys: int, blocks_per_chunk: int) -> Int64s:
    """
    Cut a group's run of consecutive blocks into chunks.

    Args:
        blocks: Block ids, consecutive in the request; null blocks become ABSENT.
        first_index: Index of blocks[0] in the request, counted in blocks; the blocks of its chunk before it are ABSENT.
        keys: How many chunks the run touches.
        blocks_per_chunk: Blocks of a whole chunk.

    Returns:
        keys x blocks_per_chunk block ids.

    Raises:
        GeometryError: The run does not touch *keys* chunks.
    """
    skip = first_index % blocks_per_chunk
    touched = -(-(skip + len(blocks)) // blocks_per_chunk) if len(blocks) else 0
    if touched != keys:
        raise GeometryError(f"{len(blocks)} blocks from {first_index} touch {touched} chunks, but {keys} keys came")
    flat = np.full(keys * blocks_per_chunk, ABSENT, dtype=np.int64)
    flat[skip : skip + len(blocks)] = blocks
    flat[flat == NULL_BLOCK] = ABSENT
    return flat.reshape(keys, blocks_per_chunk)


def chunks_of_masks(blocks: BlockIds, *, masks: Sequence[bytes | None], blocks_per_chunk: int) -> Int64s:
    """
    Deal a group's blocks out to chunks that need not be neighbours.

    Args:
        blocks: Block ids, chunk after chunk, null blocks left out.
        masks: Per chunk one byte a position, 1 where a block is present; None for a whole chunk.
        blocks_per_chunk: Blocks of a whole chunk.

    Returns:
        len(masks) x blocks_per_chunk block ids.

    Raises:
        GeometryError: The masks speak of another number of blocks.
    """
    whole = b"\x01" * blocks_per_chunk
    present = np.frombuffer(b"".join(mask or whole for mask in masks), dtype=np.uint8).astype(bool)
    if int(present.sum()) != len(blocks) or len(present) != len(masks) * blocks_per_chunk:
        raise GeometryError(f"{len(blocks)} blocks came for {int(present.sum())} positions in {len(masks)} chunks")
    flat = np.full(len(present), ABSENT, dtype=np.int64)
    flat[present] = blocks
    return flat.reshape(len(masks), blocks_per_chunk)
