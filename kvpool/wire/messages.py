"""
Every message that kvpool's processes send one another.

Theory. A message is a frozen, typed struct; on the wire it is one MessagePack map with the field
names and a `type` tag, one message to a SEQPACKET frame, at most `FRAME_BYTES_MAX`. Unknown
types, unknown fields and wrong types are refused. Payload bytes never travel in messages: a
message names a slot. File descriptors travel beside the frame (`SCM_RIGHTS`); a class says how
many in `fd_count`. Lists longer than `ITEMS_MAX` are split by the sender into several messages.

    client (rank, scheduler, admin)  <->  coordinator        HELLO first, then as below
    rank                             <->  I/O worker         a socket pair made by the coordinator
    I/O worker                       <->  coordinator        the worker's control socket

Tags (class names) and field names are append-only within a protocol version.
"""

from typing import ClassVar

import msgspec

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 64 * 1024
#: Most items in one list of a message; 36-byte keys then stay far below FRAME_BYTES_MAX.
ITEMS_MAX = 1024

#: Keys that begin so name objects of a rank's round trip at its start: read from the device once, then removed.
TRIAL_KEY = b"kvpool round trip"

#: Flags of a key, as the index tells them.
STORED = 1  # every rank's object is published on disk
RESIDENT = 2  # every rank's object is in staging and stays there for now


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", gc=False):
    """Base of all messages."""

    #: File descriptors that must come with the frame.
    fd_count: ClassVar[int] = 0


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One KV-cache group of a namespace: its index in vLLM, and the payload bytes of one object of it."""

    group: int
    object_bytes: int


class NamespaceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    Everything that makes stored bytes interchangeable.

    Attributes:
        fingerprint: 64 lower-case hex digits over *identity*.
        model_name: One path component; never absolute, never `..`.
        block_size: Tokens per GPU block (path component only).
        blocks_per_file: GPU blocks per chunk (path component only).
        tp, pp, pcp: Parallel sizes (path components only).
        dtype: KV dtype as vLLM names it (path component only).
        rank_count: Ranks that each hold one object of every key.
        groups: The KV-cache groups, ascending by index.
        identity: The full identity in readable form, for `manifest.json`.
    """

    fingerprint: str
    model_name: str
    block_size: int
    blocks_per_file: int
    tp: int
    pp: int
    pcp: int
    dtype: str
    rank_count: int
    groups: list[GroupSpec]
    identity: dict[str, str]


# ---------------------------------------------------------------- client <-> coordinator


class Hello(Message):
    """
    First message of every client.

    Attributes:
        role: `rank`, `scheduler` or `admin`.
        engine: Identifies one vLLM engine (all its ranks and its scheduler say the same).
        rank: 0 .. rank_count - 1 for ranks, -1 otherwise.
        namespace: What the engine stores; None for admin.
        epoch: Scheduler: the namespace's epoch that this engine's KV is of; -1 for an engine that knows of none.
        reset: Scheduler: the engine has dropped all KV; start a new epoch, or join one that others started since.
        weight: Share of staging beside those of other namespaces' engines; from 1 to `config.WEIGHT_MAX`.
    """

    protocol: int
    version: str
    role: str
    engine: str
    rank: int
    pid: int
    namespace: NamespaceSpec | None = None
    epoch: int = -1
    reset: bool = False
    weight: int = 1


class Welcome(Message):
    """
    Answer to Hello. *devices* are named in index order; `device` fields elsewhere are indices into it.

    Attributes:
        epoch: Of the namespace: a job of another epoch must not be done here.
    """

    generation: int
    client: int
    namespace: int
    devices: list[str]
    device_weights: list[int]
    settings: "ClientSettings"
    epoch: int = 0


class ClientSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client must know of the pool's configuration."""

    load_deadline_s: float
    store_deadline_s: float
    defer_backlog_s: float
    answer_deadline_s: float = 0.05
    self_test: bool = False


class Refused(Message):
    """Answer to a Hello, or to a later message, that the coordinator does not accept; the socket closes after it."""

    code: int
    message: str
    context: dict[str, str | int | float] = {}


class WorkerUp(Message):
    """A device's I/O worker runs. For ranks the frame carries the rank's end of a socket to that worker."""

    fd_count: ClassVar[int] = 1

    device: int
    worker_generation: int


