"""What the rows of the field's troubles share: a device of their own, workers on it, a small filesystem."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.process.worker_harness import WorkerProcess, mounted_disk
from tests.unit.vllm_there import import_vllm

if TYPE_CHECKING:
    from tests.unit.vllm_world import World

StartWorker = Callable[..., WorkerProcess]
MakeWorld = Callable[..., "World"]


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


@pytest.fixture
def make_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    """Make vLLM's scheduler over a pool that answers from a table: `make_world(blocks=…, groups=[…], extra={…})`."""
    import_vllm()
    from kvpool_vllm import spec  # noqa: PLC0415 - vLLM may be absent
    from tests.unit import vllm_world  # noqa: PLC0415 - the same

    monkeypatch.setattr(spec, "SchedulerClient", vllm_world.FakePool)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def made(*, groups: Any = None, blocks: int = 200, **changes: Any) -> "World":
        config = vllm_world.vllm_config(tmp_path / "models", **changes)
        return vllm_world.World(config, groups or [vllm_world.full_attention()], blocks=blocks)

    return made
