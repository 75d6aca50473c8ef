"""Row 31: "usage" showed pinned bytes only, and people read it as contents; nobody knew why keys were missed."""

from pathlib import Path

from kvpool.core.requests import AnnouncedRequests
from kvpool.health import facts
from kvpool.wire import messages as m
from tests.field.conftest import StartWorker
from tests.process.worker_harness import key_of


def test_row_31_stored_and_staged_are_separate_figures(device: Path, start: StartWorker) -> None:
    worker = start(device, slots=32)
    assert list(range(4)) == worker.store(range(4))
    worker.until(lambda: worker.facts()[facts.STORES] == 4)
    told = worker.facts()
    assert 4 == told[facts.INDEX_OBJECTS]
    assert 32 == sum(
        told[name] for name in (facts.SLOTS_FREE, facts.SLOTS_FILLING, facts.SLOTS_RESIDENT, facts.SLOTS_QUARANTINED)
    )
    assert {facts.INDEX_OBJECTS, facts.SLOTS_RESIDENT, facts.BYTES_STORED, facts.BYTES_LOADED} <= set(facts.MEANING)


def test_row_31_every_miss_has_a_reason() -> None:
    table = AnnouncedRequests()
    table.lookup("r", key_of(0), now_ns=0)
    table.pool_joined(10**9, now_ns=0)
    table.lookup("r", key_of(0), now_ns=0)
    table.announce("r", [key_of(0), key_of(1)], 0, now_ns=0)
    table.lookup("r", key_of(0), now_ns=10**9)
    table.status_told("r", 0, bytes([m.STORED, 0]), bytes([0, 255]), complete=True)
    table.lookup("r", key_of(1), now_ns=10**9)
    told = table.statistics()
    reasons = {name: count for name, count in told.items() if name.startswith("missed_") and count}
    assert {"missed_unconnected": 1, "missed_unannounced": 1, "missed_unanswered": 1, "missed_absent": 1} == reasons
    assert sum(reasons.values()) == told["lookups_missed"]
