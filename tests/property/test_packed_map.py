"""The packed map against a dict: whatever is put, read and removed, in whichever order, both say the same."""

import random
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.packed_map import SHARDS, PackedMap
from kvpool.errors import InvariantError


def crowded_keys(count: int) -> list[bytes]:
    """Return keys of one shard that all want the first three of its places: every step meets others' entries."""
    numbered = (number.to_bytes(4, "big") + bytes(4) for number in range(1 << 20))
    wanted = (key for key in numbered if crc32(key) % SHARDS == 5 and crc32(key) // SHARDS % 64 < 3)
    return [next(wanted) for _ in range(count)]


CROWDED = crowded_keys(40)
KEYS = st.sampled_from(CROWDED) | st.binary(min_size=1, max_size=5)
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "add", "pop", "get"]), KEYS, st.integers(0, 255)), max_size=120
)


def check_same(made: PackedMap, model: dict[bytes, int]) -> None:
    """Compare everything that can be asked."""
    made.validate()
    assert model == dict(made.items())
    assert len(model) == len(made) == len(list(made))
    assert set(model) == set(made)


@pytest.mark.parametrize("value_bytes", [1, 3])
@given(steps=STEPS)
def test_it_is_a_dict_of_small_numbers(value_bytes: int, steps: list[tuple[str, bytes, int]]) -> None:
    made, model = PackedMap(value_bytes), {}
    for what, key, number in steps:
        value = number << 8 * (value_bytes - 1)
        if what == "put":
            made[key] = model[key] = value
        elif what == "add":
            assert model.get(key, -1) == made.add(key, value)
            model.setdefault(key, value)
        elif what == "pop":
            assert model.pop(key, 7) == made.pop(key, 7)
        assert model.get(key, 9) == made.get(key, 9)
        assert (key in model) == (key in made)
    check_same(made, model)


def test_thousands_of_keys_grow_and_shrink() -> None:
    chance = random.Random(1)
    made, model = PackedMap(2), {}
    for number in range(20_000):
        key = chance.randbytes(32) + bytes(4)
        made[key] = model[key] = number
    for key in list(model)[::3]:
        assert model.pop(key) == made.pop(key)
    assert all(number == made.get(key, -1) for key, number in model.items())
    check_same(made, model)
    made.clear()
    check_same(made, {})


@given(numbers=st.lists(st.integers(0, 255), max_size=200), bound=st.integers(0, 255), most=st.integers(0, 9))
@pytest.mark.parametrize("value_bytes", [1, 2])
def test_parts_cover_everything_once(value_bytes: int, numbers: list[int], bound: int, most: int) -> None:
    made = PackedMap(value_bytes)
    for index, number in enumerate(numbers):
        made[index.to_bytes(2 + index % 2, "big")] = number
    packed: list[bytes] = []
    for part in range(made.part_count):
        length, raw = made.packed_part(part)
        packed += [raw[at : at + length] for at in range(0, len(raw), length + value_bytes)]
        wanted = [
            key for key in packed[-(len(raw) // (length + value_bytes)) or len(packed) :] if made.get(key) > bound
        ]
        assert sorted(wanted) == sorted(made.above(part, bound, 999))
        assert min(most, len(wanted)) == len(made.above(part, bound, most))
    assert sorted(made) == sorted(packed)


def test_a_number_that_does_not_fit_is_refused() -> None:
    made = PackedMap(1)
    for key in (b"new", b"old"):
        made[b"old"] = 1
        with pytest.raises(OverflowError):
            made[key] = 256
        check_same(made, {b"old": 1})


def test_the_check_sees_an_entry_that_nothing_finds() -> None:
    made = PackedMap(1)
    made[b"key"] = 1
    shard = made._part(next(part for part in range(made.part_count) if made.packed_part(part)[1]))
    shard.table[shard.table.index(1)] = 0
    with pytest.raises(InvariantError):
        made.validate()
