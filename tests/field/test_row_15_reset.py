"""Row 15: a reset after a weight update left the disk tier filled, and old KV was served."""

import signal
from pathlib import Path

from kvpool.client.scheduler import Hit, Miss
from tests.process.engine_harness import KEYS, WAIT_S, Engine, files_of, served
from tests.process.pool_harness import PoolProcess, wait_until


def test_row_15_nothing_from_before_a_reset_is_served_not_even_after_a_crash_and_its_files_go(tmp_path: Path) -> None:
    pool = PoolProcess(tmp_path, worker_module="kvpool.procs.io_worker", answer_deadline_s=5.0)
    engine = Engine(tmp_path)
    try:
        engine.wait_connected().store(1)
        engine.wait_hits()
        assert served(engine, 1), "the control: without a reset it is served"
        wait_until(lambda: len(files_of(tmp_path, 0)) == len(KEYS), WAIT_S)
        engine.reset()
        assert {Miss} == set(engine.lookups())
        pool.popen.send_signal(signal.SIGKILL)
        pool.popen.wait()
        pool.close()
        pool = PoolProcess(tmp_path, worker_module="kvpool.procs.io_worker", answer_deadline_s=5.0)
        assert {Miss} == set(engine.wait_connected().lookups())
        assert not served(engine, 1)
        engine.store(2)
        engine.wait_hits()
        assert {Hit} == set(engine.lookups())
        assert served(engine, 2)
        wait_until(lambda: files_of(tmp_path, 0) == [], WAIT_S)
    finally:
        engine.close()
        pool.close()
