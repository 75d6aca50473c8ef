"""
When the walks beside a device's loads may go on.

Theory. A walk reads folders from the drive that serves loads, and on a small machine it wants a processor too. So it
waits while a load does, and a little longer, since loads come in groups. Under loads without an end it still has a
short turn now and then: a walk always ends.

    quiet for QUIET_NS   -> goes
    a load is there      -> waits; after WAIT_NS of waiting, a turn of TURN_NS, then it waits again

Does not cover: how it is told (`procs/turns.py`).
"""

from dataclasses import dataclass

QUIET_NS = 3_000_000
WAIT_NS = 100_000_000
TURN_NS = 1_000_000


@dataclass(slots=True)
class ScanPace:
    """
    See the module.

    Attributes:
        going: Whether walks go on, as of the last look.
        since_ns: When that began.
        busy_ns: When loads were seen last.
        in_turn: It goes on beside loads, for a turn.
    """

    going: bool = True
    since_ns: int = 0
    busy_ns: int = -QUIET_NS
    in_turn: bool = False

    def look(self, now_ns: int, *, busy: bool) -> bool:
        """Return whether walks go on now; *busy*: a load waits or runs."""
        if busy:
            self.busy_ns = now_ns
        quiet = now_ns - self.busy_ns >= QUIET_NS
        spent_ns = now_ns - self.since_ns
        its_turn = self.in_turn and spent_ns < TURN_NS if self.going else spent_ns >= WAIT_NS
        wanted = quiet or its_turn
        if wanted != self.going:
            self.going, self.since_ns = wanted, now_ns
            self.in_turn = wanted and not quiet
        self.in_turn = self.in_turn and not quiet
        return self.going

    def due_ns(self) -> int | None:
        """Return when the next look changes something though nothing else happens; None: nothing would."""
        if self.going:
            return self.since_ns + TURN_NS if self.in_turn else None
        return min(self.busy_ns + QUIET_NS, self.since_ns + WAIT_NS)
