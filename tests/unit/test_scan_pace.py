"""When walks wait for loads, and that they always end."""

from kvpool.core.scan_pace import QUIET_NS, TURN_NS, WAIT_NS, ScanPace

S = 10**9


def test_a_walk_goes_on_while_nothing_is_loaded() -> None:
    pace = ScanPace()
    assert pace.look(S, busy=False)
    assert pace.due_ns() is None


def test_it_waits_from_the_first_load_until_a_while_after_the_last() -> None:
    pace = ScanPace()
    pace.look(S, busy=False)
    assert not pace.look(2 * S, busy=True)
    assert not pace.look(2 * S + 10, busy=False)
    assert 2 * S + QUIET_NS == pace.due_ns()
    assert not pace.look(2 * S + QUIET_NS - 1, busy=False)
    assert pace.look(2 * S + QUIET_NS, busy=False)
    assert not pace.look(2 * S + QUIET_NS + 1, busy=True)


def test_under_loads_without_an_end_it_has_a_short_turn_now_and_then() -> None:
    pace, now_ns, gone_ns = ScanPace(), S, 0
    for _ in range(200_000):
        now_ns += 10_000
        gone_ns += 10_000 * pace.look(now_ns, busy=True)
    spent_ns = now_ns - S
    assert 0.5 * TURN_NS / WAIT_NS < gone_ns / spent_ns < 2 * TURN_NS / WAIT_NS


def test_a_turn_and_a_wait_say_when_they_end() -> None:
    pace = ScanPace()
    pace.look(S, busy=True)
    now_ns = S
    while not pace.look(now_ns, busy=True):
        due_ns = pace.due_ns()
        assert due_ns is not None
        assert now_ns < due_ns <= S + WAIT_NS
        now_ns = due_ns
    assert S + WAIT_NS == now_ns
    assert now_ns + TURN_NS == pace.due_ns()
    assert pace.look(now_ns + TURN_NS - 1, busy=True)
    assert not pace.look(now_ns + TURN_NS, busy=True)


def test_quiet_makes_a_turn_a_walk_as_usual() -> None:
    pace = ScanPace()
    pace.look(S, busy=True)
    assert pace.look(S + WAIT_NS, busy=True)
    assert pace.look(S + WAIT_NS + QUIET_NS, busy=False)
    assert pace.due_ns() is None
    assert not pace.look(S + WAIT_NS + QUIET_NS + 1, busy=True)
