"""When a hit has to wait before it is loaded."""

from kvpool_vllm.defer import Deferral, Verdict, Wish

SPEEDS = {0: 100.0, 1: 100.0}


def wish(missing: dict[int, int], *, blocks: int = 1, free: int = 10, others: bool = True) -> Wish:
    return Wish(missing_bytes=missing, blocks=blocks, blocks_free=free, others_free_blocks=others)


def deferral() -> Deferral:
    return Deferral(backlog_s_max=1.0, defer_s_max=5.0)


def test_the_first_load_is_admitted_however_large() -> None:
    assert Verdict.ADMIT == deferral().verdict("a", wish({0: 10_000}), SPEEDS, now=0.0)


def test_a_load_waits_while_more_than_a_second_of_work_is_admitted() -> None:
    rule = deferral()
    rule.admitted("a", {0: 101})
    assert Verdict.DEFER_BACKLOG == rule.verdict("b", wish({0: 1}), SPEEDS, now=0.0)
    rule.landed("a")
    assert Verdict.ADMIT == rule.verdict("b", wish({0: 1}), SPEEDS, now=0.1)


def test_exactly_a_second_of_work_defers_nobody() -> None:
    rule = deferral()
    rule.admitted("a", {0: 100})
    assert Verdict.ADMIT == rule.verdict("b", wish({0: 1}), SPEEDS, now=0.0)


def test_the_work_of_another_device_does_not_count() -> None:
    rule = deferral()
    rule.admitted("a", {0: 1000})
    assert Verdict.ADMIT == rule.verdict("b", wish({1: 50}), SPEEDS, now=0.0)


def test_a_resident_hit_is_never_deferred() -> None:
    rule = deferral()
    rule.admitted("a", {0: 1000})
    assert Verdict.ADMIT == rule.verdict("b", wish({}, blocks=99), SPEEDS, now=0.0)


def test_a_load_whose_blocks_do_not_fit_waits_while_others_will_free_some() -> None:
    rule = deferral()
    assert Verdict.DEFER_BLOCKS == rule.verdict("b", wish({0: 1}, blocks=11), SPEEDS, now=0.0)
    assert Verdict.ADMIT == rule.verdict("b", wish({0: 1}, blocks=10), SPEEDS, now=0.0)
    assert Verdict.ADMIT == rule.verdict("c", wish({0: 1}, blocks=11, others=False), SPEEDS, now=0.0)


def test_a_deferral_has_an_end() -> None:
    rule = deferral()
    rule.admitted("a", {0: 1000})
    assert rule.verdict("b", wish({0: 1}), SPEEDS, now=0.0).deferred
    assert rule.verdict("b", wish({0: 1}), SPEEDS, now=4.9).deferred
    assert not rule.verdict("b", wish({0: 1}), SPEEDS, now=5.0).deferred


def test_a_device_without_a_measured_speed_counts_as_a_slow_drive() -> None:
    rule = deferral()
    rule.admitted("a", {0: 2_000_000_000})
    assert rule.verdict("b", wish({0: 1}), {}, now=0.0).deferred
    assert rule.verdict("b", wish({0: 1}), {0: 0.0}, now=0.0).deferred
