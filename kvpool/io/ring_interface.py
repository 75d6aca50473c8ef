"""
What a storage engine needs of a ring: requests by token, results by token.

A request made under a token comes back from :meth:`Ring.reap` as (token, result), the result being what the system
call returns, or a negative errno. Implemented by `kvpool.io.ring` (io_uring) and `kvpool.io.thread_ring`.
"""

from collections.abc import Sequence
from typing import Any, Protocol


class Ring(Protocol):
    """
    One queue of requests to the kernel.

    Attributes:
        kind: In words, for health.
        fd: Polls readable when something is to be reaped.
        in_flight: Requests made and not yet reaped.
        registered: Memory is registered; reads and writes name its buffers.
    """

    kind: str
    fd: int
    in_flight: int
    registered: bool

    def register(self, views: Sequence[memoryview]) -> bool:
        """Register *views* as buffers 0, 1, ...; False where that cannot be had. Not while others are registered."""

    def unregister(self) -> bool:
        """Register no buffers any more: their pages are free; False: not now, as prepared requests name them."""

    def vector(self, view: memoryview) -> Any:
        """Return what read and write take for *view*. It may never be freed: make one a slot, and keep it."""

    def open(self, token: int, path: str, flags: int, mode: int) -> None:
        """Open *path*; the result is a descriptor."""

    def close_file(self, token: int, fd: int) -> None:
        """Close *fd*."""

    def read(self, token: int, fd: int, vector: Any, buffer: int, offset: int) -> None:
        """Read at *offset* into *vector*, which lies in buffer number *buffer*."""

    def write(self, token: int, fd: int, vector: Any, buffer: int, offset: int) -> None:
        """Write *vector*, which lies in buffer number *buffer*, at *offset*."""

    def fsync(self, token: int, fd: int) -> None:
        """Bring data and metadata of *fd* to the drive."""

    def link_fd(self, token: int, fd: int, path: str) -> None:
        """Give the unnamed file *fd* the name *path*."""

    def link(self, token: int, source: str, path: str) -> None:
        """Give the file *source* the second name *path*."""

    def rename(self, token: int, source: str, path: str) -> None:
        """Rename; a file of that name is replaced."""

    def rename_noreplace(self, token: int, source: str, path: str) -> None:
        """Rename; a taken name is EEXIST."""

    def unlink(self, token: int, path: str) -> None:
        """Remove the name *path* of a file."""

    def mkdir(self, token: int, path: str, mode: int) -> None:
        """Make the folder *path*."""

    def stat(self, token: int, path: str) -> None:
        """Look whether *path* exists; the result is 0."""

    def submit(self) -> None:
        """Give what was made to the kernel."""

    def ready(self) -> bool:
        """Tell whether something ended inside submit; `fd` need not poll readable for it."""

    def reap(self) -> list[tuple[int, int]]:
        """Return (token, result) of every request that has ended."""

    def close(self) -> None:
        """End the ring."""
