"""What the rows of the field's troubles share: a device of their own, workers on it, a small filesystem."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.worker_harness import WorkerProcess, mounted_disk

StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device's directory."""
    path = tmp_path / "device"
    path.mkdir()
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 24 MiB of its own."""
    with contextlib.ExitStack() as stack:
        try:
            yield mounted_disk(stack, tmp_path / "disk")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no loop device can be mounted here: {error}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartWorker]:
    """Start a worker on a path; it has told its index when this returns."""
    with contextlib.ExitStack() as stack:

        def start_worker(path: Path, **options: object) -> WorkerProcess:
            worker = WorkerProcess(path, log=tmp_path / "worker.log", **options)
            stack.callback(worker.close)
            worker.scanned()
            return worker

        yield start_worker
