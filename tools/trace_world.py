"""
A GPU, its drive and vLLM's queue, simulated, under the real planner's decisions.

Theory. vLLM's scheduler as far as it matters for the time to first token: steps of a token budget, running prefills
first; then the queue is scanned in order of arrival, only while budget is left; a load takes its GPU blocks when it is
admitted and computes when it has landed; the scan stops at the first request whose blocks do not fit. The drive serves
loads first in, first out, and preloads, in the queue's order, while it has no load to do. A chunk is stored once it was
computed; writing takes no time from the reads (they have precedence), there is no GPU prefix cache and no DRAM cache:
every hit comes from the drive.

The truth differs from what the curves say: each read and each step has its own luck, and the drive has slow spells.
The planner hears of them through the same trackers as in the connector; the oracle is told.

Covers: one engine, one drive. Does not cover: traces (`traces.py`), tables and plots (`trace_sim.py`).
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.core.curves import Curve, Curves, break_even_tokens
from kvpool.core.estimates import RatioTracker
from kvpool.core.planner import Ask, Kind, Load, Planner, Verdict
from kvpool.core.prices import Prices, Scales
from kvpool.core.profiles import RESIDENT, Profile
from tools.traces import CHUNK_TOKENS, Request

POLICIES = ("off", "never", "gate", "planner", "oracle")
#: Planning happens at most this often.
PLAN_EVERY_S = 0.02
#: Tokens of a scheduling step.
STEP_TOKENS = 8192
#: Seconds that one generated token holds its request's blocks.
OUTPUT_TOKEN_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """
    What is simulated.

    Attributes:
        f: Prefill, seconds over tokens.
        drive_bytes_per_s, drive_latency_s: Of a read.
        copy_bytes_per_s: Staging to GPU.
        kv_bytes: Per token.
        blocks_tokens: What the GPU's KV cache holds.
        staging_bytes: For preloads.
        read_luck, step_luck: Standard deviation of the logarithm of a read's and a step's time.
        spell_slow, spell_s: Factor of a slow spell, and the mean length of a spell, slow or not.
    """

    f: Curve
    drive_bytes_per_s: float
    drive_latency_s: float = 0.0002
    copy_bytes_per_s: float = 50e9
    kv_bytes: float = 147_000.0
    blocks_tokens: int = 700_000
    staging_bytes: float = 16e9
    read_luck: float = 0.15
    step_luck: float = 0.03
    spell_slow: float = 1.25
    spell_s: float = 20.0

    def curves(self) -> Curves:
        """Return what measuring this machine would give."""
        lengths = [1024 * 2**i for i in range(8)]
        floor = self.f.floor
        return Curves(
            self.f,
            Curve(floor, [(n, floor + self.read_s(n)) for n in lengths]),
            Curve(floor, [(n, floor + n * self.kv_bytes / self.copy_bytes_per_s) for n in lengths]),
        )

    def read_s(self, tokens: float) -> float:
        """Return the usual seconds of a read."""
        return self.drive_latency_s + tokens * self.kv_bytes / self.drive_bytes_per_s


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the simulated engine."""

    number: int
    request: Request
    stored: int = 0
    staged: int = 0
    preload: int = 0
    loaded: int = 0
    computed: int = 0
    state: str = "waiting"
    first_s: float = -1.0
    read_bytes: float = 0.0
    profile: Profile | None = None
    profile_of: tuple[int, int] = (-1, -1)
    predicted_s: float = 0.0
    admitted_s: float = 0.0


