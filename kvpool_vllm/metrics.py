"""
What vLLM's `/metrics` says of the pool: names, and how their values come together.

Theory. Three sources, none of which does anything for a block or for a poll of a waiting request:

    ranks       count the objects of each job when it ends (:class:`JobCounts`), by device, tier and reason; the counts
                travel with the job's completion
    scheduler   knows which requests it declined or deferred, and why; once per request, when it gets its blocks
    the pool    tells the scheduler client the state of each device, at most once a second where nothing else changes

:class:`PoolMetrics` makes vLLM's stats of them in the scheduler role: what jobs and requests did at once, the rest
every EVERY_S, and of gauges only those that changed. vLLM takes stats when it steps, so an idle engine's gauges are
as of its last step. vLLM's own metrics are made in another process than the connector: what cannot be observed there
is dropped, since its logger must not fail.

Gauges and `device_` counters speak of the whole pool; everything else of this engine alone.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats, OffloadPromMetrics
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

from kvpool.errors import Code

if TYPE_CHECKING:
    from kvpool.client.scheduler import SchedulerClient
    from kvpool.wire.messages import DeviceState, NamespaceSpec

logger = init_logger(f"vllm.{__name__}")

PREFIX = "vllm:kvpool_"
#: What is not told by ended jobs and admitted requests is looked at this often.
EVERY_S = 1.0

DISK, MEMORY = "disk", "memory"

#: Why a request computed what is stored, and why it waited: values of `reason`.
COSTS_LESS = "computing_costs_less"
TOO_SHORT = "below_break_even"
REST_COSTS_LESS = "computing_the_rest_costs_less"
LOAD_FAILED = "load_failed"

DEVICE, DEVICE_TIER, DEVICE_REASON, REASON = ("device",), ("device", "tier"), ("device", "reason"), ("reason",)

_COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "served_tokens": (
        DEVICE_TIER,
        "Prompt tokens of the chunks that loads brought, by where they were found.",
    ),
    "served_bytes": (DEVICE_TIER, "Bytes of KV cache that loads brought, on all ranks."),
    "failed_bytes": (DEVICE_REASON, "Bytes of KV cache that loads did not bring; their tokens were computed."),
    "stored_bytes": (DEVICE, "Bytes of KV cache taken over for storing, on all ranks."),
    "dropped_bytes": (DEVICE_REASON, "Bytes of KV cache offered and not stored: later misses."),
    "declined_requests": (REASON, "Requests that computed what is stored of them, or the rest of it."),
    "deferred_requests": (REASON, "Requests that waited in the queue, holding no blocks, before they got any."),
    "missed_lookups": (REASON, "Lookups of chunks that were answered as misses."),
    "device_read_bytes": (DEVICE, "Bytes of KV cache read from the device, for all engines of the pool."),
    "device_written_bytes": (DEVICE, "Bytes of KV cache published on the device, for all engines of the pool."),
}
_GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "connected": ((), "1 while a pool answers this engine's scheduler."),
    "device_healthy": (DEVICE, "1 while the device is used."),
    "device_read_bytes_per_second": (DEVICE, "Measured read speed of the device; 0 while it is not measured."),
    "device_backlog_bytes": (DEVICE, "Bytes of loads that are queued or being read."),
    "staging_bytes": (DEVICE, "Staging memory that the device's I/O worker has."),
    "resident_bytes": (DEVICE, "Of it, what holds a whole object."),
    "pinned_bytes": (DEVICE, "Of it, what a rank copies from now."),
    "staged_bytes": (DEVICE, "Of it, what is kept for waiting requests, read already or still to be read."),
}

#: Gauges and counters that are attributes of a device's state.
_STATE_GAUGES = {
    "device_healthy": "healthy", "device_read_bytes_per_second": "read_bytes_per_s",
    "device_backlog_bytes": "backlog_bytes", "staging_bytes": "staging_bytes", "resident_bytes": "resident_bytes",
    "pinned_bytes": "pinned_bytes", "staged_bytes": "staged_bytes",
}  # fmt: skip
_STATE_COUNTERS = {"device_read_bytes": "read_bytes", "device_written_bytes": "written_bytes"}

#: (is a load, device, was resident, KV group, code of the failure or 0) -> objects.
Counted = Mapping[tuple[bool, int, bool, int, int], int]
Labels = tuple[str | int, ...]


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics by name, as vLLM wants them declared."""
    counters = {
        PREFIX + name: OffloadingCounterMetadata(documentation=text, labelnames=labels)
        for name, (labels, text) in _COUNTERS.items()
    }
    gauges = {
        PREFIX + name: OffloadingGaugeMetadata(documentation=text, labelnames=labels)
        for name, (labels, text) in _GAUGES.items()
    }
    return {**counters, **gauges}


