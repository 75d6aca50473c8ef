"""
Least recently used: the object whose last use ended first goes first. Remembers nothing of what is gone.

Every step is O(1). Good for one working set that fits; a loop larger than the cache hits nothing, and
a scan sweeps everything out (`arc.py` resists both).
"""

from collections import OrderedDict
from typing import Generic

from kvpool.core.cache import K, Past
from kvpool.errors import invariant


class Lru(Generic[K]):
    """The policy for one slot size; see `cache.py` for the methods."""

    __slots__ = ("_idle", "capacity")

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._idle: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, key: K) -> bool:
        return key in self._idle

    def resize(self, capacity: int) -> None:
        """Set the capacity; the caller drops what is idle beyond it."""
        self.capacity = capacity

    def recall(self, key: K) -> Past:
        """Nothing is remembered."""
        return Past.UNKNOWN

    def victim(self, past: Past = Past.UNKNOWN) -> K:
        """Return the least recently used; KeyError when nobody is idle."""
        return _first(self._idle)

    def drop(self, key: K) -> None:
        """*key* makes place."""
        del self._idle[key]

    def add(self, key: K, *, often: bool) -> None:
        """*key* is the most recently used."""
        invariant(key not in self._idle, "an idle object became idle", key=key)
        self._idle[key] = None

    def take(self, key: K) -> None:
        """*key* is not idle any more."""
        del self._idle[key]

    def validate(self) -> None:
        """Check the bound."""
        invariant(len(self._idle) <= self.capacity, "more idle objects than the cache's capacity", idle=len(self._idle))


def _first(keys: OrderedDict[K, None]) -> K:
    for key in keys:
        return key
    raise KeyError("nobody is idle")
