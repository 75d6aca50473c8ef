"""
Which chunks with missing blocks may be stored: pure decisions about KV groups.

Theory. A sliding-window or Mamba group gives up blocks that its attention has passed, so at a store
the head of a chunk may be gone. A key promises a whole chunk to every later load. Its missing blocks
are therefore harmless only if no load that uses the object can want them. A load ends at a hit
boundary; the objects end at multiples of the chunk size; a boundary is the end of a chunk or, for
a prompt that ends there, one token before it. So of a chunk of a group with a window of w tokens a load
wants at most the last w tokens (w - 1 before the boundary, and that one token more); of a Mamba group, in
the mode that keeps one state per boundary, the last block. All other holes make the chunk unstorable: it would be
zeros where another request expects keys and values.
"""

from typing import NamedTuple


class ChunkNeed(NamedTuple):
    """Of a chunk of *blocks_per_chunk* blocks, the last *tail_blocks* must be present."""

    blocks_per_chunk: int
    tail_blocks: int

    def mask_of(self, blocks: list[int]) -> bytes | None:
        """
        Return which of a chunk's *blocks* (ids, 0: gone) are present, one byte each.

        Returns:
            None: the chunk must not be stored.
        """
        mask = bytes(block != 0 for block in blocks)
        whole_tail = mask[self.blocks_per_chunk - self.tail_blocks :]
        return mask if len(mask) == self.blocks_per_chunk and all(whole_tail) else None


def need_of_window(*, window_tokens: int, block_tokens: int, blocks_per_chunk: int) -> ChunkNeed:
    """Return what a sliding-window group needs of a chunk, when boundaries are ends of its chunks."""
    return ChunkNeed(blocks_per_chunk, min(blocks_per_chunk, -(-window_tokens // block_tokens)))


def need_of_state(*, blocks_per_chunk: int) -> ChunkNeed:
    """Return what a group needs of which only the last block of a chunk is ever loaded."""
    return ChunkNeed(blocks_per_chunk, 1)


def need_all(*, blocks_per_chunk: int) -> ChunkNeed:
    """Return the need of a group that any block may be wanted of."""
    return ChunkNeed(blocks_per_chunk, blocks_per_chunk)
