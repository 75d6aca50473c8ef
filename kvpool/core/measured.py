"""
Prices of now: from the user's curves and what has been measured since, or from measurements alone.

Theory. With curves, everything that is seen is compared with them, and the ratios scale them: prefill by the steps of
the engine, devices by their speed, copies by theirs. Without curves, f is made of the steps seen so far, and the loads
are lines: latency plus bytes over the speed of reads that queue. Until enough was seen there are no prices, and whoever
plans behaves as if the planner were off.

A device's speed counts beside what it was at first: the disk curve holds more than the drive, and what it holds is in
both. Only a drive that was slower than the curve from the start counts beside the curve. What is left, the copies, the
ranks, the engine's steps, is in `load_scale`: how long whole loads took beside their prediction.

What a slow drive makes the planner decline is measured no more. So all of this is forgotten in `FADE_S` without news:
scales go back to 1, and without curves there are no prices until loads that nobody declined have told the speed anew.

Prices change by steps: tables are made anew only when something has moved by more than STEP_MIN, so that noise
costs neither time nor decisions.

Does not cover: the trackers (`estimates.py`), the tables (`prices.py`).
"""

from kvpool.core.curves import Curve, Curves
from kvpool.core.estimates import DeviceEstimate, FadingScale, PrefillMeter, RatioTracker
from kvpool.core.prices import Prices, Scales, worst_change

#: A change of a scale by less is left for later.
STEP_MIN = 1.03
#: Lengths at which lines are told as curves.
_LINE_TOKENS = (1, 1 << 20)
#: Where the disk curve's bandwidth is read off: between these lengths latency no longer counts.
_SLOPE_TOKENS = (16_384, 65_536)
#: Taken for the speed of copies before one was seen: PCIe 4 x16 at half its speed.
COPY_BYTES_PER_S_ASSUMED = 12e9
#: Samples of a device's speed before loads are priced by it without a curve.
DEVICE_SAMPLES_ENOUGH = 2
#: A load that takes less, and was to, says more of the engine's steps than of loads.
LOAD_TELLS_S = 0.05


