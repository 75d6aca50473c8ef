"""Checks of the pool's facts: what is found, what is not, and the verdict."""

import pytest

from kvpool.errors import Code
from kvpool.health import facts
from kvpool.health.checks import CHECKS, Finding, Picture, findings_of, subject_of
from kvpool.health.facts import Facts, Value
from kvpool.health.render import HealthReport


def worker(**more: Value) -> Facts:
    """A row of a worker with nothing wrong."""
    row: Facts = {
        facts.ROLE: facts.IO_WORKER,
        facts.DEVICE: "nvme0",
        facts.PID: 4711,
        facts.STATE: facts.RUNNING,
        facts.UPTIME_S: 10.0,
        facts.RESTARTS: 0,
        facts.IO_MODE: "io_uring, registered buffers",
        facts.IO_DEGRADED: False,
        facts.DEPTH_LIMIT: 16,
        facts.DEPTH_POSSIBLE: 16,
        facts.SLOT_SIZES: 1,
        facts.SLOTS_QUARANTINED: 0,
        facts.BREAKER: facts.BREAKER_CLOSED,
        facts.STORES: 100,
        facts.STORES_DROPPED: 0,
        facts.LOADS: 1,
        facts.BYTES_STORED: 64 << 30,
        facts.INDEX_COMPLETE: True,
        facts.SPACE_FREE_BYTES: 1 << 40,
        facts.SPACE_TOTAL_BYTES: 2 << 40,
        facts.VERIFY: True,
    }
    return {**row, **more}


def rank(**more: Value) -> Facts:
    """A row of a rank with nothing wrong."""
    row: Facts = {facts.ROLE: facts.RANK_CLIENT, facts.ENGINE: "e1", facts.RANK: 1, facts.PID: 4712}
    return {**row, facts.STATE: facts.RUNNING, facts.SEGMENTS_MAPPED: 3, facts.SEGMENTS_PINNED: 3, **more}


def scheduler(**more: Value) -> Facts:
    """A row of a scheduler with nothing wrong."""
    row: Facts = {facts.ROLE: facts.SCHEDULER_CLIENT, facts.ENGINE: "e1", facts.PID: 4713, facts.ANSWERS_LATE: 0}
    return {**row, facts.STATE: facts.RUNNING, **more}


POOL: Facts = {facts.DEVICES: 1, facts.STAGING_BYTES: 1 << 30, facts.STAGING_READY_BYTES: 1 << 28}


def find(*rows: Facts, **pool: Value) -> list[Finding]:
    return findings_of(Picture({**POOL, **pool}, list(rows)))


def test_a_pool_with_nothing_wrong_has_no_findings() -> None:
    assert find({facts.ROLE: facts.COORDINATOR, facts.PID: 1}, worker(), rank(), scheduler()) == []


def test_what_is_not_known_is_no_finding() -> None:
    rows: list[Facts] = [{facts.ROLE: role} for role in (facts.COORDINATOR, facts.RANK_CLIENT, facts.SCHEDULER_CLIENT)]
    assert findings_of(Picture({}, [*rows, {facts.ROLE: facts.IO_WORKER}, {}])) == []


