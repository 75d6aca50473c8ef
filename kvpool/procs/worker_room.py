"""
Room on one I/O worker's device: counted, kept, and made by removing what was not used for longest.

Theory. `core/eviction.py` says how many bytes have to go. What goes is found by a helper process (`room_scanner`)
that walks the device, all namespaces on it, and names the oldest keys. They are condemned in small batches: the object
table refuses those that are in use, tells everybody that the others are gone, and only then are their files removed, in
a thread (`io/remover.py`), the next batch when the last one has ended. So no load waits for a removal, and none is
surprised by one. Keys of namespaces that nobody has opened in this worker are removed without asking.

    look ──need──► scan ──► candidates ──► condemn ──RemoveKey──► remove ──KeysRemoved──► look
                                             └─ in use: it stays

Recency is the files' modification times. A load renews the time of a key, at most once in RENEW_S, so that a key in
daily use costs a few inode writes a day.

Does not cover: the sockets and the loop (`io_worker`).
"""

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvpool import config
from kvpool.core import layout
from kvpool.core.eviction import Aged, Bounds, Filesystem, Occupancy, Verdict
from kvpool.core.object_events import Dropped, Event, KeysCondemned, KeysFound, KeysRemoved, ObjectId
from kvpool.core.trailer import ALIGNMENT_BYTES
from kvpool.health import facts
from kvpool.health.facts import Facts
from kvpool.io.remover import Condemned, Remover
from kvpool.procs import room_scanner
from kvpool.procs.room_scanner import KeysAged, KeysFresh, RoomCounted, RoomFrame, SpaceSeen
from kvpool.procs.scanner import CLOCK_LAG_S, Frames
from kvpool.procs.turns import Walker
from kvpool.procs.worker_namespaces import Namespaces

log = logging.getLogger("kvpool.worker")

#: The filesystem is asked for its free space at most, and at least, this often.
LOOK_S_MIN, LOOK_S_MAX = 0.5, 5.0
#: Keys that go together.
BATCH_KEYS = 16
#: A scan names this much more than is needed, since some of it will be in use.
SCAN_MARGIN = 1.25
#: How often a shared device is counted anew.
RECOUNT_S = 300.0
#: Nothing could be removed: wait so long before the next scan.
PAUSE_S = 10.0
#: A key's time is renewed at most once in this time.
RENEW_S = 600.0
#: Keys remembered as renewed; beyond them some are renewed early.
RENEWED_MAX = 1 << 16
_READ_BYTES = 64 * 1024


@dataclass(slots=True, kw_only=True)
class _Scan:
    """
    A walk under way.

    Attributes:
        named: It was asked to name keys, not only to count.
    """

    walker: Walker
    named: bool
    frames: Frames[RoomFrame] = field(
        default_factory=lambda: Frames(msgspec.msgpack.Decoder(SpaceSeen | KeysFresh | KeysAged | RoomCounted))
    )
    spaces: dict[int, dict[int, str]] = field(default_factory=dict)
    keys: list[Aged] = field(default_factory=list)
    counted: RoomCounted | None = None


@dataclass(frozen=True, slots=True)
class _Going:
    """A key whose files are being removed; *namespace* None: nobody has opened it here."""

    namespace: int | None
    key: bytes


