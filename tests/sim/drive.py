"""
A simulated drive, and the storage engine that an I/O worker has over it.

Theory. The drive outlives its workers: it has the files, and what was given to it lands though the worker is dead.
Transfers share its bandwidth one after the other, slower while reads and writes mix; each also takes a latency of its
own, now and then a long one. Faults are drawn per operation, by the rates that the schedule has.

The engine has the interface of `kvpool/io/engine.py`. A read's slot is written to from its start to its end, whatever
becomes of the worker meanwhile; the ring pipe hangs up a while after the last of a dead worker's operations.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from kvpool.core.object_events import SlotRef
from kvpool.core.trailer import Expected
from kvpool.errors import Code
from kvpool.io.engine import Ended, Kind, SegmentMemory

from .kernel import HUNG_UP, MS, US, Flag, Kernel, Process, S, check
from .memory import TORN, Memory


@dataclass(slots=True)
class DriveFaults:
    """Rates of what goes wrong, per operation; 0 for not at all. *late_ns*: a dead worker's operations take longer."""

    open_errors: float = 0.0
    read_errors: float = 0.0
    corruption: float = 0.0
    write_errors: float = 0.0
    full: float = 0.0
    stalls: float = 0.0
    stall_ns: int = S
    late_ns: int = 0
    outages: bool = False


@dataclass(slots=True, kw_only=True)
class Drive:
    """
    One device.

    Attributes:
        files: Path -> what it holds.
        bytes_per_s: Shared by all transfers.
        mixed_penalty: Times slower while reads and writes are under way together.
        latency_us: Median of an operation's own latency.
        failing_until_ns: Every operation fails until then.
        reads_of: Path -> how often it was read.
    """

    kernel: Kernel
    rng: random.Random
    bytes_per_s: float = 1e9
    mixed_penalty: float = 2.0
    latency_us: float = 100.0
    faults: DriveFaults = field(default_factory=DriveFaults)
    files: dict[str, object] = field(default_factory=dict)
    failing_until_ns: int = 0
    reads_of: dict[str, int] = field(default_factory=dict)
    busy_until_ns: int = 0
    reading: int = 0
    writing: int = 0
    read_bytes: int = 0
    busy_ns: int = 0

    def transfer_ns(self, size: int, *, write: bool) -> int:
        """Return how long a transfer that begins now takes."""
        mixed = self.reading if write else self.writing
        service_ns = int(size / self.bytes_per_s * S * (self.mixed_penalty if mixed else 1.0))
        self.busy_until_ns = max(self.busy_until_ns, self.kernel.now_ns) + service_ns
        self.busy_ns += service_ns
        return self.busy_until_ns - self.kernel.now_ns + self.latency_ns()

    def latency_ns(self) -> int:
        """Return one operation's own latency: log-normal, with a rare long one, or a stall."""
        if self.rng.random() < self.faults.stalls:
            return int(self.faults.stall_ns * (0.5 + 2 * self.rng.random()))
        tail = 20.0 if self.rng.random() < 0.005 else 1.0
        return int(self.latency_us * tail * self.rng.lognormvariate(0, 0.5)) * US

    def fails(self, rate: float) -> bool:
        """Whether an operation with that rate of failure fails now."""
        return self.kernel.now_ns < self.failing_until_ns or (rate > 0 and self.rng.random() < rate)


