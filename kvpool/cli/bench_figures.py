"""
Figures of `kvpool bench`: from the times of one phase to the JSON and the table. Pure functions.

Covers: what each figure means (`MEANING` is what `--help` prints), percentiles, medians over rounds.
Does not cover: taking the times (`bench_rank`, `bench_pool`), running a pool.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Keys of the JSON and what they mean; `store_` and `load_` share their meanings.
MEANING: dict[str, str] = {
    "object_bytes": "payload bytes of one object",
    "objects": "objects stored and loaded per round",
    "total_bytes": "payload bytes stored and loaded per round",
    "paths": "the directories, one device each",
    "queue_depth": "reads and writes in flight per device, at most",
    "staging_bytes": "staging memory of the pool",
    "verify": "true: payload checksums are verified when an object is loaded",
    "io_mode": "effective I/O mode, as the I/O workers say",
    "caches_dropped": "true: the page cache was dropped before each load (needs root)",
    "bytes_checked": "true: every object loaded carried its marks, and a sample was compared as a whole",
    "rounds": "rounds; every other figure is the median over them, `_min` and `_max` beside it",
    "store_gbps": "10^9 payload bytes per second from the first Filled until the index tells the last object stored",
    "load_gbps": "10^9 payload bytes per second from the first Load until the last Ready, new pool, cold",
    "*_cpu_s_per_gb": "CPU seconds of all processes of the pool and of the client, per 10^9 payload bytes",
    "store_p50_ms": "per object, from its Filled until its file has its final name: median (p99: 99th percentile)",
    "load_p50_ms": "per object, from its Load until its Ready: median (p99: 99th percentile)",
    "*_depth": "mean of reads and writes in flight over the time any was, mean of the devices",
    "*_s": "seconds the rate is computed from",
    "by_round": "the figures of every round",
    "host": "kernel, processors, versions, date",
}

#: Figures of one phase that are reported for store and load.
PHASE_KEYS = ("gbps", "cpu_s_per_gb", "p50_ms", "p99_ms", "depth", "s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """
    What one timed phase (a store or a load of all objects) gave.

    Attributes:
        payload_bytes: Bytes moved.
        seconds: Wall time.
        cpu_s: CPU seconds of all processes in that time.
        latencies_s: One per object.
        depth: Achieved queue depth; None if the pool did not tell.
    """

    payload_bytes: int
    seconds: float
    cpu_s: float
    latencies_s: Sequence[float]
    depth: float | None = None


def named_ns(filled_ns: int, file_ns: int | None, stored_ns: int) -> int:
    """
    Return when an object's file got its name.

    A filesystem's clock ticks only every few milliseconds: a file's time can lie before its Filled, and tells nothing
    then. The time at which the pool told the object as stored is an upper bound.
    """
    return min(file_ns, stored_ns) if file_ns is not None and filled_ns < file_ns else stored_ns


def percentile(values: Sequence[float], share: float) -> float:
    """
    Return the smallest value that at least *share* of the values do not exceed (nearest rank).

    Args:
        values: At least one, in any order.
        share: 0 < share <= 1.
    """
    ordered = sorted(values)
    rank = -(-len(ordered) * share // 1)
    return ordered[max(0, min(len(ordered), int(rank)) - 1)]


def phase_figures(phase: Phase) -> dict[str, float | None]:
    """Return the figures of one phase, by `PHASE_KEYS`."""
    gigabytes = phase.payload_bytes / 1e9
    return {
        "gbps": gigabytes / phase.seconds,
        "cpu_s_per_gb": phase.cpu_s / gigabytes,
        "p50_ms": 1e3 * percentile(phase.latencies_s, 0.5),
        "p99_ms": 1e3 * percentile(phase.latencies_s, 0.99),
        "depth": phase.depth,
        "s": phase.seconds,
    }


def round_figures(store: Phase, load: Phase) -> dict[str, float | None]:
    """Return the figures of one round, keys with `store_` and `load_`."""
    return {
        f"{name}_{key}": value
        for name, phase in (("store", store), ("load", load))
        for key, value in phase_figures(phase).items()
    }


def over_rounds(rounds: Sequence[dict[str, float | None]]) -> dict[str, float | int | None]:
    """Return for every figure the median over the rounds, and with `_min` and `_max` its range."""
    summary: dict[str, float | int | None] = {"rounds": len(rounds)}
    for name in (f"{phase}_{key}" for phase in ("store", "load") for key in PHASE_KEYS):
        values = [value for one in rounds if (value := one[name]) is not None]
        summary[name] = statistics.median(values) if values else None
        summary[f"{name}_min"] = min(values, default=None)
        summary[f"{name}_max"] = max(values, default=None)
    return summary


def help_text() -> str:
    """Return the JSON's keys with their meanings, for `--help`."""
    return "\n\n".join(f"{name}: {meaning}" for name, meaning in MEANING.items())