class Room:
    """
    See the module.

    Args:
        device: The device's settings.
        namespaces: Those opened here.
        tell: Hands an event to the object table, and performs what it asks for.
        watch: Lets the loop wake when a descriptor is readable; closing the descriptor ends that.
    """

    def __init__(
        self,
        device: config.DeviceSettings,
        namespaces: Namespaces,
        *,
        tell: Callable[[Event], None],
        watch: Callable[[int], None],
    ) -> None:
        self._device = device
        self._namespaces = namespaces
        self._tell = tell
        self._watch = watch
        self._occupancy = Occupancy(
            bounds=Bounds(
                capacity_bytes=device.capacity_bytes,
                high=device.high_watermark,
                low=device.low_watermark,
                min_free_bytes=device.min_free_bytes,
            )
        )
        self._remover = Remover()
        watch(self._remover.fd)
        self._scan: _Scan | None = None
        #: Folders of the last scan's namespaces, and the keys that it named and that are still to go.
        self._spaces: dict[int, dict[int, str]] = {}
        self._candidates: deque[Aged] = deque()
        #: Keys that the table was asked about, with the last known use; those it lets go move to `_batch`.
        self._asked: dict[tuple[int, bytes], float] = {}
        self._batch: list[Condemned] = []
        self._going: dict[int, _Going] = {}
        self._token = 0
        self._verdict = Verdict(0, storing=True, why="")
        #: False: `kvpool stores off`.
        self.stores_on = True
        self._looked_ns = self._paused_ns = 0
        self._renewed: tuple[set[tuple[int, bytes]], set[tuple[int, bytes]]] = (set(), set())
        self._turned_ns = time.monotonic_ns()
        self._evicted_keys = self._evicted_bytes = self._spared = self._scans = 0
        self._freed_in_scan = 0
        #: What was published since the scan under way started: object -> bytes.
        self._fresh: dict[ObjectId, int] = {}
        self._want_count = bool(device.capacity_bytes)
        #: When what other hosts stored and removed is to be counted too.
        self._recount_ns = 0 if device.shared and device.capacity_bytes else None

    # ------------------------------------------------------------ what the loop asks

    @property
    def refusing(self) -> Dropped | None:
        """Why the device takes no new objects; None: it does."""
        if not self.stores_on:
            return Dropped.OFF
        return None if self._verdict.storing else Dropped.ROOM

    def fds(self) -> frozenset[int]:
        """Return the descriptors that the loop watches for this."""
        scan = {self._scan.walker.fd} if self._scan is not None else set()
        return frozenset({self._remover.fd, *scan})

    def due_ns(self) -> int:
        """Return when :meth:`look` has to be called at the latest."""
        return self._looked_ns + int(LOOK_S_MAX * 1e9)

    @property
    def walking(self) -> bool:
        """Whether a helper walks the device."""
        return self._scan is not None

    def let_scan(self, going: bool) -> None:
        """Let it go on, or wait."""
        if self._scan is not None:
            self._scan.walker.let(going)

    def on_ready(self, fd: int) -> None:
        """One of :meth:`fds` is readable."""
        if fd == self._remover.fd:
            self._reap()
        elif self._scan is not None:
            self._read_scan(self._scan, fd)

    def look(self, now_ns: int) -> None:
        """See whether there is room; start what makes some."""
        if now_ns - self._looked_ns >= LOOK_S_MIN * 1e9:
            self._looked_ns = now_ns
            self._decide()
        if self._scan is not None or self._going or now_ns < self._paused_ns:
            return
        if self._want_count or (self._recount_ns is not None and now_ns >= self._recount_ns):
            self._want_count = False
            if self._recount_ns is not None:
                self._recount_ns = now_ns + int(RECOUNT_S * 1e9)
            self._start_scan(0)
        elif self._verdict.need_bytes and self._candidates:
            self._condemn(self._verdict.need_bytes)
        elif self._verdict.need_bytes:
            self._start_scan(int(self._verdict.need_bytes * SCAN_MARGIN))

    def _decide(self) -> None:
        was = self._verdict
        try:
            space = os.statvfs(self._device.path)
        except OSError:
            return
        self._verdict = self._occupancy.look(
            Filesystem(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)
        )
        if was.storing and not self._verdict.storing:
            log.warning("device %s: stores stop (%s), loads go on", self._device.name, self._verdict.why)
        elif not was.storing and self._verdict.storing:
            log.warning("device %s: there is room again, stores go on", self._device.name)

    # ------------------------------------------------------------ what happens to objects

    def published(self, target: ObjectId, slot_bytes: int, folders: int) -> None:
        """A new object is on disk, and *folders* that were made for it."""
        stored_bytes = slot_bytes + folders * ALIGNMENT_BYTES
        self._occupancy.changed(stored_bytes)
        if self._scan is not None:
            self._fresh[target] = stored_bytes
        if self._occupancy.over_high:
            self._looked_ns = 0

    def said_full(self) -> None:
        """A write found no room."""
        self._occupancy.said_full()
        self._looked_ns = 0

    def used(self, namespace: int, rank: int, keys: list[bytes]) -> None:
        """A rank's load asked for these keys: they are in use."""
        now_ns = time.monotonic_ns()
        young, old = self._renewed
        if now_ns - self._turned_ns >= RENEW_S * 1e9 / 2 or len(young) >= RENEWED_MAX // 2:
            self._renewed = young, old = set(), young
            self._turned_ns = now_ns
        paths = []
        for key in keys:
            name = (namespace, key)
            if name not in young:
                young.add(name)
                if name not in old:
                    paths.append(self._namespaces.path(ObjectId(namespace, key, rank)))
        if paths:
            self._remover.renew(paths)

    # ------------------------------------------------------------ scans

    def _start_scan(self, want_bytes: int) -> None:
        try:
            walker = Walker(room_scanner.command(self._device.path, want_bytes, time.time() - CLOCK_LAG_S))
        except OSError as error:
            log.warning("device %s: its files cannot be counted now: %s", self._device.name, error)
            self._pause()
            return
        self._scans += 1
        self._scan = _Scan(walker=walker, named=bool(want_bytes))
        self._occupancy.scan_started()
        self._freed_in_scan = 0
        self._fresh.clear()
        self._watch(walker.fd)

    def _read_scan(self, scan: _Scan, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
            for frame in scan.frames.feed(data):
                self._take_frame(scan, frame)
        except BlockingIOError:
            return
        except msgspec.MsgspecError as error:
            log.warning("device %s: counting its files broke: %s", self._device.name, error)
            data = b""
        if not data:
            self._end_scan(scan)

    def _take_frame(self, scan: _Scan, frame: RoomFrame) -> None:
        match frame:
            case SpaceSeen():
                scan.spaces[frame.space] = frame.directories
            case KeysFresh():
                namespace = self._namespaces.find(_first(scan.spaces[frame.space]))
                if namespace is not None:
                    seen = [ObjectId(namespace, key, rank) for key, ranks in frame.keys for rank in ranks]
                    self._occupancy.scan_saw(sum(self._fresh.pop(target, 0) for target in seen))
            case KeysAged():
                scan.keys += [Aged(*key) for key in frame.keys]
            case RoomCounted():
                scan.counted = frame

    def _end_scan(self, scan: _Scan) -> None:
        self._scan = None
        scan.walker.end(kill=scan.counted is None)
        if scan.counted is None:
            log.warning("device %s: its files could not be counted", self._device.name)
            self._want_count = bool(self._device.capacity_bytes) and self._occupancy.used_bytes is None
            self._pause()
            return
        first = self._occupancy.used_bytes is None
        self._occupancy.scan_ended(scan.counted.total_bytes)
        self._want_count |= self._occupancy.recount
        log.log(
            logging.INFO if first else logging.DEBUG,
            "device %s: %d keys, %.2f GiB on disk",
            self._device.name,
            scan.counted.keys,
            scan.counted.total_bytes / 2**30,
        )
        self._spaces, self._candidates = scan.spaces, deque(scan.keys)
        self._decide()
        if scan.named and not scan.keys:
            self._occupancy.relieved()
            self._pause()

    def _pause(self) -> None:
        self._paused_ns = time.monotonic_ns() + int(PAUSE_S * 1e9)

    # ------------------------------------------------------------ removals

    def _condemn(self, need_bytes: int) -> None:
        """Let the next few of the oldest keys go."""
        by_namespace: dict[int, list[bytes]] = {}
        taken = 0
        while self._candidates and taken < BATCH_KEYS and need_bytes > 0:
            aged = self._candidates.popleft()
            taken += 1
            need_bytes -= aged.stored_bytes
            directories = self._spaces[aged.space]
            namespace = self._namespaces.find(_first(directories))
            if namespace is None:
                paths = tuple(layout.object_path(directory, aged.key) for directory in directories.values())
                self._add_to_batch(_Going(None, aged.key), paths, aged.used_s)
            else:
                self._asked[namespace, aged.key] = aged.used_s
                by_namespace.setdefault(namespace, []).append(aged.key)
        for namespace, keys in by_namespace.items():
            self._tell(KeysCondemned(namespace=namespace, keys=keys))
        self._spared += len(self._asked)
        self._asked.clear()
        batch, self._batch = self._batch, []
        if batch:
            self._remover.remove(batch)
        else:
            self._looked_ns = 0  # go on at once
        if not self._candidates and self._freed_in_scan == 0 and not batch:
            self._occupancy.relieved()
            self._pause()

    def told_removed(self, freed_bytes: int) -> None:
        """Somebody else removed files."""
        self._occupancy.removed_by_others(freed_bytes)
        self._looked_ns = 0

    def forget(self, target: ObjectId) -> None:
        """Remove one object's file."""
        batch, self._batch = self._batch, []
        self._add_to_batch(_Going(None, target.key), (self._namespaces.path(target),), math.inf)
        forgotten, self._batch = self._batch, batch
        self._remover.remove(forgotten)

    def remove(self, namespace: int, key: bytes) -> None:
        """The table lets that key go."""
        used_s = self._asked.pop((namespace, key))
        ranks = self._namespaces.rank_count(namespace)
        paths = tuple(self._namespaces.path(ObjectId(namespace, key, rank)) for rank in range(ranks))
        self._add_to_batch(_Going(namespace, key), paths, used_s)

    def _add_to_batch(self, going: _Going, paths: tuple[str, ...], used_s: float) -> None:
        self._token += 1
        self._going[self._token] = going
        self._batch.append(Condemned(self._token, paths, used_s))

    def _reap(self) -> None:
        failed = ""
        for removed in self._remover.reap():
            going = self._going.pop(removed.token)
            self._occupancy.changed(-removed.stored_bytes)
            self._evicted_bytes += removed.stored_bytes
            self._freed_in_scan += removed.stored_bytes
            self._evicted_keys += not removed.left
            failed = removed.error or failed
            if going.namespace is not None:
                self._tell(KeysRemoved(namespace=going.namespace, keys=[going.key]))
                for rank in removed.left:
                    self._tell(KeysFound(namespace=going.namespace, rank=rank, keys=[going.key]))
        if failed:
            log.warning("device %s: files cannot be removed (%s): a pause", self._device.name, failed)
            self._candidates.clear()
            self._pause()
        if not self._going:
            self._looked_ns = 0

    # ------------------------------------------------------------ the rest

    def facts(self) -> Facts:
        """Return what health shows."""
        told: Facts = {
            facts.CAPACITY_BYTES: self._device.capacity_bytes,
            facts.STORING: self.refusing is None,
            facts.EVICTED_KEYS: self._evicted_keys,
            facts.EVICTED_BYTES: self._evicted_bytes,
            facts.EVICTIONS_SPARED: self._spared,
        }
        if self._occupancy.used_bytes is not None:
            told[facts.USED_BYTES] = self._occupancy.used_bytes
        if self.refusing is not None:
            told[facts.STORING_WHY] = self._verdict.why if self.stores_on else facts.STORES_TURNED_OFF
        return told

    def close(self) -> None:
        """End the helper and the thread."""
        if self._scan is not None:
            self._scan.walker.end(kill=True)
        self._remover.close()


def _first(directories: dict[int, str]) -> str:
    """Return the folder that names a namespace."""
    return directories[min(directories)]