class WorkerDown(Message):
    """A device's I/O worker is gone. The rank ends its copies from and to its slots, then says CopiesEnded."""

    device: int
    worker_generation: int


class CopiesEnded(Message):
    """Rank: no copy of mine touches a slot of that worker any more."""

    device: int
    worker_generation: int


class SegmentUp(Message):
    """A segment of staging to map and pin; the frame carries its descriptor."""

    fd_count: ClassVar[int] = 1

    segment: int
    segment_bytes: int


class SegmentDown(Message):
    """A segment to unpin and forget. The rank answers SegmentForgotten."""

    segment: int


class SegmentForgotten(Message):
    """Rank: that segment is no longer pinned here."""

    segment: int


class Announce(Message):
    """
    Scheduler: a request arrived that may want these keys.

    A request with more than ITEMS_MAX keys is sent in parts: *first* is the index of keys[0] in
    the request, *more* says that another part follows. Announcing a known request again appends.
    """

    request: str
    first: int
    keys: list[bytes]
    more: bool = False
    priority: int = 0


class Withdraw(Message):
    """
    Scheduler: these requests finished or were aborted.

    Attributes:
        started: They have only started: nothing is to be read ahead for them, their keys are told of as before. One
            that waits again is announced again, with no further keys.
    """

    requests: list[str]
    started: bool = False


class Status(Message):
    """
    Coordinator's answer to an Announce (or to one part of it).

    Attributes:
        first: Index, in the request, of the key that byte 0 of *flags* and *devices* speaks of.
        flags: One byte a key: STORED | RESIDENT.
        devices: One byte a key: the device's index; 255 where flags are 0.
        complete: False while the answer may still change soon (index not built, probe running).
    """

    request: str
    first: int
    flags: bytes
    devices: bytes
    complete: bool = True


class KeyState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One key's flags (STORED | RESIDENT) on the device that holds it."""

    key: bytes
    flags: int
    device: int


class KeysChanged(Message):
    """Coordinator: keys of announced requests changed."""

    entries: list[KeyState]


class StoresEnded(Message):
    """To the scheduler whose engine stored them: *kept* are loadable now, *dropped* are not stored."""

    kept: list[bytes]
    dropped: list[bytes]


class DeviceState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    What a scheduler must know of a device: measured speed (0: not measured), queued bytes, health.

    Attributes:
        staging_bytes: Staging that its worker has; of it
        resident_bytes: hold a whole object,
        pinned_bytes: hold one that a rank copies from,
        staged_bytes: are kept for waiting requests, read already or not.
        read_bytes, written_bytes: Payload read from and published on the device since its worker's start.
        queued_bytes_per_s: Measured speed while reads queued (0: they have not yet): what a long load gets.
        read_latency_s: What a read takes beside its bytes' time at that speed.
    """

    device: int
    healthy: bool
    read_bytes_per_s: float
    backlog_bytes: int
    staging_bytes: int = 0
    resident_bytes: int = 0
    pinned_bytes: int = 0
    staged_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    queued_bytes_per_s: float = 0.0
    read_latency_s: float = 0.0


class DevicesChanged(Message):
    """Coordinator: devices' speed, backlog or health changed."""

    devices: list[DeviceState]


class ReportWanted(Message):
    """Ask a client or a worker for its facts; it answers Report with the same id."""

    report: int


class Report(Message):
    """Facts of one process, for health: flat, JSON-ready."""

    report: int
    facts: dict[str, str | int | float | bool]


class HealthWanted(Message):
    """Admin: tell the state of the whole pool."""


class Health(Message):
    """State of the whole pool: pool facts, and one row per process."""

    pool: dict[str, str | int | float | bool]
    rows: list[dict[str, str | int | float | bool]]
    more: bool = False


class StopWanted(Message):
    """Admin: write what is filled, then end."""


class ResetWanted(Message):
    """
    Admin: start a new epoch of the namespaces that *name* means: a model's name, or the start of a fingerprint.

    Answered by ResetDone, or by Refused. Engines that are attached neither load nor store until they reset, too.
    """

    name: str


class ResetDone(Message):
    """The new epochs count: model name and fingerprint of each namespace, and the engines that have to reset."""

    namespaces: list[str]
    engines: list[str]


class ResizeWanted(Message):
    """Admin: let staging have so many bytes. Answered by ResizeState, now and then until it is done, or by Refused."""

    staging_bytes: int


