"""
The namespaces of one I/O worker: their directories, what an object's file is called, scans and probes.

Theory. A namespace is opened once: its directories on the device are claimed (`io/files.py`), and a helper process
reads the snapshot of its index, if there is one, and walks them (`scanner`). While it walks, loads work by name, and
the coordinator may ask for keys that are not indexed yet (a probe: every rank's file is looked up by name). A scan that
fails is a complete scan as far as anybody waits for it: what it did not see is a miss until it is stored again.

Does not cover: the index itself (`core/key_index.py`), reading and writing of objects (`io/engine.py`).
"""

import logging
import os
from dataclasses import dataclass, field

import msgspec

from kvpool.core import layout, trailer
from kvpool.core.epochs import base_of, epoch_of
from kvpool.core.identities import differences
from kvpool.core.object_events import ObjectId
from kvpool.core.trailer import Expected
from kvpool.io import snapshot_file
from kvpool.io.engine import Ended, Engine
from kvpool.io.files import LEFTOVER_AGE_S, DeviceFiles
from kvpool.procs import scanner
from kvpool.procs.turns import Walker
from kvpool.procs.worker_epochs import WorkerEpochs
from kvpool.wire.messages import NamespaceSpec

log = logging.getLogger("kvpool.worker")

#: Bytes taken from a scan's pipe in one pass, so that a scan never delays a load.
SCAN_READ_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """
    One namespace on this device.

    Attributes:
        directories: One absolute directory a rank.
        fingerprint: 32 bytes, as trailers hold it.
        payload_bytes: KV group -> payload bytes of one object.
    """

    spec: NamespaceSpec
    directories: list[str]
    fingerprint: bytes
    payload_bytes: dict[int, int]


