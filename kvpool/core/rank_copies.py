"""
The copies that a rank has launched: what they touch, and what their end lets go.

Theory. Nothing may be done to a launched copy but to wait for its end. So "does anything still touch this slot,
this segment, this worker's memory?" is answered by counting copies, not jobs: a lost worker is told to the
coordinator, and a recalled segment unmapped, when the last copy that touches it has ended.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from kvpool.core.rank_base import Ground, Job
from kvpool.core.rank_events import JobKind, LaunchLoad, LaunchStore, SlotCopy, TellCopiesEnded, UnmapSegment
from kvpool.errors import invariant

_T = TypeVar("_T")

#: A slot's owner: (device, generation of its worker).
Owner = tuple[int, int]


@dataclass(slots=True)
class Batch:
    """Copies launched together, and the owner of each slot."""

    kind: JobKind
    copies: list[SlotCopy]
    owners: list[Owner]


class Copies:
    """See the module."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._batches: dict[int, Batch] = {}
        self._owner_copies: Counter[Owner] = Counter()
        self._segment_copies: Counter[int] = Counter()
        #: Lost workers whose slots copies still touch.
        self._departing: set[Owner] = set()
        #: Segments to unmap as soon as no copy touches them.
        self._leaving: set[int] = set()
        self._ticket_next = 1

    def __len__(self) -> int:
        """Objects being copied now."""
        return self._owner_copies.total()

    def launch_load(self, copies: list[SlotCopy], jobs: list[Job]) -> None:
        """Ask for one launch of *copies*; `jobs[i]` is that of `copies[i]`."""
        self._ground.act(LaunchLoad(ticket=self._keep(JobKind.LOAD, copies, jobs), copies=copies))

    def launch_store(self, copies: list[SlotCopy], job: Job) -> None:
        """Ask for one launch of *copies*, all of one job."""
        ticket = self._keep(JobKind.STORE, copies, [job] * len(copies))
        self._ground.act(LaunchStore(ticket=ticket, wire=job.wire, copies=copies))

    def end(self, ticket: int) -> Batch:
        """Forget a batch that has ended, and return it. `let_go` is due when its jobs have heard of it."""
        invariant(ticket in self._batches, "copies ended twice, or were never launched", ticket=ticket)
        batch = self._batches.pop(ticket)
        for copy, owner in zip(batch.copies, batch.owners, strict=True):
            _count_down(self._owner_copies, owner)
            _count_down(self._segment_copies, copy.segment)
        return batch

    def let_go(self) -> None:
        """Tell of lost workers, and unmap recalled segments, that no copy touches any more."""
        for device, generation in sorted(self._departing - self._owner_copies.keys()):
            self._departing.discard((device, generation))
            self._ground.act(TellCopiesEnded(device=device, generation=generation))
        for segment in sorted(self._leaving - self._segment_copies.keys()):
            self._leaving.discard(segment)
            self._ground.act(UnmapSegment(segment=segment))

    def worker_departs(self, owner: Owner) -> None:
        """Tell the coordinator, as soon as that is true, that no copy touches that worker's slots."""
        self._departing.add(owner)

    def segment_leaves(self, segment: int) -> None:
        """Unmap *segment* as soon as no copy touches it."""
        self._leaving.add(segment)

    def pool_departs(self) -> None:
        """There is nobody any more to be told of workers."""
        self._departing.clear()

    def tickets_of(self, wires: set[int]) -> list[int]:
        """Return the batches that copy for any of these jobs."""
        return [ticket for ticket, batch in self._batches.items() if any(copy.wire in wires for copy in batch.copies)]

    def copying(self) -> set[tuple[int, int]]:
        """Return (wire, index) of every object being copied."""
        return {(copy.wire, copy.object_index) for batch in self._batches.values() for copy in batch.copies}

    def validate(self) -> None:
        """Check that the counts are those of the batches."""
        copies = [copy for batch in self._batches.values() for copy in batch.copies]
        owners = Counter(owner for batch in self._batches.values() for owner in batch.owners)
        invariant(len(self.copying()) == len(copies), "an object is copied twice at once")
        invariant(Counter(copy.segment for copy in copies) == self._segment_copies, "copies per segment are miscounted")
        invariant(owners == self._owner_copies, "copies per worker are miscounted")
        invariant(not self._ground.segments & self._leaving, "a segment is used and leaving")
        invariant(self._leaving <= self._segment_copies.keys(), "a segment that nothing touches was not unmapped")
        invariant(self._departing <= self._owner_copies.keys(), "a worker that nothing touches was not told")

    def _keep(self, kind: JobKind, copies: list[SlotCopy], jobs: Iterable[Job]) -> int:
        ticket = self._ticket_next
        self._ticket_next += 1
        devices = [job.devices[copy.object_index] for copy, job in zip(copies, jobs, strict=True)]
        owners = [(device, self._ground.workers[device]) for device in devices]
        self._batches[ticket] = Batch(kind, copies, owners)
        self._owner_copies.update(owners)
        self._segment_copies.update([copy.segment for copy in copies])
        return ticket


def _count_down(counts: Counter[_T], what: _T) -> None:
    left = counts.pop(what) - 1
    if left:
        counts[what] = left
