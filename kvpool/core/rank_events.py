"""
What a rank's job table is told (events) and what it asks for (actions).

Events are facts in the past tense, actions are verbs. `job` is the caller's number, unique per kind; `wire` is
the client's own number for it, the one on the wire, never used twice. A *wire index* counts a job's objects of
one device, as `wire/messages.py` says; an *index* counts all of them. A ticket names one launched batch of
copies: every LaunchLoad and LaunchStore is ended by exactly one CopiesEnded with the same ticket.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.errors import Code
from kvpool.wire.messages import ObjectFailed, SlotGrant


class JobKind(enum.StrEnum):
    """Which way the bytes go."""

    LOAD = "load"
    STORE = "store"


class SlotCopy(NamedTuple):
    """One copy of a batch: object number *object_index* of job *wire*, from or to *offset* of *segment*."""

    wire: int
    object_index: int
    segment: int
    offset: int


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolJoined:
    """The coordinator welcomed this rank. Times are those of the pool plus what the rank adds for itself."""

    load_deadline_ns: int
    store_deadline_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLost:
    """The coordinator is gone, or the client closes: nobody answers any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A device's worker can be talked to."""

    device: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """That worker is gone, or no longer talks to this rank."""

    device: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMapped:
    """Copies can reach that segment now."""

    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentUnmappable:
    """That segment cannot be mapped here."""

    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecalled:
    """That segment has to be unmapped."""

    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSubmitted:
    """The engine wants these objects; `devices[i]` is where the index says that `keys[i]` is."""

    job: int
    wire: int
    keys: Sequence[bytes]
    devices: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSubmitted:
    """The engine offers these objects of a request, in prefix order."""

    job: int
    wire: int
    request: str
    keys: Sequence[bytes]
    devices: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsReady:
    """A worker's Ready; indices are wire indices."""

    device: int
    wire: int
    slots: Sequence[SlotGrant]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadsFailed:
    """A worker's LoadFailed; indices are wire indices."""

    device: int
    wire: int
    objects: Sequence[ObjectFailed]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswered:
    """A worker's StoreAnswer; indices are wire indices."""

    device: int
    wire: int
    slots: Sequence[SlotGrant] = ()
    exist: Sequence[int] = ()
    dropped: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesEnded:
    """That batch touches no slot and no engine memory any more; *failed*: its bytes did not arrive."""

    ticket: int
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsFlushed:
    """The engine is about to reuse the memory of these jobs: launch nothing more of them. Unknown ones are ignored."""

    jobs: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEnded:
    """All that could be read now has been told: launch and send what has gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing but time; look at the deadlines."""


PoolEvent = PoolJoined | PoolLost | WorkerJoined | WorkerLost | SegmentMapped | SegmentUnmappable | SegmentRecalled
Event = (
    PoolEvent | LoadSubmitted | StoreSubmitted | SlotsReady | LoadsFailed | StoreAnswered | CopiesEnded | JobsFlushed
    | RoundEnded | TimePassed
)  # fmt: skip


# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLoad:
    """Ask the device's worker for these keys; wire index of `keys[0]` is 0."""

    device: int
    wire: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLoadCancel:
    """Tell it that what is not Ready of that job is no longer wanted."""

    device: int
    wire: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRelease:
    """Tell it that no copy out of these objects' slots runs or will run."""

    device: int
    wire: int
    indices: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStore:
    """Offer it these keys, in prefix order; *job* is the decision's number, the same on all ranks."""

    device: int
    wire: int
    job: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendFilled:
    """Tell it that these objects' slots hold their bytes."""

    device: int
    wire: int
    indices: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStoreCancel:
    """Tell it that these objects will not be filled, and no copy touches their slots."""

    device: int
    wire: int
    indices: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLoad:
    """Copy slots to the engine's memory. Ended by CopiesEnded."""

    ticket: int
    copies: list[SlotCopy]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchStore:
    """Copy the engine's memory to slots. Ended by CopiesEnded."""

    ticket: int
    wire: int
    copies: list[SlotCopy]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """Report the job: *failed* are (index, code) pairs, ascending. Exactly one for each submitted job."""

    job: int
    kind: JobKind
    wire: int
    failed: tuple[tuple[int, Code], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TellCopiesEnded:
    """Tell the coordinator that no copy touches a slot of that worker any more."""

    device: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmapSegment:
    """No copy touches that segment any more and none will: unmap it, then tell the coordinator."""

    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropWorker:
    """That worker does not speak as agreed: close the socket to it. It counts as lost already."""

    device: int
    why: str


Action = (
    SendLoad | SendLoadCancel | SendRelease | SendStore | SendFilled | SendStoreCancel | LaunchLoad | LaunchStore
    | EndJob | TellCopiesEnded | UnmapSegment | DropWorker
)  # fmt: skip
