"""What the planner never does, whatever the numbers."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.curves import Curve, Curves
from kvpool.core.planner import Ask, Kind, Load, Planner, Verdict
from kvpool.core.prices import Prices, Scales
from kvpool.core.profiles import RESIDENT, STORING, Profile

CHUNK = 256
SECOND = 1_000_000_000

seconds = st.floats(0.0, 10.0, allow_nan=False)
scale = st.floats(0.05, 20.0, allow_nan=False)
growth = st.lists(st.floats(0.0, 2.0, allow_nan=False), min_size=1, max_size=6)


@st.composite
def curve(draw: st.DrawFn) -> Curve:
    total, knots = draw(st.floats(0.0, 0.1)), []
    floor = total
    for index, more in enumerate(draw(growth)):
        total += more
        knots.append(((index + 1) * 4096, total))
    return Curve(floor, knots)


@st.composite
def situation(draw: st.DrawFn) -> dict[str, Any]:
    devices = draw(st.integers(1, 3))
    places = draw(st.lists(st.integers(RESIDENT, devices - 1), max_size=60))
    tokens = len(places) * CHUNK + draw(st.integers(1, 9000))
    return {
        "curves": Curves(draw(curve()), draw(curve()), draw(curve())),
        "devices": devices,
        "places": places,
        "tokens": tokens,
        "local": draw(st.integers(0, tokens - 1)),
        "load": (draw(seconds), [draw(seconds) for _ in range(devices)]),
        "scales": Scales(draw(scale), draw(scale), tuple(draw(scale) for _ in range(devices))),
    }


def decide(case: dict[str, Any], planner: Planner | None = None, **changes: Any) -> Verdict:
    case = case | changes
    prices = Prices(case["curves"], CHUNK, device_count=case["devices"], scales=case["scales"])
    profile = Profile(case["tokens"], case["local"], case["places"], chunk_tokens=CHUNK)
    gpu_s, drives_s = case["load"]
    ask = Ask("a", profile, preloading=case.get("preloading", False), storing_s=case.get("storing_s", 0.0))
    load = Load(gpu_s, list(drives_s), blocks_scarce=case.get("scarce", False))
    return (planner or Planner()).decide(ask, load, prices, behind=0, now_ns=case.get("now_ns", 0))


@given(situation(), st.floats(0.1, 1.0))
def test_a_faster_drive_never_turns_admit_into_decline(case: dict[str, Any], factor: float) -> None:
    scales = case["scales"]
    faster = Scales(scales.prefill, scales.copy * factor, tuple(drive * factor for drive in scales.drives))
    if decide(case).kind is Kind.ADMIT:
        assert Kind.ADMIT is decide(case, scales=faster).kind


@given(situation(), st.floats(0.1, 1.0))
def test_a_faster_gpu_never_turns_decline_into_admit(case: dict[str, Any], factor: float) -> None:
    scales = case["scales"]
    faster = Scales(scales.prefill * factor, scales.copy, scales.drives)
    if decide(case).kind is Kind.DECLINE:
        assert Kind.DECLINE is decide(case, scales=faster).kind


@given(situation())
def test_a_request_alone_takes_what_is_sooner(case: dict[str, Any]) -> None:
    case["load"] = (0.0, [0.0] * case["devices"])
    found = decide(case, preloading=True)
    assert Kind.DEFER is not found.kind
    assert found.load_s <= found.recompute_s
    every = [found.load_s]
    prices = Prices(case["curves"], CHUNK, device_count=case["devices"], scales=case["scales"])
    first = case["local"] // CHUNK
    for chunks in range(first + 1, len(case["places"]) + 1):
        taken = case["places"][first:chunks]
        reads = [prices.read(device, taken.count(device)) for device in range(case["devices"])]
        every.append(max(prices.copy(len(taken)), *reads) + prices.prefill(chunks * CHUNK, case["tokens"]))
    assert math.isclose(min(every), found.load_s, rel_tol=1e-9, abs_tol=1e-9)


@given(situation(), st.lists(st.floats(0.0, 3.0), max_size=12), st.data())
def test_nothing_is_deferred_past_its_first_deadline_or_longer_than_allowed(
    case: dict[str, Any], steps: list[float], data: st.DataObject
) -> None:
    planner, now_s, deadline_ns = Planner(), 0.0, None
    for step in [0.0, *steps]:
        now_s += step
        storing = data.draw(st.integers(0, len(case["places"])))
        places = [*case["places"][:storing], *[STORING] * (len(case["places"]) - storing)]
        found = decide(
            case, planner, now_ns=int(now_s * SECOND), preloading=True, scarce=data.draw(st.booleans()),
            places=places, storing_s=data.draw(seconds), load=(data.draw(seconds), case["load"][1]),
        )  # fmt: skip
        if found.kind is Kind.DEFER:
            deadline_ns = deadline_ns or found.until_ns
            assert deadline_ns == found.until_ns
            assert now_s * SECOND < deadline_ns + 1


@given(situation(), st.integers(0, 8))
def test_every_decision_has_its_reason_and_fits_its_request(case: dict[str, Any], behind: int) -> None:
    found = decide(case)
    assert found.why
    assert 0 <= found.chunks <= len(case["places"])
    assert (found.chunks == 0) == (found.kind is Kind.DECLINE)
    assert math.isfinite(found.load_s) and math.isfinite(found.recompute_s)
