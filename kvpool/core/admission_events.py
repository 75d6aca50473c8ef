"""
What the admission of preloads is told (events) and what it asks for (actions).

A *request* is (scheduler, name): a waiting request of one engine, as its scheduler announced it. An *admission* is the
pool's number for one attempt to have all of a request's objects in staging; it is never given twice.
"""

from dataclasses import dataclass
from typing import NamedTuple


class RequestId(NamedTuple):
    """A request of the engine behind that scheduler."""

    scheduler: int
    name: str


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceOpened:
    """Objects of this namespace may be announced; `object_bytes[group]` is the payload of each KV group's objects."""

    namespace: int
    rank_count: int
    object_bytes: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAnnounced:
    """
    A request waits, or waits again: its keys from index *first* on are *keys*, in prefix order.

    Attributes:
        more: Further keys follow at once: it is not looked at before they are there.
        priority: The scheduler's, lower ones first.
    """

    request: RequestId
    namespace: int
    first: int
    keys: list[bytes]
    more: bool
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsStarted:
    """These requests have what they wanted, or do without: nothing is to be read ahead for them."""

    requests: list[RequestId]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsWithdrawn:
    """These requests are over."""

    requests: list[RequestId]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysChanged:
    """The state of these keys on *device* changed; *freed*: some are in its staging no more."""

    namespace: int
    device: int
    keys: list[bytes]
    freed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomChanged:
    """That device may have more free slots than before."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLost:
    """That device's worker ended, and with it all that it had reserved and read."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChanged:
    """That device is given up for now, or used again; its worker lives, and what it had reserved it still has."""

    device: int
    healthy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveAnswered:
    """That device has the slots of an admission, or has not."""

    device: int
    admission: int
    reserved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRevoked:
    """A load had to take slots of that admission; that device has withdrawn it already."""

    device: int
    admission: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLanded:
    """All objects of that admission on that device are in staging, or given up."""

    device: int
    admission: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Nothing but time; look at the deadlines."""


Event = (
    NamespaceOpened | RequestAnnounced | RequestsStarted | RequestsWithdrawn | KeysChanged | RoomChanged | DeviceLost
    | DeviceChanged | ReserveAnswered | AdmissionRevoked | AdmissionLanded | TimePassed
)  # fmt: skip


# ------------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Ask that device to reserve slots for these keys' objects, all or none. Ended by ReserveAnswered or DeviceLost."""

    device: int
    admission: int
    namespace: int
    keys: list[bytes]
    priority: int
    arrival: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Tell that device to read an admission's objects."""

    device: int
    admission: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Tell that device that nobody wants an admission any more."""

    device: int
    admission: int


Action = Reserve | Commit | Withdraw
