"""Each verdict and each rule of the planner, on numbers that can be added up by hand (see `planner_world.py`)."""

import math

import pytest

from kvpool.core.planner import (
    COMPUTE,
    LOAD_ALL,
    LOAD_PART,
    NOTHING_STORED,
    STAGING,
    STORE_UNDER_WAY,
    Ask,
    Kind,
    Load,
    Planner,
    Verdict,
)
from kvpool.core.prices import Prices
from kvpool.core.profiles import RESIDENT, STORING
from tests.unit.planner_world import SECOND, ask, idle, prices


def one(planner: Planner, asked: Ask, load: Load, priced: Prices, *, now_ns: int = 0, behind: int = 0) -> Verdict:
    return planner.decide(asked, load, priced, behind=behind, now_ns=now_ns)


# ------------------------------------------------------------ one request, an idle system


def test_a_cheaper_load_is_admitted_whole() -> None:
    found = one(Planner(), ask("a", 1000, [0] * 8), idle(), prices())
    assert (Kind.ADMIT, 8, LOAD_ALL) == (found.kind, found.chunks, found.why)
    assert math.isclose(0.4 + 0.2, found.load_s)  # 800 tokens at 0.5 s a thousand, 200 computed
    assert math.isclose(1.0, found.recompute_s)


def test_a_dearer_load_is_declined() -> None:
    found = one(Planner(), ask("a", 1000, [0] * 8), idle(), prices(read_s=1.5))
    assert (Kind.DECLINE, 0, COMPUTE) == (found.kind, found.chunks, found.why)
    assert math.isclose(1.0, found.load_s)


def test_what_costs_the_same_is_computed() -> None:
    assert Kind.DECLINE is one(Planner(), ask("a", 1000, [0] * 8), idle(), prices(read_s=1.0)).kind


def test_nothing_stored_is_declined_and_its_prefill_waited_for_by_the_next() -> None:
    load = idle()
    found = one(Planner(), ask("a", 1000, []), load, prices())
    assert (Kind.DECLINE, NOTHING_STORED) == (found.kind, found.why)
    assert math.isclose(1.0, load.gpu_s)


def test_a_local_prefix_beyond_the_stored_one_leaves_nothing_to_load() -> None:
    load = idle()
    found = one(Planner(), ask("a", 1000, [0] * 3, local=500), load, prices())
    assert (Kind.DECLINE, NOTHING_STORED) == (found.kind, found.why)
    assert math.isclose(0.5, load.gpu_s)


def test_a_local_prefix_is_not_loaded_again() -> None:
    found = one(Planner(), ask("a", 1000, [0] * 8, local=600), idle(), prices())
    assert (Kind.ADMIT, 8) == (found.kind, found.chunks)
    assert math.isclose(0.1 + 0.2, found.load_s)  # chunks 6 and 7 read, 200 tokens computed
    assert math.isclose(0.4, found.recompute_s)


def test_resident_bytes_cost_a_copy_only() -> None:
    found = one(Planner(), ask("a", 1000, [RESIDENT] * 8), idle(), prices(read_s=50.0))
    assert Kind.ADMIT is found.kind
    assert math.isclose(0.08 + 0.2, found.load_s)


def test_mixed_residency_is_read_while_the_rest_is_copied() -> None:
    found = one(Planner(), ask("a", 1000, [RESIDENT] * 6 + [0] * 2), idle(), prices())
    assert math.isclose(max(0.1, 0.08) + 0.2, found.load_s)


def test_the_part_that_is_resident_is_loaded_when_the_rest_is_not_worth_its_wait() -> None:
    found = one(Planner(), ask("a", 1000, [RESIDENT] * 5 + [0] * 3), Load(0.0, [10.0]), prices())
    assert (Kind.ADMIT, 5, LOAD_PART) == (found.kind, found.chunks, found.why)
    assert math.isclose(0.05 + 0.5, found.load_s)


def test_only_a_cut_that_the_lookup_confirms_is_loaded() -> None:
    asked = ask("a", 1000, [RESIDENT] * 5 + [0] * 3, cuts=[3, 8])
    assert 3 == one(Planner(), asked, Load(0.0, [10.0]), prices()).chunks
    assert Kind.DECLINE is one(Planner(), ask("a", 1000, [0] * 8, cuts=[]), idle(), prices()).kind


# ------------------------------------------------------------ what is ahead


