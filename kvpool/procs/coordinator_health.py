"""
Answers about health: what the coordinator knows, beside what each process says of itself.

Theory. An admin's question makes one *round*: every ready worker and attached client is asked for
its facts, and the answer goes out when all have answered, or `ROUND_S` later without those that did
not (they are "silent"). Questions that come during a round share its answer. A scheduler answers when its engine
takes a step, which an idle one does not: it is asked but not waited for, and what it said last is told.
Nothing is measured here: CPU, memory and descriptors are read from outside, by whoever asks.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.health import facts as f
from kvpool.procs.coordinator_loop import Loop
from kvpool.procs.coordinator_peer import Peer
from kvpool.wire.codec import split
from kvpool.wire.messages import Health, ReportWanted

#: How long a round waits for answers.
ROUND_S = 1.0

Facts = dict[str, str | int | float | bool]


@dataclass(slots=True)
class Row:
    """
    One process.

    Attributes:
        known: What is known of it here for certain.
        peer: How to ask it for more; None: nothing to ask.
        last_known: What it said earlier, and may say anew.
        awaited: Whether the round waits for its answer.
    """

    known: Facts
    peer: Peer | None = None
    last_known: Facts = field(default_factory=dict)
    awaited: bool = True


@dataclass(slots=True)
class _Round:
    """One question to all. `said[i]` is what rows[i] answered."""

    rows: list[Row]
    said: dict[int, Facts] = field(default_factory=dict)
    asked_by: list[Peer] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return all(
            row.peer is None or row.peer.gone or not row.awaited or index in self.said
            for index, row in enumerate(self.rows)
        )


class Rounds:
    """
    See the module.

    Args:
        rows: Returns one row per process of the pool.
        pool: Returns the facts of the pool as a whole.
    """

    def __init__(self, loop: Loop, rows: Callable[[], list[Row]], pool: Callable[[], Facts]) -> None:
        self._loop = loop
        self._rows = rows
        self._pool = pool
        self._number = 0
        self._round: _Round | None = None
        #: What peers said last, of those that are not awaited.
        self._said_last: dict[Peer, Facts] = {}

    def asked(self, admin: Peer) -> None:
        """An admin wants the pool's health."""
        if self._round is None:
            self._begin()
        if self._round is not None:
            self._round.asked_by.append(admin)
            self._end_if_complete()

    def reported(self, peer: Peer, number: int, facts: Facts) -> None:
        """A process answered; an answer to a round that is over counts for the next one, if it is not awaited there."""
        self._said_last[peer] = facts
        if self._round is None or number != self._number:
            return
        for index, row in enumerate(self._round.rows):
            if row.peer is peer:
                self._round.said[index] = facts
        self._end_if_complete()

    def _begin(self) -> None:
        self._number += 1
        self._round = _Round(self._rows())
        unawaited = {row.peer for row in self._round.rows if not row.awaited}
        self._said_last = {peer: said for peer, said in self._said_last.items() if peer in unawaited}
        for row in self._round.rows:
            if row.peer is not None:
                row.peer.send(ReportWanted(report=self._number))
        self._loop.set_timer("health", time.monotonic_ns() + int(ROUND_S * 1e9), self._end)

    def _end_if_complete(self) -> None:
        if self._round is not None and self._round.is_complete:
            self._end()

    def _end(self) -> None:
        ended, self._round = self._round, None
        self._loop.cancel_timer("health")
        if ended is None:
            return
        rows = [self._answer(row, ended.said.get(index)) for index, row in enumerate(ended.rows)]
        parts = [part for _, part in split(rows)] or [[]]
        pool = self._pool()
        for admin in ended.asked_by:
            for index, part in enumerate(parts):
                admin.send(Health(pool=pool, rows=part, more=index < len(parts) - 1))

    def _answer(self, row: Row, said: Facts | None) -> Facts:
        """Join what a process said with what is known here, which wins."""
        if row.peer is None:
            return row.known
        if said is None and not row.awaited:
            said = self._said_last.get(row.peer, {})
        if said is None:
            return {**row.last_known, **row.known, f.STATE: f.SILENT}
        return {**row.last_known, **said, **row.known}
