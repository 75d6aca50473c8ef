"""A device that fails or stalls is given up, tried, and used again; seen from the coordinator and a rank."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.errors import Code
from kvpool.io.faults import FaultSettings
from tests.process.worker_harness import WorkerProcess, key_of

POOL = {"breaker_failures": 3, "breaker_retry_s": 0.2, "operation_deadline_s": 0.5, "load_deadline_s": 5.0}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """While this file exists, the device is broken."""
    return tmp_path / "broken"


@pytest.fixture
def device(tmp_path: Path) -> Path:
    path = tmp_path / "device"
    path.mkdir()
    return path


@pytest.fixture
def worker(request: pytest.FixtureRequest, device: Path, broken: Path) -> Iterator[WorkerProcess]:
    made = WorkerProcess(device, pool=POOL, faults=FaultSettings(while_exists=str(broken), **request.param))
    made.scanned()
    yield made
    made.close()


def ends_within(seconds: float, started: float) -> bool:
    return time.monotonic() - started < seconds


@pytest.mark.parametrize("worker", [{"read_error": 1.0}], indirect=True)
def test_failing_reads_give_the_device_up_until_it_answers(worker: WorkerProcess, broken: Path) -> None:
    assert [0, 1, 2, 3] == worker.store(range(4))
    broken.touch()
    assert {Code.READ_ERROR} == set(worker.load(range(4)).values())
    worker.until(lambda: not worker.healthy)
    started = time.monotonic()
    assert {0: Code.READ_ERROR} == worker.load([0])
    assert [] == worker.store([9])
    assert ends_within(0.2, started)
    told = worker.facts()
    assert (1, "3 reads failed, the last with read: Input/output error (EIO)") == (
        told["breaker_opened"], told["breaker_why"],
    )  # fmt: skip
    assert told["breaker"] in ("open", "probing")
    broken.unlink()
    worker.until(lambda: worker.healthy)
    assert {0: True, 3: True} == worker.load([0, 3])
    assert [9] == worker.store([9])
    assert "closed" == worker.facts()["breaker"]
    log = worker.log()
    assert (1, 1) == (log.count("given up for now"), log.count("is used again"))


@pytest.mark.parametrize("worker", [{"write_error": 1.0}], indirect=True)
def test_failing_writes_give_the_device_up_too(worker: WorkerProcess, broken: Path) -> None:
    broken.touch()
    worker.store(range(3), wait=False)
    worker.until(lambda: not worker.healthy)
    assert not any(worker.flags.get(key_of(number), 0) for number in range(3))
    broken.unlink()
    worker.until(lambda: worker.healthy)
    assert [0] == worker.store([0])


@pytest.mark.parametrize("worker", [{"delay": 1.0, "delay_s": 3.0}], indirect=True)
def test_a_stall_gives_the_device_up_at_its_first_deadline(worker: WorkerProcess, broken: Path) -> None:
    worker.store(range(8))
    time.sleep(0.6)  # longer than a deadline without any operation is no stall
    assert {7: True} == worker.load([7])
    broken.touch()
    started = time.monotonic()
    # Four are with the device and late; the others would still wait for their turn.
    assert {Code.DEADLINE, Code.READ_ERROR} == set(worker.load(range(7)).values())
    assert ends_within(2.0, started)
    worker.until(lambda: not worker.healthy)
    assert "nothing has ended in 0.5 s" in worker.facts()["breaker_why"]
    broken.unlink()
    worker.until(lambda: worker.healthy)
    assert {3: True} == worker.load([3])


@pytest.mark.parametrize("worker", [{"read_error": 0.2, "seed": 3}], indirect=True)
def test_a_few_failures_among_many_reads_give_nothing_up(worker: WorkerProcess, broken: Path) -> None:
    worker.store(range(8))
    broken.touch()
    found = [worker.load(range(8)) for _ in range(6)]
    failed = [code for round_ in found for code in round_.values() if code is not True]
    assert len(failed) >= 4
    assert {Code.READ_ERROR} == set(failed)
    assert "closed" == worker.facts()["breaker"]
