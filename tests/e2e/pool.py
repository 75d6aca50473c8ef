"""
A pool for end-to-end tests: its folder, its configuration, its processes, and harm done to its files.

Covers: `kvpool serve` as a child, pools that an engine starts, health, waiting for what is stored, altering,
truncating and removing objects. Does not cover: engines (`tools/engine_process.py`).
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kvpool.client import admin
from kvpool.client.launch import LOCK_NAME
from kvpool.core.trailer import TRAILER_BYTES
from kvpool.errors import PoolUnavailable
from kvpool.health import facts

ROOT = Path(__file__).resolve().parents[2]
_EVERY_S = 0.05


def wait_until(there: Callable[[], Any], what: str, *, within_s: float = 60.0) -> Any:
    """Return the first true value of *there*, asked again and again; fail after *within_s*."""
    end = time.monotonic() + within_s
    while True:
        found = there()
        if found:
            return found
        assert time.monotonic() < end, f"not within {within_s:.0f} s: {what}"
        time.sleep(_EVERY_S)


class Pool:
    """
    One pool below *folder*: `d0`, `d1` … are its devices, `run` its run directory.

    Attributes:
        config: The TOML file; engines name it as `kvpool_config`.
    """

    def __init__(self, folder: Path, *, devices: list[Path] | int = 1, **settings: Any) -> None:
        """Write the configuration; *settings* go to `[pool]`, and `device` holds what each `[[device]]` gets."""
        self.folder = folder
        self.config = folder / "kvpool.toml"
        self.run_dir = folder / "run"
        paths = [folder / f"d{index}" for index in range(devices)] if isinstance(devices, int) else devices
        self.devices = paths
        self.settings: dict[str, Any] = {
            "staging": "256MiB",
            "verify": True,
            "answer_deadline_s": 10.0,
            "store_deadline_s": 20.0,
        } | settings
        self.process: subprocess.Popen[bytes] | None = None
        self._start_lock = -1
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.mkdir(parents=True, exist_ok=True)
        self.configure()

    def configure(self, **settings: Any) -> None:
        """Change settings; the next start reads them."""
        self.settings |= settings
        device = self.settings.get("device", {})
        pool = {key: value for key, value in self.settings.items() if key != "device"}
        lines = ["[pool]", f"run_dir = {json.dumps(str(self.run_dir))}", *_toml(pool)]
        for index, path in enumerate(self.devices):
            lines += ["[[device]]", f'name = "d{index}"', f"path = {json.dumps(str(path))}", *_toml(device)]
        self.config.write_text("\n".join(lines) + "\n")

    def connector(self, **extra: Any) -> dict[str, Any]:
        """Return vLLM's `kv_transfer_config` for an engine on this pool: it loads what is stored at any cost."""
        return {
            "kv_connector": "KvPoolConnector",
            "kv_connector_module_path": "kvpool_vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvpool_config": str(self.config), "load_planner": "off", **extra},
        }

    # ------------------------------------------------------------ life

    def start(self, *, faults: dict[str, Any] | None = None) -> "Pool":
        """Run `kvpool serve`; *faults* go to its I/O workers. Returns when it answers."""
        self._keep_engines_from_starting()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if faults:
            environment["KVPOOL_TEST_FAULTS"] = json.dumps(faults)
        with (self.folder / "pool.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvpool.cli.main", "serve", "--config", str(self.config)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            )  # fmt: skip
        try:
            wait_until(self._answers, f"pool answers; see {self.folder / 'pool.log'}")
        finally:
            self.let_engines_start()
        return self

    def _keep_engines_from_starting(self) -> None:
        """Engines that lost their pool start one themselves, with the settings they know: not in between ours."""
        if self._start_lock < 0:
            self.run_dir.mkdir(mode=0o700, exist_ok=True)
            self._start_lock = os.open(self.run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._start_lock, fcntl.LOCK_EX)

    def let_engines_start(self) -> None:
        """Engines may start a pool again."""
        if self._start_lock >= 0:
            os.close(self._start_lock)
            self._start_lock = -1

    def _answers(self) -> bool:
        if self.process is not None:
            assert self.process.poll() is None, (self.folder / "pool.log").read_text()[-4000:]
        try:
            rows = self.rows()
        except PoolUnavailable:
            return False
        workers = [row for row in rows if row.get(facts.ROLE) == facts.IO_WORKER]
        return len(workers) == len(self.devices) and all(row.get(facts.STATE) == facts.RUNNING for row in workers)

    def stop(self) -> None:
        """End the pool as a user would; what is filled is written first. Engines start none meanwhile."""
        if self.process is None:
            return
        self._keep_engines_from_starting()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process = None

    def wait_clients(self, count: int, *, within_s: float = 60.0) -> None:
        """Return once *count* clients are attached, and their staging is there for them."""
        wait_until(lambda: self.attached() >= count, f"{count} clients attached", within_s=within_s)

    def attached(self) -> int:
        """Return how many clients are attached; 0 while a rank has no staging yet."""
        rows = self.rows()
        ranks = [row for row in rows if row.get(facts.ROLE) == facts.RANK_CLIENT]
        segments = [int(row.get(facts.SEGMENTS_MAPPED, 0)) for row in ranks]
        if not all(segments):
            return 0
        return len(ranks) + len([row for row in rows if row.get(facts.ROLE) == facts.SCHEDULER_CLIENT])

    def wait_indexed(self) -> None:
        """Return once every device knows what it holds: a file removed before that is not missed."""
        wait_until(lambda: all(row.get(facts.INDEX_COMPLETE) for row in self.workers()), "devices are scanned")

    def pids(self) -> list[int]:
        """Return the pids of the pool's own processes."""
        roles = (facts.COORDINATOR, facts.IO_WORKER)
        return [int(row[facts.PID]) for row in self.rows() if row.get(facts.ROLE) in roles and facts.PID in row]

    def kill(self) -> list[int]:
        """SIGKILL every process of the pool at once; return their pids when they are gone."""
        pids = self.pids()
        kill_all(pids)
        if self.process is not None:
            self.process.wait(10)
            self.process = None
        return pids

    # ------------------------------------------------------------ what it says

    def rows(self) -> list[facts.Facts]:
        """Return health's rows, one a process."""
        return list(admin.health(str(self.run_dir)).rows)

    def fact(self, name: str) -> int:
        """Return a number of health's line of the whole pool; 0 where it is not told."""
        return int(admin.health(str(self.run_dir)).pool.get(name, 0))

    def workers(self) -> list[facts.Facts]:
        """Return health's rows of the I/O workers."""
        return [row for row in self.rows() if row.get(facts.ROLE) == facts.IO_WORKER]

    def total(self, name: str) -> int:
        """Return a fact summed over the I/O workers."""
        return sum(int(row.get(name, 0)) for row in self.workers())

    def idle(self) -> bool:
        """Say whether no I/O worker has anything queued, in flight or pinned."""
        names = (
            facts.QUEUE_LOAD, facts.QUEUE_STORE, facts.IN_FLIGHT_READS, facts.IN_FLIGHT_WRITES, facts.SLOTS_FILLING,
            facts.SLOTS_PINNED, facts.SLOTS_QUARANTINED,
        )  # fmt: skip
        return all(row.get(name, 0) == 0 for row in self.workers() for name in names)

    # ------------------------------------------------------------ its files

    def objects(self) -> list[Path]:
        """Return the published objects, sorted."""
        return sorted(path for device in self.devices for path in _objects_below(device))

    def wait_objects(self, count: int, *, within_s: float = 60.0) -> list[Path]:
        """Return the objects once there are *count*; fail when there are more or it takes too long."""
        wait_until(lambda: len(self.objects()) >= count, f"{count} objects published", within_s=within_s)
        found = self.objects()
        assert len(found) == count
        return found