@dataclass(slots=True, kw_only=True)
class _Scan:
    namespace: int
    walker: Walker
    frames: scanner.FrameReader = field(default_factory=scanner.FrameReader)
    finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    probe: int
    namespace: int
    keys: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scanned:
    """
    What one read of a scan's pipe brought.

    Attributes:
        ended: The pipe is at its end.
        whole: All was walked.
    """

    namespace: int
    found: list[scanner.Found]
    ended: bool
    remembered: list[scanner.Remembered] = field(default_factory=list)
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a probe found: per rank the keys whose files are there."""

    probe: int
    namespace: int
    found: list[scanner.Found]


class Namespaces:
    """
    All namespaces opened on one device.

    Args:
        files: The device's directory.
        device: The device's name, for logs.
    """

    def __init__(self, files: DeviceFiles, device: str, *, shared: bool = False) -> None:
        self._files = files
        #: A temporary file that old is nobody's any more: other hosts may be at work.
        self._leftover_age_s = LEFTOVER_AGE_S if shared else scanner.CLOCK_LAG_S
        self._device = device
        self.epochs = WorkerEpochs(files, device)
        self._open: dict[int, Namespace] = {}
        #: Namespaces whose epoch is over: nothing of them is read or written any more.
        self._retired: set[int] = set()
        #: Descriptor of the scanner's output -> its scan.
        self._scans: dict[int, _Scan] = {}
        #: Engine token -> probe.
        self._probes: dict[int, _Probe] = {}
        self._token = 0

    def open(self, namespace: int, spec: NamespaceSpec) -> int:
        """
        Claim the directories and start the scan; return the descriptor that polls readable as the scan goes on.

        Raises:
            DeviceError: The filesystem refused.
            OSError: The scanner cannot be started.
        """
        directories = self._files.open_namespace(spec)
        self._say_difference(spec)
        if epoch_of(spec):
            self.epochs.clear_older(spec)
        self._open[namespace] = Namespace(
            spec=spec,
            directories=directories,
            fingerprint=bytes.fromhex(spec.fingerprint),
            payload_bytes={group.group: group.object_bytes for group in spec.groups},
        )
        command = scanner.command(
            directories,
            self.snapshot_path(namespace),
            spec.fingerprint,
            leftover_age_s=self._leftover_age_s,
        )
        walker = Walker(command)
        self._scans[walker.fd] = _Scan(namespace=namespace, walker=walker)
        return walker.fd

    def retire(self, fingerprint: str, epoch: int) -> list[int]:
        """Serve no older epoch of what clients call *fingerprint*; return the namespaces that this ends."""
        older = [
            number
            for number, opened in self._open.items()
            if base_of(opened.spec) == fingerprint and epoch_of(opened.spec) < epoch and number not in self._retired
        ]
        self._retired.update(older)
        return older

    def is_retired(self, namespace: int) -> bool:
        """Tell whether the namespace's epoch is over."""
        return namespace in self._retired

    def _say_difference(self, spec: NamespaceSpec) -> None:
        """Say once, for each namespace, why nothing of what lies under its model's name is found."""
        other = self._files.others.get(spec.fingerprint)
        if other is not None:
            log.warning(
                "device %s: KV of %s is on disk that this engine cannot use; it differs in %s",
                self._device,
                spec.model_name,
                "; ".join(differences(other, spec)) or "its fingerprint",
            )

    def fingerprint(self, namespace: int) -> str:
        """Return the namespace's fingerprint, 64 hex digits."""
        return self._open[namespace].spec.fingerprint

    def snapshot_path(self, namespace: int) -> str:
        """Return where the snapshot of the namespace's index is."""
        return snapshot_file.path_of(self._files.private, self.fingerprint(namespace))

    def find(self, directory: str) -> int | None:
        """Return the namespace whose first rank's folder that is, if it is open."""
        return next((number for number, opened in self._open.items() if opened.directories[0] == directory), None)

    def rank_count(self, namespace: int) -> int:
        """Return how many ranks hold each key."""
        return len(self._open[namespace].directories)

    def slot_bytes(self, namespace: int) -> dict[int, int]:
        """Return the slot size of each KV group's objects."""
        return {
            group: trailer.slot_bytes(payload_bytes)
            for group, payload_bytes in self._open[namespace].payload_bytes.items()
        }

    def path(self, target: ObjectId) -> str:
        """Return the object's path."""
        return layout.object_path(self._open[target.namespace].directories[target.rank], target.key)

    def place(self, target: ObjectId) -> tuple[str, str]:
        """Return the object's folder and its name there."""
        directory = self._open[target.namespace].directories[target.rank]
        return f"{directory}/{layout.object_directory(target.key)}", layout.object_name(target.key)

    def expected(self, target: ObjectId) -> Expected:
        """Return what the object's trailer must say."""
        namespace = self._open[target.namespace]
        group = int.from_bytes(target.key[-layout.GROUP_BYTES :], "big")
        return Expected(target.key, target.rank, namespace.fingerprint, namespace.payload_bytes[group])

    # ------------------------------------------------------------ scans

    def scan_fds(self) -> frozenset[int]:
        """Return the descriptors of scans under way."""
        return frozenset(self._scans)

    def complete(self) -> bool:
        """Tell whether no scan is under way."""
        return not self._scans

    def let_scans(self, going: bool) -> None:
        """Let the walks go on, or wait."""
        for scan in self._scans.values():
            scan.walker.let(going)

    def read_scan(self, fd: int) -> Scanned:
        """Take in what a scan has said; at its end reap its process."""
        scan = self._scans[fd]
        try:
            data = os.read(fd, SCAN_READ_BYTES)
        except BlockingIOError:
            return Scanned(namespace=scan.namespace, found=[], ended=False)
        found: list[scanner.Found] = []
        remembered: list[scanner.Remembered] = []
        try:
            for message in scan.frames.feed(data):
                match message:
                    case scanner.Found():
                        found.append(message)
                    case scanner.Remembered():
                        remembered.append(message)
                    case scanner.SnapshotRead():
                        self._report_snapshot(message)
                    case scanner.ScanEnded():
                        scan.finished = True
                        self._report(scan, message)
        except msgspec.MsgspecError as error:
            log.warning("device %s: the scan of its index broke: %s", self._device, error)
            data = b""
        if not data:
            self._end_scan(fd, scan)
        return Scanned(
            namespace=scan.namespace, found=found, ended=not data, remembered=remembered, whole=scan.finished
        )

    def _report_snapshot(self, read: scanner.SnapshotRead) -> None:
        if read.reason:
            log.warning("device %s: its index is scanned for anew: %s", self._device, read.reason)
        elif read.keys:
            log.info(
                "device %s: %d keys known from the last run, while its folders are scanned", self._device, read.keys
            )

    def _report(self, scan: _Scan, ended: scanner.ScanEnded) -> None:
        model = self._open[scan.namespace].spec.model_name
        log.info("device %s: %s has %d objects on disk", self._device, model, ended.objects)
        if ended.removed:
            log.info("device %s: %d unpublished files of an earlier run removed", self._device, ended.removed)
        if ended.unreadable:
            log.warning(
                "device %s: %d folders of %s cannot be read; what is in them is a miss",
                self._device,
                ended.unreadable,
                model,
            )

    def _end_scan(self, fd: int, scan: _Scan) -> None:
        del self._scans[fd]
        if not scan.finished:
            log.warning("device %s: the scan of its index ended early; what it missed is stored again", self._device)
        scan.walker.end(kill=not scan.finished)

    # ------------------------------------------------------------ probes

    def begin_probe(self, engine: Engine, probe: int, namespace: int, keys: list[bytes]) -> bool:
        """Look every rank's file of *keys* up by name; False where that namespace is not open."""
        opened = self._open.get(namespace)
        if opened is None:
            return False
        self._token += 1
        self._probes[self._token] = _Probe(probe=probe, namespace=namespace, keys=keys)
        engine.probe(
            self._token, [layout.object_path(directory, key) for directory in opened.directories for key in keys]
        )
        return True

    def end_probe(self, ended: Ended) -> Probed:
        """Return what the probe that just ended found."""
        probe = self._probes.pop(ended.op)
        by_rank: dict[int, list[bytes]] = {}
        for path in ended.found:
            rank, index = divmod(path, len(probe.keys))
            by_rank.setdefault(rank, []).append(probe.keys[index])
        found = [scanner.Found(rank=rank, keys=keys) for rank, keys in by_rank.items()]
        return Probed(probe=probe.probe, namespace=probe.namespace, found=found)

    def close(self) -> None:
        """End the helpers."""
        self.epochs.close()
        for scan in self._scans.values():
            scan.walker.end(kill=True)
        self._scans.clear()
