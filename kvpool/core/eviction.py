"""
Capacity: how much a device may hold, when files have to go, and which.

Theory. Two bounds. *Capacity* bounds what is ours, as the filesystem counts it: above the high watermark keys go, the
least recently used first, until the low one is reached. The *free floor* bounds what is left to everybody, so that
what others put on the drive counts too: below it keys go until there is some room above it. Between the marks
nothing happens. At capacity, or below the floor, the device takes no stores.

What is ours is counted by walking the directory (a scan); from then on what is written adds to it and what is removed
takes away, and each later scan sets it right. Before the first one ended, capacity removes nothing and refuses nothing.

Recency is in the files' modification times, where a restart finds it: a scan keeps the oldest keys that
together hold what is needed (:class:`OldestKeys`), so that nothing has to be remembered about the others.

Does not cover: walking (`io/inventory.py`), removing (`io/remover.py`), which keys are in use (`core/objects.py`).
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

#: Without a setting, this part of the filesystem is left free.
MIN_FREE_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """
    What a device may hold.

    Attributes:
        capacity_bytes: Of ours; 0 for no such bound.
        high, low: Watermarks, shares of the capacity; low < high <= 1.
        min_free_bytes: Left free for everybody; 0 for MIN_FREE_SHARE of the filesystem.
    """

    capacity_bytes: int
    high: float
    low: float
    min_free_bytes: int


class Filesystem(NamedTuple):
    """Its size, and what is free for us, bytes."""

    total_bytes: int
    free_bytes: int


class Verdict(NamedTuple):
    """How many bytes should go, whether stores are taken, and if not why."""

    need_bytes: int
    storing: bool
    why: str


@dataclass(slots=True, kw_only=True)
class Occupancy:
    """
    What is on one device.

    Attributes:
        used_bytes: Ours, as the filesystem counts; None until a scan has ended.
        reclaiming: Keys go, until the low mark.
        pressed_bytes: To go since the device said that it is full although the bounds allow more (quota, inodes).
        recount: Others removed files during the last scan; whether it had counted them nobody knows.
    """

    bounds: Bounds
    used_bytes: int | None = None
    reclaiming: bool = False
    pressed_bytes: int = 0
    recount: bool = False
    _scanning: bool = False
    _said_full: bool = False
    _grown_bytes: int = 0

    def scan_started(self) -> None:
        """What is written from now on counts beside what the scan will count."""
        self._grown_bytes = 0
        self._scanning, self.recount = True, False

    def scan_saw(self, stored_bytes: int) -> None:
        """Of what was written since the scan started, the scan counted this much too."""
        self._grown_bytes -= stored_bytes

    def scan_ended(self, used_bytes: int) -> None:
        """A scan counted what is ours."""
        self._scanning = False
        self.used_bytes = used_bytes + max(0, self._grown_bytes)

    def changed(self, by_bytes: int) -> None:
        """Files were written (more) or removed (less)."""
        self._grown_bytes += by_bytes
        self.pressed_bytes = max(0, self.pressed_bytes + min(0, by_bytes))
        if self.used_bytes is not None:
            self.used_bytes = max(0, self.used_bytes + by_bytes)

    def removed_by_others(self, freed_bytes: int) -> None:
        """Files went that this device's worker did not remove."""
        self.changed(-freed_bytes)
        self.recount |= self._scanning

    @property
    def over_high(self) -> bool:
        """Whether what is ours is above the high watermark."""
        return self.used_bytes is not None and 0 < self.bounds.high * self.bounds.capacity_bytes < self.used_bytes

    def said_full(self) -> None:
        """A write found no room."""
        self._said_full = True

    def look(self, filesystem: Filesystem) -> Verdict:
        """Say what is to be done now."""
        capacity, used, free = self.bounds.capacity_bytes, self.used_bytes, filesystem.free_bytes
        floor = self.bounds.min_free_bytes or int(filesystem.total_bytes * MIN_FREE_SHARE)
        gap = int((self.bounds.high - self.bounds.low) * (capacity or used or filesystem.total_bytes))
        if self._said_full:
            self._said_full, self.pressed_bytes = False, gap
        self.reclaiming |= self.over_high or free < floor
        need = self.pressed_bytes
        if self.reclaiming:
            if capacity and used is not None:
                need = max(need, used - int(self.bounds.low * capacity))
            need = max(need, floor + min(gap, floor) - free)
            self.reclaiming = need > self.pressed_bytes
        if capacity and used is not None and used >= capacity:
            return Verdict(max(need, 0), storing=False, why="its capacity is used")
        if free < floor:
            return Verdict(max(need, 0), storing=False, why="the drive has less free space than is left to others")
        return Verdict(max(need, 0), storing=True, why="")

    def relieved(self) -> None:
        """Nothing more can go now."""
        self.pressed_bytes = 0


class Aged(NamedTuple):
    """One key over all ranks: when it was last used (seconds since 1970), what it holds, and whose it is."""

    used_s: float
    stored_bytes: int
    space: int
    key: bytes


class OldestKeys:
    """
    Keeps, of all keys offered, the least recently used ones that together hold *want_bytes*.

    Needs memory for those only.
    """

    def __init__(self, want_bytes: int) -> None:
        self._want_bytes = want_bytes
        self._held_bytes = 0
        #: A heap with the most recently used on top.
        self._heap: list[tuple[float, Aged]] = []

    def offer(self, key: Aged) -> None:
        """One key more."""
        if self._held_bytes >= self._want_bytes and (not self._heap or key.used_s >= -self._heap[0][0]):
            return
        heapq.heappush(self._heap, (-key.used_s, key))
        self._held_bytes += key.stored_bytes
        while self._heap and self._held_bytes - self._heap[0][1].stored_bytes >= self._want_bytes:
            self._held_bytes -= heapq.heappop(self._heap)[1].stored_bytes

    def in_order(self) -> list[Aged]:
        """Return them, the least recently used first."""
        return sorted(aged for _, aged in self._heap)
