"""
A first-in first-out queue per owner, served in turns.

Theory. Each owner has its own queue; :meth:`FairQueue.pop` serves the owner whose turn it is and
moves it to the end. So one owner with a thousand items delays another owner's single item by one
item, not by a thousand. Every operation is O(1); an item may be taken out of the middle.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class FairQueue(Generic[T]):
    """Items of several owners; an item is at most once in the queue of its owner."""

    __slots__ = ("_length", "_owners")

    def __init__(self) -> None:
        self._owners: OrderedDict[Hashable, OrderedDict[T, None]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[T]:
        """Iterate over all items, owner by owner; for checks, not for serving."""
        for items in self._owners.values():
            yield from items

    def push(self, owner: Hashable, item: T) -> None:
        """Append *item* to its owner's queue."""
        items = self._owners.get(owner)
        if items is None:
            items = self._owners[owner] = OrderedDict()
        if item not in items:
            items[item] = None
            self._length += 1

    def push_first(self, owner: Hashable, item: T) -> None:
        """Put *item* before the others of its owner."""
        self.push(owner, item)
        self._owners[owner].move_to_end(item, last=False)

    def pop(self) -> T:
        """Return the next item of the owner whose turn it is. KeyError when empty."""
        owner, items = next(iter(self._owners.items()))
        item, _ = items.popitem(last=False)
        self._length -= 1
        if items:
            self._owners.move_to_end(owner)
        else:
            del self._owners[owner]
        return item

    def heads(self) -> list[tuple[Hashable, T]]:
        """Return each owner with its first item, in order of turns."""
        return [(owner, next(iter(items))) for owner, items in self._owners.items()]

    def yield_turn(self, owner: Hashable) -> None:
        """That owner was served without :meth:`pop`: it comes last now."""
        if owner in self._owners:
            self._owners.move_to_end(owner)

    def discard(self, owner: Hashable, item: T) -> bool:
        """Take *item* out wherever it is; return whether it was there."""
        items = self._owners.get(owner)
        if items is None or item not in items:
            return False
        del items[item]
        self._length -= 1
        if not items:
            del self._owners[owner]
        return True
