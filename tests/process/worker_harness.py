"""A real I/O worker as a process, with the test as its coordinator and as its ranks."""

import contextlib
import json
import mmap
import os
import random
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvpool.config import DeviceSettings, PoolSettings, Settings, to_json
from kvpool.core import layout, trailer
from kvpool.errors import Code
from kvpool.io import channel, shm
from kvpool.io.faults import FaultSettings
from kvpool.procs.io_worker import FAULTS_VARIABLE
from kvpool.wire import messages as m
from tests.process.pool_harness import ROOT, WAIT_S, Talker, namespace

OBJECT_BYTES = 60_000
SLOT_BYTES = trailer.slot_bytes(OBJECT_BYTES)
ENGINE = "engine-0"
DEVICE = "nvme0"


def key_of(number: int, group: int = 0) -> bytes:
    """Return a key like vLLM's: spread over folders."""
    return random.Random(number).randbytes(32) + group.to_bytes(4, "big")


def payload_of(number: int, rank: int = 0) -> bytes:
    """Return what object *number* of that rank holds."""
    return random.Random(1_000 * number + rank).randbytes(OBJECT_BYTES)


def mounted_disk(stack: contextlib.ExitStack, at: Path, *options: str, size: int = 24 << 20) -> Path:
    """Make and mount an ext4 of that size at *at*: a loop device over a file in shared memory. Needs root."""
    image, name = tempfile.mkstemp(prefix="disk-test-", dir="/dev/shm")
    stack.callback(os.unlink, name)
    os.ftruncate(image, size)
    os.close(image)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", *options, name], check=True, capture_output=True)
    at.mkdir()
    subprocess.run(["mount", "-o", "loop", name, str(at)], check=True, capture_output=True)
    stack.callback(subprocess.run, ["umount", "-l", str(at)], check=True, capture_output=True)
    return at


def used_bytes(root: Path) -> int:
    """Return what lies below *root*, as du(1) counts it; what vanishes meanwhile does not count."""
    return int(subprocess.run(["du", "-s", "-B1", str(root)], check=False, capture_output=True).stdout.split()[0])


