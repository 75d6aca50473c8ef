"""
What an I/O worker asks of its storage engine: the interface and its data.

Theory. Every call starts something and returns at once; what has ended comes out of :meth:`Engine.reap`, once for
each `op` (or probe token). Between two reaps the caller sleeps on `fds()`, no longer than until `next_due_ns()`.
Implemented by `kvpool.io.ring_engine`, and by simulators.
"""

import enum
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvpool.core.object_events import SlotRef
from kvpool.core.trailer import Expected
from kvpool.errors import Code


class Kind(enum.Enum):
    """What has ended."""

    OPENED = "opened"
    READ = "read"
    PUBLISHED = "published"
    PROBED = "probed"
    TRIED = "tried"


class Ended(NamedTuple):
    """
    The end of one operation.

    Attributes:
        op: As given at its start (the token of a probe or a trial).
        kind: Which call started it.
        error: None if it did what it was asked.
        detail: The error in words, for the log.
        bytes: Read or written, with trailer.
        ns: Since its start, on the monotonic clock; for READ and PUBLISHED the device's part, without checksums.
        found: PROBED: indices of the paths that exist.
        device_trouble: The error is the device's or the filesystem's, and counts for its health.
        existed: PUBLISHED: somebody else had published the same object.
        folders: PUBLISHED: folders that had to be made for it.
    """

    op: int
    kind: Kind
    error: Code | None = None
    detail: str = ""
    bytes: int = 0
    ns: int = 0
    found: tuple[int, ...] = ()
    device_trouble: bool = False
    existed: bool = False
    folders: int = 0


@dataclass(frozen=True, slots=True)
class SegmentMemory:
    """A mapped segment of staging, cut into slots of *slot_bytes* from its start on."""

    segment: int
    memory: mmap.mmap | memoryview
    slot_bytes: int


class Engine(Protocol):
    """One device's storage engine."""

    mode: str

    def fds(self) -> list[int]:
        """Return descriptors that poll readable when there is something to reap; the same ones for life."""

    def take_ring_pipe(self) -> int:
        """Return the read end of the ring pipe, once; it hangs up when nothing can land in staging any more."""

    def add_segments(self, batch: Sequence[SegmentMemory]) -> None:
        """Use these segments; they are registered together. Blocks for the registration (some 26 ms a GiB)."""

    def drop_segment(self, segment: int) -> None:
        """Forget a segment that no operation uses."""

    def open_file(self, op: int, path: str) -> None:
        """Open *path* for reading. Ends OPENED; the file then waits for read_file or close_file."""

    def read_file(self, op: int, slot: SlotRef, expect: Expected) -> None:
        """Read the whole file opened under *op* into *slot*, close it, verify. Ends READ."""

    def close_file(self, op: int) -> None:
        """Close the file opened under *op*. Has no end."""

    def publish_object(self, op: int, directory: str, name: str, slot: SlotRef, expect: Expected) -> None:
        """Seal *slot* (padding, trailer), write it as *directory*/*name*. Ends PUBLISHED."""

    def set_aside(self, path: str) -> None:
        """Move a file that does not hold what was published out of the way, now."""

    def probe(self, token: int, paths: Sequence[str]) -> None:
        """Look which of *paths* exist. Ends PROBED."""

    def try_device(self, token: int) -> None:
        """Write a page to the device and read it back. Ends TRIED; a device without space did well."""

    def submit(self) -> None:
        """Give what was started to the kernel."""

    def reap(self) -> list[Ended]:
        """Return what has ended, and start what follows from it."""

    def next_due_ns(self) -> int | None:
        """Return when reap has to be called at the latest (monotonic clock), None for no such time."""

    def in_flight(self) -> int:
        """Return the number of operations that have not ended."""

    def statistics(self) -> dict[str, int | float | str]:
        """Return counts, bytes and achieved depth since the start."""

    def close(self) -> None:
        """End it all; what has not ended never will."""
