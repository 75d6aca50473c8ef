"""A pool of real processes on directories, with a real rank client and scheduler client in this process."""

import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvpool.client.copier import MemoryCopier
from kvpool.client.launch import ClientConfig
from kvpool.client.rank import JobEnded, LoadObject, RankClient, StoreObject
from kvpool.client.scheduler import Hit, SchedulerClient
from kvpool.core.budget import slot_bytes_of
from kvpool.wire.messages import NamespaceSpec
from tests.process.pool_harness import PoolProcess, namespace, wait_until

#: On a busy machine two workers take seconds to start.
START_S = 30.0
OBJECT_BYTES = 100_000
SLOT_BYTES = slot_bytes_of(OBJECT_BYTES)


def key_of(number: int) -> bytes:
    """Return a key like vLLM's."""
    return random.Random(number).randbytes(32) + bytes(4)


def payload_of(number: int) -> bytes:
    """Return what object *number* holds."""
    return random.Random(1_000_000 + number).randbytes(OBJECT_BYTES)


class RealPool(PoolProcess):
    """A coordinator with real I/O workers; objects are numbers, striped over the devices."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, worker_module="kvpool.procs.io_worker", **options)
        self.device_count = len(options.get("devices", ("d0", "d1")))
        self.clients: list[RankClient | SchedulerClient] = []
        self._ended: dict[int, JobEnded] = {}
        self._places: dict[int, tuple[list[int], list[bytearray]]] = {}
        self._job = 0

    def start_rank(self, engine: str = "engine-0", spec: NamespaceSpec | None = None) -> RankClient:
        """Return a connected rank client."""
        spec = spec or namespace(rank_count=1, object_bytes=(OBJECT_BYTES,))
        rank = RankClient(self._config(), spec, engine=engine, rank=0, copier=MemoryCopier())
        self.clients.append(rank)
        assert rank.wait_connected(START_S)
        return rank

    def start_scheduler(self, engine: str = "engine-0") -> SchedulerClient:
        """Return a connected scheduler client."""
        spec = namespace(rank_count=1, object_bytes=(OBJECT_BYTES,))
        scheduler = SchedulerClient(self._config(), spec, engine=engine)
        self.clients.append(scheduler)
        pump_until(scheduler, lambda: scheduler.connected)
        return scheduler

    def _config(self) -> ClientConfig:
        self.connect().close()  # wait for the socket
        return ClientConfig(run_dir=self.run_dir)

    def device_of(self, number: int) -> int:
        return number % self.device_count

    def store(self, rank: RankClient, numbers: Iterable[int]) -> int:
        """Submit a store of these objects; return its job."""
        self._job += 1
        objects = [
            StoreObject(key_of(number), self.device_of(number), memoryview(bytearray(payload_of(number))))
            for number in numbers
        ]
        rank.submit_store(self._job, f"request-{self._job}", objects, None)
        return self._job

    def load(self, rank: RankClient, numbers: Iterable[int]) -> int:
        """Submit a load of these objects; return its job."""
        self._job += 1
        wanted = list(numbers)
        places = [bytearray(OBJECT_BYTES) for _ in wanted]
        self._places[self._job] = (wanted, places)
        objects = [
            LoadObject(key_of(number), self.device_of(number), memoryview(place))
            for number, place in zip(wanted, places, strict=True)
        ]
        rank.submit_load(self._job, objects)
        return self._job

    def take_ended(self, rank: RankClient) -> None:
        """Take in what has ended."""
        self._ended.update((ended.job, ended) for ended in rank.take_ended())

    def has_ended(self, job: int) -> bool:
        """Whether that job's end was taken in."""
        return job in self._ended

    def end_of(self, rank: RankClient, job: int, wait_s: float = 30.0) -> JobEnded:
        """Wait for a job's end; check that what it loaded is what was stored."""
        deadline = time.monotonic() + wait_s
        while job not in self._ended:
            self.take_ended(rank)
            assert time.monotonic() < deadline, f"job {job} did not end"
            time.sleep(0.002)
        ended = self._ended.pop(job)
        numbers, places = self._places.pop(job, ([], []))
        failed = {index for index, _ in ended.failed}
        for index, (number, place) in enumerate(zip(numbers, places, strict=True)):
            assert index in failed or bytes(place) == payload_of(number), f"object {number} is not what was stored"
        return ended

    def stored(self, rank: RankClient, numbers: Iterable[int]) -> None:
        """Store objects, and wait until they are on their drives."""
        wanted = list(numbers)
        wait_until(lambda: all(row.get("slots_free", 0) > 0 for row in self.worker_rows()), START_S)
        before = self.told("stores")
        ended = self.end_of(rank, self.store(rank, wanted))
        assert () == ended.failed
        deadline = time.monotonic() + 30
        while self.told("stores") - before < len(wanted):
            assert time.monotonic() < deadline, "stores were not written"
            time.sleep(0.02)

    def told(self, fact: str) -> float:
        """Return a fact of the I/O workers, summed."""
        return sum(float(row.get(fact, 0)) for row in self.worker_rows())

    def close(self) -> None:
        for client in self.clients:
            client.close()
        super().close()


def pump_until(scheduler: SchedulerClient, what: Callable[[], object], wait_s: float = START_S) -> None:
    """Let the scheduler step until *what* holds."""
    deadline = time.monotonic() + wait_s
    while not what():
        assert time.monotonic() < deadline, "did not come"
        time.sleep(0.005)
        scheduler.pump()


def is_resident(scheduler: SchedulerClient, request: str, numbers: Iterable[int]) -> bool:
    """Tell whether all these objects are hits in staging."""
    found = [scheduler.lookup(request, key_of(number)) for number in numbers]
    return all(isinstance(hit, Hit) and hit.resident for hit in found)
