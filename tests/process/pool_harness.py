"""A coordinator as a process with fake workers, and peers that speak to it message by message."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kvpool import __version__
from kvpool.config import DeviceSettings, PoolSettings, Settings, to_json
from kvpool.errors import PeerGone, PoolUnavailable
from kvpool.io import channel
from kvpool.io.channel import Channel
from kvpool.wire import messages as m

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 10.0
MIB = 1 << 20

_M = TypeVar("_M", bound=m.Message)


def namespace(letter: str = "a", *, rank_count: int = 2, object_bytes: tuple[int, ...] = (100_000,)) -> m.NamespaceSpec:
    """Return a sound namespace; *letter* (a hex digit) makes its fingerprint."""
    return m.NamespaceSpec(
        fingerprint=letter * 64,
        model_name="tiny",
        block_size=16,
        blocks_per_file=16,
        tp=rank_count,
        pp=1,
        pcp=1,
        dtype="bfloat16",
        rank_count=rank_count,
        groups=[m.GroupSpec(group=index, object_bytes=size) for index, size in enumerate(object_bytes)],
        identity={"model": "tiny"},
    )


class Talker:
    """One peer of the coordinator (or of a worker): sends, and waits for messages with a deadline."""

    def __init__(self, sock: Any, decoder: Any = m.CoordinatorToClient) -> None:
        self.channel = Channel(sock, decoder)
        self.inbox: list[tuple[m.Message, list[int]]] = []
        #: It hung up while somebody else was listened to.
        self.gone = False

    def fileno(self) -> int:
        return self.channel.fileno()

    def listen(self) -> None:
        """Read what is there; answer questions for facts."""
        try:
            for message, fds in self.channel.receive():
                if isinstance(message, m.ReportWanted):
                    self.send(m.Report(report=message.report, facts={}))
                else:
                    self.inbox.append((message, fds))
        except PeerGone:
            self.gone = True

    def send(self, message: m.Message) -> None:
        self.channel.send(message)

    def wait(self, kind: type[_M], accept: Callable[[_M], bool] = lambda _: True) -> tuple[_M, list[int]]:
        """Return the first message of *kind* that *accept* takes; others stay in the inbox."""
        deadline = time.monotonic() + WAIT_S
        while True:
            for index, (message, fds) in enumerate(self.inbox):
                if isinstance(message, kind) and accept(message):
                    del self.inbox[index]
                    return message, fds
            self.read(deadline, kind.__name__)

    def read(self, deadline: float, wanted: str) -> None:
        """Read what comes next into the inbox."""
        left = deadline - time.monotonic()
        ready = left > 0 and select.select([self.channel], [], [], left)[0]
        assert ready, f"no {wanted} came; there were {[type(message).__name__ for message, _ in self.inbox]}"
        self.inbox += self.channel.receive()

    def is_silent(self, for_s: float, kind: type[m.Message]) -> bool:
        """Whether no message of *kind* comes within *for_s*."""
        deadline = time.monotonic() + for_s
        while (left := deadline - time.monotonic()) > 0 and select.select([self.channel], [], [], left)[0]:
            self.inbox += self.channel.receive()
        return not any(isinstance(message, kind) for message, _ in self.inbox)

    def wait_hang_up(self) -> None:
        """Wait until the peer hangs up."""
        deadline = time.monotonic() + WAIT_S
        try:
            while True:
                self.read(deadline, "hang-up")
        except PeerGone:
            pass

    def close(self) -> None:
        for _, fds in self.inbox:
            for fd in fds:
                os.close(fd)
        self.inbox.clear()
        self.channel.close()


class PoolProcess:
    """A coordinator process on *directory*; `close` ends it and all it started."""

    def __init__(
        self,
        directory: Path,
        *,
        devices: tuple[str, ...] = ("d0", "d1"),
        staging_bytes: int = 16 * MIB,
        detached: bool = False,
        idle_exit_s: float = 0.3,
        environment: dict[str, str] | None = None,
        worker_module: str = "tests.process.fake_worker",
        capacity_bytes: int = 0,
        shared: bool = False,
        device_root: Path | None = None,
        **pool_settings: Any,
    ) -> None:
        self.run_dir = str(directory / "run")
        self.talkers: list[Talker] = []
        root = device_root or directory
        directory.mkdir(exist_ok=True)
        for name in devices:
            (root / name).mkdir(exist_ok=True)
        settings = Settings(
            pool=PoolSettings(
                run_dir=self.run_dir, staging_bytes=staging_bytes, idle_exit_s=idle_exit_s, **pool_settings
            ),
            device=[
                DeviceSettings(
                    name=name, path=str(root / name), iodepth=4, capacity_bytes=capacity_bytes, shared=shared
                )
                for name in devices
            ],
        )
        config = directory / "pool.json"
        config.write_text(to_json(settings))
        command = [sys.executable, "-m", "kvpool.procs.coordinator", "--config-json", str(config)]
        command += ["--worker-module", worker_module, *(["--detached"] if detached else [])]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
        self.errors = open(directory / "errors.log", "ab")  # noqa: SIM115 - closed in close()
        self.popen = subprocess.Popen(
            command, env=environment, stderr=self.errors, stdin=subprocess.DEVNULL, process_group=0
        )

    def connect(self) -> Talker:
        """Return a talker that has not greeted; waits for the socket."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                talker = Talker(channel.connect(os.path.join(self.run_dir, "pool.sock")))
            except PoolUnavailable:
                assert self.popen.poll() is None, f"coordinator ended with {self.popen.returncode}"
                assert time.monotonic() < deadline
                time.sleep(0.01)
                continue
            self.talkers.append(talker)
            return talker

    def hello(self, role: str, rank: int = -1, **changes: Any) -> m.Hello:
        """Return a Hello of this test's process."""
        spec = changes.pop("namespace", namespace() if role != "admin" else None)
        fields = {
            "protocol": m.PROTOCOL_VERSION,
            "version": __version__,
            "role": role,
            "engine": "engine-0",
            "rank": rank,
            "pid": os.getpid(),
            "namespace": spec,
        }
        return m.Hello(**{**fields, **changes})

    def attach(self, role: str, rank: int = -1, **changes: Any) -> Talker:
        """Return a talker that was welcomed."""
        talker = self.connect()
        talker.send(self.hello(role, rank, **changes))
        talker.welcome = talker.wait(m.Welcome)[0]  # type: ignore[attr-defined]
        return talker

    def worker_of(self, rank: Talker, device: int) -> tuple[Talker, int]:
        """Return the rank's socket to a device's worker, and that run's generation."""
        up, fds = rank.wait(m.WorkerUp, lambda up: up.device == device)
        worker = Talker(channel.adopt(fds[0]), m.WorkerToRank)
        self.talkers.append(worker)
        return worker, up.worker_generation

    def health(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the pool's facts and rows."""
        admin = self.attach("admin")
        admin.send(m.HealthWanted())
        rows: list[dict[str, Any]] = []
        more = True
        while more:
            answer = self._health_part(admin)
            rows += answer.rows
            more = answer.more
        admin.close()
        return dict(answer.pool), rows

    def _health_part(self, admin: Talker) -> m.Health:
        """Return the next part of the answer; meanwhile the other talkers say their facts, as clients do."""
        deadline = time.monotonic() + WAIT_S
        while not any(isinstance(message, m.Health) for message, _ in admin.inbox):
            talkers = [talker for talker in self.talkers if talker.channel.fileno() >= 0 and not talker.gone]
            ready = select.select(talkers, [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, "no Health came"
            for talker in ready:
                talker.listen()
        return admin.wait(m.Health)[0]

    def worker_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the I/O workers."""
        return [row for row in self.health()[1] if row["role"] == "io_worker"]

    def end(self, wait_s: float = WAIT_S) -> int:
        """Ask it to end; return its exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(wait_s)

    def log(self) -> str:
        """Return what it wrote to standard error."""
        return Path(self.errors.name).read_text()

    def close(self) -> None:
        for talker in self.talkers:
            talker.close()
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self.errors.close()


def held(worker: Talker) -> dict[int, int]:
    """Return the segments that a fake worker holds: number to slot size in KiB."""
    worker.send(m.Load(job=1, first=0, keys=[b"k"]))
    ready, _ = worker.wait(m.Ready)
    return {slot.segment: slot.index for slot in ready.slots}


def wait_until(fact: Callable[[], Any], wait_s: float = WAIT_S) -> Any:
    """Ask *fact* again and again until it is true; return it."""
    deadline = time.monotonic() + wait_s
    while not (found := fact()):
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)
    return found
