"""
How staging memory is divided into segments, between devices and slot sizes.

Theory of operation. A *pair* is a (device, slot size) in use. Each pair has a *target* in slots,
made of three layers that are poured one after the other as far as the memory goes, and of what pairs lend one
another by demand (`core/lending.py`):

    minimum   max(2, rank_count) slots; if these do not fit, the namespace is refused with the number needed
    wanted    iodepth + 4 slots, so that the drive can be kept busy
    share     the rest, by device weight, then by namespaces' weights, then by slot size within a namespace
              (as many slots of each of its groups)

A segment belongs to one pair and moves through these states:

    (created) -> CREATING -> GRANTED -> RECALLED -> CLOSING -> (gone: its bytes are free)
                    ^           |          |
                    |           v          v
                    |        QUARANTINED (its worker died; proof pending)
                    +-- granted again after proof, if the pair still wants it; else CLOSING

`plan` compares targets with what pairs hold and returns the steps: create from free bytes, recall
from pairs above their target when another is short. Only segments that are gone free their bytes:
what is recalled, closing or quarantined still counts. A quarantined segment counts for its pair
until `QUARANTINE_PATIENCE_S`; after that its bytes are taken out of the division until proof comes,
so that a rank that never answers cannot leave a device without staging.

Covers: numbers. Does not cover: shared memory, who has mapped what (`procs/coordinator_segments.py`).
"""

import enum
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvpool.core.lending import Lending
from kvpool.errors import HostError, invariant

SLOT_ALIGNMENT = 4096
TRAILER_BYTES = 4096
#: io_uring registers no buffer above this (kernel: IORING_OP_..._FIXED, 1 GiB a buffer).
SEGMENT_BYTES_MAX = 1 << 30
SEGMENT_BYTES_USUAL = 64 << 20
SEGMENT_SLOTS_MIN = 4
#: A pair is cut into at least about this many segments, so that some can be recalled without all.
SEGMENTS_WANTED = 8
SEGMENTS_PER_PAIR_MAX = 64
#: Slots a pair wants beyond its device's iodepth.
SLOTS_BEYOND_DEPTH = 4
QUARANTINE_PATIENCE_S = 10.0


