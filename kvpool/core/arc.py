"""
Adaptive replacement: keeps what was used once and what was used often, and learns how much of each.

Theory. Four lists, least recently used first: T1 idle objects used once, T2 idle objects used more than
once, and the ghosts B1 and B2 of what was dropped from them (only the keys, no bytes). A miss that B1
remembers says that T1 should have been larger, one that B2 remembers says so of T2; the target size *p*
of T1 moves accordingly. The victim is T1's first when T1 is above its target, else T2's. So a scan
passes through T1 without touching what is used often.

The bounds of the paper hold at all times, with c the capacity: |T1| + |B1| <= c, all four lists together
<= 2c, 0 <= p <= c. Every step is O(1).

Differences from the paper, where every request is over at once: an object in use is in none of the lists
(`cache.py`), so T1 and T2 may hold less than c while ghosts exist; and ghosts are trimmed after an
insertion instead of before it, which leaves the same lists (the reference model in
`tests/property/test_caches.py` is the paper's text, and the two agree step by step).

Source:
    N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4.
"""

from collections import OrderedDict
from typing import Generic

from kvpool.core.cache import K, Past
from kvpool.errors import invariant


class Arc(Generic[K]):
    """
    The policy for one slot size; see `cache.py` for the methods.

    Attributes:
        target: The paper's p: how many objects T1 should hold. A real number, as there.
    """

    __slots__ = ("_b1", "_b2", "_t1", "_t2", "capacity", "target")

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.target = 0.0
        self._t1: OrderedDict[K, None] = OrderedDict()
        self._t2: OrderedDict[K, None] = OrderedDict()
        self._b1: OrderedDict[K, None] = OrderedDict()
        self._b2: OrderedDict[K, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __contains__(self, key: K) -> bool:
        return key in self._t1 or key in self._t2

    def resize(self, capacity: int) -> None:
        """Set the capacity; the caller drops what is idle beyond it."""
        self.capacity = capacity
        self.target = min(self.target, float(capacity))
        self._trim()

    def recall(self, key: K) -> Past:
        """Return which ghost list knows *key*, move the target towards that list's side, and forget it."""
        once, often = len(self._b1), len(self._b2)
        if key in self._b1:
            self.target = min(self.target + max(1.0, often / once), float(self.capacity))
            del self._b1[key]
            return Past.ONCE
        if key in self._b2:
            self.target = max(self.target - max(1.0, once / often), 0.0)
            del self._b2[key]
            return Past.OFTEN
        return Past.UNKNOWN

    def victim(self, past: Past = Past.UNKNOWN) -> K:
        """Return the paper's choice (its REPLACE); KeyError when nobody is idle."""
        once = len(self._t1)
        if once and (once > self.target or not self._t2 or (past is Past.OFTEN and once == self.target)):
            return next(iter(self._t1))
        for key in self._t2:
            return key
        raise KeyError("nobody is idle")

    def drop(self, key: K) -> None:
        """*key* makes place and becomes a ghost."""
        if key in self._t1:
            del self._t1[key]
            self._b1[key] = None
        else:
            del self._t2[key]
            self._b2[key] = None
        self._trim()

    def add(self, key: K, *, often: bool) -> None:
        """*key* is the most recently used of its list."""
        invariant(key not in self, "an idle object became idle", key=key)
        self._b1.pop(key, None)
        self._b2.pop(key, None)
        (self._t2 if often else self._t1)[key] = None
        self._trim()

    def take(self, key: K) -> None:
        """*key* is not idle any more."""
        if key in self._t1:
            del self._t1[key]
        else:
            del self._t2[key]

    def _trim(self) -> None:
        while self._b1 and len(self._t1) + len(self._b1) > self.capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self) + len(self._b1) + len(self._b2) > 2 * self.capacity:
            self._b2.popitem(last=False)

    def lists(self) -> dict[str, list[K]]:
        """Return the four lists, least recently used first, under the paper's names."""
        return {"t1": list(self._t1), "t2": list(self._t2), "b1": list(self._b1), "b2": list(self._b2)}

    def validate(self) -> None:
        """Check the paper's bounds, and that no object is in two lists."""
        lists = self.lists()
        sizes = {name: len(keys) for name, keys in lists.items()}
        all_keys = {key for keys in lists.values() for key in keys}
        invariant(len(all_keys) == sum(sizes.values()), "an object is in two lists", **sizes)
        invariant(len(self) <= self.capacity, "more idle objects than the cache's capacity", **sizes)
        invariant(sizes["t1"] + sizes["b1"] <= self.capacity, "too many used once are remembered", **sizes)
        invariant(sum(sizes.values()) <= 2 * self.capacity, "too many are remembered", **sizes)
        invariant(0 <= self.target <= self.capacity, "the target is out of bounds", target=self.target)
