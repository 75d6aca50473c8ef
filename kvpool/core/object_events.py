"""
What an I/O worker's object table is told (events) and what it asks for (actions).

Events are facts in the past tense, actions are verbs. Every action with an `op` starts I/O and is
ended by exactly one event with the same `op`, also when it fails or its device is gone. Actions
without an `op` cannot fail for the table: a peer that cannot be told is gone, which is an event.

`namespace`, `client`, `job`, `segment` are the numbers used on the wire (`wire/messages.py`);
`key` is vLLM's OffloadKey, opaque here; an *object* is (namespace, key, rank).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvpool.errors import Code


class ObjectId(NamedTuple):
    """One immutable file: the bytes of one chunk of one KV group on one rank."""

    namespace: int
    key: bytes
    rank: int


class SlotRef(NamedTuple):
    """A slot: number *index* of segment *segment*."""

    segment: int
    index: int  # type: ignore[assignment]  # a slot's index hides tuple.index


class Dropped(StrEnum):
    """Why a key that was offered is not stored."""

    OFF = "off"  # stores are turned off
    ROOM = "room"  # the device has no room
    DEVICE = "device"  # the device is given up for now
    DRAINING = "draining"  # the pool ends
    STAGING = "staging"  # staging has too few slots of that size for all ranks
    LATE = "late"  # no slots came in time, or they were not filled in time
    CANCELLED = "cancelled"  # a rank cancelled it, or left
    PREFIX = "prefix"  # a key before it in its prefix was dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """
    Limits of one device's object table.

    Attributes:
        device: The device's index, for KeyTold.
        iodepth: Reads and writes in flight together, at most.
        open_lookahead: Opens in flight plus files opened but not yet read, at most.
        writes_inflight_beside_loads: Writes in flight while loads wait or run, at most (>= 1).
        client_share: Share of the slots of one size that one client may pin or fill while others use that size too.
        load_deadline_ns: An object of a load that is not Ready by then is failed.
        load_patience_ns: Loads that wait for a slot and have got none for so long take an admission's.
        store_deadline_ns: A key of a store that is not granted by then is dropped.
        fill_deadline_ns: A granted store not filled by then is dropped; its slot waits for proof.
        op_deadline_ns: An operation in flight longer than this fails its waiters and counts as device trouble.
        device_full_backoff_ns: No store gets slots for so long after the device said that it is full.
        staging_cache: What stays in staging though nobody needs it: "off" nothing, or by policy "lru" or "arc".
    """

    device: int = 0
    iodepth: int = 16
    open_lookahead: int = 16
    writes_inflight_beside_loads: int = 4
    client_share: float = 0.5
    load_deadline_ns: int = 30 * 10**9
    load_patience_ns: int = 20 * 10**6
    store_deadline_ns: int = 1 * 10**9
    fill_deadline_ns: int = 30 * 10**9
    op_deadline_ns: int = 10 * 10**9
    device_full_backoff_ns: int = 5 * 10**9
    staging_cache: str = "off"


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceAdded:
    """Objects of this namespace may come; `slot_bytes[group]` is the slot size of each KV group's objects."""

    namespace: int
    rank_count: int
    slot_bytes: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAdded:
    """Staging of *slot_count* slots of *slot_bytes* each is ours now."""

    segment: int
    slot_bytes: int
    slot_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecalled:
    """The coordinator wants that segment back: grant nothing from it any more, ReturnSegment when it is empty."""

    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientJoined:
    """A rank of an engine attached."""

    client: int
    engine: str
    namespace: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLeft:
    """A rank's socket closed. Its copies may still run: the slots it pinned or was filling wait for ClientProven."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProven:
    """No copy of that departed client can touch a slot any more."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWanted:
    """A rank wants objects; index of keys[i] in the job is first + i. A job may come in several parts."""

    client: int
    job: int
    first: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCancelled:
    """What is not Ready yet of this job is no longer wanted (no reply is expected for it)."""

    client: int
    job: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsReleased:
    """The rank's copies out of these objects' slots have ended."""

    client: int
    job: int
    indices: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreWanted:
    """A rank offers objects in prefix order; *store* is the decision's number, the same on all ranks of the engine."""

    client: int
    job: int
    store: int
    first: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsFilled:
    """The rank's copies into these objects' slots have ended: the bytes are whole."""

    client: int
    job: int
    indices: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCancelled:
    """The rank will not fill these indices, and no copy of its touches their slots."""

    client: int
    job: int
    indices: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysFound:
    """Files of these objects of one rank are on the device (scan or probe)."""

    namespace: int
    rank: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysRemembered:
    """A snapshot names these keys, with the ranks (bits of the mask) whose files were there when it was written."""

    namespace: int
    keys: list[bytes]
    masks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysUnseen:
    """The whole directory was walked: what only a snapshot says of these keys is not so."""

    namespace: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadAsked:
    """
    The coordinator asks for slots for all ranks' objects of these keys, all or none; answered by SendPreloadAnswer.

    *priority*, *arrival*: the request's place in the scheduler's order, ascending.
    """

    admission: int
    namespace: int
    keys: list[bytes]
    priority: int
    arrival: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadCommitted:
    """Every device has reserved: read that admission's objects when no load needs the drive."""

    admission: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreloadWithdrawn:
    """Nobody wants that admission any more: what has landed is cache, what has not is forgotten."""

    admission: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOpened:
    """End of OpenFile. *error* None: the file is open and waits for ReadFile or CloseFile."""

    op: int
    error: Code | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRead:
    """End of ReadFile: the file is closed. *error* None: the slot holds the object's bytes, verified."""

    op: int
    error: Code | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectPublished:
    """End of PublishObject. *error* None: the object is on disk under its final name."""

    op: int
    error: Code | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChanged:
    """
    What may be asked of the device changed.

    Attributes:
        healthy: False: it is given up for now. Loads fail, what waits for its reads fails too, stores are dropped.
        refusing: Why it takes no new objects; None: it does. Loads go on.
    """

    healthy: bool
    refusing: Dropped | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysCondemned:
    """The files of these keys are to go, for lack of room. Those that nobody uses now are answered by RemoveKey."""

    namespace: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysRemoved:
    """End of RemoveKey: these keys may be stored again. Files that could not go are told by KeysFound after it."""

    namespace: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRetired:
    """A reset: nothing of that namespace is asked for any more. What is under way for it still ends."""

    namespace: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FileForgotten:
    """Nobody needs that object's file any more: the shell removes it."""

    object: ObjectId


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """Nothing new is taken: loads are refused, stores dropped; what is granted may still be filled and is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing but time; look at the deadlines."""


