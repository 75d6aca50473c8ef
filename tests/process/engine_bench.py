"""A storage engine on a real directory with staging of its own, driven as an I/O worker drives it."""

import contextlib
import dataclasses
import functools
import hashlib
import mmap
import os
import random
import select
import time
from pathlib import Path

from kvpool.core import layout
from kvpool.core.object_events import SlotRef
from kvpool.core.trailer import Expected, slot_bytes
from kvpool.io import syscall_ring
from kvpool.io.engine import Ended, SegmentMemory
from kvpool.io.faults import Faults, FaultSettings
from kvpool.io.files import DeviceFiles, Features
from kvpool.io.ring_engine import RingEngine
from kvpool.io.ring_interface import Ring
from kvpool.io.thread_ring import ThreadRing

FINGERPRINT = b"\xab" * 32
SEGMENT = 7
WAIT_S = 20.0


@functools.cache
def ring_kinds() -> list[str]:
    """Return the kinds of ring that this host has: threads, io_uring by system calls, io_uring by the binding."""
    kinds = ["threads"]
    if syscall_ring.why_not() is None:
        kinds.append("syscalls")
        with contextlib.suppress(ImportError):
            from kvpool.io import ring  # noqa: PLC0415 - the binding may be missing

            if ring.why_not() is None:
                kinds.append("binding")
    return kinds


def make_ring(kind: str, pipe_fd: int) -> Ring:
    """Make a ring of that kind."""
    if kind == "threads":
        return ThreadRing(threads=8)
    if kind == "syscalls":
        return syscall_ring.SyscallRing(entries=64, pipe_fd=pipe_fd)
    from kvpool.io import ring  # noqa: PLC0415 - the binding may be missing

    return ring.UringRing(entries=64, pipe_fd=pipe_fd)


def key(number: int, group: int = 0) -> bytes:
    """Return a key like vLLM's."""
    return hashlib.sha256(str(number).encode()).digest() + group.to_bytes(4, "big")


class Bench:
    """The engine, one segment of slots, and its files."""

    def __init__(
        self,
        root: Path,
        kind: str,
        *,
        payload_bytes: int = 200_000,
        slots: int = 8,
        faults: FaultSettings | None = None,
        verify: bool = True,
        sync: bool = False,
        **features: object,
    ) -> None:
        self.files = DeviceFiles(str(root))
        if features:
            self.files.features: Features = dataclasses.replace(self.files.features, **features)
        self.root = root
        self.namespace = f"{root}/model/rank_0/dtype"
        self.payload_bytes = payload_bytes
        self.slot_bytes = slot_bytes(payload_bytes)
        self.slots = slots
        self.engine = RingEngine(
            self.files,
            lambda pipe_fd: make_ring(kind, pipe_fd),
            faults=Faults(faults) if faults else None,
            verify=verify,
            sync_on_store=sync,
        )
        self.memory = mmap.mmap(-1, self.slot_bytes * slots)
        self.engine.add_segments([SegmentMemory(SEGMENT, self.memory, self.slot_bytes)])
        self._op = 0

    def expected(self, number: int) -> Expected:
        """Return what object *number* is."""
        return Expected(key(number), 0, FINGERPRINT, self.payload_bytes)

    def path(self, number: int) -> Path:
        """Return the path of object *number*."""
        return Path(layout.object_path(self.namespace, key(number)))

    def fill(self, slot: int, number: int) -> bytes:
        """Put object *number*'s bytes into a slot, garbage behind them; return them."""
        payload = random.Random(number).randbytes(self.payload_bytes)
        base = slot * self.slot_bytes
        self.memory[base : base + self.slot_bytes] = payload + b"\xee" * (self.slot_bytes - self.payload_bytes)
        return payload

    def payload(self, slot: int) -> bytes:
        """Return the payload in a slot."""
        base = slot * self.slot_bytes
        return self.memory[base : base + self.payload_bytes]

    def poison(self) -> None:
        """Overwrite all slots."""
        self.memory[:] = b"\x55" * len(self.memory)

    def publish(self, number: int, slot: int) -> int:
        """Start the publication of object *number*; return its op."""
        self._op += 1
        directory = f"{self.namespace}/{layout.object_directory(key(number))}"
        self.engine.publish_object(
            self._op, directory, layout.object_name(key(number)), SlotRef(SEGMENT, slot), self.expected(number)
        )
        return self._op

    def open(self, number: int, path: Path | None = None) -> int:
        """Start to open object *number*; return the op."""
        self._op += 1
        self.engine.open_file(self._op, str(path or self.path(number)))
        return self._op

    def read(self, op: int, number: int, slot: int) -> None:
        """Start to read what *op* opened."""
        self.engine.read_file(op, SlotRef(SEGMENT, slot), self.expected(number))

    def wait(self, count: int) -> list[Ended]:
        """Return the next *count* ends, as an I/O worker's loop gets them."""
        ended: list[Ended] = []
        deadline_s = time.monotonic() + WAIT_S
        self.engine.submit()
        with contextlib.closing(select.epoll()) as epoll:
            for fd in self.engine.fds():
                epoll.register(fd, select.EPOLLIN)
            while len(ended) < count:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"only {len(ended)} of {count} ended"
                due_ns = self.engine.next_due_ns()
                if due_ns is not None:
                    left_s = min(left_s, max(0.0, (due_ns - time.monotonic_ns()) / 1e9))
                epoll.poll(left_s)
                ended += self.engine.reap()
        assert count == len(ended)
        return ended

    def store(self, number: int, slot: int = 0) -> Ended:
        """Publish object *number* and wait for the end."""
        self.fill(slot, number)
        self.publish(number, slot)
        return self.wait(1)[0]

    def load(self, number: int, slot: int = 0, path: Path | None = None) -> Ended:
        """Open and read object *number*; return how that ended."""
        op = self.open(number, path)
        opened = self.wait(1)[0]
        if opened.error is not None:
            return opened
        self.read(op, number, slot)
        return self.wait(1)[0]

    def settle(self) -> None:
        """Wait until closes that nobody waits for have been made."""
        deadline_s = time.monotonic() + WAIT_S
        while any(ring.in_flight for ring in self.engine._rings):
            assert time.monotonic() < deadline_s
            assert [] == self.engine.reap()
            select.select(self.engine.fds(), [], [], 0.05)

    def close(self) -> None:
        """End the engine."""
        self.engine.close()


def temporaries(root: Path) -> list[str]:
    """Return the names of files below *root* that were never published."""
    return [name for _, _, names in os.walk(root) for name in names if layout.is_temporary(name)]
