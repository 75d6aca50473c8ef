"""Which loads and stores are too short."""

import pytest

from kvpool.core.curves import BreakEven, Curve, Curves
from kvpool.core.gate import Gate

THRESHOLDS = Gate(ssd_tokens=1000, mem_tokens=200)


@pytest.mark.parametrize(
    ("resident", "read", "expected"),
    [(0, 999, False), (0, 1000, True), (199, 0, False), (200, 0, True), (300, 300, True), (300, 299, False)],
)
def test_a_load_is_as_long_as_the_break_even_of_where_it_lies(resident: int, read: int, expected: bool) -> None:
    assert expected is THRESHOLDS.may_load(resident, read)


def test_nothing_is_declined_without_thresholds() -> None:
    assert Gate().may_load(0, 1)
    assert Gate().may_store(1)


def test_the_margin_is_added_to_thresholds_that_are_there() -> None:
    found = Gate.of(BreakEven(model_name="m", ssd_tokens=1000, mem_tokens=0, margin_tokens=24))
    assert (1024, 0) == (found.ssd_tokens, found.mem_tokens)


def test_a_load_from_both_is_priced_by_its_parts() -> None:
    line = Curve(0.0, [(1000, 1.0)])
    gate = Gate(1000, 200, Curves(line, Curve(0.5, [(1000, 1.0)]), Curve(0.0, [(1000, 0.1)])))
    assert not gate.may_load(300, 300)  # reading 300 takes 0.65 s, computing 600 takes 0.6 s
    assert gate.may_load(400, 300)


def test_a_prefix_is_stored_when_it_can_be_worth_loading_from_anywhere() -> None:
    assert not THRESHOLDS.may_store(199)
    assert THRESHOLDS.may_store(200)
