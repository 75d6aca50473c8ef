"""Which chunks with missing blocks may be stored."""

from kvpool_vllm.holes import need_all, need_of_state, need_of_window


def test_a_window_needs_the_blocks_that_hold_its_last_tokens() -> None:
    need = need_of_window(window_tokens=128, block_tokens=16, blocks_per_chunk=16)
    assert bytes(8) + b"\x01" * 8 == need.mask_of([0] * 8 + list(range(1, 9)))
    assert need.mask_of([0] * 9 + list(range(1, 8))) is None


def test_a_window_longer_than_the_chunk_needs_all_of_it() -> None:
    need = need_of_window(window_tokens=512, block_tokens=128, blocks_per_chunk=2)
    assert need.mask_of([0, 5]) is None
    assert b"\x01\x01" == need.mask_of([4, 5])


def test_a_window_that_ends_inside_a_block_needs_that_block() -> None:
    need = need_of_window(window_tokens=129, block_tokens=128, blocks_per_chunk=4)
    assert b"\x00\x00\x01\x01" == need.mask_of([0, 0, 7, 8])
    assert need.mask_of([0, 0, 0, 8]) is None


def test_a_state_group_needs_the_last_block_only() -> None:
    need = need_of_state(blocks_per_chunk=4)
    assert b"\x00\x00\x00\x01" == need.mask_of([0, 0, 0, 8])
    assert need.mask_of([5, 6, 7, 0]) is None


def test_other_groups_need_every_block() -> None:
    need = need_all(blocks_per_chunk=2)
    assert b"\x01\x01" == need.mask_of([1, 2])
    assert need.mask_of([0, 2]) is None
    assert need.mask_of([2]) is None
