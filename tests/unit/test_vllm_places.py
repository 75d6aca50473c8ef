"""Where the bytes of objects lie in the KV cache."""

import numpy as np
import pytest

from kvpool_vllm.places import (
    ABSENT,
    GeometryError,
    GroupLayout,
    Place,
    TensorRef,
    chunks_of_masks,
    chunks_of_run,
    gaps_of,
    runs_of,
)

LAYOUT = GroupLayout(0, 4, 4 * (100 + 20), (TensorRef(10_000, 100, 100), TensorRef(50_000, 64, 20)))


def place(*blocks: int, layout: GroupLayout = LAYOUT) -> Place:
    return Place(layout, np.array(blocks, dtype=np.int64))


def test_an_object_is_each_tensor_in_order_and_in_it_the_blocks_in_order() -> None:
    runs = runs_of([(1_000_000, place(7, 3, 9, 1))])
    expected = [
        (1_000_000, 10_700, 100), (1_000_100, 10_300, 100), (1_000_200, 10_900, 100), (1_000_300, 10_100, 100),
        (1_000_400, 50_448, 20), (1_000_420, 50_192, 20), (1_000_440, 50_576, 20), (1_000_460, 50_064, 20),
    ]  # fmt: skip
    assert expected == list(zip(*(column.tolist() for column in runs), strict=True))


def test_neighbours_on_both_sides_are_one_run() -> None:
    runs = runs_of([(0, place(5, 6, 7, 2))])
    assert [300, 100, 20, 20, 20, 20] == runs.sizes.tolist()
    assert [10_500, 10_200] == runs.cache.tolist()[:2]


def test_absent_blocks_are_not_copied_and_are_gaps_of_a_store() -> None:
    one = place(ABSENT, 6, 7, ABSENT)
    assert [200, 20, 20] == runs_of([(0, one)]).sizes.tolist()
    assert [(0, 100), (400, 20), (300, 100), (460, 20), (480, 4096 - 480)] == gaps_of(one)


def test_objects_without_any_block_have_no_runs() -> None:
    assert 0 == len(runs_of([(0, place(ABSENT, ABSENT, ABSENT, ABSENT))]).sizes)
    assert 0 == len(runs_of([]).sizes)


def test_a_whole_object_that_fills_its_pages_has_no_gaps() -> None:
    layout = GroupLayout(0, 2, 8192, (TensorRef(0, 4096, 4096),))
    assert [] == gaps_of(place(1, 2, layout=layout))


def test_a_run_that_starts_and_ends_inside_chunks_is_cut_at_chunk_borders() -> None:
    chunks = chunks_of_run([11, 12, 13, 14], first_index=6, keys=2, blocks_per_chunk=4)
    assert [[ABSENT, ABSENT, 11, 12], [13, 14, ABSENT, ABSENT]] == chunks.tolist()


def test_null_blocks_of_a_run_are_absent() -> None:
    assert [[5, ABSENT]] == chunks_of_run([5, 0], first_index=0, keys=1, blocks_per_chunk=2).tolist()


@pytest.mark.parametrize("keys", [0, 1, 3])
def test_a_run_that_does_not_match_its_keys_is_refused(keys: int) -> None:
    with pytest.raises(GeometryError):
        chunks_of_run([11, 12, 13, 14], first_index=6, keys=keys, blocks_per_chunk=4)


def test_masks_deal_blocks_out_to_chunks_that_are_not_neighbours() -> None:
    chunks = chunks_of_masks([4, 8, 9], masks=[b"\x00\x01", None], blocks_per_chunk=2)
    assert [[ABSENT, 4], [8, 9]] == chunks.tolist()


@pytest.mark.parametrize("blocks", [[4, 8], [4, 8, 9, 10]])
def test_blocks_that_do_not_match_their_masks_are_refused(blocks: list[int]) -> None:
    with pytest.raises(GeometryError):
        chunks_of_masks(blocks, masks=[b"\x00\x01", None], blocks_per_chunk=2)
