"""
What a rank's loads and stores stand on: the pool, its workers and segments, and the answers that gather.

Covers: the facts both kinds of jobs look at, the actions of one event, the messages that leave at the end of a
round, the counters, and what a load and a store have in common. Does not decide anything.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvpool.core.rank_events import (
    Action,
    EndJob,
    JobKind,
    PoolJoined,
    SendFilled,
    SendRelease,
    SendStoreCancel,
)
from kvpool.errors import Code

#: What is counted since the start.
COUNTERS = (
    "loads_submitted", "loads_ended", "objects_loaded", "objects_failed",
    "stores_submitted", "stores_ended", "objects_filled", "objects_existed", "objects_dropped", "workers_dropped",
)  # fmt: skip

_State = TypeVar("_State")
GatheredMessage = type[SendRelease | SendFilled | SendStoreCancel]


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """
    What loads and stores have in common.

    Attributes:
        job, wire: The caller's number, and ours on the wire.
        devices: Device of each object.
        parts: Per device, the indices of its objects: the wire index counts this list.
        positions: Wire index of each object.
        slots: (segment, offset) of the objects that have a slot now.
        codes: Why objects failed or were dropped.
        open: Objects that are not in a closed state.
        expired: The deadline was acted upon.
    """

    job: int
    wire: int
    keys: Sequence[bytes]
    devices: Sequence[int]
    deadline_ns: int
    parts: dict[int, list[int]] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    codes: dict[int, Code] = field(default_factory=dict)
    open: int = 0
    expired: bool = False

    def __post_init__(self) -> None:
        self.open = len(self.keys)
        for index, device in enumerate(self.devices):
            part = self.parts.setdefault(device, [])
            self.positions.append(len(part))
            part.append(index)

    def may_answer(
        self, device: int, wire_indices: Sequence[int], states: Sequence[_State], answerable: tuple[_State, ...]
    ) -> bool:
        """Tell whether *device*'s worker may answer for these: its own, each once, in an *answerable* state."""
        part = self.parts.get(device, [])
        return len(set(wire_indices)) == len(wire_indices) and all(
            0 <= wire_index < len(part) and states[part[wire_index]] in answerable for wire_index in wire_indices
        )


class Ground:
    """
    See the module.

    Attributes:
        pool: Set between PoolJoined and PoolLost.
        workers: Workers that can be talked to: device -> generation.
        segments: Those that copies can reach.
        segments_unmappable: Those that cannot be mapped here.
        counts: By the names in COUNTERS.
    """

    def __init__(self) -> None:
        self.pool: PoolJoined | None = None
        self.workers: dict[int, int] = {}
        self.segments: set[int] = set()
        self.segments_unmappable: set[int] = set()
        self.counts: Counter[str] = Counter()
        self._actions: list[Action] = []
        #: Gathered for the end of the round: (message, device, wire) -> wire indices.
        self._gathered: dict[tuple[GatheredMessage, int, int], list[int]] = {}

    def act(self, action: Action) -> None:
        """Ask for *action*, behind those asked for before."""
        self._actions.append(action)

    def take_actions(self) -> list[Action]:
        """Return what was asked for since the last call."""
        actions, self._actions = self._actions, []
        return actions

    def gather(self, message: GatheredMessage, device: int, wire: int, wire_index: int) -> None:
        """Tell the device's worker at the end of the round; a lost one is not told."""
        if device in self.workers:
            self._gathered.setdefault((message, device, wire), []).append(wire_index)

    def send_gathered(self) -> None:
        """Ask for one message per kind, worker and job."""
        gathered, self._gathered = self._gathered, {}
        for (message, device, wire), indices in gathered.items():
            self.act(message(device=device, wire=wire, indices=indices))

    def lose_worker(self, device: int) -> None:
        """Forget a worker, and what was to be told to it."""
        del self.workers[device]
        self._gathered = {key: indices for key, indices in self._gathered.items() if key[1] != device}

    def end(self, job: Job, kind: JobKind) -> None:
        """Report the end of a job."""
        self.counts[f"{kind}s_ended"] += 1
        failed = tuple(sorted(job.codes.items()))
        self.act(EndJob(job=job.job, kind=kind, wire=job.wire, failed=failed))