@dataclass(slots=True)
class Read:
    """Chunks that the drive reads for one request, as a load or ahead of it."""

    waiter: Waiter
    chunks: int
    load: bool
    seconds: float = 0.0
    began_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a run is judged by: time to first token of each request, bytes read, and what was hit."""

    first_s: list[float] = field(default_factory=list)
    read_bytes: float = 0.0
    gpu_s: float = 0.0
    end_s: float = 0.0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    waits: list[tuple[float, float]] = field(default_factory=list)
    plans: int = 0


class World:
    """One run. See the module."""

    def __init__(self, machine: Machine, trace: Sequence[Request], policy: str, seed: int, planner: Planner) -> None:
        self.machine, self.trace, self.policy = machine, trace, policy
        self.planner = planner
        self.chance = random.Random(seed)
        curves = machine.curves()
        self.prices = Prices(curves, CHUNK_TOKENS)
        self.gate_tokens = break_even_tokens(curves.f, curves.g_ssd)
        self.read_ratio, self.step_ratio = RatioTracker(), RatioTracker()
        self.now = 0.0
        self.events: list[tuple[float, int, str, object]] = []
        self.order = itertools.count()
        self.queue: list[Waiter] = []
        self.running: list[Waiter] = []
        self.stored: set[int] = set()
        self.blocks_free = machine.blocks_tokens
        self.loads: deque[Read] = deque()
        self.reading: Read | None = None
        self.staging_free = machine.staging_bytes
        self.stepping = False
        self.spell = 1.0
        self.verdicts: dict[int, Verdict] = {}
        self.plan_at, self.changed = 0.0, True
        self.outcome = Outcome()
        self.woken_at = math.inf
        self.chunk_bytes = CHUNK_TOKENS * machine.kv_bytes

    # ------------------------------------------------------------ the clock

    def run(self) -> Outcome:
        """Serve the whole trace."""
        for number, request in enumerate(self.trace):
            self._at(request.arrival_s, "arrive", Waiter(number, request))
        self._at(self.chance.expovariate(1 / self.machine.spell_s), "spell", None)
        waiting = len(self.trace)
        while waiting > len(self.outcome.first_s):
            self.now, _, what, about = heapq.heappop(self.events)
            getattr(self, f"_{what}")(about)
            if not self.stepping:
                self._schedule()
            if self.reading is None:
                self._read_next()
        self.outcome.end_s = self.now
        return self.outcome

    def _at(self, when: float, what: str, about: object) -> None:
        heapq.heappush(self.events, (when, next(self.order), what, about))

    def _wake(self, _: object) -> None:
        self.woken_at = math.inf

    def _spell(self, _: object) -> None:
        self.spell = self.machine.spell_slow if self.spell == 1.0 else 1.0
        self._at(self.now + self.chance.expovariate(1 / self.machine.spell_s), "spell", None)

    def _arrive(self, waiter: Waiter) -> None:
        self.queue.append(waiter)
        self.outcome.prompt_tokens += waiter.request.tokens
        self.changed = True
        self._look_up(waiter)

    def _look_up(self, waiter: Waiter) -> None:
        stored = 0
        for chunk in waiter.request.chunks:
            if chunk not in self.stored:
                break
            stored += 1
        if stored * CHUNK_TOKENS == waiter.request.tokens:
            stored -= 1  # the last token is always computed
        waiter.stored = stored

    # ------------------------------------------------------------ the GPU

    def _schedule(self) -> None:
        budget = STEP_TOKENS
        pieces: list[tuple[Waiter, int]] = []
        for waiter in self.running:
            budget = self._take(waiter, budget, pieces)
        if budget > 0:
            self._scan(budget, pieces)
        if not pieces:
            return
        f = self.machine.f
        usual = sum(f.at(waiter.computed + tokens) - f.at(waiter.computed) for waiter, tokens in pieces)
        ends = any(waiter.computed + tokens >= waiter.request.tokens for waiter, tokens in pieces)
        usual += f.floor if ends else 0.0
        seconds = usual * math.exp(self.chance.gauss(0.0, self.machine.step_luck))
        self.outcome.gpu_s += seconds
        self.stepping = True
        self._at(self.now + seconds, "stepped", (pieces, seconds / usual))

    def _take(self, waiter: Waiter, budget: int, pieces: list[tuple[Waiter, int]]) -> int:
        tokens = min(budget, waiter.request.tokens - waiter.computed)
        if tokens > 0:
            pieces.append((waiter, tokens))
        return budget - tokens

    def _scan(self, budget: int, pieces: list[tuple[Waiter, int]]) -> None:
        planned = self.policy in ("planner", "oracle")
        if planned and self.changed and self.now >= self.plan_at:
            self._plan()
        for waiter in list(self.queue):
            if budget <= 0:
                return
            if waiter.state == "loading":
                continue
            if waiter.state == "waiting":
                chunks = self._ask(waiter, planned)
                if chunks is None:
                    continue
                if self.blocks_free < waiter.request.tokens:
                    return
                self.blocks_free -= waiter.request.tokens
                self.planner.forget(str(waiter.number))
                if chunks > 0:
                    self._load(waiter, chunks)
                    continue
                self._unstage(waiter, 0)
            self.queue.remove(waiter)
            self.running.append(waiter)
            budget = self._take(waiter, budget, pieces)

    def _stepped(self, about: tuple[list[tuple[Waiter, int]], float]) -> None:
        pieces, ratio = about
        self.stepping = False
        self.step_ratio.observe(ratio, now_ns=round(self.now * 1e9))
        for waiter, tokens in pieces:
            first = waiter.computed // CHUNK_TOKENS
            waiter.computed += tokens
            self.stored.update(waiter.request.chunks[first : waiter.computed // CHUNK_TOKENS])
            if waiter.computed >= waiter.request.tokens:
                self.running.remove(waiter)
                waiter.first_s = self.now - waiter.request.arrival_s
                self.outcome.first_s.append(waiter.first_s)
                self._at(self.now + waiter.request.output_tokens * OUTPUT_TOKEN_S, "finished", waiter)
        self.changed = True

    def _finished(self, waiter: Waiter) -> None:
        self.blocks_free += waiter.request.tokens

    # ------------------------------------------------------------ the drive

    def _load(self, waiter: Waiter, chunks: int) -> None:
        waiter.state, waiter.loaded, waiter.admitted_s = "loading", chunks, self.now
        missing = chunks - waiter.staged
        self.outcome.hit_tokens += chunks * CHUNK_TOKENS
        if missing > 0:
            self.loads.append(Read(waiter, missing, load=True))
        else:
            self._landed(waiter)

    def _landed(self, waiter: Waiter) -> None:
        copied = min(waiter.staged, waiter.loaded) if waiter.staged >= waiter.loaded else 1
        self._at(self.now + copied * self.chunk_bytes / self.machine.copy_bytes_per_s, "copied", waiter)

    def _copied(self, waiter: Waiter) -> None:
        self._unstage(waiter, 0)
        waiter.state, waiter.computed = "landed", waiter.loaded * CHUNK_TOKENS
        verdict = self.verdicts.pop(waiter.number, None)
        if verdict is not None:
            self.outcome.waits.append((verdict.wait_s, self.now - waiter.admitted_s))
        self.changed = True

    def _read_next(self) -> None:
        if self.loads:
            read = self.loads.popleft()
        else:
            ahead = next((w for w in self.queue if w.state == "waiting" and w.staged < w.preload), None)
            if ahead is None:
                return
            read = Read(ahead, 1, load=False)
        luck = math.exp(self.chance.gauss(0.0, self.machine.read_luck if read.load else 0.0)) * self.spell
        latency_s = self.machine.drive_latency_s
        transfer_s = read.chunks * self.chunk_bytes / self.machine.drive_bytes_per_s
        read.seconds = (latency_s + transfer_s) * luck
        read.began_s, self.reading = self.now, read
        self._at(self.now + read.seconds, "was_read", (read, luck))

    def _was_read(self, about: tuple[Read, float]) -> None:
        read, luck = about
        self.reading = None
        self.read_ratio.observe(luck, now_ns=round(self.now * 1e9))
        self.outcome.read_bytes += read.chunks * self.chunk_bytes
        waiter = read.waiter
        if read.load:
            self._landed(waiter)
        elif waiter.state == "waiting":
            waiter.staged += read.chunks
            if waiter.staged >= waiter.preload:
                self.changed = True
        elif waiter.state == "loading" and waiter.staged + read.chunks <= waiter.loaded:
            waiter.staged += read.chunks

    def _unstage(self, waiter: Waiter, chunks: int) -> None:
        """Give back the staging that is reserved for a request beyond *chunks*."""
        if waiter.preload > chunks:
            self.staging_free += (waiter.preload - chunks) * self.chunk_bytes
            waiter.preload = chunks
            waiter.staged = min(waiter.staged, chunks)

    # ------------------------------------------------------------ policies

    def _ask(self, waiter: Waiter, planned: bool) -> int | None:
        """Return how many chunks to load now; None: later."""
        if planned:
            return self._verdict(waiter)
        self._look_up(waiter)
        if self.policy == "never":
            return 0
        if self.policy == "gate" and waiter.stored * CHUNK_TOKENS < self.gate_tokens:
            return 0
        return waiter.stored

    def _verdict(self, waiter: Waiter) -> int | None:
        verdict = self.verdicts.get(waiter.number)
        if verdict is None:
            self._plan()
            verdict = self.verdicts[waiter.number]
        if verdict.kind is Kind.DEFER:
            until_s = verdict.until_ns / 1e9
            if self.now < until_s:
                self._wake_at(max(until_s, self.now + 1e-3))
                return None
            self._plan()
            verdict = self.verdicts[waiter.number]
            if verdict.kind is Kind.DEFER:
                raise AssertionError("deferred past its deadline")
        return verdict.chunks if verdict.kind is Kind.ADMIT else 0

    def _wake_at(self, when: float) -> None:
        if when < self.woken_at:
            self.woken_at = when
            self._at(when, "wake", None)

    def _plan(self) -> None:
        self.plan_at, self.changed = self.now + PLAN_EVERY_S, False
        self.outcome.plans += 1
        if self.policy == "oracle":
            scales = Scales(1.0, 1.0, (self.spell,))
        else:
            scales = Scales(self.step_ratio.value, 1.0, (self.read_ratio.value,))
        if scales != self.prices.scales:
            self.prices.set_scales(scales)
        asks = []
        for waiter in self.queue:
            if waiter.state == "waiting":
                self._look_up(waiter)
                self._reserve(waiter)
                asks.append(Ask(str(waiter.number), self._profile(waiter), preloading=waiter.preload > waiter.staged))
        found = self.planner.plan(asks, self._ahead(), self.prices, now_ns=round(self.now * 1e9))
        for request, verdict in found.items():
            self.verdicts[int(request)] = verdict
        for waiter in self.queue:
            if waiter.state == "waiting":
                verdict = self.verdicts[waiter.number]
                self._unstage(waiter, verdict.chunks if verdict.kind is not Kind.DECLINE else 0)

    def _reserve(self, waiter: Waiter) -> None:
        wanted = (waiter.stored - waiter.preload) * self.chunk_bytes
        if 0 < wanted <= self.staging_free:
            self.staging_free -= wanted
            waiter.preload = waiter.stored

    def _profile(self, waiter: Waiter) -> Profile:
        of = waiter.stored, waiter.staged
        if waiter.profile is None or waiter.profile_of != of:
            staged = min(waiter.staged, waiter.stored)
            places = [RESIDENT] * staged + [0] * (waiter.stored - staged)
            waiter.profile = Profile(waiter.request.tokens, 0, places, chunk_tokens=CHUNK_TOKENS)
            waiter.profile_of = of
        return waiter.profile

    def _ahead(self) -> Load:
        prices = self.prices
        gpu_s = sum(prices.prefill(waiter.computed, waiter.request.tokens) for waiter in self.running)
        for waiter in self.queue:
            if waiter.state != "waiting":
                gpu_s += prices.prefill(waiter.loaded * CHUNK_TOKENS, waiter.request.tokens)
        drive_s = sum(prices.read(0, read.chunks) for read in self.loads)
        if self.reading is not None and self.reading.load:
            usual = prices.read(0, self.reading.chunks)
            drive_s += max(usual - (self.now - self.reading.began_s), 0.05 * usual)
        return Load(gpu_s, [drive_s], blocks_scarce=self.blocks_free < 0.2 * self.machine.blocks_tokens)