class JobCounts:
    """What one rank's jobs came to, since it was last taken."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[bool, Sequence[bytes], Sequence[int], Sequence[int]]] = {}
        self._counted: Counter[tuple[bool, int, bool, int, int]] = Counter()

    def submitted(self, job: int, keys: Sequence[bytes], devices: Sequence[int], resident: bytes | None = None) -> None:
        """
        A job was submitted.

        Args:
            resident: One byte a key, 1 where a load found it in staging; None: a store.
        """
        self._open[job] = (resident is not None, keys, devices, resident or bytes(len(keys)))

    def ended(self, job: int, failed: Iterable[tuple[int, int]]) -> None:
        """A job has ended; *failed* are (index into its keys, code)."""
        known = self._open.pop(job, None)
        if known is None:
            return
        load, keys, devices, resident = known
        codes = bytearray(len(keys))
        for index, code in failed:
            codes[index] = code
        groups = [key[-4:] for key in keys]
        for (device, there, group, code), count in Counter(zip(devices, resident, groups, codes, strict=True)).items():
            self._counted[load, device, bool(there), int.from_bytes(group, "big"), code] += count

    def take(self) -> dict[tuple[bool, int, bool, int, int], int]:
        """Return what was counted since the last time."""
        taken, self._counted = dict(self._counted), Counter()
        return taken


class PoolMetrics:
    """
    One engine's stats for vLLM, in the scheduler role.

    Args:
        namespace: Sizes of the objects.
        chunk_tokens: Tokens of a chunk, per KV group index.
    """

    def __init__(self, namespace: "NamespaceSpec", chunk_tokens: Mapping[int, int]) -> None:
        self._object_bytes = {group.group: group.object_bytes for group in namespace.groups}
        self._chunk_tokens = chunk_tokens
        self._ranks = namespace.rank_count
        #: The KV group whose chunks count as tokens; the connector knows which has one for every position.
        self.main_group = min(self._object_bytes, default=0)
        self._names: list[str] = []
        #: By name and labels; a device stands there by its number, since its name may come later.
        self._counts: Counter[tuple[str, Labels]] = Counter()
        self._gauges: dict[tuple[str, Labels], float] = {}
        self._due = -math.inf
        self._totals: dict[tuple[str, Labels], int] = {}

    # ------------------------------------------------------------ events

    def jobs_counted(self, counted: Counted) -> None:
        """Ranks have counted what ended."""
        for (load, device, resident, group, code), objects in counted.items():
            count = objects * self._object_bytes.get(group, 0)
            if code:
                self._counts["failed_bytes" if load else "dropped_bytes", (device, _reason(code))] += count
            elif not load:
                self._counts["stored_bytes", (device,)] += count
            else:
                tier = MEMORY if resident else DISK
                self._counts["served_bytes", (device, tier)] += count
                if group == self.main_group:
                    tokens = objects * self._chunk_tokens.get(group, 0) // self._ranks
                    self._counts["served_tokens", (device, tier)] += tokens

    def declined(self, reason: str) -> None:
        """A request got its blocks and computes what is stored of it, or the rest of it."""
        self._counts["declined_requests", (reason,)] += 1

    def deferred(self, reason: str) -> None:
        """A request got its blocks and has waited for that reason."""
        self._counts["deferred_requests", (reason,)] += 1

    # ------------------------------------------------------------ stats

    def take(self, client: "SchedulerClient") -> OffloadingConnectorStats | None:
        """Return what there is to tell since the last time; None: nothing. Called in every step."""
        now = time.monotonic()
        due = now >= self._due
        if not due and not self._counts:
            return None
        stats = OffloadingConnectorStats()
        self._names = client.devices or self._names
        if due:
            self._due = now + EVERY_S
            self._look(client, stats)
        counts, self._counts = self._counts, Counter()
        for (name, labels), count in counts.items():
            if count:
                stats.increase_counter(PREFIX + name, count, self._named(labels))
        return None if stats.is_empty() else stats

    def _look(self, client: "SchedulerClient", stats: OffloadingConnectorStats) -> None:
        self._set(stats, "connected", (), float(client.connected))
        for device, state in client.device_states().items():
            self._look_at(device, state, stats)
        for name, total in client.counters().items():
            if name.startswith("missed_"):
                self._count_up("missed_lookups", (name.removeprefix("missed_"),), total)

    def _look_at(self, device: int, state: "DeviceState", stats: OffloadingConnectorStats) -> None:
        for name, attribute in _STATE_GAUGES.items():
            self._set(stats, name, (device,), float(getattr(state, attribute)))
        for name, attribute in _STATE_COUNTERS.items():
            self._count_up(name, (device,), getattr(state, attribute))

    def _set(self, stats: OffloadingConnectorStats, name: str, labels: Labels, value: float) -> None:
        if self._gauges.get((name, labels)) != value:
            self._gauges[name, labels] = value
            stats.set_gauge(PREFIX + name, value, self._named(labels))

    def _count_up(self, name: str, labels: Labels, total: int) -> None:
        """Count what has come to a total of somebody who may have started anew: then all of it is new."""
        before = self._totals.get((name, labels), 0)
        self._totals[name, labels] = total
        self._counts[name, labels] += total - before if total >= before else total

    def _named(self, labels: Labels) -> tuple[str, ...]:
        return tuple(label if isinstance(label, str) else self._name(label) for label in labels)

    def _name(self, device: int) -> str:
        return self._names[device] if device < len(self._names) else str(device)


def _reason(code: int) -> str:
    return Code(code).name.lower() if code in Code._value2member_map_ else str(code)


class PoolPromMetrics(OffloadPromMetrics):
    """VLLM's Prometheus side of the stats: whatever cannot be observed is dropped, and said once."""

    _complained = False

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take one step's stats in."""
        try:
            super().observe(transfer_stats_data, engine_idx)
        except Exception:  # the border to the engine: its logger must go on
            if not self._complained:
                self._complained = True
                logger.exception("kvpool: metrics of the KV connector are incomplete")