def _objects_below(device: Path) -> Iterator[Path]:
    return (path for path in device.rglob("*.bin") if ".kvpool" not in path.parts)


def _toml(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]


def kill_all(pids: list[int]) -> None:
    """SIGKILL these processes and return when none of them runs."""
    found = []
    for pid in pids:
        try:
            found.append(psutil.Process(pid))
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    wait_until(lambda: not any(_runs(process) for process in found), "killed processes are gone")


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# ---------------------------------------------------------------- harm


def alter_payload(path: Path) -> None:
    """Replace an object's payload by noise of its size; its name, size and trailer stay."""
    size = path.stat().st_size
    noise = _noise(size - TRAILER_BYTES)
    with path.open("r+b") as file:
        file.write(noise)


def _noise(size: int) -> bytes:
    """Return *size* bytes that are small float32 numbers, so that the model computes with them and not with NaN."""
    return np.random.default_rng(7).standard_normal(-(-size // 4), dtype=np.float32).tobytes()[:size]


@contextmanager
def altered(pool: Pool) -> Iterator[None]:
    """
    Within the block the payloads of all objects are noise; afterwards everything is as before.

    What is published within the block was computed from noise, and is removed. The pool must not run at either end.
    """
    before = {path: path.read_bytes() for path in pool.objects()}
    for path in before:
        alter_payload(path)
    yield
    for path in pool.objects():
        path.unlink()
    for path, content in before.items():
        path.write_bytes(content)
