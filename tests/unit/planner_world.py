"""A machine of round numbers, so that every price in the tests can be checked by hand."""

from collections.abc import Sequence

from kvpool.core.curves import Curve, Curves
from kvpool.core.planner import Ask, Load
from kvpool.core.prices import Prices, Scales
from kvpool.core.profiles import Profile

CHUNK = 100
SECOND = 1_000_000_000


def prices(
    *, read_s: float = 0.5, copy_s: float = 0.1, prefill_s: float = 1.0, devices: int = 1, drives: Sequence[float] = ()
) -> Prices:
    """Return lines: seconds for each 1,000 tokens to read from the whole pool, to copy, to compute; no floors."""
    curves = Curves(*(Curve(0.0, [(1000, seconds)]) for seconds in (prefill_s, read_s, copy_s)))
    return Prices(curves, CHUNK, device_count=devices, scales=Scales(1.0, 1.0, tuple(drives) or (1.0,) * devices))


def ask(name: str, tokens: int, places: Sequence[int], *, local: int = 0, **more: object) -> Ask:
    """Return a waiting request."""
    cuts = more.pop("cuts", None)
    profile = Profile(tokens, local, places, chunk_tokens=CHUNK, cuts=cuts)  # type: ignore[arg-type]
    return Ask(name, profile, **more)  # type: ignore[arg-type]


def idle(devices: int = 1) -> Load:
    """Return a system without work."""
    return Load(0.0, [0.0] * devices)
