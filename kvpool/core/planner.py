"""
Which waiting request is loaded, how much of it, and when: all ways compared, request by request.

Theory. A waiting request of n prompt tokens has l of them on the GPU, and the pool holds a prefix of whole chunks:
some resident in staging, some on a device, some being stored. Loading up to chunk k lets its first token come at

    max(gpu_wait, arrived(k)) + prefill(k, n)         against         gpu_wait + prefill(l, n)

where arrived(k) is the latest of: the copy of what is loaded, each device's backlog plus its share of the chunks, and
the end of stores under way. All k are compared. So a prefix is loaded in full, in part (the rest is not worth its
wait), or not at all; a store under way is a wait like any other.

Seconds of the GPU and of the drives are not one's own: each delays everybody behind. So a way costs its own time, plus
its GPU seconds and its drive seconds once for each request that waits behind. A request alone takes what is sooner
for itself; in a queue the drives and the GPU share the work. (Without that the simulated queues of
`docs/results/planner-simulation.md` took up to 1.4 times as long.)

Requests are priced in the scheduler's order, and each adds its work to what the next ones wait for.

    decline   computing costs no more
    defer     bytes are still coming, and nothing is lost by holding no blocks meanwhile; until a deadline of
              min(deadline_max, max(0.05 s, tolerance x predicted wait)), armed once
    admit     otherwise: k chunks now

A verdict is kept until another way is better by a margin, so that noise in the estimates does not make it flip.

Does not cover: where the numbers come from (`prices.py`, `estimates.py`), who asks and when (the connector).
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvpool.core.curves import Floats
from kvpool.core.prices import Prices
from kvpool.core.profiles import Priced, Profile

#: The least deadline of a deferral.
DEFER_S_MIN = 0.05
#: Another way must cost less than the present one by this much, relative and absolute.
MARGIN = 0.1
MARGIN_S = 0.002
#: Reading that takes no longer is not worth a deferral.
SOON_S = 0.001


class Kind(enum.Enum):
    """What to do with a waiting request."""

    ADMIT = "admit"
    DEFER = "defer"
    DECLINE = "decline"


NOTHING_STORED = "nothing is stored beyond what the GPU has"
COMPUTE = "computing costs no more"
STAGING = "its bytes are being staged"
STORE_UNDER_WAY = "a store of it is under way"
LOAD_ALL = "loading all of it costs least"
LOAD_PART = "the rest is not worth its wait"


@dataclass(frozen=True, slots=True)
class Verdict:
    """
    One decision.

    Attributes:
        kind: What to do.
        chunks: Whole chunks of the prompt, from its start, that are there after the load; 0 where none is worth it.
        why: In words, for health and the log.
        until_ns: End of a deferral; 0 otherwise.
        wait_s: Predicted time until the bytes are there.
        load_s, recompute_s: Predicted time to first token, from now, of the way taken and of computing.
    """

    kind: Kind
    chunks: int
    why: str
    until_ns: int = 0
    wait_s: float = 0.0
    load_s: float = 0.0
    recompute_s: float = 0.0


@dataclass(slots=True)
class Ask:
    """
    A waiting request as the planner sees it.

    Attributes:
        request: Its name.
        profile: Where its prefix lies.
        preloading: The pool brings its missing bytes to staging while it waits.
        storing_s: Predicted seconds until what is being stored of it can be loaded.
    """

    request: str
    profile: Profile
    preloading: bool = False
    storing_s: float = 0.0


@dataclass(slots=True)
class Load:
    """
    What is ahead of the next waiting request; each decision adds to it.

    Attributes:
        gpu_s: GPU seconds of prefills that run, or will when their loads have landed.
        drives_s: Per device, seconds of reading that are queued.
        blocks_scarce: GPU blocks are short: who holds some while it waits stops others.
    """

    gpu_s: float
    drives_s: list[float]
    blocks_scarce: bool = False


@dataclass(slots=True)
class _Past:
    """What was decided about a request: the kept number of chunks (-1: none yet), and its deadline once armed."""

    chunks: int = -1
    deadline_ns: int = 0


@dataclass(slots=True, kw_only=True)
class Planner:
    """
    Decides, and remembers what must outlive a decision.

    Attributes:
        tolerance: Deadline of a deferral as a multiple of the predicted wait.
        deadline_max_s: And its upper bound.
    """

    tolerance: float = 2.0
    deadline_max_s: float = 2.0
    _past: dict[str, _Past] = field(default_factory=dict)

    def plan(self, waiting: Iterable[Ask], load: Load, prices: Prices, *, now_ns: int) -> dict[str, Verdict]:
        """Decide about all waiting requests, in their order; *load* ends as what a further one would wait for."""
        asks = list(waiting)
        behind = range(len(asks) - 1, -1, -1)
        return {
            ask.request: self.decide(ask, load, prices, behind=count, now_ns=now_ns)
            for ask, count in zip(asks, behind, strict=True)
        }

    def decide(self, ask: Ask, load: Load, prices: Prices, *, behind: int, now_ns: int) -> Verdict:
        """
        Decide about the next request in order, and add its work to *load*.

        Args:
            behind: Requests that wait behind it.
        """
        profile, past = ask.profile, self._past.setdefault(ask.request, _Past())
        if profile.empty:
            load.gpu_s += prices.prefill(profile.local_tokens, profile.tokens)
            return Verdict(Kind.DECLINE, 0, NOTHING_STORED, recompute_s=load.gpu_s, load_s=load.gpu_s)
        priced = profile.priced(prices)
        expired = bool(past.deadline_ns) and now_ns >= past.deadline_ns
        arrived = _arrivals(ask, priced, load, expired=expired)
        costs = np.maximum(arrived, load.gpu_s)
        costs += priced.charges(behind)
        if profile.forbidden is not None:
            costs = np.where(profile.forbidden, np.inf, costs)
        best = _keep(costs, past.chunks - profile.first if past.chunks >= 0 else -1)
        past.chunks = best + profile.first
        gpu_before_s, rest_s = load.gpu_s, float(priced.rest[best])
        recompute_s = max(float(arrived[0]), gpu_before_s) + float(priced.rest[0])
        load.gpu_s += rest_s
        if not best:
            return Verdict(Kind.DECLINE, 0, COMPUTE, load_s=recompute_s, recompute_s=recompute_s)
        reads_s = _queue(profile, priced, best, load)
        wait_s, chunks = float(arrived[best]), past.chunks
        figures = (wait_s, max(wait_s, gpu_before_s) + rest_s, recompute_s)
        stored_later = best >= profile.storing_from
        gains = load.blocks_scarce or gpu_before_s >= wait_s
        if not expired and (stored_later or (ask.preloading and reads_s > SOON_S and gains)):
            until_ns = self._deadline(past, wait_s, now_ns)
            return Verdict(Kind.DEFER, chunks, STORE_UNDER_WAY if stored_later else STAGING, until_ns, *figures)
        return Verdict(Kind.ADMIT, chunks, LOAD_ALL if chunks == profile.chunks else LOAD_PART, 0, *figures)

    def _deadline(self, past: _Past, wait_s: float, now_ns: int) -> int:
        if not past.deadline_ns:
            allowed_s = min(self.deadline_max_s, max(DEFER_S_MIN, self.tolerance * wait_s))
            past.deadline_ns = now_ns + int(allowed_s * 1e9)
        return past.deadline_ns

    def forget(self, request: str) -> None:
        """The request runs, or is over."""
        self._past.pop(request, None)

    @property
    def remembered(self) -> int:
        """How many requests it remembers something of."""
        return len(self._past)


def _arrivals(ask: Ask, priced: Priced, load: Load, *, expired: bool) -> Floats:
    """Return when the bytes of a load of i chunks are on the GPU; past its deadline a request waits for no store."""
    arrived: Floats
    if ask.profile.devices:
        before = np.array([*map(load.drives_s.__getitem__, ask.profile.devices), 0.0])
        arrived = np.maximum.reduce(priced.brings + before[:, None])
    else:
        arrived = priced.brings[0].copy()
    first = ask.profile.storing_from
    if first < len(arrived):
        arrived[first:] = np.inf if expired else np.maximum(arrived[first:], ask.storing_s)
    return arrived


def _keep(costs: Floats, kept: int) -> int:
    """Return the way that costs least, or the one kept so far where the gain is within the margin."""
    best = int(costs.argmin())
    if 0 <= kept < len(costs) and float(costs[best]) > float(costs[kept]) * (1 - MARGIN) - MARGIN_S:
        return kept
    return best


def _queue(profile: Profile, priced: Priced, best: int, load: Load) -> float:
    """Add the reads of the way taken to the devices' queues; return the longest of them."""
    longest_s = 0.0
    for device, read_s in zip(profile.devices, priced.brings[:-1, best].tolist(), strict=True):
        if read_s > 0:
            load.drives_s[device] += read_s
            longest_s = max(longest_s, read_s)
    return longest_s