class WorkerProcess:
    """
    One I/O worker on *path*; `close` ends it.

    Attributes:
        control: The coordinator's end.
        ranks: One socket for each rank of the one engine.
        flags: Last flags told of each key.
        states: All device states told, in order.
        stores: Ends of stores: key -> kept.
    """

    def __init__(
        self,
        path: Path,
        *,
        faults: FaultSettings | None = None,
        spec: m.NamespaceSpec | None = None,
        slots: int = 16,
        pool: dict[str, Any] | None = None,
        device: dict[str, Any] | None = None,
        log: Path | None = None,
        launcher: list[str] | None = None,
    ) -> None:
        settings = Settings(
            pool=PoolSettings(run_dir="/nowhere", **(pool or {})),
            device=[DeviceSettings(name=DEVICE, path=str(path), **({"iodepth": 4} | (device or {})))],
        )
        ours, theirs = channel.pair()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if faults is not None:
            environment[FAULTS_VARIABLE] = json.dumps(msgspec.to_builtins(faults))
        self.path = path
        self.log_path = log or path.parent / f"{path.name}.log"
        command = [
            *(launcher or []),
            sys.executable,
            "-m",
            "kvpool.procs.io_worker",
            "--control-fd",
            str(theirs.fileno()),
        ]
        with open(self.log_path, "ab") as errors:
            self.popen = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stderr=errors
            )
        theirs.close()
        self.control = Talker(ours, m.WorkerToCoordinator)
        self.ranks: list[Talker] = []
        self.flags: dict[bytes, int] = {}
        self.states: list[m.DeviceState] = []
        self.stores: dict[bytes, bool] = {}
        self._job = 0
        self.control.send(m.WorkerSetup(generation=1, worker_generation=1, device=0, config_json=to_json(settings)))
        _, fds = self.control.wait(m.WorkerReady)
        for fd in fds:
            os.close(fd)
        self.spec = spec or namespace(rank_count=1, object_bytes=(OBJECT_BYTES,))
        self.control.send(m.NamespaceOpened(namespace=1, spec=self.spec))
        self.memory = self._grant(slots)
        for rank in range(self.spec.rank_count):
            self.join(rank)

    def _grant(self, slots: int) -> mmap.mmap:
        fd = shm.create_segment(slots * SLOT_BYTES)
        granted = m.SegmentGranted(segment=1, segment_bytes=slots * SLOT_BYTES, slot_bytes=SLOT_BYTES)
        self.control.channel.send(granted, [fd])
        self.control.send(m.SegmentsGranted(count=1))
        memory = shm.map_segment(fd, slots * SLOT_BYTES)
        os.close(fd)
        return memory

    def join(self, rank: int, namespace_number: int = 1) -> Talker:
        """Attach a rank."""
        ours, theirs = channel.pair()
        joined = m.ClientJoined(
            client=100 * namespace_number + rank, engine=f"{ENGINE}{namespace_number}", namespace=namespace_number,
            rank=rank, pid=os.getpid(),
        )  # fmt: skip
        self.control.channel.send(joined, [theirs.fileno()])
        theirs.close()
        talker = Talker(ours, m.WorkerToRank)
        self.ranks.append(talker)
        return talker

    # ------------------------------------------------------------ the coordinator's side

    def listen(self, seconds: float = 0.0) -> None:
        """Take in what the worker tells the coordinator."""
        if select.select([self.control], [], [], seconds)[0]:
            self.control.inbox += self.control.channel.receive()
        rest = []
        for message, fds in self.control.inbox:
            if isinstance(message, m.KeysTold):
                self.flags.update((entry.key, entry.flags) for entry in message.entries)
            elif isinstance(message, m.WorkerState):
                self.states.append(message.state)
            elif isinstance(message, m.WorkerStoresEnded):
                self.stores |= dict.fromkeys(message.kept, True) | dict.fromkeys(message.dropped, False)
            else:
                rest.append((message, fds))
        self.control.inbox[:] = rest

    def until(self, fact: Any, wait_s: float = WAIT_S) -> Any:
        """Listen until *fact* is true; return it."""
        deadline = time.monotonic() + wait_s
        while not (found := fact()):
            assert time.monotonic() < deadline, f"it did not become true in time\n{self.log()}"
            self.listen(0.05)
        return found

    def scanned(self) -> m.ScanEnded:
        """Wait until the index is complete."""
        return self.control.wait(m.ScanEnded)[0]

    def facts(self) -> dict[str, Any]:
        """Ask for the worker's facts."""
        self.control.send(m.ReportWanted(report=7))
        return self.control.wait(m.Report)[0].facts

    @property
    def healthy(self) -> bool:
        """What the worker said last of its device."""
        return not self.states or self.states[-1].healthy

    # ------------------------------------------------------------ the ranks' side

    def store(self, numbers: Iterable[int], *, wait: bool = True) -> list[int]:
        """Store these objects on all ranks; return those that were kept, in order."""
        wanted = list(numbers)
        keys = [key_of(number) for number in wanted]
        self._job += 1
        for talker in self.ranks:
            talker.send(m.Store(job=self._job, store=self._job, first=0, keys=keys))
        kept: set[int] = set()
        for rank, talker in enumerate(self.ranks):
            kept = self._fill(talker, rank, wanted)
        if wait:
            self.until(lambda: all(self.flags.get(key_of(wanted[index]), 0) & m.STORED for index in kept))
        return [wanted[index] for index in sorted(kept)]

    def _fill(self, talker: Talker, rank: int, numbers: list[int]) -> set[int]:
        answered: set[int] = set()
        kept: set[int] = set()
        while len(answered) < len(numbers):
            answer, _ = talker.wait(m.StoreAnswer)
            for grant in answer.slots:
                self.memory[grant.offset : grant.offset + OBJECT_BYTES] = payload_of(numbers[grant.index], rank)
            if answer.slots:
                talker.send(m.Filled(job=answer.job, indices=[grant.index for grant in answer.slots]))
            kept |= {grant.index for grant in answer.slots} | set(answer.exist)
            answered |= {grant.index for grant in answer.slots} | {*answer.exist, *answer.dropped}
        return kept

    def load(self, numbers: Iterable[int], rank: int = 0) -> dict[int, Code | bool]:
        """Load these objects; per object the code of its failure, or whether its bytes are right."""
        wanted = list(numbers)
        self._job += 1
        talker = self.ranks[rank]
        talker.send(m.Load(job=self._job, first=0, keys=[key_of(number) for number in wanted]))
        found: dict[int, Code | bool] = {}
        deadline = time.monotonic() + WAIT_S
        while len(found) < len(wanted):
            for message, _ in talker.inbox:
                if isinstance(message, m.Ready):
                    for grant in message.slots:
                        bytes_there = self.memory[grant.offset : grant.offset + OBJECT_BYTES]
                        found[wanted[grant.index]] = bytes_there == payload_of(wanted[grant.index], rank)
                    talker.send(m.Release(job=message.job, indices=[grant.index for grant in message.slots]))
                elif isinstance(message, m.LoadFailed):
                    found |= {wanted[failed.index]: Code(failed.code) for failed in message.objects}
            talker.inbox.clear()
            if len(found) < len(wanted):
                talker.read(deadline, "answer to a load")
        return found

    def file_of(self, number: int, rank: int = 0) -> Path:
        """Return the path of an object's file."""
        directory = layout.rank_directory(self.spec, layout.model_directories(self.spec)[0], rank)
        return Path(layout.object_path(f"{self.path}/{directory}", key_of(number)))

    def log(self) -> str:
        """Return what it wrote to standard error."""
        return self.log_path.read_text()

    def drain(self) -> int:
        """Let it write what is filled and end; return its exit code."""
        self.control.send(m.Drain())
        return self.popen.wait(WAIT_S)

    def close(self) -> None:
        """End it, however it is."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        for talker in [*self.ranks, self.control]:
            talker.close()
        with contextlib.suppress(BufferError):
            self.memory.close()