def test_a_backlog_of_the_drive_makes_computing_cheaper() -> None:
    assert Kind.ADMIT is one(Planner(), ask("a", 1000, [0] * 8), Load(0.0, [0.3]), prices()).kind
    assert Kind.DECLINE is one(Planner(), ask("a", 1000, [0] * 8), Load(0.0, [0.5]), prices()).kind


def test_gpu_work_ahead_hides_the_load() -> None:
    found = one(Planner(), ask("a", 1000, [0] * 8), Load(5.0, [4.0]), prices(read_s=1.2))
    assert Kind.ADMIT is found.kind
    assert math.isclose(5.0 + 0.2, found.load_s)


def test_the_device_with_the_longest_backlog_decides_when_a_striped_load_is_there() -> None:
    places = [0, 1] * 4
    priced = prices(devices=2)
    found = one(Planner(), ask("a", 1000, places), Load(0.0, [0.0, 0.1]), priced)
    assert math.isclose(0.1 + 0.4 + 0.2, found.load_s)  # half of the chunks on each: as long as 8 on the whole pool


def test_a_device_with_a_backlog_counts_only_for_loads_that_read_from_it() -> None:
    found = one(Planner(), ask("a", 1000, [0] * 6 + [1] * 2), Load(0.0, [0.0, 50.0]), prices(read_s=0.25, devices=2))
    assert (Kind.ADMIT, 6, LOAD_PART) == (found.kind, found.chunks, found.why)


def test_a_slower_device_has_its_own_speed() -> None:
    found = one(Planner(), ask("a", 1000, [0, 1] * 4), idle(2), prices(devices=2, drives=(1.0, 2.0)))
    assert (5, LOAD_PART) == (found.chunks, found.why)  # 2 chunks of the slow one take as long as 4 of the other
    assert math.isclose(0.4 + 0.5, found.load_s)


def test_what_was_decided_is_ahead_of_the_next() -> None:
    load = idle()
    found = Planner().plan([ask("a", 1000, [0] * 8), ask("b", 1000, [0] * 8)], load, prices(read_s=0.1), now_ns=0)
    assert [Kind.ADMIT, Kind.ADMIT] == [verdict.kind for verdict in found.values()]
    assert math.isclose(0.08 + 0.08, load.drives_s[0])
    assert math.isclose(0.2 + 0.2, load.gpu_s)
    assert math.isclose(0.2 + 0.2, found["b"].load_s)  # behind a's prefill; its bytes are there by then


def test_seconds_of_the_gpu_count_for_everybody_behind() -> None:
    priced = prices(read_s=1.0, copy_s=0.01)
    assert Kind.DECLINE is one(Planner(), ask("a", 1000, [0] * 8), Load(0.0, [0.1]), priced).kind
    # Two wait behind: computing costs them 2 x 0.8 s, reading 2 x 0.8 s; resident bytes cost them nothing.
    resident = ask("b", 1000, [RESIDENT] * 8)
    assert Kind.ADMIT is one(Planner(), resident, Load(0.0, [0.1]), prices(copy_s=1.05), behind=2).kind
    assert Kind.DECLINE is one(Planner(), resident, Load(0.0, [0.1]), prices(copy_s=1.05)).kind


# ------------------------------------------------------------ deferring


def test_bytes_on_their_way_are_waited_for_while_the_gpu_is_busy_anyway() -> None:
    found = one(Planner(), ask("a", 1000, [0] * 8, preloading=True), Load(3.0, [0.0]), prices())
    assert (Kind.DEFER, 8, STAGING, int(0.8 * SECOND)) == (found.kind, found.chunks, found.why, found.until_ns)


def test_bytes_on_their_way_are_waited_for_without_blocks_where_these_are_scarce() -> None:
    load = Load(0.0, [0.0], blocks_scarce=True)
    assert Kind.DEFER is one(Planner(), ask("a", 1000, [0] * 8, preloading=True), load, prices()).kind


def test_nobody_waits_in_an_idle_system() -> None:
    assert Kind.ADMIT is one(Planner(), ask("a", 1000, [0] * 8, preloading=True), idle(), prices()).kind


def test_nobody_waits_for_bytes_that_nobody_brings() -> None:
    assert Kind.ADMIT is one(Planner(), ask("a", 1000, [0] * 8), Load(3.0, [0.0]), prices()).kind


