"""
Deciding by cost inside vLLM's scheduler: what the planner needs of vLLM's requests, and what it says about them.

Theory. The planner is pure (`kvpool/core/planner.py`); this module feeds it. Requests wait in the order of their
arrival, or of vLLM's priority. Where their prefix lies comes from the scheduler client, of the first full-attention
group: it alone has a chunk for every position (with several groups only the whole hit is a choice, since a shorter one
may need what was never stored). What is ahead are the prefills of running requests and the devices' backlogs.

Speeds are taken from what happens anyway. A step's time is that from its scheduling to the next one's, if both have
work; with vLLM's asynchronous scheduling a step runs while its successor is scheduled, so its time is one interval
later. Only steps with one prompt in them tell the speed of prefill. A load without company tells the copies' speed.

Without enough of that, and without a break-even file, there is no verdict, and the connector does as with the planner
off. The gate counts only while there is none.

Does not cover: how a verdict becomes vLLM's answer (`scheduling.py`).
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpool.config_planner import PlannerSettings
from kvpool.core.curves import BreakEven
from kvpool.core.estimates import STEP_TOKENS_SMALL
from kvpool.core.gate import Gate
from kvpool.core.measured import Measured
from kvpool.core.planner import LOAD_PART, Ask, Kind, Load, Planner, Verdict
from kvpool.core.prices import Prices
from kvpool.core.profiles import Profile
from kvpool.core.rounds import Rounds

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpool.wire.messages import DeviceState

logger = init_logger(f"vllm.{__name__}")

#: Residency of a waiting request is looked up again after this long, however much is told meanwhile.
PLACES_EVERY_S = 0.25
#: The same for one that is deferred: it waits for just that.
PLACES_DEFERRED_EVERY_S = 0.03
#: Requests whose residency one step looks up.
PLACES_PER_STEP = 1
#: Taken for the time until a store under way can be loaded: its bytes leave the GPU behind the step that made them.
STORE_S_ASSUMED = 0.05
#: A device's speed is taken in again after this long though it was told no new one.
SPEED_EVERY_S = 1.0
#: Prices follow what was measured this often: making curves of it takes longer than a step may.
PRICES_EVERY_S = 0.5
#: GPU blocks are short below this share of them.
BLOCKS_SCARCE = 0.1


@dataclass(slots=True)
class Waiter:
    """
    A waiting request.

    Attributes:
        keys: Of the group that has all positions, in order.
        computed: Tokens on the GPU, as vLLM last said.
        profile: As of *looked_at*.
    """

    request: "Request"
    keys: Callable[[], Sequence[bytes]]
    order: tuple[int, int]
    computed: int = 0
    profile: Profile | None = None
    looked_at: float = 0.0


@dataclass(slots=True)
class _Step:
    """A step that was scheduled: when, and the one prompt in it as (first, last) tokens; None: several, or none."""

    at: float
    prompt: tuple[int, int] | None


class Planning:
    """
    One engine's planner.

    Args:
        settings: Of the connector.
        break_even: The user's file, or None.
        chunk_tokens: Tokens of a chunk of the group whose keys are given.
        kv_bytes_per_token: Of all groups and ranks together.
        device_count: Devices of the pool.
        places: Where the stored beginning of keys lies.
        answered: The pool has answered a request's announcement: before that nothing is known of it.
        several_groups: The model has more than one KV group.
        preloads: Waiting requests that the pool reads ahead, from the first on; 0: none.
        async_steps: VLLM schedules a step while the one before runs.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        break_even: BreakEven | None,
        *,
        chunk_tokens: int,
        kv_bytes_per_token: float,
        device_count: int,
        places: Callable[[Sequence[bytes]], list[int]],
        answered: Callable[[str], bool],
        several_groups: bool = False,
        preloads: int = 0,
        async_steps: bool = False,
    ) -> None:
        self._on = settings.mode != "off"
        self.gate = Gate.of(break_even) if break_even is not None else Gate()
        self._chunk_tokens = chunk_tokens
        self._places = places
        self._answered = answered
        self._several_groups = several_groups
        self._preloads = preloads
        self._measured = Measured(
            chunk_tokens=chunk_tokens,
            kv_bytes_per_token=kv_bytes_per_token,
            device_count=device_count,
            curves=break_even.curves if break_even is not None else None,
        )
        self._device_count = device_count
        self._planner = Planner(tolerance=settings.tolerance, deadline_max_s=settings.deadline_max_s)
        self._rounds = Rounds(self._planner)
        self._waiting: dict[str, Waiter] = {}
        self._arrivals = 0
        self._pool_changes = -1
        self._lookups_left = PLACES_PER_STEP
        self._told: dict[int, tuple[float, float]] = {}
        self._steps: deque[_Step] = deque(maxlen=3)
        self._lag = 1 if async_steps else 0
        self._prices: Prices | None = None
        self._priced_at = -math.inf
        self._ahead: Callable[[], Load] = lambda: Load(0.0, [0.0] * device_count)
        #: Predicted and actual seconds of loads, newest last.
        self.waits: deque[tuple[float, float]] = deque(maxlen=256)
        #: Of loads under way: predicted seconds, the scale in them, when they began.
        self._loading: dict[str, tuple[float, float, float]] = {}
        #: What vLLM was told last about each waiting request, and how often each kind of it became true.
        self._told_kinds: dict[str, Kind] = {}
        self._counts: Counter[str] = Counter()
        self._last_why = ""

    # ------------------------------------------------------------ requests

    def arrived(self, request: "Request", keys: Callable[[], Sequence[bytes]], *, by_priority: bool) -> None:
        """A request waits, perhaps again after a preemption; then it is the first of its priority."""
        name = request.request_id
        if name in self._waiting:
            return
        self._arrivals += 1
        again = request.num_computed_tokens > 0 or request.num_output_tokens > 0
        arrival = -self._arrivals if again else self._arrivals
        self._waiting[name] = Waiter(request, keys, (request.priority if by_priority else 0, arrival))
        self._rounds.changed()

    def left(self, request: str) -> None:
        """The request has its blocks, or is over."""
        self._told_kinds.pop(request, None)
        if self._waiting.pop(request, None) is not None:
            self._rounds.forget(request)

    def ended(self, request: str) -> None:
        """The request is over, wherever it was."""
        self.left(request)
        self._loading.pop(request, None)

    def load_admitted(self, request: str) -> None:
        """VLLM took the load that was planned."""
        found = self._rounds.known(request)
        if found is not None and found.chunks:
            scale = self._measured.load_scale(now_ns=time.monotonic_ns())
            self._loading[request] = (found.wait_s, scale, time.monotonic())

    def load_landed(self, request: str, *, copied_bytes: int, alone: bool) -> None:
        """
        A load has ended.

        Args:
            copied_bytes: Of a load of which everything was resident; 0 for another one.
            alone: Nothing else kept the engine busy meanwhile.
        """
        predicted = self._loading.pop(request, None)
        if predicted is None:
            return
        wait_s, scale, began = predicted
        took_s = time.monotonic() - began
        self.waits.append((wait_s, took_s))
        now_ns = time.monotonic_ns()
        if copied_bytes and alone:
            self._measured.copy_ended(copied_bytes, took_s, now_ns=now_ns)
        elif alone:
            self._measured.load_ended(wait_s, took_s, scale=scale, now_ns=now_ns)
        self._rounds.changed()

    # ------------------------------------------------------------ steps

    def step_built(self, scheduled: Mapping[str, int], holding: Mapping[str, "Request"]) -> None:
        """
        A step was scheduled: take the time of the one before it.

        Args:
            scheduled: Tokens by request.
            holding: Requests with blocks; their `num_computed_tokens` is from before the step.
        """
        now = time.monotonic()
        self._lookups_left = PLACES_PER_STEP
        if not scheduled:
            self._steps.clear()
            return
        self._steps.append(_Step(now, _single_prompt(scheduled, holding)))
        if len(self._steps) < 2 + self._lag:
            return
        begun, done = self._steps[-2], self._steps[-2 - self._lag]
        if done.prompt is not None:
            self._measured.step_ended(*done.prompt, now - begun.at, now_ns=time.monotonic_ns())

    def pool_told(self, states: Mapping[int, "DeviceState"], changes: int, ahead: Callable[[], Load]) -> None:
        """
        Begin a scheduling pass: take in speeds, and go on planning.

        Args:
            states: The devices as the pool last told.
            changes: Moves with everything that the pool tells.
            ahead: What is ahead of the first waiting request; asked when a round begins.
        """
        if not self._on:
            return
        self._take_speeds(states)
        if changes != self._pool_changes:
            self._pool_changes = changes
            self._rounds.changed()
        self._ahead = ahead
        if not self._waiting:
            return
        prices = self._prices_of_now()
        if prices is not None:
            self._rounds.step(self._order, self._maybe_ask, ahead, prices, now_ns=time.monotonic_ns())

    def _prices_of_now(self) -> Prices | None:
        now = time.monotonic()
        if now - self._priced_at >= PRICES_EVERY_S:
            self._priced_at, self._prices = now, self._measured.maybe_prices(now_ns=time.monotonic_ns())
        return self._prices

    def _take_speeds(self, states: Mapping[int, "DeviceState"]) -> None:
        now = time.monotonic()
        for device, state in states.items():
            speed, since = self._told.get(device, (0.0, 0.0))
            if state.queued_bytes_per_s != speed or now - since >= SPEED_EVERY_S:
                self._told[device] = (state.queued_bytes_per_s, now)
                self._measured.device_told(
                    device, state.queued_bytes_per_s, state.read_latency_s, now_ns=time.monotonic_ns()
                )

    def _order(self) -> Iterable[str]:
        return sorted(self._waiting, key=lambda name: self._waiting[name].order)

    # ------------------------------------------------------------ verdicts

    def maybe_verdict(self, request: str, computed: int) -> Verdict | None:
        """Return the verdict on a waiting request with *computed* tokens on the GPU; None: there is none."""
        waiter = self._waiting.get(request)
        if not self._on or waiter is None or not self._answered(request):
            return None
        prices = self._prices_of_now()
        if prices is None:
            return None
        if waiter.computed != computed or waiter.profile is None:
            waiter.computed, waiter.profile = computed, None
            self._rounds.changed()
        found = self._rounds.verdict(lambda: self._ask(request, waiter), request, prices, now_ns=time.monotonic_ns())
        if self._told_kinds.get(request) is not found.kind:
            self._told_kinds[request] = found.kind
            self._note(request, found)
        return found

    def _note(self, request: str, found: Verdict) -> None:
        self._counts[f"planner_{found.kind.value}"] += 1
        self._counts["planner_partial"] += found.why == LOAD_PART
        self._last_why = f"{found.kind.value} {found.chunks} chunks: {found.why}"
        logger.debug(
            "kvpool: %s: %s; bytes there in %.3f s, first token in %.3f s, computed in %.3f s",
            request, self._last_why, found.wait_s, found.load_s, found.recompute_s,
        )  # fmt: skip

    def backlog_seconds(self, backlog_bytes: Mapping[int, float]) -> list[float]:
        """Return how long each device will read for what is queued."""
        speeds = [self._measured.bytes_per_s(device) for device in range(self._device_count)]
        return [backlog_bytes.get(device, 0) / speed if speed else 0.0 for device, speed in enumerate(speeds)]

    def prefill_seconds(self, requests: Iterable["Request"]) -> float:
        """Return the GPU work that is left of the prompts of *requests*."""
        prices = self._prices
        if prices is None:
            return 0.0
        left = (r for r in requests if r.num_computed_tokens + 1 < r.num_tokens)
        return sum(prices.rest(request.num_computed_tokens, request.num_tokens) for request in left)

    def _maybe_ask(self, request: str) -> Ask | None:
        waiter = self._waiting.get(request)
        return self._ask(request, waiter) if waiter is not None and self._answered(request) else None

    def _ask(self, request: str, waiter: Waiter) -> Ask:
        now, known = time.monotonic(), self._rounds.known(request)
        deferred = known is not None and known.kind is Kind.DEFER
        every_s = PLACES_DEFERRED_EVERY_S if deferred else PLACES_EVERY_S
        stale = now - waiter.looked_at >= every_s and self._lookups_left > 0
        if waiter.profile is None or stale:
            self._lookups_left -= 1
            waiter.profile, waiter.looked_at = self._look(waiter), now
        place = sum(other.order < waiter.order for other in self._waiting.values()) if self._preloads else 0
        return Ask(request, waiter.profile, preloading=place < self._preloads, storing_s=STORE_S_ASSUMED)

    def _look(self, waiter: Waiter) -> Profile:
        tokens = waiter.request.num_tokens
        keys = waiter.keys()[: (tokens - 1) // self._chunk_tokens]
        places = self._places(keys)
        if places and max(places) >= self._device_count:  # a pool of other devices than this engine was told of
            places = places[: next(index for index, place in enumerate(places) if place >= self._device_count)]
        cuts = [len(places)] if self._several_groups else None
        return Profile(tokens, waiter.computed, places, chunk_tokens=self._chunk_tokens, cuts=cuts)

    # ------------------------------------------------------------ facts

    def facts(self) -> dict[str, str | int | float | bool]:
        """Return what is told for health: how much is planned, and how well waits were predicted."""
        near = sum(abs(actual - predicted) <= 0.25 * actual for predicted, actual in self.waits)
        return {
            "planner": "off" if not self._on else "on" if self._prices is not None else "measuring",
            "planned_waiting": len(self._waiting),
            "waits_predicted": len(self.waits),
            "waits_within_quarter": near,
            "planner_last": self._last_why,
            "wait_last_predicted_s": round(self.waits[-1][0], 4) if self.waits else 0.0,
            "wait_last_s": round(self.waits[-1][1], 4) if self.waits else 0.0,
            **self._counts,
            **self._rounds.statistics(),
        }


def _single_prompt(scheduled: Mapping[str, int], holding: Mapping[str, "Request"]) -> tuple[int, int] | None:
    """Return (first, last) tokens of the one prompt that a step computes, if others add next to nothing."""
    largest = max(scheduled, key=lambda name: scheduled[name])
    tokens, request = scheduled[largest], holding.get(largest)
    others = sum(scheduled.values()) - tokens
    if request is None or others > STEP_TOKENS_SMALL:
        return None
    first = request.num_computed_tokens
    return first, first + tokens
