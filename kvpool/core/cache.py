"""
What a cache policy is asked: which of the objects that nobody needs stays, and which goes first.

Theory. A policy knows the *idle* objects of one slot size: resident, and kept only because their slots
are needed by nobody. An object that is pinned, admitted or being written is taken out of the policy's
hands and put back when it is idle again, so what is in use is never a victim and no search passes over
it. The order is therefore by the end of an object's last use. Dropping an object costs no I/O, since
all that is idle is on disk.

    recall(x)          a slot is about to be taken for x: what is remembered of x?
    victim(), drop(v)  until there is a slot
    add(x, often)      x is idle
    take(x)            x is used again, or is gone for another reason

Policies: `lru.py`, `arc.py`. Who calls them: `residency.py`.
"""

import enum
from collections.abc import Hashable
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)


class Past(enum.IntEnum):
    """What a policy remembers of an object that it dropped."""

    UNKNOWN = 0
    ONCE = 1
    OFTEN = 2


class CachePolicy(Protocol[K]):
    """
    The policy for one slot size.

    Attributes:
        capacity: How many objects may be idle at most; also sets how much is remembered of dropped ones.
    """

    capacity: int

    def __len__(self) -> int:
        """Return how many objects are idle."""
        ...

    def __contains__(self, key: K) -> bool:
        """Return whether *key* is idle."""
        ...

    def resize(self, capacity: int) -> None:
        """Set the capacity; the caller drops what is idle beyond it."""
        ...

    def recall(self, key: K) -> Past:
        """Return what is remembered of *key*, learn from it, and forget it."""
        ...

    def victim(self, past: Past = Past.UNKNOWN) -> K:
        """Return who goes first when a place is made for an object with that past; KeyError when nobody is idle."""
        ...

    def drop(self, key: K) -> None:
        """*key* makes place: remember it as dropped."""
        ...

    def add(self, key: K, *, often: bool) -> None:
        """*key* is idle from now on; *often*: it was asked for more than once."""
        ...

    def take(self, key: K) -> None:
        """*key* is not idle any more, and is not remembered as dropped."""
        ...

    def validate(self) -> None:
        """Check the bounds."""
        ...
