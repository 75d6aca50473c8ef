"""
When a hit has to wait before it is loaded: pure decisions.

Theory. vLLM reserves a load's GPU blocks from admission to landing, and stops scanning its queue at the
first load that does not fit. So a hit whose bytes are still on the drive is deferred, which holds
nothing, while (a) the drive already has enough admitted work, or (b) its blocks do not fit and somebody else will
free some. At least one load is always admitted, and a deferral has an end: after `defer_s_max` the
request is handed to vLLM, whatever comes then.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Taken for a device whose speed is not measured yet: a slow NVMe drive.
READ_BYTES_PER_S_ASSUMED = 1_000_000_000
#: A request is deferred for at most this long in all.
DEFER_S_MAX = 10.0


class Verdict(enum.Enum):
    """What to do with a hit now."""

    ADMIT = "admit"
    DEFER_BACKLOG = "the drive has enough admitted work"
    DEFER_BLOCKS = "its blocks do not fit the free ones"

    @property
    def deferred(self) -> bool:
        """The request stays in the queue."""
        return self is not Verdict.ADMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """
    A hit that could be loaded.

    Attributes:
        missing_bytes: Per device, bytes on all ranks that are not in staging.
        blocks: GPU blocks that vLLM will ask for.
        blocks_free: GPU blocks that are free and not promised to others.
        others_free_blocks: Requests run or load that will free blocks.
    """

    missing_bytes: Mapping[int, int]
    blocks: int
    blocks_free: int
    others_free_blocks: bool


@dataclass(slots=True, kw_only=True)
class Deferral:
    """
    Admitted loads of one engine, and the verdict on the next one.

    Attributes:
        backlog_s_max: Seconds of a drive's work that may be admitted and not landed.
    """

    backlog_s_max: float
    defer_s_max: float = DEFER_S_MAX
    _admitted: dict[str, dict[int, int]] = field(default_factory=dict)
    _deferred_since: dict[str, float] = field(default_factory=dict)

    def verdict(self, request: str, wish: Wish, speeds: Mapping[int, float], *, now: float) -> Verdict:
        """
        Decide about *wish*; *speeds* are bytes per second by device, 0 or absent where not measured.

        The time of the first deferral of *request* is remembered until it is admitted or forgotten.
        """
        found = self._judge(wish, speeds)
        if not found.deferred:
            return found
        since = self._deferred_since.setdefault(request, now)
        return found if now - since < self.defer_s_max else Verdict.ADMIT

    def _judge(self, wish: Wish, speeds: Mapping[int, float]) -> Verdict:
        if not any(wish.missing_bytes.values()):
            return Verdict.ADMIT
        if any(
            self.backlog_s(device, speeds) > self.backlog_s_max
            for device, missing in wish.missing_bytes.items()
            if missing
        ):
            return Verdict.DEFER_BACKLOG
        if wish.others_free_blocks and wish.blocks > wish.blocks_free:
            return Verdict.DEFER_BLOCKS
        return Verdict.ADMIT

    def backlog_s(self, device: int, speeds: Mapping[int, float]) -> float:
        """Return how long *device* will read for what is admitted and has not landed."""
        waiting = sum(missing.get(device, 0) for missing in self._admitted.values())
        return waiting / (speeds.get(device) or READ_BYTES_PER_S_ASSUMED)

    def admitted(self, request: str, missing_bytes: Mapping[int, int]) -> None:
        """Note that vLLM took the load."""
        self._admitted[request] = dict(missing_bytes)
        self._deferred_since.pop(request, None)

    def landed(self, request: str) -> None:
        """Note that the load has ended, in whatever way."""
        self._admitted.pop(request, None)

    def forget(self, request: str) -> None:
        """Forget a finished request's waiting; its load may still be in flight."""
        self._deferred_since.pop(request, None)

    def clear(self) -> None:
        """Forget all loads: the engine was reset."""
        self._admitted.clear()
        self._deferred_since.clear()

    @property
    def loading(self) -> tuple[str, ...]:
        """Requests whose loads have not landed."""
        return tuple(self._admitted)
