"""The breaker: what gives a device up, what does not, and how it comes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.breaker import RETRY_GROWTH_MAX, Breaker, Direction, State
from kvpool.errors import InvariantError

S = 10**9
READ, WRITE = Direction.READ, Direction.WRITE


@pytest.fixture
def breaker() -> Breaker:
    made = Breaker(failures=3, retry_ns=S, stall_ns=10 * S)
    made.did_well(READ, 0)
    return made


def opened(breaker: Breaker, now_ns: int) -> Breaker:
    while not breaker.failed(READ, "EIO", now_ns):
        pass
    return breaker


def test_it_opens_when_as_many_operations_failed_as_allowed(breaker):
    assert [False, False, True] == [breaker.failed(READ, "EIO", 0) for _ in range(3)]
    assert not breaker.healthy
    assert breaker.why == "3 reads failed, the last with EIO"


def test_failures_among_as_many_successes_do_not_open_it(breaker):
    for now in range(100):
        assert not breaker.failed(READ, "EIO", now)
        breaker.did_well(READ, now)


def test_good_writes_do_not_hide_bad_reads(breaker):
    for now in range(2):
        assert not breaker.failed(READ, "EIO", now)
        breaker.did_well(WRITE, now)
    assert breaker.failed(READ, "EIO", 2)


def test_a_late_operation_is_a_stall_if_nothing_ended_well_meanwhile(breaker):
    assert breaker.late(WRITE, 10 * S)
    assert breaker.why == "a write is late and nothing has ended in 10 s"


def test_a_late_operation_among_good_ones_is_one_failure(breaker):
    breaker.did_well(READ, 9 * S)
    assert [False, False, True] == [breaker.late(READ, 10 * S) for _ in range(3)]


def test_a_probe_that_does_well_closes_it_and_forgets_the_trouble(breaker):
    opened(breaker, 0)
    assert breaker.probe_due_ns() == S
    breaker.probe_started(S)
    assert (State.PROBING, None, False) == (breaker.state, breaker.probe_due_ns(), breaker.healthy)
    breaker.probe_ended(well=True, now_ns=2 * S)
    assert (State.CLOSED, None, True) == (breaker.state, breaker.probe_due_ns(), breaker.healthy)
    assert not breaker.failed(READ, "EIO", 3 * S)


def test_failed_probes_double_the_back_off_up_to_a_bound(breaker):
    opened(breaker, 0)
    waits = []
    for _ in range(9):
        due = breaker.probe_due_ns()
        waits.append(due - breaker.since_ns)
        breaker.probe_started(due)
        breaker.probe_ended(well=False, now_ns=due)
    assert [S, 2 * S, 4 * S, 8 * S, 16 * S, 32 * S, 64 * S, 64 * S, 64 * S] == waits
    assert breaker.probes_failed == 9


def test_a_device_that_fails_again_at_once_has_not_recovered(breaker):
    opened(breaker, 0)
    breaker.probe_started(S)
    breaker.probe_ended(well=True, now_ns=S)
    opened(breaker, 2 * S)
    assert breaker.probe_due_ns() == 4 * S
    breaker.probe_started(4 * S)
    breaker.probe_ended(well=True, now_ns=4 * S)
    later = 4 * S + RETRY_GROWTH_MAX * S
    assert opened(breaker, later).probe_due_ns() == later + S


def test_what_fails_while_it_is_open_changes_nothing(breaker):
    opened(breaker, 0)
    assert not breaker.failed(READ, "EIO", 1)
    assert not breaker.late(READ, 100 * S)
    assert breaker.opened == 1


def test_a_probe_that_was_not_started_cannot_end(breaker):
    with pytest.raises(InvariantError):
        breaker.probe_ended(well=True, now_ns=0)


@given(st.lists(st.sampled_from(["well", "failed", "late", "probe well", "probe failed"]), max_size=60))
def test_it_is_used_exactly_while_closed_and_always_has_a_way_back(steps):
    breaker = Breaker(failures=2, retry_ns=S, stall_ns=10 * S)
    now = 0
    for step in steps:
        now += S
        if step == "well":
            breaker.did_well(READ, now)
        elif step == "failed":
            breaker.failed(READ, "EIO", now)
        elif step == "late":
            breaker.late(READ, now)
        elif breaker.state is State.OPEN:
            now = max(now, breaker.probe_due_ns())
            breaker.probe_started(now)
            breaker.probe_ended(well=step == "probe well", now_ns=now)
        assert breaker.healthy == (breaker.state is State.CLOSED)
        due = breaker.probe_due_ns()
        assert (due is None) == breaker.healthy
        assert due is None or due - now <= RETRY_GROWTH_MAX * S