class StoresWanted(Message):
    """Admin, answered by the same, and on to every worker: take new objects, or none until told otherwise."""

    on: bool


class FilesRemoved(Message):
    """
    Admin, and on to that device's worker: somebody removed the files of these keys, of all ranks.

    Attributes:
        device_path: The device's directory.
        directory: Folder of the namespace's first rank.
        freed_bytes: What the device has won by that, as the filesystem counts.
    """

    device_path: str
    directory: str
    keys: list[bytes]
    freed_bytes: int


class ResizeState(Message):
    """
    How far a change of staging has come.

    Attributes:
        staging_bytes: What it is to have.
        ready_bytes: What workers have now.
        leaving_bytes: What is being taken back, and not given to the system yet.
        done: It is as wanted, or as near as *advice* says.
        advice: Why it cannot be as wanted for now; empty otherwise.
    """

    staging_bytes: int
    ready_bytes: int
    leaving_bytes: int
    done: bool
    advice: str = ""


# ---------------------------------------------------------------- rank <-> I/O worker


class SlotGrant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Object number *index* of a job has this slot: its bytes start at *offset* of *segment*."""

    index: int
    segment: int
    offset: int


class ObjectFailed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Object number *index* of a job failed; *code* is an `errors.Code`."""

    index: int
    code: int


class Load(Message):
    """Rank: bring these keys' objects of mine to staging. Indices in answers count from *first*."""

    job: int
    first: int
    keys: list[bytes]


class Ready(Message):
    """Worker: these objects are whole and stay where they are until released."""

    job: int
    slots: list[SlotGrant]


class LoadFailed(Message):
    """Worker: these objects will not come."""

    job: int
    objects: list[ObjectFailed]


class Release(Message):
    """Rank: the copies out of these objects' slots have ended."""

    job: int
    indices: list[int]


class LoadCancel(Message):
    """Rank: what is not Ready yet of this job is no longer wanted. What is Ready is released as usual."""

    job: int


class Store(Message):
    """
    Rank: I could store these keys' objects, in prefix order.

    *store* is the same on all ranks of an engine for the same decision (vLLM's job id), so that
    the worker decides once for all of them.
    """

    job: int
    store: int
    first: int
    keys: list[bytes]


class StoreAnswer(Message):
    """Worker: *slots* are granted, *exist* need no store, *dropped* get none. Every index is answered exactly once."""

    job: int
    slots: list[SlotGrant] = []
    exist: list[int] = []
    dropped: list[int] = []


class Filled(Message):
    """Rank: the copies into these objects' slots have ended; the bytes are whole."""

    job: int
    indices: list[int]


class StoreCancel(Message):
    """Rank: these indices will not be filled, no copy of mine touches their slots; unanswered ones are withdrawn."""

    job: int
    indices: list[int]


# ---------------------------------------------------------------- I/O worker <-> coordinator


class WorkerSetup(Message):
    """Coordinator's first message to a worker: its device and the pool's settings, as JSON of `config`."""

    generation: int
    worker_generation: int
    device: int
    config_json: str


class WorkerReady(Message):
    """Worker: running. The frame carries the read end of its ring pipe (or of an ordinary pipe without a ring)."""

    fd_count: ClassVar[int] = 1

    worker_generation: int
    io_mode: str
    pid: int


class EpochEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The epoch of the namespace whose clients say that fingerprint."""

    fingerprint: str
    epoch: int


class EpochsTold(Message):
    """Worker, before WorkerReady: what its device keeps, of namespaces that were reset."""

    entries: list[EpochEntry]


class EpochWanted(Message):
    """
    Coordinator: keep that epoch, durably, and answer EpochKept.

    From then on the worker serves no older epoch of that namespace: its clients are hung up on.
    """

    fingerprint: str
    epoch: int


class EpochKept(Message):
    """Worker: it is kept, or *error* says why not."""

    fingerprint: str
    epoch: int
    error: str = ""


class NamespaceOpened(Message):
    """Coordinator: objects of this namespace may be asked for."""

    namespace: int
    spec: NamespaceSpec


class ClientJoined(Message):
    """Coordinator: a rank joins; the frame carries the worker's end of a socket to it."""

    fd_count: ClassVar[int] = 1

    client: int
    engine: str
    namespace: int
    rank: int
    pid: int


class ClientProven(Message):
    """Coordinator: no copy of that (departed) client can touch a slot any more."""

    client: int


