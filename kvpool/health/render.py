"""
How a health report looks: rich tables for a terminal, JSON for a program. Pure functions.

Covers: choice and order of columns, units, the closing lines. Does not cover: gathering facts
(`gather`), finding what is wrong (`checks`), where the text goes (`cli.health_cmd`).

A fact that no column shows is in the JSON all the same; a fact that is absent shows as an empty cell.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpool.health import facts
from kvpool.health.checks import Finding, number
from kvpool.health.facts import Facts


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Facts of one moment, and what they mean."""

    pool: Facts
    rows: list[Facts]
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """True if no finding degrades the pool."""
        return not any(finding.degrades for finding in self.findings)


Cell = Callable[[Facts], str]


# ---------------------------------------------------------------- one value


def size_text(count: float) -> str:
    """Return bytes with three digits and a binary unit: `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def duration_text(seconds: float) -> str:
    """Return a duration with its two largest units: `3d 4h`, `12m 5s`, `8.1s`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    for unit, below, divisor, small in (("m", 3600, 60, "s"), ("h", 86400, 3600, "m")):
        if seconds < below:
            rest = seconds % divisor
            return f"{seconds // divisor:.0f}{unit} {rest if small == 's' else rest // 60:.0f}{small}"
    return f"{seconds // 86400:.0f}d {seconds % 86400 // 3600:.0f}h"


def plain(name: str) -> Cell:
    """Show a fact as it is."""
    return lambda row: "" if name not in row else str(row[name])


def count(name: str) -> Cell:
    """Show a fact as a whole number."""
    return lambda row: "" if name not in row else f"{number(row, name):.0f}"


def size(name: str) -> Cell:
    """Show a fact as bytes."""
    return lambda row: "" if name not in row else size_text(number(row, name))


def decimal(name: str) -> Cell:
    """Show a fact with one digit behind the point."""
    return lambda row: "" if name not in row else f"{number(row, name):.1f}"


def duration(name: str) -> Cell:
    """Show a fact as a duration."""
    return lambda row: "" if name not in row else duration_text(number(row, name))


def joined(separator: str, *cells: Cell) -> Cell:
    """Show several cells in one; empty if all of them are."""

    def show(row: Facts) -> str:
        texts = [cell(row) for cell in cells]
        return separator.join(texts) if any(texts) else ""

    return show


def depth(row: Facts) -> str:
    """Show the achieved depth beside the possible one, and the configured one where that is another."""
    if facts.DEPTH_ACHIEVED not in row and facts.DEPTH_LIMIT not in row:
        return ""
    limit = number(row, facts.DEPTH_LIMIT)
    possible = number(row, facts.DEPTH_POSSIBLE) if facts.DEPTH_POSSIBLE in row else limit
    shown = f"{number(row, facts.DEPTH_ACHIEVED):.1f}/{possible:.0f}"
    return shown if possible == limit else f"{shown} (of {limit:.0f})"


def who(row: Facts) -> str:
    """Show which device, or which engine and rank, a process is of."""
    if facts.DEVICE in row:
        return str(row[facts.DEVICE])
    engine = str(row.get(facts.ENGINE, ""))
    return f"{engine} #{row[facts.RANK]}" if number(row, facts.RANK) >= 0 and facts.RANK in row else engine


def error_text(row: Facts) -> str:
    """Show every error counter that is not zero: `corrupt 2, deadline 1`; `0` if all are; empty if none is told."""
    counters = {name: value for name, value in row.items() if name.startswith(facts.ERRORS_PREFIX)}
    told = [f"{name.removeprefix(facts.ERRORS_PREFIX)} {value}" for name, value in counters.items() if value]
    return ", ".join(told) if told else ("0" if counters else "")


# ---------------------------------------------------------------- tables

#: (heading, cell, True if it is text rather than a number)
Column = tuple[str, Cell, bool]

PROCESS_COLUMNS: tuple[Column, ...] = (
    ("role", plain(facts.ROLE), True),
    ("of", who, True),
    ("pid", plain(facts.PID), False),
    ("state", plain(facts.STATE), True),
    ("uptime", duration(facts.UPTIME_S), False),
    ("restarts", count(facts.RESTARTS), False),
    ("CPU %", decimal(facts.CPU_PERCENT), False),
    ("memory", size(facts.MEMORY_BYTES), False),
    ("fds", count(facts.DESCRIPTORS), False),
    ("threads", count(facts.THREADS), False),
    ("read", size(facts.READ_BYTES), False),
    ("written", size(facts.WRITTEN_BYTES), False),
    ("unsent", count(facts.QUEUE_MESSAGES), False),
)

WORKER_COLUMNS: tuple[Column, ...] = (
    ("device", plain(facts.DEVICE), True),
    ("I/O mode", plain(facts.IO_MODE), True),
    ("queued load/store", joined("/", count(facts.QUEUE_LOAD), count(facts.QUEUE_STORE)), False),
    ("in flight r/w", joined("/", count(facts.IN_FLIGHT_READS), count(facts.IN_FLIGHT_WRITES)), False),
    ("depth", depth, False),
    (
        "slots free/filling/resident/quarantined",
        joined(
            "/",
            count(facts.SLOTS_FREE),
            count(facts.SLOTS_FILLING),
            count(facts.SLOTS_RESIDENT),
            count(facts.SLOTS_QUARANTINED),
        ),
        False,
    ),
    ("cached/ahead", joined("/", count(facts.SLOTS_CACHED), count(facts.SLOTS_ADMITTED)), False),
    ("hits cached/ahead", joined("/", count(facts.CACHE_HITS), count(facts.PRELOAD_HITS)), False),
    ("loads", joined(" ", count(facts.LOADS), size(facts.BYTES_LOADED)), False),
    ("stores", joined(" ", count(facts.STORES), size(facts.BYTES_STORED)), False),
    ("dropped", count(facts.STORES_DROPPED), False),
    ("index", count(facts.INDEX_OBJECTS), False),
    ("used", size(facts.USED_BYTES), False),
    ("evicted", joined(" ", count(facts.EVICTED_KEYS), size(facts.EVICTED_BYTES)), False),
    ("breaker", plain(facts.BREAKER), True),
    ("errors", error_text, True),
)

