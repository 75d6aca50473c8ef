"""Row 29: queue depth 1 used 11 % of a fast drive."""

from pathlib import Path

from kvpool.io.faults import FaultSettings
from tests.field.conftest import StartWorker


def test_row_29_the_achieved_queue_depth_is_measured_and_near_what_is_configured(
    device: Path, start: StartWorker
) -> None:
    worker = start(device, faults=FaultSettings(delay=1.0, delay_s=0.02), slots=64, device={"iodepth": 8})
    worker.store(range(24))
    before = worker.facts()
    assert 8 == before["depth_limit"]
    assert dict.fromkeys(range(24), True) == worker.load(range(24))
    assert worker.facts()["engine_read_depth_mean"] >= 0.7 * 8
    assert worker.facts()["depth_achieved"] >= 0.5 * 8
