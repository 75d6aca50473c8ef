"""`kvpool health` on real pools: rows, exit codes, and what it says of a stopped process."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.cli.bench_pool import DrivenPool, Plan
from kvpool.cli.bench_work import Work
from kvpool.cli.main import main
from kvpool.health import facts
from tools import idle_check

MIB = 1 << 20
WORK = Work(seed=3, object_bytes=256 << 10, object_count=8, devices=2, batch=4)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DrivenPool]:
    paths = [str(tmp_path / name) for name in ("a", "b")]
    for path in paths:
        os.mkdir(path)
    with DrivenPool(Plan(paths=paths, queue_depth=4, staging_bytes=16 * MIB, verify=True), WORK, fill=True) as made:
        yield made


def asked(pool: DrivenPool, capfd: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Return the exit code and the JSON of `kvpool health`."""
    capfd.readouterr()
    code = main(["health", "--run-dir", pool.run_dir, "--json", "--interval", "0.05"])
    return code, json.loads(capfd.readouterr().out)


def test_every_process_and_client_has_its_row_with_both_kinds_of_facts(
    pool: DrivenPool, capfd: pytest.CaptureFixture[str]
) -> None:
    pool.timed("store", stored=0, progress=lambda _done: None)
    code, told = asked(pool, capfd)
    rows = told["rows"]
    roles = [facts.COORDINATOR, facts.IO_WORKER, facts.IO_WORKER, facts.RANK_CLIENT, facts.SCHEDULER_CLIENT]
    assert roles == sorted(row["role"] for row in rows)
    assert (0, True, []) == (code, told["healthy"], [found for found in told["findings"] if found["degrades"]])
    for row in rows:
        for name in (facts.PID, facts.STATE, facts.UPTIME_S, facts.CPU_PERCENT, facts.MEMORY_BYTES, facts.THREADS):
            assert name in row, (row["role"], name)
    workers = [row for row in rows if row["role"] == facts.IO_WORKER]
    assert {"bench0", "bench1"} == {row[facts.DEVICE] for row in workers}
    for row in workers:
        assert row[facts.IO_MODE]
        for name in (facts.QUEUE_LOAD, facts.QUEUE_STORE, facts.IN_FLIGHT_READS, facts.IN_FLIGHT_WRITES):
            assert row[name] >= 0
        assert row[facts.DEPTH_ACHIEVED] > 0
        assert row[facts.SLOTS_FREE] > 0
    assert {0} == {row[facts.RESTARTS] for row in workers}


def test_the_tables_name_every_process(pool: DrivenPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["health", "--run-dir", pool.run_dir, "--interval", "0.05"])
    text = capfd.readouterr().out
    for expected in ("coordinator", "io_worker", "bench0", "bench1", "rank", "scheduler", "I/O mode", "healthy"):
        assert expected in text


def test_a_stopped_worker_degrades_the_pool_and_the_advice_names_it(
    pool: DrivenPool, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = next(row for row in pool.worker_rows() if row[facts.DEVICE] == "bench1")
    pid = int(worker[facts.PID])
    os.kill(pid, signal.SIGSTOP)
    try:
        code, told = asked(pool, capfd)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert 1 == code
    found = [finding for finding in told["findings"] if finding["degrades"]]
    assert [("process_silent", "io_worker bench1")] == [(one["check"], one["subject"]) for one in found]
    assert f"kill -CONT {pid}" in found[0]["advice"]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_no_pool_there_is_exit_code_2(tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert 2 == main(["health", "--run-dir", str(tmp_path), *flags])
    said = capfd.readouterr()
    assert "nobody listens" in (json.loads(said.out)["error"]["message"] if flags else said.err)


def test_exactly_one_of_config_and_run_dir_is_needed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["health"])
    assert 2 == main(["health", "--run-dir", str(tmp_path), "--config", "x.toml"])
    assert "one of --config" in capfd.readouterr().err


def test_a_pool_is_found_through_its_configuration(
    pool: DrivenPool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "pool.toml"
    config.write_text(
        f'[pool]\nrun_dir = "{pool.run_dir}"\n[[device]]\nname = "bench0"\npath = "{tmp_path}/a"\n', encoding="utf-8"
    )
    assert 0 == main(["health", "--config", str(config), "--interval", "0.05"])
    assert "bench1" in capfd.readouterr().out


def test_an_idle_pool_and_its_client_use_no_cpu(tmp_path: Path) -> None:
    percents = idle_check.measure([str(tmp_path)], seconds=5.0)
    assert len(percents) >= 3
    assert {} == {name: percent for name, percent in percents.items() if percent >= idle_check.LIMIT_PERCENT}