def slot_bytes_of(object_bytes: int) -> int:
    """Return the slot size for objects of *object_bytes* payload: padded to 4096, plus the trailer."""
    return -(-object_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT + TRAILER_BYTES


class Pair(NamedTuple):
    """A device and a slot size in use on it."""

    device: int
    slot_bytes: int


class State(enum.Enum):
    """Where a segment is in its life; see the module's diagram."""

    CREATING = "creating"
    GRANTED = "granted"
    RECALLED = "recalled"
    CLOSING = "closing"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """What the division must know of a device."""

    weight: int
    iodepth: int


@dataclass(slots=True, kw_only=True)
class Segment:
    """
    One segment of staging.

    Attributes:
        segment: Its number; never given twice.
        pair: Whose it is.
        segment_bytes: Whole slots of the pair's slot size.
        state: See the module's diagram.
        quarantined_ns: Since when, while QUARANTINED.
    """

    segment: int
    pair: Pair
    segment_bytes: int
    state: State = State.CREATING
    quarantined_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Create and prefault this segment; `created` when it can be granted."""

    segment: int
    pair: Pair
    segment_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Ask the worker for this segment; `returned` when it gave it back."""

    segment: int
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """One namespace's use of staging; *weight* beside the others'."""

    rank_count: int
    slot_sizes: tuple[int, ...]
    weight: int


class Budget:
    """Division of *total_bytes* over *devices* (index order); see the module."""

    def __init__(self, total_bytes: int, devices: Iterable[DeviceShare]) -> None:
        self.total_bytes = total_bytes
        self.devices = list(devices)
        self.segments: dict[int, Segment] = {}
        #: What pairs lend one another of their shares, by demand.
        self.lending: Lending[Pair] = Lending()
        self._uses: dict[int, _Use] = {}
        self._next_segment = 1

    # ---------------------------------------------------------------- namespaces

    def _check(self, rank_count: int, object_bytes: Iterable[int]) -> None:
        """
        Refuse a namespace that does not fit beside those open.

        Raises:
            HostError: Names the staging there is and the bytes needed.
        """
        use = _use(rank_count, object_bytes, weight=1)
        for slot_bytes in use.slot_sizes:
            if slot_bytes > SEGMENT_BYTES_MAX:
                raise HostError(
                    "an object is larger than a staging segment can be: store fewer tokens per chunk (block_size)",
                    slot_bytes=slot_bytes,
                    segment_bytes_max=SEGMENT_BYTES_MAX,
                )
        self._check_minimum(self.total_bytes, [*self._uses.values(), use])

    def _check_minimum(self, total_bytes: int, uses: list[_Use]) -> None:
        minimum = _minimum_slots(uses)
        needed = len(self.devices) * sum(slot_bytes * slots for slot_bytes, slots in minimum.items())
        if needed > total_bytes:
            raise HostError(
                "staging is too small for the open namespaces: raise [pool] staging",
                staging_bytes=total_bytes,
                needed_bytes=needed,
                slots_per_device=sum(minimum.values()),
                devices=len(self.devices),
            )

    def resize(self, total_bytes: int) -> None:
        """
        Divide *total_bytes* from now on; call `plan` afterwards, and again whenever a segment is gone.

        Raises:
            HostError: The open namespaces need more; names the number.
        """
        self._check_minimum(total_bytes, list(self._uses.values()))
        self.total_bytes = total_bytes

    def open_namespace(self, namespace: int, rank_count: int, object_bytes: Iterable[int], *, weight: int = 1) -> None:
        """
        Count a namespace in; call `plan` afterwards.

        Again is fine: of the weights that were given since it was counted out last, the greatest counts.

        Raises:
            HostError: It does not fit.
        """
        sizes = list(object_bytes)
        known = self._uses.get(namespace)
        if known is None:
            self._check(rank_count, sizes)
            self._uses[namespace] = _use(rank_count, sizes, weight)
        elif weight > known.weight:
            self._uses[namespace] = replace(known, weight=weight)

    def close_namespace(self, namespace: int) -> None:
        """Count a namespace out: nobody uses it now. What it holds stays until others need it."""
        self._uses.pop(namespace, None)

    # ---------------------------------------------------------------- facts about segments

    def created(self, segment: int) -> None:
        """Its memory is there and it was granted to its worker."""
        found = self.segments[segment]
        invariant(found.state is State.CREATING, "only a segment being created becomes granted", segment=found)
        found.state = State.GRANTED

    def creation_failed(self, segment: int) -> None:
        """There is no memory for it, or it was never begun: forget it. The caller lowers `total_bytes`."""
        invariant(self.segments[segment].state is State.CREATING, "only a creation fails", segment=segment)
        del self.segments[segment]

    def returned(self, segment: int) -> bool:
        """Its worker gave it back. Returns False (and changes nothing) if it was not recalled."""
        found = self.segments.get(segment)
        if found is None or found.state is not State.RECALLED:
            return False
        found.state = State.CLOSING
        return True

    def gone(self, segment: int) -> None:
        """Nobody maps it any more and its memory is free."""
        invariant(self.segments[segment].state is State.CLOSING, "only a closing segment goes", segment=segment)
        del self.segments[segment]

    def worker_down(self, device: int, now_ns: int) -> list[int]:
        """A device's worker ended: quarantine what it held. Returns the segments that wait for proof."""
        held = [
            found
            for found in self.segments.values()
            if found.pair.device == device and found.state in (State.GRANTED, State.RECALLED)
        ]
        for pair in {found.pair for found in held}:
            self.lending.forget(pair)
        for found in held:
            found.state = State.QUARANTINED
            found.quarantined_ns = now_ns
        return [found.segment for found in held]

    def proven(self, segments: Iterable[int]) -> tuple[list[int], list[int]]:
        """
        Nothing can touch these quarantined segments any more.

        Returns:
            Those to grant to the device's next worker (CREATING until `created`), and those to
            close (CLOSING), since their pair holds its target without them.
        """
        targets = self.targets(now_ns=None)
        held = self._held_bytes()
        again: list[int] = []
        close: list[int] = []
        for number in segments:
            found = self.segments[number]
            invariant(found.state is State.QUARANTINED, "only a quarantined segment is proven", segment=found)
            if held[found.pair] == 0 or held[found.pair] + found.segment_bytes <= targets.get(found.pair, 0):
                found.state = State.CREATING
                held[found.pair] += found.segment_bytes
                again.append(number)
            else:
                found.state = State.CLOSING
                close.append(number)
        return again, close

    # ---------------------------------------------------------------- the division

    def targets(self, now_ns: int | None) -> dict[Pair, int]:
        """
        Return each pair's target in bytes, whole slots.

        Args:
            now_ns: Takes segments in quarantine for too long out of the division; None: none of them.
        """
        shares = self._share_targets(now_ns)
        loans = self.lending.loans(shares)
        lent = {pair: share + loans.get(pair, 0) for pair, share in shares.items()}
        return {pair: target // pair.slot_bytes * pair.slot_bytes for pair, target in lent.items()}

    def _share_targets(self, now_ns: int | None) -> dict[Pair, int]:
        """Return what each pair would have if nobody lent anything."""
        total = self.total_bytes - (0 if now_ns is None else self._overdue_bytes(now_ns))
        minimum = _minimum_slots(self._uses.values())
        pairs = [Pair(device, slot_bytes) for device in range(len(self.devices)) for slot_bytes in minimum]
        slots = {pair: minimum[pair.slot_bytes] for pair in pairs}
        left = total - sum(pair.slot_bytes * count for pair, count in slots.items())
        left -= self._pour_wanted(slots, left)
        self._pour_shares(slots, left, total)
        return {pair: pair.slot_bytes * count for pair, count in slots.items()}

    def _pour_wanted(self, slots: dict[Pair, int], left: int) -> int:
        """Raise *slots* towards iodepth + 4 as far as *left* bytes go, all alike. Returns the bytes used."""
        gaps = {
            pair: max(0, self.devices[pair.device].iodepth + SLOTS_BEYOND_DEPTH - count)
            for pair, count in slots.items()
        }
        gap_bytes = sum(pair.slot_bytes * gap for pair, gap in gaps.items())
        if gap_bytes == 0 or left <= 0:
            return 0
        part = min(1.0, left / gap_bytes)
        used = 0
        for pair, gap in gaps.items():
            more = gap if part == 1.0 else int(gap * part)
            slots[pair] += more
            used += more * pair.slot_bytes
        return used

    def _pour_shares(self, slots: dict[Pair, int], left: int, total: int) -> None:
        """Deal *left* bytes so that pairs come as near to their share of *total* as their floors allow."""
        shares = self._shares(slots)
        while left > 0 and shares:
            level = (left + sum(pair.slot_bytes * slots[pair] for pair in shares)) / sum(shares.values())
            above = [pair for pair, share in shares.items() if pair.slot_bytes * slots[pair] > share * level]
            if not above:
                for pair, share in shares.items():
                    slots[pair] = max(slots[pair], int(share * level) // pair.slot_bytes)
                return
            for pair in above:
                del shares[pair]

    def _shares(self, pairs: Iterable[Pair]) -> dict[Pair, float]:
        size_shares: dict[int, float] = {}
        all_weights = sum(use.weight for use in self._uses.values())
        for use in self._uses.values():
            whole = sum(use.slot_sizes)
            for slot_bytes in use.slot_sizes:
                share = slot_bytes / whole * use.weight / all_weights
                size_shares[slot_bytes] = size_shares.get(slot_bytes, 0.0) + share
        weights = sum(device.weight for device in self.devices)
        return {pair: size_shares[pair.slot_bytes] * self.devices[pair.device].weight / weights for pair in pairs}

    # ---------------------------------------------------------------- steps

    def plan(self, now_ns: int) -> tuple[list[Create | Recall], int | None]:
        """Return the steps towards the targets, now, and when to plan again although nothing happens (None: never)."""
        shares = self._share_targets(now_ns)
        floors = {pair: min(share, self._depth_bytes(pair)) for pair, share in shares.items()}
        self.lending.divide(shares, floors, now_ns)
        targets = self.targets(now_ns)
        held = self._held_bytes()
        coming = self._coming_bytes(held, now_ns)
        short = {pair: target - coming[pair] for pair, target in targets.items() if target > coming[pair]}
        steps: list[Create | Recall] = []
        free = self.free_bytes
        # The poorest first: a pair with nothing must not wait behind one that only wants more.
        for pair in sorted(short, key=lambda pair: (coming[pair] / targets[pair], pair)):
            created = self._create(pair, targets[pair], min(short[pair], free), held[pair])
            created_bytes = sum(step.segment_bytes for step in created)
            steps += created
            free -= created_bytes
            short[pair] -= created_bytes
            coming[pair] += created_bytes
        missing = sum(bytes_ for pair, bytes_ in short.items() if self._is_worth(pair, bytes_, held[pair]))
        starving = any(coming[pair] < self._minimum_bytes(pair) for pair in short)
        # What is there beyond the total has to go, whoever needs it, after a shrinking one too.
        beyond = max(0, -self.free_bytes)
        steps += self._recall(targets, held, missing + beyond, starving=starving or beyond > 0)
        wakes = [self._patience_ends_ns(now_ns), self.lending.due_ns(now_ns)]
        return steps, min((wake for wake in wakes if wake is not None), default=None)

    def _create(self, pair: Pair, target: int, room: int, held_bytes: int) -> list[Create]:
        """Create segments of at most *room* bytes in all."""
        if not self._is_worth(pair, room, held_bytes):
            return []
        created = []
        for count in cut_slots(room // pair.slot_bytes, segment_slots(pair.slot_bytes, target)):
            segment = Segment(segment=self._next_segment, pair=pair, segment_bytes=count * pair.slot_bytes)
            self._next_segment += 1
            self.segments[segment.segment] = segment
            created.append(Create(segment=segment.segment, pair=pair, segment_bytes=segment.segment_bytes))
        return created

    def _is_worth(self, pair: Pair, missing_bytes: int, held_bytes: int) -> bool:
        """Whether a pair should get *missing_bytes* more: no tiny segments once it can keep its drive busy."""
        slots_min = SEGMENT_SLOTS_MIN if held_bytes >= self._depth_bytes(pair) else 1
        return missing_bytes >= slots_min * pair.slot_bytes

    def _depth_bytes(self, pair: Pair) -> int:
        """What a pair needs to keep its drive busy."""
        depth_bytes = (self.devices[pair.device].iodepth + SLOTS_BEYOND_DEPTH) * pair.slot_bytes
        return max(depth_bytes, self._minimum_bytes(pair))

    def _recall(self, targets: dict[Pair, int], held: dict[Pair, int], missing: int, *, starving: bool) -> list[Recall]:
        """
        Recall what is missing, and not already on its way, from pairs that hold more than their target.

        Whole segments above the target; when a pair is *starving* also one that reaches below it,
        which its pair then gets back as a smaller one. Staging that shrank counts as starving.
        """
        missing -= self.leaving_bytes
        recalls: list[Recall] = []
        # The youngest first: the older ones hold what has proved useful for longer.
        for found in sorted(self.segments.values(), key=lambda found: -found.segment):
            if missing <= 0:
                break
            if found.state is not State.GRANTED:
                continue
            surplus = held[found.pair] - targets.get(found.pair, 0)
            if surplus >= found.segment_bytes or (surplus > 0 and starving):
                found.state = State.RECALLED
                # What reaches below the target has to come back to this pair.
                missing -= min(surplus, found.segment_bytes)
                held[found.pair] -= found.segment_bytes
                recalls.append(Recall(segment=found.segment, device=found.pair.device))
        return recalls

    # ---------------------------------------------------------------- sums

    @property
    def free_bytes(self) -> int:
        """Bytes of staging that no segment has; negative after the total shrank."""
        return self.total_bytes - sum(found.segment_bytes for found in self.segments.values())

    def is_closing(self, segment: int) -> bool:
        """Whether no worker has that segment any more and it waits for the ranks only."""
        return self.segments[segment].state is State.CLOSING

    def has_granted(self, device: int) -> bool:
        """Whether a device's worker holds any segment."""
        return any(found.pair.device == device and found.state is State.GRANTED for found in self.segments.values())

    @property
    def leaving_bytes(self) -> int:
        """Bytes that are being taken back."""
        leaving = (State.RECALLED, State.CLOSING)
        return sum(found.segment_bytes for found in self.segments.values() if found.state in leaving)

    @property
    def is_settled(self) -> bool:
        """Whether nothing comes and nothing goes; quarantined segments wait for others, and count as settled."""
        moving = (State.CREATING, State.RECALLED, State.CLOSING)
        return self.free_bytes >= 0 and all(found.state not in moving for found in self.segments.values())

    @property
    def quarantined_count(self) -> int:
        """Segments of dead workers that wait for proof."""
        return sum(found.state is State.QUARANTINED for found in self.segments.values())

    def held_slots(self, pair: Pair) -> int:
        """Return how many slots a pair has or is about to get, without what leaves it."""
        return self._held_bytes()[pair] // pair.slot_bytes

    def _held_bytes(self) -> defaultdict[Pair, int]:
        held: defaultdict[Pair, int] = defaultdict(int)
        for found in self.segments.values():
            if found.state in (State.CREATING, State.GRANTED):
                held[found.pair] += found.segment_bytes
        return held

    def _coming_bytes(self, held: defaultdict[Pair, int], now_ns: int) -> defaultdict[Pair, int]:
        """Return what pairs hold, with what is still likely to come back from quarantine."""
        coming = defaultdict(int, held)
        for found in self.segments.values():
            if found.state is State.QUARANTINED and not _is_overdue(found, now_ns):
                coming[found.pair] += found.segment_bytes
        return coming

    def _minimum_bytes(self, pair: Pair) -> int:
        return _minimum_slots(self._uses.values())[pair.slot_bytes] * pair.slot_bytes

    def _overdue_bytes(self, now_ns: int) -> int:
        return sum(
            found.segment_bytes
            for found in self.segments.values()
            if found.state is State.QUARANTINED and _is_overdue(found, now_ns)
        )

    def _patience_ends_ns(self, now_ns: int) -> int | None:
        ends = (
            found.quarantined_ns + int(QUARANTINE_PATIENCE_S * 10**9)
            for found in self.segments.values()
            if found.state is State.QUARANTINED and not _is_overdue(found, now_ns)
        )
        return min(ends, default=None)

    def statistics(self) -> dict[str, int]:
        """Return bytes of staging by state, and the total."""
        by_state = {f"staging_{state.value}_bytes": 0 for state in State}
        for found in self.segments.values():
            by_state[f"staging_{found.state.value}_bytes"] += found.segment_bytes
        return {"staging_bytes": self.total_bytes, **by_state}

    def validate(self) -> None:
        """Check every invariant of the division."""
        self.lending.validate()
        for number, found in self.segments.items():
            invariant(number == found.segment, "a segment stands under its number", segment=found)
            invariant(found.segment_bytes % found.pair.slot_bytes == 0, "whole slots", segment=found)
            invariant(0 < found.segment_bytes <= SEGMENT_BYTES_MAX, "a segment's size", segment=found)
            invariant(0 <= found.pair.device < len(self.devices), "a segment's device", segment=found)


def segment_slots(slot_bytes: int, target_bytes: int) -> int:
    """
    Return how many slots one segment of a pair has.

    Args:
        slot_bytes: Multiple of 4096, at most SEGMENT_BYTES_MAX.
        target_bytes: What the pair is to hold in all.
    """
    usual = max(target_bytes // SEGMENTS_PER_PAIR_MAX, min(SEGMENT_BYTES_USUAL, target_bytes // SEGMENTS_WANTED))
    return min(max(SEGMENT_SLOTS_MIN, usual // slot_bytes), SEGMENT_BYTES_MAX // slot_bytes)


def cut_slots(slots: int, slots_per_segment: int) -> list[int]:
    """Cut *slots* into as few segments of at most *slots_per_segment* as go, as even as can be."""
    if slots <= 0:
        return []
    count = -(-slots // slots_per_segment)
    base, more = divmod(slots, count)
    return [base + (index < more) for index in range(count)]


def _use(rank_count: int, object_bytes: Iterable[int], weight: int) -> _Use:
    sizes = tuple(slot_bytes_of(size) for size in object_bytes)
    return _Use(rank_count=rank_count, slot_sizes=sizes, weight=weight)


def _minimum_slots(uses: Iterable[_Use]) -> dict[int, int]:
    """Return, per slot size in use, the fewest slots a device needs of it."""
    minimum: dict[int, int] = {}
    for use in uses:
        for slot_bytes in use.slot_sizes:
            minimum[slot_bytes] = max(minimum.get(slot_bytes, 2), use.rank_count)
    return dict(sorted(minimum.items()))


def _is_overdue(found: Segment, now_ns: int) -> bool:
    return now_ns - found.quarantined_ns >= int(QUARANTINE_PATIENCE_S * 10**9)