class SegmentGranted(Message):
    """Coordinator: a segment to cut into slots of *slot_bytes*; the frame carries its descriptor."""

    fd_count: ClassVar[int] = 1

    segment: int
    segment_bytes: int
    slot_bytes: int


class SegmentsGranted(Message):
    """Coordinator: the segments granted since the last such message form one batch, registered together."""

    count: int


class SegmentRecalled(Message):
    """Coordinator: give that segment back as soon as its slots are free."""

    segment: int


class SegmentReturned(Message):
    """Worker: no slot of that segment is in use any more."""

    segment: int


class KeysTold(Message):
    """Worker: flags of keys, with *device* being the worker's own."""

    namespace: int
    entries: list[KeyState]


class ScanEnded(Message):
    """Worker: the index of that namespace is complete for this device (object count as found)."""

    namespace: int
    objects: int


class KeysProbe(Message):
    """Coordinator: look these keys up by name; answer KeysTold for those found, then KeysProbed."""

    probe: int
    namespace: int
    keys: list[bytes]


class KeysProbed(Message):
    """Worker: that probe has ended."""

    probe: int


class WorkerStoresEnded(Message):
    """Worker: ends of stores, for the scheduler of *engine*."""

    engine: str
    kept: list[bytes]
    dropped: list[bytes]


class WorkerState(Message):
    """Worker: its device's speed, backlog and health, sent when they changed."""

    state: DeviceState


class SlotsUsed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Slots of one size: those in use for more than cache, at most since the last word, and what waits for one."""

    slot_bytes: int
    used: int
    wanted: int


class StagingUsed(Message):
    """Worker: how much of its staging is needed, when that changed."""

    sizes: list[SlotsUsed]


class PreloadReserve(Message):
    """
    Coordinator: reserve slots for all ranks' objects of these keys that are not in staging yet, or none.

    A request's keys of one device may come in several messages; the last one has *more* False, and then the
    worker answers PreloadAnswer once. *priority*, *arrival*: the request's place in the scheduler's order,
    ascending; the last in order is the first that a load takes slots from.
    """

    admission: int
    namespace: int
    keys: list[bytes]
    priority: int
    arrival: int
    more: bool = False


class PreloadAnswer(Message):
    """Worker: the slots of that admission are reserved here, or cannot be."""

    admission: int
    reserved: bool


class PreloadCommit(Message):
    """Coordinator: every device has reserved; read, when no load needs the drive."""

    admission: int


class PreloadWithdraw(Message):
    """Coordinator: nobody wants that admission any more; what has landed is cache, what has not is forgotten."""

    admission: int


class PreloadRevoked(Message):
    """Worker: a load had to take slots of that admission; it is withdrawn here and must be everywhere."""

    admission: int


class PreloadLanded(Message):
    """Worker: all objects of that admission are resident here (those whose file failed are given up)."""

    admission: int


class Drain(Message):
    """Coordinator: take nothing new, write what is filled, then exit with 0."""


ClientToCoordinator = (
    Hello | CopiesEnded | SegmentForgotten | Announce | Withdraw | Report | HealthWanted | StopWanted | ResizeWanted
    | ResetWanted | FilesRemoved | StoresWanted
)  # fmt: skip
CoordinatorToClient = (
    Welcome | Refused | WorkerUp | WorkerDown | SegmentUp | SegmentDown | Status | KeysChanged | StoresEnded
    | DevicesChanged | ReportWanted | Health | ResizeState | ResetDone | StoresWanted
)  # fmt: skip
RankToWorker = Load | Release | LoadCancel | Store | Filled | StoreCancel
WorkerToRank = Ready | LoadFailed | StoreAnswer
CoordinatorToWorker = (
    WorkerSetup | EpochWanted | NamespaceOpened | ClientJoined | ClientProven | SegmentGranted | SegmentsGranted
    | SegmentRecalled | KeysProbe | ReportWanted | PreloadReserve | PreloadCommit | PreloadWithdraw | Drain
    | FilesRemoved | StoresWanted
)  # fmt: skip
WorkerToCoordinator = (
    WorkerReady | EpochsTold | EpochKept | SegmentReturned | KeysTold | ScanEnded | KeysProbed | WorkerStoresEnded
    | WorkerState | PreloadAnswer | PreloadRevoked | PreloadLanded | StagingUsed | Report
)  # fmt: skip
