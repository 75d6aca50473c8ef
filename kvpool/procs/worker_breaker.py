"""
The breaker of one I/O worker's device: fed with what ended, told in the log, seen in health.

Covers: what counts for and against the device, log lines, facts. Does not cover: when it opens and closes
(`core/breaker.py`), what follows from that (`core/objects.py`, `core/directory.py`).
"""

import logging

from kvpool import config
from kvpool.core.breaker import Breaker, Direction, State
from kvpool.core.objects import ObjectTable
from kvpool.health import facts
from kvpool.health.facts import Facts
from kvpool.io.engine import Ended, Kind

log = logging.getLogger("kvpool.worker")

_STATES = {
    State.CLOSED: facts.BREAKER_CLOSED,
    State.OPEN: facts.BREAKER_OPEN,
    State.PROBING: facts.BREAKER_PROBING,
}


class WorkerBreaker:
    """
    See the module.

    Args:
        device: The device's name.
        now_ns: When its worker started.
    """

    def __init__(self, device: str, pool: config.PoolSettings, *, now_ns: int) -> None:
        self._device = device
        self._breaker = Breaker(
            failures=pool.breaker_failures,
            retry_ns=int(pool.breaker_retry_s * 1e9),
            stall_ns=int(pool.operation_deadline_s * 1e9),
        )
        self._breaker.answered(now_ns)
        self._late_reads = self._late_writes = 0
        self._opened_ns = 0

    @property
    def healthy(self) -> bool:
        """Whether the device is used."""
        return self._breaker.healthy

    def note(self, ended: Ended, now_ns: int) -> None:
        """An operation on an object ended."""
        direction = Direction.WRITE if ended.kind is Kind.PUBLISHED else Direction.READ
        if ended.device_trouble:
            if self._breaker.failed(direction, ended.detail, now_ns):
                self._tell_opened(now_ns)
        elif ended.error is None and ended.kind in (Kind.READ, Kind.PUBLISHED):
            self._breaker.did_well(direction, now_ns)
        else:
            self._breaker.answered(now_ns)

    def note_late(self, table: ObjectTable, now_ns: int) -> None:
        """Look whether operations became late; those that did so together count as one failure."""
        late = [(Direction.READ, table.late_reads > self._late_reads)]
        late.append((Direction.WRITE, table.late_writes > self._late_writes))
        self._late_reads, self._late_writes = table.late_reads, table.late_writes
        for direction, happened in late:
            if happened and self._breaker.late(direction, now_ns):
                self._tell_opened(now_ns)

    def due_ns(self) -> int | None:
        """Return when the device is to be tried; None while it is not to be."""
        return self._breaker.probe_due_ns()

    def start_probe(self, now_ns: int) -> None:
        """The device is being tried."""
        self._breaker.probe_started(now_ns)

    def end_probe(self, ended: Ended, now_ns: int) -> None:
        """The trial ended."""
        well = ended.error is None
        self._breaker.probe_ended(well=well, now_ns=now_ns)
        if well:
            away_s = (now_ns - self._opened_ns) / 1e9
            log.warning("device %s: it answers again after %.1f s, and is used again", self._device, away_s)
        else:
            log.debug("device %s: a trial failed: %s", self._device, ended.detail)

    def facts(self) -> Facts:
        """Return what health shows."""
        breaker = self._breaker
        told: Facts = {
            facts.BREAKER: _STATES[breaker.state],
            facts.BREAKER_OPENED: breaker.opened,
            facts.BREAKER_TRIALS_FAILED: breaker.probes_failed,
        }
        return told | {facts.BREAKER_WHY: breaker.why} if breaker.why else told

    def _tell_opened(self, now_ns: int) -> None:
        self._opened_ns = now_ns
        due_ns = self._breaker.probe_due_ns() or now_ns
        log.warning(
            "device %s: given up for now (%s): its keys are misses, its stores go elsewhere; first trial in %g s",
            self._device,
            self._breaker.why,
            round((due_ns - now_ns) / 1e9, 3),
        )
