"""
Staging that pairs lend one another: from whose cache is idle to who waits for slots.

Theory of operation. Every pair (device, slot size) has a *share* by weight, and a *floor* that it never lends. What it
*needs* is told from time to time: slots in use for more than cache, and what waits for some. The highest need of the
last PEAK_NS counts, since traffic comes in bursts. A pair that needs less than its share lends the difference, at most
half its share; pairs that need more than theirs borrow it, in proportion, until what is wanted or what is there is
used up. A pair of which nothing was told needs its share.

    need below share:  lends  min(share - floor, share / 2, share - need * HEADROOM)
    need above share:  wants  need * HEADROOM - share

A loan moves segments, which empties cache here and fills pages there. So loans change at most every LOAN_NS, and not
at all unless one of them would change by an eighth of its pair's share, or a lender needs what it lent. Shares that
change (a namespace comes or goes, staging is resized) end all loans.

Covers: bytes. Does not cover: segments (`core/budget.py`), who tells needs (`procs/io_worker.py`, `core/admission.py`).
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvpool.errors import invariant

#: What a pair should have beyond its need, so that a rising need meets free slots.
HEADROOM = 1.25
#: Most that a pair lends of its share.
LENT_SHARE_MAX = 0.5
#: A change of loans below this part of a share is not worth moving segments.
CHANGE_SHARE_MIN = 0.125
#: The highest need of so long a time counts.
PEAK_NS = 10 * 10**9
#: Time between two changes of loans.
LOAN_NS = 2 * 10**9

_P = TypeVar("_P", bound=Hashable)


@dataclass(slots=True)
class _Need:
    """What a pair needs now, and the highest need of late, with its time; *waiting* comes on top of both."""

    used: int = 0
    peak: int = 0
    peak_ns: int = 0
    waiting: int = 0

    def told(self, used: int, now_ns: int) -> None:
        self.used = used
        if used >= self.peak or now_ns - self.peak_ns >= PEAK_NS:
            self.peak, self.peak_ns = used, now_ns

    def at(self, now_ns: int) -> int:
        return (self.peak if now_ns - self.peak_ns < PEAK_NS else self.used) + self.waiting


class Lending(Generic[_P]):
    """See the module."""

    def __init__(self) -> None:
        self._needs: dict[_P, _Need] = {}
        self._shares: dict[_P, int] = {}
        self._loans: dict[_P, int] = {}
        self._next_ns = 0
        #: Something was told that the loans do not know of.
        self._is_stale = False

    def used(self, pair: _P, used_bytes: int, now_ns: int) -> None:
        """A pair uses so many bytes for more than cache, or waits for them."""
        self._needs.setdefault(pair, _Need()).told(used_bytes, now_ns)
        self._is_stale = True

    def waiting(self, waiting: Mapping[_P, int]) -> None:
        """So many bytes are waited for beside what is used; nothing by pairs that are not named."""
        for pair, need in self._needs.items():
            self._is_stale |= need.waiting != waiting.get(pair, 0)
            need.waiting = waiting.get(pair, 0)

    def forget(self, pair: _P) -> None:
        """Nothing is known of that pair any more: its worker ended."""
        if self._needs.pop(pair, None) is not None:
            self._is_stale = True

    def loans(self, shares: Mapping[_P, int]) -> dict[_P, int]:
        """Return bytes by pair, borrowed (above 0) or lent (below), at most 0 in all; none under other shares."""
        return self._loans if shares == self._shares else {}

    def divide(self, shares: Mapping[_P, int], floors: Mapping[_P, int], now_ns: int) -> None:
        """Change the loans if it is time, and worth it."""
        if shares != self._shares:
            self._shares, self._loans, self._is_stale = dict(shares), {}, True
        elif now_ns < self._next_ns:
            return
        self._next_ns, self._is_stale = now_ns + LOAN_NS, False
        needs = {pair: need.at(now_ns) for pair, need in self._needs.items()}
        wanted = _loans(shares, floors, needs)
        if self._is_worth(wanted, needs):
            self._loans = wanted

    def _is_worth(self, wanted: dict[_P, int], needs: dict[_P, int]) -> bool:
        for pair, share in self._shares.items():
            now, then = self._loans.get(pair, 0), wanted.get(pair, 0)
            lender_is_short = now < 0 and needs.get(pair, share) > share + now
            if abs(then - now) > CHANGE_SHARE_MIN * share or (lender_is_short and then > now):
                return True
        return False

    def due_ns(self, now_ns: int) -> int | None:
        """When `divide` is worth calling again; None: not before something is told."""
        if self._is_stale:
            return self._next_ns
        ends = [need.peak_ns + PEAK_NS for need in self._needs.values() if need.peak > need.used]
        return max(self._next_ns, min(ends)) if ends and min(ends) > now_ns else None

    def validate(self) -> None:
        """Check that nobody borrows what nobody lends."""
        invariant(sum(self._loans.values()) <= 0, "borrowed bytes are lent by somebody", loans=str(self._loans))
        invariant(self._loans.keys() <= self._shares.keys(), "only who has a share lends and borrows")


def _loans(shares: Mapping[_P, int], floors: Mapping[_P, int], needs: Mapping[_P, int]) -> dict[_P, int]:
    """Return what each pair borrows or lends; see the module."""
    spare: dict[_P, float] = {}
    want: dict[_P, float] = {}
    for pair, share in shares.items():
        need = needs[pair] * HEADROOM if pair in needs else share
        spare[pair] = max(0.0, min(share - floors[pair], share * LENT_SHARE_MAX, share - need))
        want[pair] = max(0.0, need - share)
    moved = min(sum(spare.values()), sum(want.values()))
    if moved < 1:
        return {}
    lent = {pair: -int(-(-moved * part // sum(spare.values()))) for pair, part in spare.items() if part}
    borrowed = {pair: int(moved * part / sum(want.values())) for pair, part in want.items() if part}
    excess = sum(lent.values()) + sum(borrowed.values())
    if excess > 0:  # what rounding made
        largest = max(borrowed, key=lambda pair: borrowed[pair])
        borrowed[largest] -= excess
    return {**lent, **borrowed}
