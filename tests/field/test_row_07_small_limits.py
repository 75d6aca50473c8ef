"""Row 7: containers with a small /dev/shm, memory limit or locked-memory limit."""

import contextlib
import subprocess
from pathlib import Path

import pytest

from kvpool.cli import main as cli
from kvpool.errors import HostError
from kvpool.io import shm
from tests.process.pool_harness import PoolProcess, wait_until

MIB = 1 << 20


def test_row_07_a_limit_too_small_is_refused_before_use_with_its_name_its_value_and_the_value_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        small = tmp_path / "shm"
        small.mkdir()
        try:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=64m", "shm", str(small)], check=True, capture_output=True
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no tmpfs can be mounted here: {error}")
        stack.callback(subprocess.run, ["umount", str(small)], check=True)
        with pytest.raises(HostError) as raised:
            shm.check_staging(100 * MIB, str(small))
        context = raised.value.context
        assert (64 * MIB, 100 * MIB) == (context["value_bytes"], context["needed_bytes"])
        assert "--shm-size" in str(context["limit"])
        shm.check_staging(60 * MIB, str(small))
        assert list(small.iterdir()) == []

    pool = PoolProcess(tmp_path, staging_bytes=1 << 44)
    try:
        assert "staging does not fit" in wait_until(lambda: pool.log() if "value_bytes=" in pool.log() else "")
        assert "needed_bytes=17592186044416" in pool.log()
    finally:
        pool.close()

    monkeypatch.setattr(shm, "memlock_bytes_max", lambda: 8 * MIB)
    cli.main(["doctor"])
    assert "limit is 8MiB, staging is 1GiB" in capsys.readouterr().out
