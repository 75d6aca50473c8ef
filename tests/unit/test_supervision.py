"""Supervision: when an I/O worker is started again."""

import pytest

from kvpool.core import supervision as s
from kvpool.errors import Exit

S = 10**9


def test_every_device_starts_at_once_in_the_beginning() -> None:
    assert ([s.Start(0), s.Start(1)], None) == s.plan([s.Child(device=0), s.Child(device=1)], 5)


def test_a_running_worker_is_left_alone() -> None:
    child = s.ready(s.started(s.Child(device=0), 0), 1 * S)
    assert ([], None) == s.plan([child], 10**6 * S)


def test_a_crash_waits_for_its_back_off() -> None:
    child = s.ended(s.ready(s.started(s.Child(device=0), 0), 1), -9, 5 * S)
    due = 5 * S + int(s.BACKOFF_S_MIN * S)
    assert ([], due) == s.plan([child], 5 * S)
    assert ([s.Start(0)], None) == s.plan([child], due)


def test_back_off_doubles_up_to_its_limit() -> None:
    waits = [s.backoff_s(crashes) for crashes in range(1, 20)]
    assert [0.1, 0.2, 0.4, 0.8] == pytest.approx(waits[:4])
    assert s.BACKOFF_S_MAX == waits[-1]


def test_a_stable_run_forgives_earlier_crashes() -> None:
    child = s.Child(device=0, crashes_in_row=7)
    child = s.ready(s.started(child, 0), 0)
    assert 1 == s.ended(child, -9, int(s.STABLE_S * S)).crashes_in_row
    assert 8 == s.ended(child, -9, int(s.STABLE_S * S) - 1).crashes_in_row


@pytest.mark.parametrize("code", [Exit.CONFIG, Exit.HOST])
def test_a_boot_failure_is_not_started_again(code: Exit) -> None:
    child = s.ended(s.started(s.Child(device=0), 0), code, 1 * S)
    assert code == child.failed
    assert ([], None) == s.plan([child], 10**6 * S)


def test_the_same_exit_code_after_being_ready_is_a_crash() -> None:
    child = s.ended(s.ready(s.started(s.Child(device=0), 0), 0), Exit.HOST, 1 * S)
    assert child.failed is None
    assert [s.Start(0)] == s.plan([child], 10**6 * S)[0]


def test_a_worker_that_never_gets_ready_is_killed() -> None:
    child = s.started(s.Child(device=0), 3 * S)
    due = 3 * S + int(s.BOOT_S_MAX * S)
    assert ([], due) == s.plan([child], 4 * S)
    assert ([s.Kill(0)], None) == s.plan([child], due)


def test_restarts_count_starts_after_the_first() -> None:
    child = s.started(s.Child(device=0), 0)
    assert 0 == child.restarts
    assert 1 == s.started(s.ended(child, 1, 1), 2).restarts
