"""Row 2: a request waited for ever on a lookup that never resolved."""

from pathlib import Path

import pytest

from kvpool.client import link
from kvpool.client.launch import ClientConfig
from kvpool.client.scheduler import Later, Miss, SchedulerClient
from kvpool.core.requests import STORE_MARGIN_NS, AnnouncedRequests
from kvpool.errors import Code
from tests.process.fake_pool import FakePool
from tests.process.real_pool import pump_until
from tests.process.test_rank_client import Rank, keys, namespace


def test_row_02_lookups_that_nobody_answers_become_misses_which_are_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, open_descriptors: None
) -> None:
    pool = FakePool(str(tmp_path))
    pool.hold_statuses = True
    client = SchedulerClient(ClientConfig(run_dir=pool.run_dir), namespace(), engine="engine")
    pump_until(client, lambda: client.connected)
    (key,) = keys(1)
    for request in ("a", "b", "c"):
        client.announce(request, [key])
        assert isinstance(client.lookup(request, key), Later)
        pump_until(client, lambda r=request: isinstance(client.lookup(r, key), Miss))  # type: ignore[misc]
    for request in ("d", "e"):  # after so many the pool counts as gone: nobody waits for it any more
        client.announce(request, [key])
        assert Miss("silent") == client.lookup(request, key)
        client.pump()
    assert 3 == client.counters()["answers_late"]
    assert 1 == sum("does not answer" in record.message for record in caplog.records)
    client.close()
    pool.close()


def test_row_02_a_lookup_of_what_is_being_stored_is_later_until_a_deadline_and_then_a_miss() -> None:
    table = AnnouncedRequests()
    table.pool_joined(1_000, now_ns=0)
    table.announce("a", keys(1), 0, now_ns=0)
    table.status_told("a", 0, b"\0", b"\xff", complete=True)
    table.offer("b", keys(1), now_ns=0)
    end_ns = 1_000 + STORE_MARGIN_NS
    assert Later(end_ns, "storing") == table.lookup("a", keys(1)[0], now_ns=end_ns - 1)
    assert Miss("absent") == table.lookup("a", keys(1)[0], now_ns=end_ns)


def test_row_02_loads_and_stores_that_nobody_answers_end_at_their_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_descriptors: None
) -> None:
    monkeypatch.setattr(link, "LOAD_MARGIN_S", 0.1)
    pool = FakePool(str(tmp_path))
    pool.load_deadline_s = 0.2
    rank = Rank(pool).connected()
    pool.hold_loads = pool.hold_stores = True
    rank.load(1, 2)
    rank.store(2, 1)
    assert ((0, Code.DEADLINE), (1, Code.DEADLINE)) == rank.end_of(1).failed
    assert ((0, Code.DEADLINE),) == rank.end_of(2).failed
    rank.client.close()
    pool.close()
