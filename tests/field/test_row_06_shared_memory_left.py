"""Row 6: /dev/shm filled with the files of killed processes: 70 restarts in 3 hours."""

import os
from pathlib import Path

from tests.process.pool_harness import wait_until
from tests.process.real_pool import RealPool


def _names() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_row_06_nothing_has_a_name_in_dev_shm_while_running_so_sigkill_leaves_nothing(tmp_path: Path) -> None:
    before = _names()
    pool = RealPool(tmp_path, staging_bytes=64 << 20)
    try:
        pool.stored(pool.start_rank(), range(8))
        assert not {name for name in _names() - before if "kvpool" in name}
        pids = [row["pid"] for row in pool.health()[1] if row["role"] in ("coordinator", "io_worker")]
        pool.popen.kill()
        pool.popen.wait()
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
        assert not {name for name in _names() - before if "kvpool" in name}
    finally:
        pool.close()
