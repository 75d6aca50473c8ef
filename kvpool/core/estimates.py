"""
What is true now, from what was seen: trackers of ratios and rates that noise does not move and changes do.

Theory. Every sample says how long something took beside how long it was expected to take. The logarithm of that ratio
is averaged exponentially. A sample counts by the time that passed since the last one, so that a burst of samples is not
a hundred votes; and it is clipped to a few of the tracker's own deviations (at least `CLIP_MIN`), so that one stalled
read moves it little, while a drive that really slowed down pulls it along sample after sample, and widens what counts
as usual. A step to half the speed is followed to within 10 % in 15 s at one sample a second (`tests/unit/
test_estimates.py`); the goal is 30 s.

Three things are made of it: a device's bandwidth and latency, told apart by the size of what was read; a prefill
curve from the steps seen, by the position in the prompt, since attention makes later tokens dearer; and plain ratios.

Does not cover: taking the samples, what is done with the estimates (`measured.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.core.curves import Curve

#: Time in which an old sample loses all but 1/e of its weight.
TIME_S = 5.0
#: The least and the greatest weight of one sample.
WEIGHT_MIN = 0.02
WEIGHT_MAX = 0.5
#: A sample is taken for at most this many deviations away, and at least CLIP_MIN (a factor of 1.3) counts in full.
CLIP_DEVIATIONS = 3.0
CLIP_MIN = 0.26
#: The first samples are averaged evenly.
EVEN_SAMPLES = 4

#: A read is long, and tells the bandwidth, when it takes so many times the latency; others tell the latency.
LONG_READ = 4.0
#: Taken for the latency of a read before one was seen.
LATENCY_S_ASSUMED = 0.001

#: Prefill is measured apart for positions up to these, each twice the one before.
POSITION_FIRST = 1024
POSITIONS = 11
#: Steps seen before a prefill curve is made of them.
STEPS_ENOUGH = 8
#: A step that computes fewer tokens tells what a step costs at least.
STEP_TOKENS_SMALL = 64


@dataclass(slots=True)
class RatioTracker:
    """
    A positive quantity, by default how many times longer than expected something takes.

    Attributes:
        samples: Seen so far.
    """

    samples: int = 0
    _log: float = 0.0
    _deviation: float = 0.0
    _last_ns: int = 0

    @property
    def value(self) -> float:
        """The estimate; 1 before the first sample."""
        return math.exp(self._log)

    @property
    def deviation(self) -> float:
        """Typical distance of a sample, as a logarithm."""
        return self._deviation

    def observe(self, ratio: float, *, now_ns: int) -> None:
        """Take in one sample; what is no positive number is passed over."""
        if not (ratio > 0 and math.isfinite(ratio)):
            return
        passed_s = (now_ns - self._last_ns) / 1e9
        self._last_ns = now_ns
        self.samples += 1
        away = math.log(ratio) - self._log
        if self.samples == 1:
            self._log, self._deviation = away, CLIP_MIN / CLIP_DEVIATIONS
            return
        weight = min(WEIGHT_MAX, max(WEIGHT_MIN, 1 - math.exp(-passed_s / TIME_S)))
        if self.samples <= EVEN_SAMPLES:
            weight = max(weight, 1 / self.samples)
        clip = max(CLIP_MIN, CLIP_DEVIATIONS * self._deviation)
        away = max(-clip, min(clip, away))
        self._log += weight * away
        self._deviation += weight * (abs(away) - self._deviation)


@dataclass(slots=True)
class DeviceEstimate:
    """Bandwidth and latency of one device's reads."""

    bandwidth: RatioTracker = field(default_factory=RatioTracker)
    latency: RatioTracker = field(default_factory=RatioTracker)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth; 0 before it was seen."""
        return self.bandwidth.value if self.bandwidth.samples else 0.0

    @property
    def latency_s(self) -> float:
        """Time of a read besides its transfer."""
        return self.latency.value if self.latency.samples else LATENCY_S_ASSUMED

    def observe(self, read_bytes: int, seconds: float, *, now_ns: int) -> None:
        """Take in one read of an otherwise idle device, or one of which the waiting was subtracted."""
        if read_bytes <= 0 or not seconds > 0:
            return
        if seconds > LONG_READ * self.latency_s:
            self.bandwidth.observe(read_bytes / (seconds - self.latency_s), now_ns=now_ns)
        else:
            transfer_s = read_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
            self.latency.observe(max(seconds - transfer_s, seconds * 0.1), now_ns=now_ns)

    def told(self, bytes_per_s: float, *, now_ns: int) -> None:
        """Take in a speed that the pool measured."""
        self.bandwidth.observe(bytes_per_s, now_ns=now_ns)


class PrefillMeter:
    """A prefill curve from the steps that an engine makes anyway."""

    def __init__(self) -> None:
        self._per_token = [RatioTracker() for _ in range(POSITIONS)]
        self._floor = RatioTracker()
        self.steps = 0

    def observe(self, first: int, last: int, seconds: float, *, now_ns: int) -> None:
        """A step computed tokens *first* to *last* of one prompt and little else, in *seconds*."""
        tokens = last - first
        if tokens <= 0 or not seconds > 0:
            return
        if tokens <= STEP_TOKENS_SMALL:
            self._floor.observe(seconds, now_ns=now_ns)
            return
        self.steps += 1
        per_token = max(seconds - self.floor_s, seconds * 0.1) / tokens
        self._per_token[_position(first + tokens // 2)].observe(per_token, now_ns=now_ns)

    @property
    def floor_s(self) -> float:
        """What a step costs at least; 0 before a small one was seen."""
        return self._floor.value if self._floor.samples else 0.0

    @property
    def enough(self) -> bool:
        """Enough steps were seen to make a curve of them."""
        return self.steps >= STEPS_ENOUGH

    def maybe_curve(self) -> Curve | None:
        """Return f as seen so far, unseen positions as their nearest neighbour; None while not enough was seen."""
        if not self.enough:
            return None
        seconds, before, knots = self.floor_s, 0, []
        for end, per_token in self._rates():
            seconds += (end - before) * per_token
            knots.append((end, seconds))
            before = end
        return Curve(self.floor_s, knots, name="f")

    def _rates(self) -> Iterator[tuple[int, float]]:
        seen = [index for index, tracker in enumerate(self._per_token) if tracker.samples]
        for index in range(POSITIONS):
            nearest = min(seen, key=lambda other, here=index: abs(other - here))  # type: ignore[misc]
            yield POSITION_FIRST << index, self._per_token[nearest].value


def _position(token: int) -> int:
    return min(POSITIONS - 1, max(0, (token // POSITION_FIRST).bit_length()))