Event = (
    NamespaceAdded | SegmentAdded | SegmentRecalled | ClientJoined | ClientLeft | ClientProven | LoadWanted
    | LoadCancelled | SlotsReleased | StoreWanted | SlotsFilled | StoreCancelled | KeysFound | KeysRemembered
    | KeysUnseen | FileOpened | FileRead | ObjectPublished | DrainStarted | TimePassed | PreloadAsked
    | PreloadCommitted | PreloadWithdrawn | DeviceChanged | KeysCondemned | KeysRemoved | FileForgotten
    | NamespaceRetired
)  # fmt: skip


# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFile:
    """Open the object's file for reading. Ended by FileOpened; the shell keeps the descriptor under *op*."""

    op: int
    object: ObjectId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFile:
    """Read the file opened under *op* into *slot*, verify, close it. Ended by FileRead with the same op."""

    op: int
    object: ObjectId
    slot: SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseFile:
    """Give back the file opened under *op*; nobody wants it any more. Not ended by an event."""

    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishObject:
    """Write *slot* under the object's final name. Ended by ObjectPublished."""

    op: int
    object: ObjectId
    slot: SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """The object's file does not hold what was published: move it out of the way, now."""

    object: ObjectId


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveKey:
    """Remove the files of that key, of all ranks; nobody uses them, and nobody will until KeysRemoved."""

    namespace: int
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReady:
    """Tell the client: object *index* of *job* is in *slot*, pinned for it."""

    client: int
    job: int
    index: int
    slot: SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLoadFailed:
    """Tell the client: object *index* of *job* will not come."""

    client: int
    job: int
    index: int
    code: Code


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGranted:
    """Tell the client: fill *slot* with object *index* of *job*."""

    client: int
    job: int
    index: int
    slot: SlotRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SendExists:
    """Tell the client: object *index* of *job* needs no store."""

    client: int
    job: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendDropped:
    """Tell the client: object *index* of *job* is not stored."""

    client: int
    job: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellKey:
    """Tell the coordinator a key's flags on this device: `messages.STORED | messages.RESIDENT`, 0 for gone."""

    namespace: int
    key: bytes
    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellKeysStored:
    """Tell the coordinator that these keys' flags on this device are `messages.STORED`: many at once."""

    namespace: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class TellStoreEnded:
    """Tell the engine's scheduler how its store of *key* ended: loadable from now on, or not stored."""

    engine: str
    key: bytes
    kept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnSegment:
    """That segment's slots are all free and it is no longer ours."""

    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPreloadAnswer:
    """Tell the coordinator whether that admission's slots are reserved here."""

    admission: int
    reserved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPreloadRevoked:
    """Tell the coordinator that a load had to take slots of that admission, which is withdrawn here."""

    admission: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPreloadLanded:
    """Tell the coordinator that all objects of that admission are resident here, or given up."""

    admission: int


Action = (
    OpenFile | ReadFile | CloseFile | PublishObject | SetAside | SendReady | SendLoadFailed | SendGranted | SendExists
    | SendDropped | TellKey | TellKeysStored | TellStoreEnded | ReturnSegment | SendPreloadAnswer | SendPreloadRevoked
    | SendPreloadLanded | RemoveKey
)  # fmt: skip
