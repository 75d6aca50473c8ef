"""
The planner's work, cut into pieces that a scheduling step can afford.

Theory. Something changed (an arrival, residency, a speed): a *round* goes over the waiting requests in the scheduler's
order and decides each anew. A round begins at most every EVERY_NS, and each step does at most `asks_per_step` of it, so
that a long queue costs no step more than a short one; the first in the queue come first. Between rounds the verdicts
stand. A request that was never decided is decided when it is asked about, behind everything the last round planned.

Does not cover: the decisions (`planner.py`), where residency and backlogs are known from (the connector).
"""

from collections.abc import Callable, Iterable

from kvpool.core.planner import Ask, Load, Planner, Verdict
from kvpool.core.prices import Prices

#: A round begins at most this often.
EVERY_NS = 20_000_000
#: Requests decided in one step. 64 requests of 128 k tokens: `tools/planner_bench.py`.
ASKS_PER_STEP = 3


class Rounds:
    """
    Verdicts on the waiting requests of one engine.

    Args:
        planner: Decides.
        asks_per_step: See the module.

    Attributes:
        count: Rounds begun.
    """

    def __init__(self, planner: Planner, *, asks_per_step: int = ASKS_PER_STEP) -> None:
        self._planner = planner
        self._asks_per_step = asks_per_step
        self._verdicts: dict[str, Verdict] = {}
        self._queue: list[str] = []
        self._next = 0
        self._load = Load(0.0, [])
        self._changed = True
        self._due_ns = 0
        self.count = 0

    def changed(self) -> None:
        """Something that verdicts depend on is different."""
        self._changed = True

    def step(
        self,
        waiting: Callable[[], Iterable[str]],
        ask_of: Callable[[str], Ask | None],
        ahead: Callable[[], Load],
        prices: Prices,
        *,
        now_ns: int,
    ) -> None:
        """
        Do a step's share of the round under way, or begin one that is due.

        Args:
            waiting: Names in the scheduler's order.
            ask_of: The request as it is now; None: it no longer waits.
            ahead: What is ahead of the first of them.
            prices: Of now.
        """
        if self._next >= len(self._queue):
            if not self._changed or now_ns < self._due_ns:
                return
            self._queue, self._next, self._load = list(waiting()), 0, ahead()
            self._changed, self._due_ns = False, now_ns + EVERY_NS
            self.count += 1
        end = min(len(self._queue), self._next + self._asks_per_step)
        for place in range(self._next, end):
            ask = ask_of(self._queue[place])
            if ask is not None:
                self._decide(ask, prices, len(self._queue) - place - 1, now_ns)
        self._next = end

    def verdict(self, ask: Callable[[], Ask], request: str, prices: Prices, *, now_ns: int) -> Verdict:
        """Return the verdict on a request that vLLM asks about; one past its deadline is decided anew."""
        found = self._verdicts.get(request)
        if found is None or (found.until_ns and now_ns >= found.until_ns):
            found = self._decide(ask(), prices, 0, now_ns)
        return found

    def _decide(self, ask: Ask, prices: Prices, behind: int, now_ns: int) -> Verdict:
        found = self._planner.decide(ask, self._load, prices, behind=behind, now_ns=now_ns)
        self._verdicts[ask.request] = found
        return found

    def known(self, request: str) -> Verdict | None:
        """Return the standing verdict, for health."""
        return self._verdicts.get(request)

    def forget(self, request: str) -> None:
        """The request runs, or is over."""
        self._verdicts.pop(request, None)
        self._planner.forget(request)
        self._changed = True

    def statistics(self) -> dict[str, int]:
        """Return rounds begun, and standing verdicts by kind."""
        kinds = [verdict.kind.value for verdict in self._verdicts.values()]
        return {"planned_rounds": self.count, **{f"planned_{kind}": kinds.count(kind) for kind in sorted(set(kinds))}}
