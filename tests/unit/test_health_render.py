"""Rendering of a health report: pure functions from facts to text and JSON."""

import io
import json

import pytest
from rich.console import Console

from kvpool.health import facts, gather, render
from kvpool.health.checks import Finding
from kvpool.health.facts import Facts
from kvpool.health.render import HealthReport
from kvpool.wire.messages import Health

ROWS: list[Facts] = [
    {facts.ROLE: "coordinator", facts.PID: 10, facts.STATE: "running", facts.UPTIME_S: 75.0, facts.CPU_PERCENT: 0.04},
    {
        facts.ROLE: "io_worker",
        facts.DEVICE: "nvme0",
        facts.PID: 11,
        facts.STATE: "running",
        facts.IO_MODE: "io_uring, registered buffers",
        facts.QUEUE_LOAD: 3,
        facts.QUEUE_STORE: 4,
        facts.IN_FLIGHT_READS: 15,
        facts.IN_FLIGHT_WRITES: 1,
        facts.DEPTH_ACHIEVED: 14.25,
        facts.DEPTH_LIMIT: 16,
        facts.DEPTH_POSSIBLE: 12,
        facts.SLOTS_FREE: 5,
        facts.SLOTS_FILLING: 6,
        facts.SLOTS_RESIDENT: 7,
        facts.SLOTS_QUARANTINED: 8,
        facts.LOADS: 100,
        facts.BYTES_LOADED: 3 << 29,
        "errors_corrupt": 2,
        "errors_deadline": 0,
    },
    {facts.ROLE: "rank", facts.ENGINE: "e1", facts.RANK: 3, facts.PID: 12, facts.MODEL: "m", facts.JOBS: 9},
]
POOL: Facts = {
    facts.VERSION: "0.1",
    facts.STATE: "running",
    facts.RUN_DIR: "/run/x",
    facts.STAGING_BYTES: 4 << 30,
    facts.STAGING_READY_BYTES: 3 << 29,
    facts.SEGMENTS: 24,
    facts.DEVICES: 1,
    facts.DEVICES_HEALTHY: 1,
}
FINDING = Finding(check="x", subject="io_worker nvme0", what="it is [red]slow[/red]", advice="Do something.")


def shown(report: HealthReport) -> str:
    out = io.StringIO()
    Console(file=out, width=240).print(render.to_tables(report))
    return out.getvalue()


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5 TiB")]
)
def test_sizes_have_a_binary_unit(count: int, text: str) -> None:
    assert text == render.size_text(count)


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.125, "8.1s"), (725, "12m 5s"), (7260, "2h 1m"), (3 * 86400 + 4 * 3600, "3d 4h")]
)
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert text == render.duration_text(seconds)


def test_the_tables_show_what_was_told() -> None:
    text = shown(HealthReport(POOL, ROWS, [FINDING]))
    for expected in (
        "staging 1.5 GiB of 4 GiB, segments 24, devices 1 healthy of 1",
        "1m 15s",
        "io_uring, registered buffers",
        "14.2/12 (of 16)",
        "5/6/7/8",
        "3/4",
        "15/1",
        "100 1.5 GiB",
        "corrupt 2",
        "e1 #3",
        "it is [red]slow[/red]",
        "Do something.",
        "degraded",
    ):
        assert expected in text
    assert "deadline" not in text


def test_columns_that_no_row_fills_are_left_out() -> None:
    assert "threads" not in shown(HealthReport(POOL, ROWS, []))
    assert "threads" in shown(HealthReport(POOL, [{**ROWS[0], facts.THREADS: 2}], []))


def test_markup_in_a_fact_is_shown_and_not_obeyed() -> None:
    row: Facts = {facts.ROLE: "rank", facts.ENGINE: "[bold]e[/bold]", facts.PID: 1}
    assert "[bold]e[/bold]" in shown(HealthReport(POOL, [row], []))


def test_json_keeps_the_names_of_the_facts() -> None:
    told = json.loads(render.to_json(HealthReport(POOL, ROWS, [FINDING])))
    assert False is told["healthy"]
    assert (POOL, ROWS) == (told["pool"], told["rows"])
    assert ["Do something."] == [finding["advice"] for finding in told["findings"]]


def test_a_processs_own_word_wins_over_the_kernels() -> None:
    health = Health(pool=POOL, rows=ROWS)
    assert [10, 11, 12] == gather.pids_of(health)
    report = gather.report_of(health, {10: {facts.UPTIME_S: 1.0, facts.THREADS: 2}, 99: {facts.THREADS: 3}})
    assert (75.0, 2) == (report.rows[0][facts.UPTIME_S], report.rows[0][facts.THREADS])
    assert facts.THREADS not in report.rows[1]
