"""
Joins what a pool tells of itself with what the kernel tells of its processes, into one report.

Covers: matching rows with process facts, running the checks. Does not cover: asking the pool
(`client.admin`), reading /proc (`process_facts`).
"""

from collections.abc import Mapping

from kvpool.health import facts
from kvpool.health.checks import Picture, findings_of
from kvpool.health.facts import Facts
from kvpool.health.render import HealthReport
from kvpool.wire.messages import Health


def pids_of(health: Health) -> list[int]:
    """Return the process ids that the rows name, each once."""
    return list(dict.fromkeys(pid for row in health.rows if isinstance(pid := row.get(facts.PID), int) and pid > 0))


def report_of(health: Health, processes: Mapping[int, Facts]) -> HealthReport:
    """
    Return the report over *health*, with the kernel's facts of each process beside its own.

    A process's own word wins where both speak (an uptime that it tells counts the same run).
    """
    rows: list[Facts] = []
    for row in health.rows:
        pid = row.get(facts.PID)
        seen = processes.get(pid, {}) if isinstance(pid, int) else {}
        rows.append({**seen, **row})
    return HealthReport(health.pool, rows, findings_of(Picture(health.pool, rows)))
