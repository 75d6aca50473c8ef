"""`kvpool stores off`: nothing new is written, also by a worker that starts later; loads go on."""

import os
import signal
from pathlib import Path

from kvpool.cli import main as cli
from kvpool.health import facts
from kvpool.health.checks import Picture, findings_of
from tests.process.pool_harness import wait_until
from tests.process.real_pool import RealPool


def test_a_pool_stores_nothing_while_stores_are_off_and_loads_what_it_has(tmp_path: Path) -> None:
    pool = RealPool(tmp_path)
    try:
        rank = pool.start_rank()
        pool.stored(rank, range(4))
        assert 0 == cli.main(["stores", "off", "--run-dir", pool.run_dir])
        wait_until(lambda: not any(row["storing"] for row in pool.worker_rows()))
        assert 4 == len(pool.end_of(rank, pool.store(rank, range(4, 8))).failed)
        assert 4 == pool.told(facts.STORES_DROPPED_OFF) == pool.told(facts.STORES_DROPPED)
        assert () == pool.end_of(rank, pool.load(rank, range(4))).failed

        found = [finding.check for finding in findings_of(Picture(*pool.health()))]
        assert ["stores_off"] == [name for name in found if name in ("stores_off", "stores_dropped", "space_short")]

        before = {row["pid"] for row in pool.worker_rows()}
        for pid in before:
            os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: _running_others(pool, before))
        wait_until(lambda: not any(row["storing"] for row in pool.worker_rows()))

        assert 0 == cli.main(["stores", "on", "--run-dir", pool.run_dir])
        wait_until(lambda: all(row["storing"] for row in pool.worker_rows()))
        pool.stored(rank, range(4, 8))
        assert () == pool.end_of(rank, pool.load(rank, range(8))).failed
    finally:
        pool.close()


def _running_others(pool: RealPool, pids: set[object]) -> bool:
    rows = [row for row in pool.worker_rows() if row.get("pid") and "storing" in row]
    return len(rows) == pool.device_count and not pids & {row["pid"] for row in rows}


def test_where_no_pool_is_it_says_so(tmp_path: Path) -> None:
    assert 2 == cli.main(["stores", "off", "--run-dir", str(tmp_path)])