#: (check, rows, pool facts, does it degrade): the smallest picture that each check must find.
SICK = [
    ("worker_down", [worker(state=facts.DOWN)], {}, True),
    ("worker_absent", [worker()], {facts.DEVICES: 2}, True),
    ("process_silent", [worker(state=facts.SILENT)], {}, True),
    ("process_silent", [worker(), rank(state=facts.SILENT)], {}, True),
    ("worker_restarted", [worker(restarts=1, uptime_s=59.0)], {}, True),
    ("worker_restarted", [worker(restarts=1, uptime_s=61.0)], {}, False),
    ("io_fallback", [worker(io_degraded=True, io_mode="io_uring, plain buffers")], {}, True),
    ("depth_short", [worker(depth_possible=7)], {}, True),
    ("breaker_open", [worker(breaker=facts.BREAKER_OPEN)], {}, True),
    ("breaker_open", [worker(breaker=facts.BREAKER_PROBING)], {}, True),
    ("corrupt_objects", [worker(errors_corrupt=1)], {}, True),
    ("corrupt_objects", [worker(set_aside=1)], {}, True),
    ("device_errors", [worker(errors_read_error=1)], {}, True),
    ("device_errors", [worker(errors_write_error=1)], {}, True),
    ("operations_late", [worker(errors_deadline=1)], {}, True),
    ("space_short", [worker(space_free_bytes=1 << 30)], {}, True),
    ("space_short", [worker(errors_device_full=1)], {}, True),
    ("space_short", [worker(storing=False, storing_why="its capacity is used")], {}, True),
    ("stores_off", [worker(stores_dropped=9, stores_dropped_off=9)], {facts.STORES_ON: False}, False),
    ("stores_off", [worker(storing=False, storing_why=facts.STORES_TURNED_OFF)], {facts.STORES_ON: False}, False),
    ("stores_dropped", [worker(stores=100, stores_dropped=6)], {}, True),
    ("write_only", [worker(loads=0)], {}, True),
    ("serves_little", [worker(), rank(bytes_kept=64 << 30, bytes_served=600 << 20)], {}, True),
    ("self_test_failed", [worker(), rank(self_test="failed", self_test_why="device d0: other bytes")], {}, True),
    ("engines_outdated", [worker()], {facts.ENGINES_OUTDATED: "engine-b"}, True),
    ("index_building", [worker(index_complete=False)], {}, False),
    ("verification_off", [worker(verify=False)], {}, False),
    ("staging_short", [worker()], {facts.STAGING_ADVICE: "Make /dev/shm at least 1 GiB."}, True),
    ("staging_changing", [worker()], {facts.STAGING_CHANGING: True, facts.STAGING_LEAVING_BYTES: 1 << 28}, False),
    (
        "preload_crowded",
        [worker()],
        {facts.PRELOAD_WAITING: 1, facts.PRELOAD_REFUSED: 1, facts.PRELOAD_ADMISSIONS: 0},
        False,
    ),
    ("preload_expired", [worker()], {facts.PRELOAD_EXPIRED: 2, facts.PRELOAD_USED: 8}, False),
    ("evicted_before_use", [worker(evicted_before_use=3, preload_reads=100)], {}, False),
    ("slots_quarantined", [worker(slots_quarantined=1)], {}, True),
    ("slots_quarantined", [worker()], {facts.SEGMENTS_QUARANTINED: 1}, True),
    ("segments_not_pinned", [worker(), rank(segments_pinned=2)], {}, True),
    ("answers_late", [worker(), scheduler(answers_late=1)], {}, True),
    ("peers_refused", [worker()], {facts.PEERS_REFUSED: 1}, False),
    ("peers_refused", [worker()], {facts.PEERS_DROPPED: 1}, True),
]


@pytest.mark.parametrize(("name", "rows", "pool", "degrades"), SICK)
def test_each_check_finds_its_own_case_and_nothing_else(
    name: str, rows: list[Facts], pool: Facts, degrades: bool
) -> None:
    found = find(*rows, **pool)
    assert [(name, degrades)] == [(finding.check, finding.degrades) for finding in found]


def test_every_check_has_a_case_that_it_finds() -> None:
    assert set(CHECKS) == {case[0] for case in SICK}


@pytest.mark.parametrize(("name", "rows", "pool", "degrades"), SICK)
def test_every_finding_says_in_one_sentence_what_to_do(
    name: str, rows: list[Facts], pool: Facts, degrades: bool
) -> None:
    for finding in find(*rows, **pool):
        assert finding.advice.endswith(".")
        assert 1 == finding.advice.count(". ") + 1
        assert finding.what and not finding.what.endswith(".")


def test_few_dropped_stores_are_no_finding() -> None:
    assert find(worker(stores=100, stores_dropped=5)) == []


def test_few_expired_requests_and_few_early_evictions_are_no_finding() -> None:
    row = worker(evicted_before_use=2, preload_reads=100)
    assert find(row, **{facts.PRELOAD_EXPIRED: 1, facts.PRELOAD_USED: 9}) == []


def test_a_depth_is_not_short_before_any_slot_size_is_in_use() -> None:
    assert find(worker(slot_sizes=0, depth_possible=0)) == []


def test_a_small_write_only_device_is_no_finding() -> None:
    assert find(worker(loads=0, bytes_stored=(16 << 30) - 1)) == []


@pytest.mark.parametrize(("kept", "served"), [((64 << 30) - 1, 0), (100 << 30, 1 << 30)])
def test_an_engine_that_gave_little_or_got_some_back_is_no_finding(kept: int, served: int) -> None:
    assert find(worker(), rank(bytes_kept=kept, bytes_served=served)) == []


def test_error_counters_are_named_after_the_codes() -> None:
    assert "errors_corrupt" == facts.errors(Code.CORRUPT.name)


def test_a_note_leaves_the_pool_healthy_and_a_degrading_finding_does_not() -> None:
    assert HealthReport(POOL, [], find(worker(verify=False))).healthy
    assert not HealthReport(POOL, [], find(worker(state=facts.DOWN))).healthy


def test_subjects_name_role_and_device_or_engine() -> None:
    names = [subject_of(row) for row in (worker(), rank(), scheduler(), {facts.ROLE: facts.COORDINATOR})]
    assert ["io_worker nvme0", "rank 1 of e1", "scheduler of e1", "coordinator"] == names


def test_every_fact_has_its_name_as_a_constant_and_a_meaning() -> None:
    constants = {value for name, value in vars(facts).items() if name.isupper() and isinstance(value, str)}
    assert set(facts.MEANING) <= constants
    assert all(facts.MEANING.values())
