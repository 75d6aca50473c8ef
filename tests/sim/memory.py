"""
Staging memory: what the bytes of each slot are, who touches them now, and who may.

Theory. Bytes are modelled by what they are (the `Expected` of an object), or TORN while or after somebody wrote only
a part of them. Two independent accounts are kept, neither of which knows the pool's own:

    touches   reads and writes under way, by the drive and by ranks' copies. A write excludes all others;
              who reads must find the same whole bytes at the beginning and at the end.
    leases    a slot that a worker promised to a rank (to fill, or to copy out of) is the rank's until the rank says
              so itself, says that all its copies of that worker ended, greets the pool anew, or is gone.

Giving a slot to anybody while a lease or a touch of another holds it is a violation, also if no byte was harmed.
"""

from collections import defaultdict
from collections.abc import KeysView
from dataclasses import dataclass, field

from .kernel import File, Kernel, check

TORN = "torn"
#: Who touches: ("drive", worker's pid, op) or ("rank", pid, copy).
Who = tuple[object, ...]
#: A promise to a rank: (its pid, job on the wire, device, index).
LeaseId = tuple[int, int, int, int]


@dataclass(slots=True)
class _Slot:
    content: object = TORN
    writer: Who | None = None
    readers: dict[Who, object] = field(default_factory=dict)
    fills: set[LeaseId] = field(default_factory=set)
    pins: set[LeaseId] = field(default_factory=set)


class Memory:
    """One segment. Slots are named by their offset."""

    def __init__(self, kernel: Kernel, segment_bytes: int) -> None:
        self._kernel = kernel
        self._bytes = segment_bytes
        self._slots: defaultdict[int, _Slot] = defaultdict(_Slot)
        self.gone = False

    def __len__(self) -> int:
        return self._bytes

    def close(self) -> None:
        """Unmapped by one of those who map it."""

    def at(self, offset: int) -> _Slot:
        """Return the slot there."""
        check(0 <= offset < self._bytes, "a slot beyond its segment", offset=offset)
        check(not self.gone, "memory is used after it was given back", offset=offset)
        return self._slots[offset]

    def punch_out(self) -> None:
        """Its pages are given back: nobody may touch it any more."""
        for offset, slot in self._slots.items():
            check(slot.writer is None, "memory is given back that is written to", offset=offset, by=slot.writer)
            check(not slot.readers, "memory is given back that is read", offset=offset, by=[*slot.readers])
            check(not slot.fills and not slot.pins, "memory is given back that is promised", offset=offset)
        self.gone = True

    # ---------------------------------------------------------------- touches

    def begin_write(self, offset: int, who: Who) -> None:
        """*who* writes from now on."""
        slot = self.at(offset)
        check(slot.writer is None, "two write to one slot", offset=offset, first=slot.writer, second=who)
        check(not slot.readers, "a slot is written to that is read", offset=offset, by=[*slot.readers], writer=who)
        check(not slot.pins, "a slot is written to that ranks may read", offset=offset, by=slot.pins, writer=who)
        if who[0] == "drive":
            check(not slot.fills, "a slot is written to that a rank may fill", offset=offset, by=slot.fills, writer=who)
        else:
            check(any(lease[0] == who[1] for lease in slot.fills), "a rank fills what is not its own", who=who)
        slot.writer, slot.content = who, TORN

    def end_write(self, offset: int, who: Who, content: object) -> None:
        """*who* writes no more; the bytes are *content*."""
        slot = self._slots[offset]
        check(slot.writer == who, "a write ends that was not under way", offset=offset, by=slot.writer)
        slot.writer, slot.content = None, content

    def begin_read(self, offset: int, who: Who, expected: object) -> None:
        """*who* reads from now on, and takes the bytes for *expected*."""
        slot = self.at(offset)
        check(slot.writer is None, "a slot is read that is written to", offset=offset, writer=slot.writer, reader=who)
        check(slot.content == expected, "wrong bytes", offset=offset, found=slot.content, wanted=expected, reader=who)
        slot.readers[who] = expected

    def end_read(self, offset: int, who: Who) -> None:
        """*who* reads no more."""
        slot = self._slots[offset]
        expected = slot.readers.pop(who)
        check(slot.content == expected, "bytes changed under a reader", offset=offset, found=slot.content, reader=who)


class MemoryFile(File):
    """What a segment's descriptor names."""

    def __init__(self, kernel: Kernel, memory: Memory) -> None:
        super().__init__(kernel)
        self.memory = memory


class Leases:
    """Who was promised which slot."""

    def __init__(self) -> None:
        self._held: dict[LeaseId, tuple[Memory, int, int]] = {}
        #: Ranks' words that came before the promise they take back.
        self._declined: set[LeaseId] = set()

    def promise(self, lease: LeaseId, memory: Memory, offset: int, generation: int, *, fill: bool) -> None:
        """A worker's run *generation* gives a rank a slot, to *fill* or to copy out of."""
        slot = memory.at(offset)
        check(not slot.fills, "a slot is promised that another may fill", offset=offset, to=lease, other=slot.fills)
        check(slot.writer is None, "a slot is promised that is written to", offset=offset, to=lease, by=slot.writer)
        if fill:
            check(not slot.pins, "a slot to fill that others may read", offset=offset, to=lease, other=slot.pins)
            check(not slot.readers, "a slot to fill that is read", offset=offset, to=lease, other=[*slot.readers])
        if lease in self._declined:
            return
        check(lease not in self._held, "an index was promised twice", lease=lease)
        (slot.fills if fill else slot.pins).add(lease)
        self._held[lease] = (memory, offset, generation)

    def end(self, lease: LeaseId, *, may_come: bool) -> None:
        """The rank touches it no more; *may_come*: it says so before it was promised, and does not want it."""
        held = self._held.pop(lease, None)
        if held is not None:
            slot = held[0]._slots[held[1]]
            slot.fills.discard(lease)
            slot.pins.discard(lease)
        elif may_come:
            self._declined.add(lease)

    def end_of_rank(self, pid: int, device: int | None = None, generation: int | None = None) -> None:
        """The rank touches nothing any more: at all, or of that run of a device's worker."""
        for lease, (_, _, of_generation) in list(self._held.items()):
            if lease[0] == pid and device in (None, lease[2]) and generation in (None, of_generation):
                self.end(lease, may_come=False)

    def held(self) -> KeysView[LeaseId]:
        """Return the promises that are not over."""
        return self._held.keys()

    def __len__(self) -> int:
        return len(self._held)
