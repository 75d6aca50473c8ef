"""
Deadlines of one kind: things that each get the same time, in the order in which they started.

Theory. All waits of one kind last equally long, so their deadlines come in the order of their
starts and a queue does what otherwise takes a heap: O(1) each. A wait that ended is not searched
for: it says so itself (`alive`) when its entry comes to the front, so stale entries cost their
memory for at most one period.
"""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deadlines(Generic[T]):
    """
    A queue of (deadline, item).

    Attributes:
        period_ns: How long each item has.
        alive: Whether an item still waits for the deadline it was given, nanoseconds.
    """

    __slots__ = ("_alive", "_entries", "period_ns")

    def __init__(self, period_ns: int, alive: Callable[[T, int], bool]) -> None:
        self.period_ns = period_ns
        self._alive = alive
        self._entries: deque[tuple[int, T]] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def start(self, item: T, now_ns: int) -> int:
        """Give *item* its time from now on and return its deadline."""
        deadline_ns = now_ns + self.period_ns
        self._entries.append((deadline_ns, item))
        return deadline_ns

    def next_ns(self) -> int | None:
        """Return the earliest deadline of an item that still waits."""
        entries = self._entries
        while entries:
            deadline_ns, item = entries[0]
            if self._alive(item, deadline_ns):
                return deadline_ns
            entries.popleft()
        return None

    def expired(self, now_ns: int) -> list[T]:
        """Take out and return the items that still wait at their deadline."""
        found: list[T] = []
        while (deadline_ns := self.next_ns()) is not None and deadline_ns <= now_ns:
            found.append(self._entries.popleft()[1])
        return found
