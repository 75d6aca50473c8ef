"""Row 28: direct I/O silently became buffered, or failed on overlayfs."""

import contextlib
import subprocess
from pathlib import Path

import pytest

from tests.field.conftest import StartWorker


def test_row_28_where_direct_io_cannot_be_had_it_works_and_the_effective_mode_is_shown(
    tmp_path: Path, device: Path, start: StartWorker
) -> None:
    direct = start(device)
    assert direct.facts()["io_mode"].endswith(", direct")
    with contextlib.ExitStack() as stack:
        memory = tmp_path / "memory"  # a filesystem without O_DIRECT
        memory.mkdir()
        try:
            subprocess.run(["mount", "-t", "ramfs", "ramfs", str(memory)], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no filesystem without O_DIRECT can be mounted here: {error}")
        stack.callback(subprocess.run, ["umount", "-l", str(memory)], check=True)
        buffered = start(memory / "kv")
        assert [0, 1] == buffered.store([0, 1])
        assert {0: True, 1: True} == buffered.load([0, 1])
        told = buffered.facts()
        assert told["io_mode"].endswith(", buffered")
        assert told["io_degraded"] is True
        buffered.close()
