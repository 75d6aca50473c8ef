"""One of two devices fails: its keys are misses, the other is unharmed, new stores go there; then it is back."""

import json
from pathlib import Path

import msgspec
import pytest

from kvpool.client.scheduler import Hit, SchedulerClient
from kvpool.errors import Code
from kvpool.io.faults import FaultSettings
from kvpool.procs.io_worker import FAULTS_VARIABLE
from tests.process.real_pool import RealPool, key_of, pump_until

KEYS = [key_of(number) for number in range(16)]
FIRST = range(0, 16, 2)  # on device 0
SECOND = range(1, 16, 2)  # on device 1


def hits(scheduler: SchedulerClient, numbers: range) -> set[int]:
    """Return on which devices these objects are hits; -1 stands for a miss."""
    found = [scheduler.lookup("request", KEYS[number]) for number in numbers]
    return {hit.device if isinstance(hit, Hit) else -1 for hit in found}


def placed(scheduler: SchedulerClient) -> set[int]:
    """Return the devices on which new chunks would be stored."""
    return {scheduler.place_store("request", key_of(number), number, KEYS[0]) for number in range(200, 216)}


@pytest.mark.parametrize("trouble", ["read_error", "write_error"])
def test_a_failing_device_costs_its_own_keys_and_nothing_else_until_it_is_back(tmp_path: Path, trouble: str) -> None:
    broken = tmp_path / "broken"
    faults = {"d0": {}, "d1": msgspec.to_builtins(FaultSettings(while_exists=str(broken), **{trouble: 1.0}))}
    pool = RealPool(tmp_path, environment={FAULTS_VARIABLE: json.dumps(faults)})
    try:
        rank, scheduler = pool.start_rank(), pool.start_scheduler()
        pool.stored(rank, range(16))
        scheduler.announce("request", KEYS)
        pump_until(scheduler, lambda: hits(scheduler, FIRST) == {0} and hits(scheduler, SECOND) == {1})

        broken.touch()
        if trouble == "read_error":
            failed = dict(pool.end_of(rank, pool.load(rank, range(16))).failed)
            assert dict.fromkeys(SECOND, Code.READ_ERROR) == failed
        else:
            pool.end_of(rank, pool.store(rank, range(101, 121, 2)))
        pump_until(scheduler, lambda: hits(scheduler, SECOND) == {-1})
        assert {0} == hits(scheduler, FIRST)
        assert () == pool.end_of(rank, pool.load(rank, FIRST)).failed
        pump_until(scheduler, lambda: placed(scheduler) == {0})
        assert 1 == pool.health()[0]["devices_healthy"]

        broken.unlink()
        pump_until(scheduler, lambda: hits(scheduler, SECOND) == {1})
        assert () == pool.end_of(rank, pool.load(rank, range(16))).failed
        pump_until(scheduler, lambda: placed(scheduler) == {0, 1})
        assert 2 == pool.health()[0]["devices_healthy"]
    finally:
        pool.close()