def test_bytes_that_are_there_end_the_wait() -> None:
    planner = Planner()
    assert Kind.DEFER is one(planner, ask("a", 1000, [0] * 8, preloading=True), Load(3.0, [0.0]), prices()).kind
    assert Kind.ADMIT is one(planner, ask("a", 1000, [RESIDENT] * 8), Load(3.0, [0.0]), prices()).kind


@pytest.mark.parametrize(("read_s", "allowed_s"), [(0.01, 0.05), (0.5, 0.8), (4.0, 2.0)])
def test_the_deadline_is_twice_the_wait_within_bounds(read_s: float, allowed_s: float) -> None:
    found = one(
        Planner(), ask("a", 1000, [0] * 8, preloading=True), Load(9.0, [0.0]), prices(read_s=read_s, copy_s=0.0)
    )
    assert int(allowed_s * SECOND) == found.until_ns


def test_the_deadline_is_armed_once() -> None:
    planner, asked = Planner(), ask("a", 1000, [0] * 8, preloading=True)
    first = one(planner, asked, Load(3.0, [0.0]), prices())
    later = one(planner, asked, Load(3.0, [1.0]), prices(), now_ns=SECOND // 2)
    assert (Kind.DEFER, first.until_ns) == (later.kind, later.until_ns)


def test_past_its_deadline_a_request_is_admitted() -> None:
    planner, asked = Planner(), ask("a", 1000, [0] * 8, preloading=True)
    until_ns = one(planner, asked, Load(3.0, [0.0]), prices()).until_ns
    assert Kind.DEFER is one(planner, asked, Load(3.0, [0.0]), prices(), now_ns=until_ns - 1).kind
    assert Kind.ADMIT is one(planner, asked, Load(3.0, [0.0]), prices(), now_ns=until_ns).kind


def test_a_forgotten_request_begins_anew() -> None:
    planner, asked = Planner(), ask("a", 1000, [0] * 8, preloading=True)
    one(planner, asked, Load(3.0, [0.0]), prices())
    planner.forget("a")
    assert 0 == planner.remembered
    assert int(5.8 * SECOND) == one(planner, asked, Load(3.0, [0.0]), prices(), now_ns=5 * SECOND).until_ns


# ------------------------------------------------------------ stores under way


def test_a_store_under_way_is_waited_for_when_that_is_cheaper() -> None:
    asked = ask("a", 1000, [STORING] * 8, storing_s=0.3)
    found = one(Planner(), asked, idle(), prices())
    assert (Kind.DEFER, STORE_UNDER_WAY) == (found.kind, found.why)
    assert math.isclose(0.3 + 0.2, found.load_s)


def test_a_store_under_way_is_not_waited_for_when_that_is_dearer() -> None:
    assert Kind.DECLINE is one(Planner(), ask("a", 1000, [STORING] * 8, storing_s=0.9), idle(), prices()).kind


def test_what_lies_before_a_store_under_way_is_loaded_alone_when_the_wait_is_too_long() -> None:
    asked = ask("a", 1000, [RESIDENT] * 6 + [STORING] * 2, storing_s=0.5)
    found = one(Planner(), asked, idle(), prices())
    assert (Kind.ADMIT, 6) == (found.kind, found.chunks)


def test_past_its_deadline_a_request_waits_for_no_store() -> None:
    planner, asked = Planner(), ask("a", 1000, [STORING] * 8, storing_s=0.3)
    until_ns = one(planner, asked, idle(), prices()).until_ns
    assert Kind.DECLINE is one(planner, asked, idle(), prices(), now_ns=until_ns).kind


# ------------------------------------------------------------ keeping a verdict


def test_a_verdict_is_kept_within_the_margin() -> None:
    planner, asked = Planner(), ask("a", 1000, [0] * 8)
    assert Kind.ADMIT is one(planner, asked, Load(0.0, [0.38]), prices()).kind  # 0.98 s against 1 s
    assert Kind.ADMIT is one(planner, asked, Load(0.0, [0.45]), prices()).kind  # 1.05 s against 1 s
    assert Kind.DECLINE is one(planner, asked, Load(0.0, [0.60]), prices()).kind  # 1.2 s against 1 s
    assert Kind.DECLINE is one(planner, asked, Load(0.0, [0.38]), prices()).kind
    assert Kind.ADMIT is one(planner, asked, Load(0.0, [0.25]), prices()).kind  # 0.85 s against 1 s