CLIENT_COLUMNS: tuple[Column, ...] = (
    ("client", joined(" ", plain(facts.ROLE), who), True),
    ("model", plain(facts.MODEL), True),
    ("jobs", count(facts.JOBS), False),
    ("copying", count(facts.COPIES_IN_FLIGHT), False),
    ("segments pinned/mapped", joined("/", count(facts.SEGMENTS_PINNED), count(facts.SEGMENTS_MAPPED)), False),
    ("loaded", joined(" ", count(facts.LOADS), size(facts.BYTES_LOADED)), False),
    ("stored", joined(" ", count(facts.STORES), size(facts.BYTES_STORED)), False),
    ("announced", count(facts.REQUESTS_ANNOUNCED), False),
    ("keys hit/missed", joined("/", count(facts.LOOKUPS_HIT), count(facts.LOOKUPS_MISSED)), False),
    ("late", count(facts.ANSWERS_LATE), False),
    ("errors", error_text, True),
)


def table(title: str, columns: Sequence[Column], rows: Sequence[Facts]) -> Group:
    """Return a titled table of *rows*; a column that is empty in every row is left out."""
    cells = [(heading, [cell(row) for row in rows], is_text) for heading, cell, is_text in columns]
    made = Table(header_style="dim", box=None, pad_edge=False)
    shown = [entry for entry in cells if any(entry[1])]
    for heading, _, is_text in shown:
        made.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for index in range(len(rows)):
        made.add_row(*[Text(texts[index]) for _, texts, _ in shown])
    return Group(Text(title, "bold"), made, "")


def pool_text(pool: Facts) -> str:
    """Return the pool's line: who it is, its staging, its devices and clients; what is not known is left out."""
    staged = f"{size(facts.STAGING_READY_BYTES)(pool)} of {size(facts.STAGING_BYTES)(pool)}"
    healthy = f"{count(facts.DEVICES_HEALTHY)(pool)} healthy of {count(facts.DEVICES)(pool)}"
    ahead = f"{count(facts.PRELOAD_LANDED)(pool)} of {count(facts.PRELOAD_ADMISSIONS)(pool)}"
    parts = [
        ("kvpool", plain(facts.VERSION)(pool)),
        ("", plain(facts.STATE)(pool)),
        ("in", plain(facts.RUN_DIR)(pool)),
        ("generation", plain(facts.GENERATION)(pool)),
        ("staging", staged if facts.STAGING_READY_BYTES in pool else ""),
        ("being given back", size(facts.STAGING_LEAVING_BYTES)(pool) if pool.get(facts.STAGING_LEAVING_BYTES) else ""),
        ("requests read ahead", ahead if facts.PRELOAD_ADMISSIONS in pool else ""),
        ("segments", count(facts.SEGMENTS)(pool)),
        ("devices", healthy if facts.DEVICES_HEALTHY in pool else ""),
        ("clients", count(facts.CLIENTS)(pool)),
        ("keys", count(facts.KEYS)(pool)),
    ]
    return ", ".join(f"{word} {text}".strip() for word, text in parts if text)


def finding_text(finding: Finding) -> Text:
    """Return a finding as two lines: what is the case, what to do."""
    mark, style = ("degraded", "bold yellow") if finding.degrades else ("note", "dim")
    return Text.assemble((f"{mark}: ", style), f"{finding.subject}: {finding.what}.\n", (f"  {finding.advice}", "dim"))


def to_tables(report: HealthReport) -> RenderableType:
    """Return the report for a terminal."""
    workers = [row for row in report.rows if row.get(facts.ROLE) == facts.IO_WORKER]
    clients = [row for row in report.rows if row.get(facts.ROLE) in (facts.RANK_CLIENT, facts.SCHEDULER_CLIENT)]
    parts: list[RenderableType] = [Text(pool_text(report.pool)), "", table("processes", PROCESS_COLUMNS, report.rows)]
    if workers:
        parts.append(table("I/O workers", WORKER_COLUMNS, workers))
    if clients:
        parts.append(table("clients", CLIENT_COLUMNS, clients))
    parts += [finding_text(finding) for finding in report.findings]
    parts.append(Text("healthy", "bold green") if report.healthy else Text("degraded", "bold yellow"))
    return Group(*parts)


def to_json(report: HealthReport) -> str:
    """
    Return the report as JSON: `healthy`, `pool`, `rows`, `findings`.

    Facts keep their names of `facts`; a fact that is not known is absent.
    """
    told = {
        "healthy": report.healthy,
        "pool": report.pool,
        "rows": report.rows,
        "findings": [asdict(finding) for finding in report.findings],
    }
    return json.dumps(told, indent=2)
