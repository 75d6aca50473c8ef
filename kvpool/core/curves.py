"""
What computing and loading a prefix cost on one machine: measured curves, read from and written to JSON.

Theory. Three curves of seconds over tokens: f(n), the time to first token of a prompt of n tokens that is computed;
g_ssd(n) and g_mem(n), the same where the whole prompt is loaded from the drives or from staging. Each has its
*floor*, the time of an empty one: a scheduling step that computes next to nothing. Between knots a curve is a monotone
piecewise cubic (PCHIP) through (0, floor) and the knots; beyond the last knot it goes on along its last chord, since
attention makes f steeper and nothing makes it flatter.

The floor is paid once by every request, whichever way it goes, and is part of all three curves. So the pieces that
are added up elsewhere are free of it:

    prefill(k, n) = floor_f + f(n) - f(k)      computing tokens k..n, one step's floor included
    transfer(n)   = g(n) - min(floor_f, floor_g)

and `transfer(k - l) + prefill(k, n)` is the g(k-l) + f(n) - f(k) of the literature, against `prefill(l, n)`.

Files. Version 1 has the two break-even thresholds only; version 2 has the curves, what they were measured on, and
golden points that a reader with another interpolation would miss. Everything that cannot be a measurement is refused
with its reason. A curve of another GPU or drive than ours is a warning.

Does not cover: measuring (tools), what is true now (`estimates.py`), decisions (`planner.py`), files.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from kvpool.errors import ConfigError

SCHEMA_VERSION = 2
#: A golden point may differ from the curve by this much, absolute (seconds) or relative.
GOLDEN_ABSOLUTE = 1e-6
GOLDEN_RELATIVE = 1e-3
#: More knots than anybody measures.
KNOTS_MAX = 4096
#: Longest prompt that a threshold or knot may name.
TOKENS_MAX = 1 << 30

Floats = NDArray[np.float64]


class Curve:
    """
    Seconds over tokens: not negative, never falling.

    Args:
        floor: Seconds at 0 tokens; not above the first knot.
        knots: (tokens, seconds), tokens ascending from 1 on.
        name: What errors call it.

    Raises:
        ConfigError: No such curve can have been measured; says why.
    """

    def __init__(self, floor: float, knots: Sequence[tuple[int, float]], *, name: str = "curve") -> None:
        _check_knots(floor, knots, name)
        self.floor = float(floor)
        self.knots = tuple((int(tokens), float(seconds)) for tokens, seconds in knots)
        xs = np.array([tokens for tokens, _ in self.knots], dtype=np.float64)
        ys = np.array([seconds for _, seconds in self.knots])
        #: One knot alone has nothing to be interpolated with.
        self._pchip = PchipInterpolator(xs, ys) if len(xs) > 1 else None
        self._first_x, self._first_y = self.knots[0]
        self._last_x = self.knots[-1][0]
        before_x, before_y = self.knots[-2] if len(self.knots) > 1 else (0, self.floor)
        self._slope = (self.knots[-1][1] - before_y) / (self._last_x - before_x)

    def at(self, tokens: float) -> float:
        """Return the seconds at *tokens*; the floor at 0 and below."""
        return float(self.many(np.array([tokens], dtype=np.float64))[0])

    def many(self, tokens: Floats) -> Floats:
        """Return the seconds at each of *tokens*."""
        inside = self._first_y if self._pchip is None else self._pchip(np.clip(tokens, self._first_x, self._last_x))
        below = (self._first_y - self.floor) / self._first_x * np.clip(self._first_x - tokens, 0.0, self._first_x)
        beyond = self._slope * np.maximum(tokens - self._last_x, 0.0)
        return np.asarray(inside - below + beyond, dtype=np.float64)

    def to_json(self) -> dict[str, Any]:
        """Return it as version 2 writes it."""
        return {"floor": self.floor, "knots": {str(tokens): seconds for tokens, seconds in self.knots}}


def _check_knots(floor: float, knots: Sequence[tuple[int, float]], name: str) -> None:
    if not 1 <= len(knots) <= KNOTS_MAX:
        raise _refused(name, f"has {len(knots)} knots", f"1 to {KNOTS_MAX}")
    if not (math.isfinite(floor) and floor >= 0):
        raise _refused(f"{name}.floor", f"is {floor}", "seconds, not negative")
    before_tokens, before_s = 0, floor
    for tokens, seconds in knots:
        if not (math.isfinite(seconds) and seconds >= 0):
            raise _refused(f"{name}.knots.{tokens}", f"is {seconds}", "seconds, not negative")
        if not 0 < tokens <= TOKENS_MAX:
            raise _refused(f"{name}.knots.{tokens}", "is no prompt length", f"1 to {TOKENS_MAX} tokens")
        if tokens <= before_tokens:
            what = "is there twice" if tokens == before_tokens else f"comes after {before_tokens}"
            raise _refused(f"{name}.knots.{tokens}", what, "tokens ascending, each once")
        if seconds < before_s:
            raise _refused(
                f"{name}.knots.{tokens}",
                f"falls from {before_s:g} to {seconds:g} s",
                "a longer prompt never takes less time; measure again",
            )
        before_tokens, before_s = tokens, seconds


def _refused(key: str, what: str, allowed: str) -> ConfigError:
    return ConfigError(f"break-even file refused: {key} {what}", key=key, allowed=allowed)


@dataclass(frozen=True, slots=True)
class Curves:
    """The three of one machine."""

    f: Curve
    g_ssd: Curve
    g_mem: Curve

    def at(self, tokens: float) -> tuple[float, float, float]:
        """Return f, g_ssd and g_mem at *tokens*."""
        return self.f.at(tokens), self.g_ssd.at(tokens), self.g_mem.at(tokens)

    def prefill(self, computed: float, tokens: float) -> float:
        """Return the seconds to compute tokens *computed* to *tokens* of a prompt."""
        return self.f.floor + self.f.at(tokens) - self.f.at(computed)


def break_even_tokens(f: Curve, g: Curve) -> int:
    """
    Return the smallest prompt length from which on loading is never slower than computing, within the knots of both.

    0: at every length. One more than the longest measured length: at none.
    """
    longest = min(f.knots[-1][0], g.knots[-1][0])
    lengths = np.unique(np.concatenate([np.linspace(1, longest, min(longest, 4096)), *_knots_below(longest, f, g)]))
    slower = np.flatnonzero(f.many(lengths) < g.many(lengths))
    if not len(slower):
        return 0
    if slower[-1] == len(lengths) - 1:
        return longest + 1
    low, high = int(lengths[slower[-1]]), math.ceil(float(lengths[slower[-1] + 1]))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if f.at(middle) < g.at(middle) else (low, middle)
    return high


def _knots_below(longest: int, *curves: Curve) -> list[Floats]:
    return [np.array([tokens for tokens, _ in curve.knots if tokens <= longest], dtype=np.float64) for curve in curves]


def speed_up(curves: Curves, medium: Curve, tokens: int, reused: float) -> float:
    """Return how much sooner the first token of a document comes when a fraction *reused* of it is loaded."""
    loaded = reused * tokens
    if loaded <= 0:
        return 1.0
    f = curves.f
    return f.at(tokens) / (medium.at(loaded) + f.at(tokens) - f.at(loaded))


# ------------------------------------------------------------ the file


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """
    What a break-even file says.

    Attributes:
        model_name, kv_dtype: What it was measured with.
        ssd_tokens, mem_tokens: Loads shorter than these (plus the margin) are declined; 0: never.
        margin_tokens: Added to a threshold that is not 0.
        curves: None in version 1.
        gpu_model, ssd_model, kv_bytes_per_token: Of version 2; empty or 0 where not told.
        provenance: Free text and numbers: versions, date, sample counts, spread.
    """

    model_name: str
    kv_dtype: str = ""
    ssd_tokens: int = 0
    mem_tokens: int = 0
    margin_tokens: int = 0
    curves: Curves | None = None
    gpu_model: str = ""
    ssd_model: str = ""
    kv_bytes_per_token: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def check_model(self, model_name: str) -> None:
        """Raise ConfigError where it was measured with another model."""
        if self.model_name != model_name:
            raise _refused("model_name", f"is {self.model_name!r}", f"{model_name!r}, the model that is served")

    def warnings(self, *, kv_dtype: str = "", gpu_model: str = "", ssd_model: str = "") -> list[str]:
        """Return what differs between the machine it was measured on and the one named here; "" is not compared."""
        pairs = (("KV dtype", self.kv_dtype, kv_dtype), ("GPU", self.gpu_model, gpu_model))
        return [
            f"the break-even file was measured on another {what}: {measured!r}, here is {ours!r}"
            for what, measured, ours in (*pairs, ("drive", self.ssd_model, ssd_model))
            if measured and ours and measured != ours
        ]


def parse_break_even(text: str) -> BreakEven:
    """
    Read the text of a break-even file, version 1 or 2.

    Raises:
        ConfigError: It is none, or says what cannot have been measured.
    """
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConfigError("break-even file refused: not JSON", reason=str(error)) from error
    if not isinstance(data, dict):
        raise _refused("the file", "is no table", "a JSON object")
    version = data.get("schema_version", 1)
    if version not in (1, SCHEMA_VERSION) or isinstance(version, bool):
        raise _refused("schema_version", f"is {version!r}", f"1 or {SCHEMA_VERSION}")
    return BreakEven(
        model_name=_text(data, "model_name", needed=True),
        kv_dtype=_text(data, "kv_dtype"),
        ssd_tokens=_tokens(data, "break_even_ssd_tokens"),
        mem_tokens=_tokens(data, "break_even_mem_tokens"),
        margin_tokens=_tokens(data, "safety_margin_tokens"),
        **(_version_2(data) if version == SCHEMA_VERSION else {}),
    )


def _version_2(data: dict[str, Any]) -> dict[str, Any]:
    tables = _table(data, "curves")
    curves = Curves(*(_curve(tables, name) for name in ("f", "g_ssd", "g_mem")))
    _check_golden(data.get("golden", []), curves)
    return {
        "curves": curves,
        "gpu_model": _text(data, "gpu_model"),
        "ssd_model": _text(data, "ssd_model"),
        "kv_bytes_per_token": _number(data.get("kv_bytes_per_token", 0), "kv_bytes_per_token"),
        "provenance": _table(data, "provenance") if "provenance" in data else {},
    }


def _curve(tables: dict[str, Any], name: str) -> Curve:
    table = _table(tables, name)
    knots = [
        (_knot_tokens(tokens, name), _number(seconds, f"{name}.knots.{tokens}"))
        for tokens, seconds in _table(table, "knots").items()
    ]
    return Curve(_number(table.get("floor", 0.0), f"{name}.floor"), knots, name=name)


def _check_golden(golden: object, curves: Curves) -> None:
    if not isinstance(golden, list) or not all(isinstance(point, dict) for point in golden):
        raise _refused("golden", "is no list of points", "[{tokens, f, g_ssd, g_mem}]")
    for point in golden:
        tokens = _number(point.get("tokens"), "golden.tokens")
        for name, ours in zip(("f", "g_ssd", "g_mem"), curves.at(tokens), strict=True):
            if name not in point:
                continue
            theirs = _number(point[name], f"golden.{name}")
            if not math.isclose(ours, theirs, rel_tol=GOLDEN_RELATIVE, abs_tol=GOLDEN_ABSOLUTE):
                what = f"at {tokens:g} tokens is {theirs:g} s, interpolated here {ours:g} s"
                raise _refused(f"golden.{name}", what, "the same interpolation: PCHIP through the knots")


def emit_break_even(found: BreakEven) -> str:
    """Return the text of a file of version 2, or of version 1 where *found* has no curves."""
    data: dict[str, Any] = {
        "model_name": found.model_name,
        "kv_dtype": found.kv_dtype,
        "break_even_ssd_tokens": found.ssd_tokens,
        "break_even_mem_tokens": found.mem_tokens,
        "safety_margin_tokens": found.margin_tokens,
    }
    if found.curves is not None:
        data = {
            "schema_version": SCHEMA_VERSION,
            **data,
            "gpu_model": found.gpu_model,
            "ssd_model": found.ssd_model,
            "kv_bytes_per_token": found.kv_bytes_per_token,
            "provenance": dict(found.provenance),
            "curves": {name: getattr(found.curves, name).to_json() for name in ("f", "g_ssd", "g_mem")},
            "golden": _golden(found.curves),
        }
    return json.dumps(data, indent=1) + "\n"


def _golden(curves: Curves) -> list[dict[str, float]]:
    """Points between the knots, where interpolations differ most."""
    knots = [0, *(tokens for tokens, _ in curves.f.knots)]
    middles = [(left + right) // 2 for left, right in itertools.pairwise(knots)]
    return [
        dict(zip(("tokens", "f", "g_ssd", "g_mem"), (tokens, *curves.at(tokens)), strict=True)) for tokens in middles
    ]


# ------------------------------------------------------------ pieces of JSON


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _refused(twice, "is there twice", "each name once")
    return table


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name)
    if not isinstance(found, dict):
        raise _refused(name, "is missing" if found is None else "is no table", "a JSON object")
    return found


def _text(data: dict[str, Any], name: str, *, needed: bool = False) -> str:
    found = data.get(name)
    if found is None and not needed:
        return ""
    if not isinstance(found, str) or (needed and not found):
        raise _refused(name, "is missing" if found is None else f"is {found!r}", "text")
    return found


def _tokens(data: dict[str, Any], name: str) -> int:
    found = data.get(name, 0)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= TOKENS_MAX:
        raise _refused(name, f"is {found!r}", f"a whole number from 0 to {TOKENS_MAX}")
    return found


def _knot_tokens(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > len(str(TOKENS_MAX)):
        raise _refused(f"{name}.knots.{text}", "is no prompt length", "a whole number of tokens")
    return int(text)


def _number(value: object, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _refused(key, f"is {value!r}", "a number")
    return float(value)