class Measured:
    """
    One engine's view of its machine.

    Args:
        chunk_tokens: Tokens of a chunk.
        kv_bytes_per_token: On all ranks together.
        device_count: Devices of the pool.
        curves: The user's, or None.
    """

    def __init__(
        self, *, chunk_tokens: int, kv_bytes_per_token: float, device_count: int, curves: Curves | None = None
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._kv_bytes = kv_bytes_per_token
        self._curves = curves
        self._prefill = RatioTracker()
        self._copy = RatioTracker()
        self._loads = FadingScale()
        self._meter = PrefillMeter()
        self._devices = [DeviceEstimate() for _ in range(device_count)]
        self._prices: Prices | None = None
        self._version = 0
        #: Of one device, by the disk curve; 0: there is none, or it does not rise.
        self._curve_bytes_per_s = 0.0
        if curves is not None:
            self._curve_bytes_per_s = self._disk_bandwidth(curves) / device_count
            self._prices = Prices(curves, chunk_tokens, device_count=device_count)

    def _disk_bandwidth(self, curves: Curves) -> float:
        short, long = _SLOPE_TOKENS
        seconds = curves.g_ssd.at(long) - curves.g_ssd.at(short)
        return (long - short) * self._kv_bytes / seconds if seconds > 0 else 0.0

    # ------------------------------------------------------------ what was seen

    def step_ended(self, first: int, last: int, seconds: float, *, now_ns: int) -> None:
        """A step computed tokens *first* to *last* of one prompt, and little else."""
        self._meter.observe(first, last, seconds, now_ns=now_ns)
        if self._curves is not None:
            usual = self._curves.f.at(last) - self._curves.f.at(first)
            if usual > 0 and last - first >= self._chunk_tokens:
                self._prefill.observe(seconds / usual, now_ns=now_ns)

    def device_told(self, device: int, bytes_per_s: float, latency_s: float = 0.0, *, now_ns: int) -> None:
        """The pool measured what reads that queue get of a device, and the latency of one alone."""
        if 0 <= device < len(self._devices):
            self._devices[device].told(bytes_per_s, latency_s, now_ns=now_ns)

    def load_ended(self, predicted_s: float, took_s: float, *, scale: float, now_ns: int) -> None:
        """
        A load from the drive ended that nothing else held up.

        Args:
            predicted_s: With *scale*, the `load_scale` of that time.
        """
        if max(predicted_s, took_s) >= LOAD_TELLS_S:
            self._loads.observe(scale * took_s / max(predicted_s, LOAD_TELLS_S), now_ns=now_ns)

    def copy_ended(self, copied_bytes: int, seconds: float, *, now_ns: int) -> None:
        """Resident bytes were copied to the GPU."""
        if copied_bytes > 0 and seconds > 0:
            self._copy.observe(copied_bytes / seconds, now_ns=now_ns)

    # ------------------------------------------------------------ what follows

    @property
    def copy_bytes_per_s(self) -> float:
        """Speed of copies to the GPU."""
        return self._copy.value if self._copy.samples else COPY_BYTES_PER_S_ASSUMED

    def load_scale(self, *, now_ns: int) -> float:
        """Return how many times longer than device, copy and curve say a whole load takes."""
        return self._loads.value(now_ns=now_ns)

    def bytes_per_s(self, device: int) -> float:
        """Speed of a device; before it was seen that of the curve, or 0."""
        return self._devices[device].bytes_per_s or self._curve_bytes_per_s

    def maybe_prices(self, *, now_ns: int) -> Prices | None:
        """Return the prices of now; None while too little was seen."""
        if self._curves is not None:
            self._rescale(now_ns)
        else:
            self._rebuild(now_ns)
        return self._prices

    def _rescale(self, now_ns: int) -> None:
        prices = self._prices
        if prices is None or self._curves is None:
            return
        loads = self.load_scale(now_ns=now_ns)
        drives = tuple(self._drive_scale(device, now_ns) * loads for device in self._devices)
        copy = self._copy_scale(self._curves) if self._copy.samples else 1.0
        scales = Scales(self._prefill.value, copy, drives)
        if worst_change(prices.scales, scales) >= STEP_MIN:
            prices.set_scales(scales)

    def _drive_scale(self, device: DeviceEstimate, now_ns: int) -> float:
        """Return how many times longer than the curve a device takes; see the module."""
        if not device.bytes_per_s:
            return 1.0
        usual = max(device.usual_bytes_per_s, self._curve_bytes_per_s)
        return float((usual / device.bytes_per_s) ** (1 - device.faded(now_ns=now_ns)))

    def _copy_scale(self, curves: Curves) -> float:
        short, long = _SLOPE_TOKENS
        seconds = curves.g_mem.at(long) - curves.g_mem.at(short)
        usual = (long - short) * self._kv_bytes / self.copy_bytes_per_s
        return usual / seconds if seconds > 0 else 1.0

    def _rebuild(self, now_ns: int) -> None:
        """Make curves of what was measured, when they are new or the old ones are off by a step."""
        f = self._meter.maybe_curve()
        seen = [device for device in self._devices if self._is_known(device, now_ns)]
        if f is None or not seen:
            self._prices = None
            return
        usual = sum(device.bytes_per_s for device in seen) / len(seen)
        latency_s = max(device.latency_s for device in seen)
        loads = self.load_scale(now_ns=now_ns)
        drives = tuple(loads * (usual / device.bytes_per_s if device.bytes_per_s else 1.0) for device in self._devices)
        built = Curves(
            f,
            self._line(f.floor, latency_s, usual * len(self._devices)),
            self._line(f.floor, 0.0, self.copy_bytes_per_s),
        )
        if self._prices is None or self._off(self._prices, built, drives):
            self._built = built
            self._prices = Prices(
                built, self._chunk_tokens, device_count=len(self._devices), scales=Scales(1.0, 1.0, drives)
            )
            self._version = self._prices.version = self._version + 1

    @staticmethod
    def _is_known(device: DeviceEstimate, now_ns: int) -> bool:
        return device.speed.samples >= DEVICE_SAMPLES_ENOUGH and device.faded(now_ns=now_ns) < 1.0

    def _line(self, floor: float, latency_s: float, bytes_per_s: float) -> Curve:
        knots = [(tokens, floor + latency_s + tokens * self._kv_bytes / bytes_per_s) for tokens in _LINE_TOKENS]
        return Curve(floor, knots)

    def _off(self, prices: Prices, built: Curves, drives: tuple[float, ...]) -> bool:
        at = _SLOPE_TOKENS[0]
        ratios = [new / old for new, old in zip(built.at(at), self._built.at(at), strict=True) if new > 0 and old > 0]
        moved = any(max(ratio, 1 / ratio) >= STEP_MIN for ratio in ratios)
        return moved or worst_change(prices.scales, Scales(1.0, 1.0, drives)) >= STEP_MIN
