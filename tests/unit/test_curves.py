"""Curves: what they are between knots, and which files are refused."""

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy.interpolate import PchipInterpolator

from kvpool.core.curves import BreakEven, Curve, Curves, break_even_tokens, emit_break_even, parse_break_even, speed_up
from kvpool.errors import ConfigError

KNOTS = [(1000, 0.1), (2000, 0.2), (4000, 0.8)]
CURVES = Curves(Curve(0.05, KNOTS), Curve(0.02, [(1000, 0.12), (4000, 0.3)]), Curve(0.01, [(1000, 0.02), (4000, 0.05)]))
FILE = BreakEven(
    model_name="m", kv_dtype="bfloat16", ssd_tokens=1500, mem_tokens=300, margin_tokens=16, curves=CURVES,
    gpu_model="GPU A", ssd_model="Drive A", kv_bytes_per_token=147_456.0, provenance={"samples": 9},
)  # fmt: skip


def changed(path: str, value: Any) -> str:
    """Return FILE's text with one value put at a dotted path."""
    data = json.loads(emit_break_even(FILE))
    *outer, last = path.split(".")
    table = data
    for name in outer:
        table = table[name]
    table[last] = value
    return json.dumps(data)


def test_between_knots_it_is_pchip() -> None:
    expected = PchipInterpolator(*np.array(KNOTS, dtype=float).T)(1500)
    assert math.isclose(expected, CURVES.f.at(1500), rel_tol=1e-12)


def test_at_knots_it_is_what_was_measured() -> None:
    assert [0.1, 0.2, 0.8] == pytest.approx([CURVES.f.at(tokens) for tokens, _ in KNOTS])


def test_below_the_first_knot_it_comes_from_the_floor() -> None:
    assert [0.05, 0.075, 0.1] == pytest.approx(list(CURVES.f.many(np.array([-5.0, 500.0, 1000.0]))))


def test_beyond_the_last_knot_it_goes_on_along_the_last_chord() -> None:
    assert math.isclose(0.8 + 0.3, CURVES.f.at(5000))


def test_one_knot_is_a_line() -> None:
    assert [0.1, 0.3, 0.5] == pytest.approx(list(Curve(0.1, [(100, 0.3)]).many(np.array([0.0, 100.0, 200.0]))))


def test_the_rest_of_a_prefill_pays_one_floor() -> None:
    assert math.isclose(0.05 + 0.8 - 0.2, CURVES.prefill(2000, 4000))
    assert math.isclose(0.8, CURVES.prefill(0, 4000))


def test_break_even_is_the_length_from_which_on_loading_wins() -> None:
    f, g = Curve(0.0, [(1000, 1.0)]), Curve(0.2, [(1000, 0.7)])  # lines: n/1000 and 0.2 + n/2000
    assert 400 == break_even_tokens(f, g)
    assert 1001 == break_even_tokens(g, Curve(1.0, [(1000, 2.0)]))
    assert 0 == break_even_tokens(f, Curve(0.0, [(1000, 0.5)]))


def test_speed_up_is_computing_all_over_loading_a_part_and_computing_the_rest() -> None:
    assert math.isclose(0.8 / (0.12 + 0.8 - 0.1), speed_up(CURVES, CURVES.g_ssd, 4000, 0.25))
    assert 1.0 == speed_up(CURVES, CURVES.g_ssd, 4000, 0.0)


def test_what_is_written_is_read_again() -> None:
    found = parse_break_even(emit_break_even(FILE))
    assert emit_break_even(FILE) == emit_break_even(found)
    assert (1500, 300, 16, "GPU A") == (found.ssd_tokens, found.mem_tokens, found.margin_tokens, found.gpu_model)


def test_version_1_has_thresholds_only() -> None:
    found = parse_break_even('{"model_name": "m", "break_even_ssd_tokens": 6203, "break_even_mem_tokens": 825}')
    assert (6203, 825, 0, None) == (found.ssd_tokens, found.mem_tokens, found.margin_tokens, found.curves)
    assert found == parse_break_even(emit_break_even(found))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no table"),
        ("{}", "model_name is missing"),
        ('{"model_name": "m", "model_name": "n"}', "model_name is there twice"),
        ('{"model_name": "m", "break_even_ssd_tokens": -1}', "break_even_ssd_tokens is -1"),
        (changed("schema_version", 3), "schema_version is 3"),
        (changed("curves.f.knots", {"1000": 0.2, "2000": 0.1}), "falls from 0.2 to 0.1"),
        (changed("curves.g_mem.knots", {"1000": 0.2, "2000": 0.1}), "g_mem.knots.2000 falls"),
        (changed("curves.f.knots", {"2000": 0.2, "1000": 0.1}), "f.knots.1000 comes after 2000"),
        (changed("curves.f.knots", {"1000": 0.1, "01000": 0.1}), "f.knots.1000 is there twice"),
        (changed("curves.g_ssd.knots", {"1000": float("nan")}), "g_ssd.knots.1000 is nan"),
        (changed("curves.g_ssd.knots", {"1000": float("inf")}), "g_ssd.knots.1000 is inf"),
        (changed("curves.g_ssd.knots", {"1000": -0.1}), "g_ssd.knots.1000 is -0.1"),
        (changed("curves.f.floor", -1), "f.floor is -1"),
        (changed("curves.f.floor", 0.2), "falls from 0.2 to 0.1"),
        (changed("curves.f.knots", {}), "f has 0 knots"),
        (changed("curves.f.knots", {"1e3": 1.0}), "is no prompt length"),
        (changed("curves.f.knots", {"1000": "fast"}), "is 'fast'"),
        (changed("curves.f", None), "f is missing"),
        (changed("golden", [{"tokens": 1500, "f": 0.5}]), "golden.f at 1500 tokens is 0.5"),
    ],
)  # fmt: skip
def test_what_cannot_have_been_measured_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("(", r"\(")):
        parse_break_even(text)


def test_golden_points_may_be_rounded() -> None:
    golden = [{"tokens": 1500, "f": CURVES.f.at(1500) * 1.0009, "g_ssd": CURVES.g_ssd.at(1500)}]
    assert parse_break_even(changed("golden", golden)).curves is not None


def test_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="model_name is 'm'"):
        FILE.check_model("another")
    FILE.check_model("m")


def test_another_gpu_or_drive_is_a_warning_that_names_both() -> None:
    assert [] == FILE.warnings(kv_dtype="bfloat16", gpu_model="GPU A", ssd_model="")
    found = FILE.warnings(kv_dtype="fp8", gpu_model="GPU B", ssd_model="Drive B")
    assert 3 == len(found)
    assert "'GPU A'" in found[1] and "'GPU B'" in found[1]
    assert "'Drive A'" in found[2] and "'Drive B'" in found[2]
