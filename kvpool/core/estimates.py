"""
What is true now, from what was seen: trackers of ratios and rates that noise does not move and changes do.

Theory. Every sample says how long something took beside how long it was expected to take. The logarithm of that ratio
is averaged exponentially. A sample counts by the time that passed since the last one, so that a burst of samples is not
a hundred votes; and it is clipped to a few of the tracker's own deviations (at least `CLIP_MIN`), so that one stalled
read moves it little, while a drive that really slowed down pulls it along sample after sample, and widens what counts
as usual. A step to half the speed is followed to within 10 % in 15 s at one sample a second (`tests/unit/
test_estimates.py`); the goal is 30 s.

Made of it are: a device's speed and latency, as its worker tells them; a prefill curve from the steps seen, by the
position in the prompt, since attention makes later tokens dearer; and ratios, plain or forgotten with time.

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

#: A speed that is told unchanged is taken for news this long: so long the tracker needs to get there.
HEARD_S = 30.0
#: From then on what was seen is forgotten, until in this time without news nothing is left of it.
FADE_S = 300.0

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

    def restart(self, value: float) -> None:
        """Go on from *value*, with the same weights."""
        self._log = math.log(value)

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
class FadingScale:
    """
    How many times longer than usual something takes, forgotten when nothing is heard of it.

    What takes long is not done, and what is not done is not measured: so it gets another chance. It begins as if
    something had taken as long as usual, so that one odd load is not believed, not even the first.
    """

    _ratio: RatioTracker = field(default_factory=RatioTracker)
    _heard_ns: int = 0

    def __post_init__(self) -> None:
        """Begin at 1."""
        self._ratio.observe(1.0, now_ns=0)

    def value(self, *, now_ns: int) -> float:
        """Return the scale; back at 1 when nothing was heard for FADE_S."""
        return math.exp(math.log(self._ratio.value) * (1 - _silence(self._heard_ns, now_ns)))

    def observe(self, ratio: float, *, now_ns: int) -> None:
        """Take in one sample, beside what is left of the ones before."""
        self._ratio.restart(self.value(now_ns=now_ns))
        self._ratio.observe(ratio, now_ns=now_ns)
        self._heard_ns = now_ns


@dataclass(slots=True)
class DeviceEstimate:
    """
    Speed and latency of one device's reads, as its worker measured them.

    Attributes:
        usual_bytes_per_s: The first speed told; 0 before it.
    """

    speed: RatioTracker = field(default_factory=RatioTracker)
    latency: RatioTracker = field(default_factory=RatioTracker)
    usual_bytes_per_s: float = 0.0
    _last: float = 0.0
    _heard_ns: int = 0

    @property
    def bytes_per_s(self) -> float:
        """Speed of loads that queue; 0 before it was seen."""
        return self.speed.value if self.speed.samples else 0.0

    @property
    def latency_s(self) -> float:
        """Time of a load besides its bytes'; 0 before one was seen."""
        return self.latency.value if self.latency.samples else 0.0

    def told(self, bytes_per_s: float, latency_s: float = 0.0, *, now_ns: int) -> None:
        """Take in what is true now; the same speed told again counts as sample for HEARD_S, then as nothing new."""
        if not bytes_per_s > 0:
            return
        if bytes_per_s != self._last:
            self._last, self._heard_ns = bytes_per_s, now_ns
        elif now_ns - self._heard_ns > HEARD_S * 1e9:
            return
        self.usual_bytes_per_s = self.usual_bytes_per_s or bytes_per_s
        self.speed.observe(bytes_per_s, now_ns=now_ns)
        self.latency.observe(latency_s, now_ns=now_ns)

    def faded(self, *, now_ns: int) -> float:
        """Return how far what was told is forgotten: 0 not at all, 1 entirely."""
        return _silence(self._heard_ns, now_ns)


def _silence(heard_ns: int, now_ns: int) -> float:
    """Return 0 up to HEARD_S without news, 1 from FADE_S on."""
    return min(1.0, max(0.0, ((now_ns - heard_ns) / 1e9 - HEARD_S) / (FADE_S - HEARD_S)))


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