class DriveEngine:
    """What an I/O worker asks of its drive; see the module. *process* is the worker's."""

    mode = "simulated"

    def __init__(self, drive: Drive, process: Process) -> None:
        self.drive = drive
        self.kernel = drive.kernel
        self._process = process
        self._wake = Flag(self.kernel)
        self._fd = self.kernel.open(self._wake)
        self._ended: list[Ended] = []
        self._opened: dict[int, tuple[str, object]] = {}
        self._running = 0
        self._segments: dict[int, SegmentMemory] = {}
        self._pipe = Flag(self.kernel, HUNG_UP)
        self.kernel_ops: dict[int, tuple[int, int]] = {}
        process.at_exit.append(self._worker_gone)

    # ---------------------------------------------------------------- the interface

    def fds(self) -> list[int]:
        """One descriptor, readable while something ended."""
        return [self._fd]

    def take_ring_pipe(self) -> int:
        """Hangs up when nothing can land any more."""
        return self.kernel.open(self._pipe)

    def add_segments(self, batch: Sequence[SegmentMemory]) -> None:
        """Use these."""
        for segment in batch:
            check(segment.segment not in self._segments, "a segment is registered twice", segment=segment.segment)
            self._segments[segment.segment] = segment

    def drop_segment(self, segment: int) -> None:
        """Forget one that no operation uses."""
        check(all(used != segment for used, _ in self.kernel_ops.values()), "a segment is dropped that is used")
        del self._segments[segment]

    def slot(self, slot: SlotRef) -> tuple[Memory, int]:
        """Return the memory and offset of a slot."""
        found = self._segments[slot.segment]
        return cast(Memory, found.memory), slot.index * found.slot_bytes

    def open_file(self, op: int, path: str) -> None:
        """Open."""
        drive, found = self.drive, self.drive.files.get(path)

        def end() -> Ended:
            if drive.fails(drive.faults.open_errors):
                return Ended(op, Kind.OPENED, Code.READ_ERROR, "simulated", device_trouble=True)
            if found is None:
                return Ended(op, Kind.OPENED, Code.MISSING, "no such file")
            self._opened[op] = (path, found)
            return Ended(op, Kind.OPENED)

        self._start(drive.latency_ns() // 2, end)

    def read_file(self, op: int, slot: SlotRef, expect: Expected) -> None:
        """Read, verify."""
        drive = self.drive
        path, content = self._opened.pop(op)
        memory, offset = self.slot(slot)
        size = self._segments[slot.segment].slot_bytes
        who = ("drive", self._process.pid, op)
        memory.begin_write(offset, who)
        self.kernel_ops[op] = slot
        drive.reading += 1
        drive.reads_of[path] = drive.reads_of.get(path, 0) + 1
        started_ns = self.kernel.now_ns
        failed = drive.fails(drive.faults.read_errors)

        def end() -> Ended:
            drive.reading -= 1
            del self.kernel_ops[op]
            memory.end_write(offset, who, TORN if failed else content)
            if failed:
                return Ended(op, Kind.READ, Code.READ_ERROR, "simulated", device_trouble=True)
            drive.read_bytes += size
            if content != expect:
                return Ended(op, Kind.READ, Code.CORRUPT, "simulated")
            return Ended(op, Kind.READ, None, "", size, self.kernel.now_ns - started_ns)

        self._start(drive.transfer_ns(size, write=False), end)

    def close_file(self, op: int) -> None:
        """Close."""
        del self._opened[op]

    def publish_object(self, op: int, directory: str, name: str, slot: SlotRef, expect: Expected) -> None:
        """Write, link."""
        drive, path = self.drive, f"{directory}/{name}"
        memory, offset = self.slot(slot)
        size = self._segments[slot.segment].slot_bytes
        who = ("drive", self._process.pid, op)
        memory.begin_read(offset, who, expect)
        self.kernel_ops[op] = slot
        drive.writing += 1

        def end() -> Ended:
            drive.writing -= 1
            del self.kernel_ops[op]
            memory.end_read(offset, who)
            if not self._process.alive and drive.rng.random() < 0.5:
                return Ended(op, Kind.PUBLISHED)  # written, and never linked
            if drive.fails(drive.faults.write_errors):
                return Ended(op, Kind.PUBLISHED, Code.WRITE_ERROR, "simulated", device_trouble=True)
            if drive.rng.random() < drive.faults.full:
                return Ended(op, Kind.PUBLISHED, Code.DEVICE_FULL, "simulated")
            existed = path in drive.files
            if not existed:
                drive.files[path] = "corrupt" if drive.rng.random() < drive.faults.corruption else expect
            return Ended(op, Kind.PUBLISHED, None, "", size, 0, existed=existed)

        self._start(drive.transfer_ns(size, write=True), end)

    def set_aside(self, path: str) -> None:
        """Move a bad file away."""
        self.drive.files.pop(path, None)

    def probe(self, token: int, paths: Sequence[str]) -> None:
        """Look which exist."""

        def end() -> Ended:
            return Ended(token, Kind.PROBED, found=tuple(i for i, path in enumerate(paths) if path in self.drive.files))

        self._start(self.drive.latency_ns(), end)

    def try_device(self, token: int) -> None:
        """Write and read a page."""

        def end() -> Ended:
            failed = self.drive.fails(self.drive.faults.read_errors)
            error = Code.READ_ERROR if failed else None
            return Ended(token, Kind.TRIED, error, "simulated", device_trouble=failed)

        self._start(self.drive.latency_ns(), end)

    def submit(self) -> None:
        """Everything starts at once here."""

    def reap(self) -> list[Ended]:
        """Return what has ended."""
        ended, self._ended = self._ended, []
        self._wake.since_ns = None
        return ended

    def next_due_ns(self) -> int | None:
        """Nothing is due by time."""
        return None

    def in_flight(self) -> int:
        """Operations that have not ended."""
        return self._running

    def statistics(self) -> dict[str, int | float | str]:
        """Nothing is counted."""
        return {}

    def close(self) -> None:
        """End it all."""

    # ---------------------------------------------------------------- inside

    def _start(self, took_ns: int, end: Callable[[], Ended]) -> None:
        self._running += 1

        def land(*, late: bool = False) -> None:
            if not self._process.alive and not late and self.drive.faults.late_ns:
                self.kernel.after(self.drive.rng.randrange(1, self.drive.faults.late_ns), lambda: land(late=True))
                return
            self._running -= 1
            ended = end()
            if self._process.alive:
                self._ended.append(ended)
                self._wake.set(self.kernel.now_ns)
            else:
                self._hang_up_when_done()

        self.kernel.after(max(1, took_ns), land)

    def _worker_gone(self) -> None:
        self._hang_up_when_done()

    def _hang_up_when_done(self) -> None:
        if self._process.gone and not self._running and self._pipe.since_ns is None:
            self._pipe.set(self.kernel.now_ns + self.drive.rng.randrange(1, 50) * MS)
