"""Copied out, then in elsewhere: exactly the object's bytes arrive and no other byte changes, by plain memory."""

import ctypes
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_vllm.places import ABSENT, PAGE_BYTES, GroupLayout, Place, TensorRef, gaps_of, runs_of

GUARD = 64


class World:
    """A KV cache of a few tensors, of which each may have padding between blocks, and a staging area."""

    def __init__(self, draw: Any) -> None:
        self.per_chunk = draw(st.integers(1, 5))
        self.block_count = draw(st.integers(self.per_chunk * 2, 24))
        shapes = draw(st.lists(st.tuples(st.integers(1, 97), st.sampled_from([0, 0, 3, 32])), min_size=1, max_size=4))
        self.tensors = [np.zeros(self.block_count * (size + padding), np.uint8) for size, padding in shapes]
        refs = [
            TensorRef(tensor.ctypes.data, size + padding, size)
            for tensor, (size, padding) in zip(self.tensors, shapes, strict=True)
        ]
        filled = self.per_chunk * sum(ref.bytes for ref in refs)
        self.layout = GroupLayout(0, self.per_chunk, filled + draw(st.sampled_from([0, 0, 17])), tuple(refs))
        self.slot_bytes = -(-self.layout.object_bytes // PAGE_BYTES) * PAGE_BYTES

    def fill(self, seed: int) -> None:
        noise = np.random.default_rng(seed)
        for tensor in self.tensors:
            tensor[:] = noise.integers(0, 256, len(tensor), np.uint8)

    def block(self, index: int, block: int) -> bytes:
        ref = self.layout.tensors[index]
        return self.tensors[index][block * ref.stride : block * ref.stride + ref.bytes].tobytes()

    def expected(self, blocks: list[int]) -> bytes:
        """The payload by the definition, byte by byte, holes and padding zero."""
        parts = [
            self.block(index, block) if block != ABSENT else bytes(ref.bytes)
            for index, ref in enumerate(self.layout.tensors)
            for block in blocks
        ]
        return b"".join(parts).ljust(self.slot_bytes, b"\0")


@st.composite
def worlds(draw: Any) -> tuple[World, list[list[int]], list[list[int]], int]:
    """A world, the blocks of some chunks with holes, other blocks to load them to with holes of their own, a seed."""
    world = World(draw)
    count = draw(st.integers(1, world.block_count // (2 * world.per_chunk)))
    order = draw(st.permutations(range(world.block_count)))
    if draw(st.booleans()):
        order = list(range(world.block_count))  # neighbours, so that runs are merged
    taken = [list(order[i * world.per_chunk : (i + 1) * world.per_chunk]) for i in range(2 * count)]
    holes = st.lists(st.booleans(), min_size=world.per_chunk, max_size=world.per_chunk)
    chunks = [[ABSENT if hole else block for block, hole in zip(chunk, draw(holes), strict=True)] for chunk in taken]
    return world, chunks[:count], chunks[count:], draw(st.integers(0, 2**32 - 1))


def copy(targets: Any, sources: Any, sizes: Any) -> None:
    for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_out_and_in_again_moves_exactly_the_objects_bytes(
    drawn: tuple[World, list[list[int]], list[list[int]], int],
) -> None:
    world, stored, loaded, seed = drawn
    world.fill(seed)
    staging = np.full(GUARD + len(stored) * world.slot_bytes + GUARD, 0xAA, np.uint8)
    slots = [staging.ctypes.data + GUARD + index * world.slot_bytes for index in range(len(stored))]

    out = [(slot, Place(world.layout, np.array(blocks))) for slot, blocks in zip(slots, stored, strict=True)]
    for slot, place in out:
        for offset, size in gaps_of(place):
            ctypes.memset(slot + offset, 0, size)
    runs = runs_of(out)
    assert all(size > 0 for size in runs.sizes.tolist())
    copy(runs.staging, runs.cache, runs.sizes)
    guard = bytes([0xAA]) * GUARD
    objects = [world.expected(blocks) for blocks in stored]
    assert guard + b"".join(objects) + guard == staging.tobytes()

    world.fill(seed + 1)
    before = [tensor.copy() for tensor in world.tensors]
    place_in = [(slot, Place(world.layout, np.array(blocks))) for slot, blocks in zip(slots, loaded, strict=True)]
    runs = runs_of(place_in)
    copy(runs.cache, runs.staging, runs.sizes)
    for payload, blocks in zip(objects, loaded, strict=True):
        offset = 0
        for index, ref in enumerate(world.layout.tensors):
            for block in blocks:
                if block != ABSENT:
                    start = block * ref.stride
                    before[index][start : start + ref.bytes] = np.frombuffer(payload, np.uint8, ref.bytes, offset)
                offset += ref.bytes
    for expected, tensor in zip(before, world.tensors, strict=True):
        assert expected.tobytes() == tensor.tobytes()
    assert guard + b"".join(objects) + guard == staging.tobytes()
