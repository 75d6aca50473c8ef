"""Row 19: tiers that were written to for days and never served a byte."""

from pathlib import Path

from kvpool.health import facts
from kvpool.health.checks import SERVES_LITTLE_BYTES, Picture, findings_of
from tests.process.engine_harness import KEYS, OBJECT_BYTES, WAIT_S, Engine, served
from tests.process.pool_harness import PoolProcess


def test_row_19_what_one_engine_stores_another_is_served_after_a_restart_and_both_are_counted(tmp_path: Path) -> None:
    pool = PoolProcess(tmp_path, worker_module="kvpool.procs.io_worker", answer_deadline_s=5.0)
    first = Engine(tmp_path, "first")
    try:
        first.wait_connected().store(1)
        first.wait_hits()
        assert (len(KEYS) * OBJECT_BYTES, 0) == _kept_and_served(first)
        assert served(first, 1)
        assert (len(KEYS), 0) == _loaded_and_older(pool)
        first.close()
        assert 0 == pool.end(WAIT_S)
    finally:
        first.close()
        pool.close()
    pool = PoolProcess(tmp_path, worker_module="kvpool.procs.io_worker", answer_deadline_s=5.0)
    second = Engine(tmp_path, "second")
    try:
        second.wait_connected().wait_hits()
        assert served(second, 1)
        assert (0, len(KEYS) * OBJECT_BYTES) == _kept_and_served(second)
        assert (len(KEYS), len(KEYS)) == _loaded_and_older(pool)
    finally:
        second.close()
        pool.close()


def test_row_19_storing_much_for_nothing_is_a_finding() -> None:
    row: facts.Facts = {facts.ROLE: facts.RANK_CLIENT, facts.BYTES_KEPT: SERVES_LITTLE_BYTES, facts.BYTES_SERVED: 0}
    assert ["serves_little"] == [finding.check for finding in findings_of(Picture({}, [row]))]


def _loaded_and_older(pool: PoolProcess) -> tuple[float, ...]:
    rows = pool.worker_rows()
    return tuple(sum(row[fact] for row in rows) for fact in (facts.LOADS, facts.LOADS_OLDER))


def _kept_and_served(engine: Engine) -> tuple[object, object]:
    told = engine.rank.facts()
    return told[facts.BYTES_KEPT], told[facts.BYTES_SERVED]
