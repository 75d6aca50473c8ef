"""
Mapping and pinning of staging segments, beside the rank client's thread.

Theory. Pinning 1 GiB takes a large part of a second, so it happens on a thread of its own that lives as long as
there is work; loads of segments already known go on meanwhile. Tasks are done in the order given, results come back
through a queue that the client's thread reads when woken.
"""

import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvpool.client.copier import Copier
from kvpool.errors import KvpoolError
from kvpool.io import shm

log = logging.getLogger(__name__)


class _Task(NamedTuple):
    """Map *fd* (ours), or unmap when it is None."""

    segment: int
    fd: int | None
    segment_bytes: int


class Mapped(NamedTuple):
    """End of a `map`; *ok* False: the segment cannot be used here."""

    segment: int
    ok: bool


class Unmapped(NamedTuple):
    """End of an `unmap`."""

    segment: int


class SegmentMapper:
    """Maps and unmaps segments in the background; *wake* is called, on that thread, after each result."""

    def __init__(self, copier: Copier, wake: Callable[[], None]) -> None:
        self._copier = copier
        self._wake = wake
        self._lock = threading.Lock()
        self._tasks: deque[_Task] = deque()
        self._thread: threading.Thread | None = None
        self._results: deque[Mapped | Unmapped] = deque()
        #: Only touched by the mapping thread.
        self._mappings: dict[int, mmap.mmap] = {}

    def map(self, segment: int, fd: int, segment_bytes: int) -> None:
        """Map and attach a segment; *fd* is the mapper's from now on. Ended by Mapped."""
        self._submit(_Task(segment, fd, segment_bytes))

    def unmap(self, segment: int) -> None:
        """Detach and unmap a segment that no copy touches. Ended by Unmapped, also if it was never mapped."""
        self._submit(_Task(segment, None, 0))

    def take_results(self) -> list[Mapped | Unmapped]:
        """Return what ended since the last call; never blocks."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def join(self, timeout_s: float) -> bool:
        """Wait until there is nothing to do; tell whether that came."""
        with self._lock:
            thread = self._thread
        if thread is None:
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _submit(self, task: _Task) -> None:
        with self._lock:
            self._tasks.append(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvpool-segments", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._thread = None
                    return
                task = self._tasks.popleft()
            self._results.append(self._map(task, task.fd) if task.fd is not None else self._unmap(task.segment))
            self._wake()

    def _map(self, task: _Task, fd: int) -> Mapped:
        try:
            memory = shm.map_segment(fd, task.segment_bytes)
        except KvpoolError as error:
            log.warning("kvpool: segment %d cannot be mapped, objects in it are misses: %s", task.segment, error)
            return Mapped(task.segment, ok=False)
        finally:
            os.close(fd)
        try:
            self._copier.attach(task.segment, memory)
        except Exception:  # border: the copier is the engine's code
            log.exception("kvpool: segment %d cannot be attached, objects in it are misses", task.segment)
            return Mapped(task.segment, ok=False)
        self._mappings[task.segment] = memory
        return Mapped(task.segment, ok=True)

    def _unmap(self, segment: int) -> Unmapped:
        memory = self._mappings.pop(segment, None)
        if memory is not None:
            try:
                self._copier.detach(segment)
                memory.close()
            except Exception:  # border: the copier is the engine's code; the mapping then stays until the process ends
                log.exception("kvpool: segment %d cannot be unmapped, its memory stays until the process ends", segment)
        return Unmapped(segment)
