"""
The snapshots of a worker's indexes: written now and then beside its work, and at its end.

Theory. While it serves, one namespace at a time is sent to a helper (`snapshot_writer`) down a pipe, a piece whenever
there is room, so a pass never waits for a file. A part of the index is copied when its turn comes: what changes
meanwhile is in the snapshot or not, and either is fine, since it is a hint. At the end nobody waits for this process
any more, and it writes what has changed itself.

Does not cover: the bytes (`core/snapshot.py`), reading them (`scanner`).
"""

import contextlib
import logging
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvpool.core import snapshot
from kvpool.core.key_index import Namespace
from kvpool.errors import IntegrityError, unreachable
from kvpool.io import snapshot_file
from kvpool.procs import snapshot_writer
from kvpool.procs.worker_namespaces import Namespaces

log = logging.getLogger("kvpool.worker")

#: Looked at this often, whether one is due.
LOOK_S = 10.0
#: Given to the pipe in one pass at most.
PASS_BYTES = 256 * 1024


@dataclass(slots=True)
class _Kept:
    """One namespace: how far its index had changed when it was last written, and when that was."""

    changes: int
    written_ns: int


@dataclass(slots=True, kw_only=True)
class _Writing:
    """A snapshot on its way to its helper: what is left of it, and how far the index had changed at its start."""

    namespace: int
    process: subprocess.Popen[bytes]
    fd: int
    pieces: Iterator[bytes]
    changes: int
    rest: memoryview


@dataclass(slots=True, kw_only=True)
class _Ending:
    """A helper that has all it needs, and the descriptor that polls readable at its end."""

    namespace: int
    process: subprocess.Popen[bytes]
    pidfd: int


class Snapshots:
    """See the module. *device*: its name, for logs."""

    def __init__(
        self,
        device: str,
        poller: select.epoll,
        namespaces: Namespaces,
        *,
        index_of: Callable[[int], Namespace | None],
    ) -> None:
        self._device = device
        self._poller = poller
        self._namespaces = namespaces
        self._index_of = index_of
        self._kept: dict[int, _Kept] = {}
        self._writing: _Writing | None = None
        self._ending: _Ending | None = None
        self._looked_ns = 0

    # ------------------------------------------------------------ what the loop asks and says

    def opened(self, namespace: int) -> None:
        """A namespace is served from now on."""
        self._kept[namespace] = _Kept(0, time.monotonic_ns())

    def retired(self, namespace: int) -> None:
        """A namespace was reset: nothing of it is to be known again."""
        self._kept.pop(namespace, None)
        if self._writing is not None and self._writing.namespace == namespace:
            self._give_up(self._writing)
        with contextlib.suppress(OSError):
            os.unlink(self._namespaces.snapshot_path(namespace))

    def fds(self) -> frozenset[int]:
        """Return the descriptors that the loop listens to for this."""
        writing = {self._writing.fd} if self._writing is not None else set()
        return frozenset(writing | ({self._ending.pidfd} if self._ending is not None else set()))

    def due_ns(self) -> int | None:
        """Return when :meth:`look` has to be called at the latest; None while nothing has changed."""
        spaces = ((self._index_of(namespace), kept) for namespace, kept in self._kept.items())
        if any(space is not None and space.changes != kept.changes for space, kept in spaces):
            return self._looked_ns + int(LOOK_S * 1e9)
        return None

    def look(self, now_ns: int) -> None:
        """Start to write what is due."""
        if now_ns - self._looked_ns < LOOK_S * 1e9:
            return
        self._looked_ns = now_ns
        if self._writing is not None or self._ending is not None:
            return
        for namespace, kept in self._kept.items():
            space = self._index_of(namespace)
            age_s = (now_ns - kept.written_ns) / 1e9
            if space is not None and snapshot.is_due(space.changes - kept.changes, len(space.masks), age_s):
                kept.written_ns = now_ns
                self._start(namespace, space)
                return

    def on_ready(self, fd: int) -> None:
        """One of :meth:`fds` is ready: the helper takes more, or has ended."""
        if self._writing is not None and fd == self._writing.fd:
            self._pump(self._writing)
        elif self._ending is not None and fd == self._ending.pidfd:
            self._reap(self._ending)

    def finish(self) -> None:
        """Write what has changed, here and now: nothing else is to be done."""
        self.close()
        for namespace, kept in self._kept.items():
            space = self._index_of(namespace)
            if space is None or space.changes == kept.changes:
                continue
            try:
                snapshot_file.write(self._namespaces.snapshot_path(namespace), self._pieces(namespace, space))
            except (OSError, IntegrityError) as error:
                log.warning("device %s: its index will be scanned for at the next start: %s", self._device, error)

    def close(self) -> None:
        """End the helper."""
        if self._writing is not None:
            self._give_up(self._writing)
        if self._ending is not None:
            self._ending.process.kill()
            self._reap(self._ending)

    # ------------------------------------------------------------ inside

    def _pieces(self, namespace: int, space: Namespace) -> Iterator[bytes]:
        writer = snapshot.Writer(self._namespaces.fingerprint(namespace), space.rank_count)
        part = 0
        while part < space.masks.part_count:
            key_bytes, entries = space.masks.packed_part(part)
            yield writer.block(key_bytes, space.masks.value_bytes, entries)
            part += 1
        yield writer.end()

    def _start(self, namespace: int, space: Namespace) -> None:
        try:
            process = subprocess.Popen(
                snapshot_writer.command(self._namespaces.snapshot_path(namespace)),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                close_fds=True,
            )
        except OSError as error:
            log.warning("device %s: its index cannot be written now: %s", self._device, error)
            return
        if process.stdin is None:
            unreachable("a writer's input is a pipe")
        fd = process.stdin.fileno()
        os.set_blocking(fd, False)
        self._writing = _Writing(
            namespace=namespace, process=process, fd=fd, pieces=self._pieces(namespace, space), changes=space.changes,
            rest=memoryview(b""),
        )  # fmt: skip
        self._poller.register(fd, select.EPOLLOUT)

    def _pump(self, writing: _Writing) -> None:
        given = 0
        try:
            while given < PASS_BYTES:
                if not writing.rest:
                    piece = next(writing.pieces, None)
                    if piece is None:
                        self._end(writing)
                        return
                    writing.rest = memoryview(piece)
                    continue
                count = os.write(writing.fd, writing.rest)
                writing.rest = writing.rest[count:]
                given += count
        except BlockingIOError:
            return
        except BrokenPipeError:
            log.warning("device %s: its index could not be written", self._device)
            self._give_up(writing)

    def _end(self, writing: _Writing) -> None:
        """The helper has everything."""
        self._writing = None
        if writing.namespace in self._kept:
            self._kept[writing.namespace].changes = writing.changes
        if writing.process.stdin is not None:
            writing.process.stdin.close()
        pidfd = os.pidfd_open(writing.process.pid)
        self._ending = _Ending(namespace=writing.namespace, process=writing.process, pidfd=pidfd)
        self._poller.register(pidfd, select.EPOLLIN)

    def _reap(self, ending: _Ending) -> None:
        self._ending = None
        os.close(ending.pidfd)
        if ending.process.wait() != 0 and ending.namespace in self._kept:
            self._kept[ending.namespace].changes = -1

    def _give_up(self, writing: _Writing) -> None:
        self._writing = None
        writing.process.kill()
        with contextlib.suppress(BrokenPipeError):
            if writing.process.stdin is not None:
                writing.process.stdin.close()
        writing.process.wait()
