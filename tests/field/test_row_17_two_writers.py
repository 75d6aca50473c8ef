"""Row 17: two writers shared a temporary name; failed stores stayed visible: gibberish."""

from pathlib import Path

from kvpool.core import layout
from kvpool.io.faults import FaultSettings
from tests.field.conftest import StartWorker
from tests.process.worker_harness import SLOT_BYTES


def _files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and path.name != "manifest.json"]


def test_row_17_two_writers_of_one_key_do_no_harm_and_a_failed_store_is_never_seen(
    tmp_path: Path, device: Path, start: StartWorker
) -> None:
    one, other = start(device), start(device)
    for first in range(0, 24, 8):
        numbers = range(first, first + 8)
        one.store(numbers, wait=False)
        other.store(numbers, wait=False)
    for worker in (one, other):
        worker.until(lambda worker=worker: worker.facts()["stores"] + worker.facts()["stores_existed"] >= 24)
    assert dict.fromkeys(range(24), True) == one.load(range(24)) == other.load(range(24))
    assert {SLOT_BYTES} == {path.stat().st_size for path in _files_below(device)}
    assert not any(layout.is_temporary(path.name) for path in _files_below(device))

    failing = start(tmp_path / "failing", faults=FaultSettings(write_error=1.0), pool={"breaker_failures": 1000})
    failing.store(range(8), wait=False)
    failing.until(lambda: failing.facts().get("errors_write_error", 0) == 8)
    assert [] == [path for path in _files_below(tmp_path / "failing") if not path.name.startswith(".")]
    again = start(tmp_path / "failing")
    assert not any(code is True for code in again.load(range(8)).values())
