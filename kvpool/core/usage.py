"""
How many slots a worker needs, size by size, and when that is worth telling.

Theory. What counts is the most that was in use for more than cache since the last word: traffic comes in bursts, and
a sample would miss them. A word is worth its message when that moved by an eighth of the slots, at most every TELL_NS.
"""

from kvpool.wire.messages import SlotsUsed

TELL_NS = 1_000_000_000
#: A change below this part of a size's slots is not told.
CHANGE_SHARE_MIN = 0.125


class Usage:
    """See the module; `seen` whenever it may have changed, `take` when `due_ns` has come."""

    def __init__(self) -> None:
        #: By slot size: slots in all, used, wanted; now, and at most since the last word.
        self._now: dict[int, tuple[int, int, int]] = {}
        self._most: dict[int, tuple[int, int, int]] = {}
        self._told: dict[int, SlotsUsed] = {}
        self._told_ns = 0

    def seen(self, slot_bytes: int, total: int, *, used: int, wanted: int) -> None:
        """So many slots of *total* are used for more than cache now, and so many more are waited for."""
        self._now[slot_bytes] = (total, used, wanted)
        _, used_most, wanted_most = self._most.get(slot_bytes, (0, 0, 0))
        self._most[slot_bytes] = (total, max(used, used_most), max(wanted, wanted_most))

    def due_ns(self) -> int | None:
        """When a word is due; None while there is nothing to tell."""
        return self._told_ns + TELL_NS if any(map(self._has_moved, self._most)) else None

    def take(self, now_ns: int) -> list[SlotsUsed]:
        """Return what is to be told now, and begin anew."""
        due_ns = self.due_ns()
        if due_ns is None or due_ns > now_ns:
            return []
        told = [
            SlotsUsed(size, used, wanted) for size, (_, used, wanted) in self._most.items() if self._has_moved(size)
        ]
        self._told |= {each.slot_bytes: each for each in told}
        self._told_ns = now_ns
        self._most = dict(self._now)
        return told

    def _has_moved(self, slot_bytes: int) -> bool:
        total, used, wanted = self._most[slot_bytes]
        told = self._told.get(slot_bytes)
        return told is None or abs(used + wanted - told.used - told.wanted) > CHANGE_SHARE_MIN * total
