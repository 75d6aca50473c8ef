"""The key index against sets of files: what was seen, what a snapshot names, what a whole walk has not seen."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.key_index import KeyIndex
from kvpool.core.object_events import ObjectId, TellKey, TellKeysStored
from kvpool.wire.messages import STORED

RANKS = 2
KEYS = [bytes([number]) * 8 for number in range(4)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "remove", "remember", "remember", "unseen", "condemn", "removed"]),
        st.sampled_from(KEYS),
        st.integers(0, RANKS - 1),
        st.integers(1, 3),
    ),
    max_size=60,
)


class Model:
    """What is known: files seen, files only a snapshot names, files looked for in vain, keys that are going."""

    def __init__(self) -> None:
        self.seen: set[tuple[bytes, int]] = set()
        self.named: set[tuple[bytes, int]] = set()
        self.missing: set[tuple[bytes, int]] = set()
        self.going: set[bytes] = set()

    def step(self, what: str, key: bytes, rank: int, mask: int) -> None:
        """Do the same as the index."""
        one = (key, rank)
        ranks = {(key, number) for number in range(RANKS)}
        match what:
            case "add" if key not in self.going:
                self.seen.add(one)
                self.named.discard(one)
                self.missing.discard(one)
            case "remove":
                self.seen.discard(one)
                self.named.discard(one)
                self.missing.add(one)
            case "remember" if key not in self.going:
                self.named |= {(key, n) for n in range(RANKS) if mask >> n & 1} - self.seen - self.missing
            case "unseen":
                self.named -= ranks
            case "condemn":
                self.seen -= ranks
                self.named -= ranks
                self.going.add(key)
            case "removed":
                self.going.discard(key)

    def stored(self, key: bytes) -> bool:
        """Whether all ranks have it."""
        return all((key, rank) in self.seen | self.named for rank in range(RANKS))


@given(steps=STEPS)
def test_it_knows_what_was_seen_and_what_only_a_snapshot_says(steps: list[tuple[str, bytes, int, int]]) -> None:
    index, model, told = KeyIndex(), Model(), dict.fromkeys(KEYS, 0)
    index.add_namespace(1, RANKS, {0: 4096})
    space = index.namespaces[1]
    for what, key, rank, mask in steps:
        before, changes = {one: space.mask(one) for one in KEYS}, space.changes
        actions: list[Any] = []
        match what:
            case "add":
                index.add(ObjectId(1, key, rank), actions)
            case "remove":
                index.remove(ObjectId(1, key, rank), actions)
            case "remember":
                index.remember(space, [key], [mask], actions)
            case "unseen":
                index.forget_unseen(space, [key], actions)
            case "condemn":
                index.condemn(space, key, actions)
            case "removed":
                space.removing.discard(key)
        model.step(what, key, rank, mask)
        for action in actions:
            if isinstance(action, TellKeysStored):
                told.update(dict.fromkeys(action.keys, STORED))
            elif isinstance(action, TellKey):
                told[action.key] = action.flags
        index.validate()
        known = {(one, number) for one in KEYS for number in range(RANKS) if index.has(ObjectId(1, one, number))}
        assert model.seen | model.named == known
        assert {one: STORED * model.stored(one) for one in KEYS} == told
        unseen = {one for part in range(space.masks.part_count) for one in space.masks.above(part, space.full, 9)}
        assert {one for one, _ in model.named} == unseen
        if what != "remember" and before != {one: space.mask(one) for one in KEYS}:
            assert space.changes > changes, "whoever keeps a copy has to know"


def test_a_retired_namespace_remembers_nothing() -> None:
    index = KeyIndex()
    index.add_namespace(1, RANKS, {0: 4096})
    index.retire(1)
    actions: list[Any] = []
    index.remember(index.namespaces[1], [KEYS[0]], [3], actions)
    assert [] == actions
    assert not index.has(ObjectId(1, KEYS[0], 0))
    index.validate()
