"""Where the stored beginning of a waiting request's keys lies, from what the pool has told."""

from kvpool.core.chunk_places import RESIDENT_PLACE, STORING_PLACE
from kvpool.core.requests import ANSWER_NS, AnnouncedRequests
from kvpool.wire.messages import RESIDENT, STORED

KEYS = [b"a", b"b", b"c", b"d", b"e"]


def told(flags: list[int], devices: list[int], *, complete: bool = True) -> AnnouncedRequests:
    """Return a table in which the pool has answered for the first keys of one request."""
    table = AnnouncedRequests()
    table.pool_joined(1_000_000_000, now_ns=0)
    table.announce("r", KEYS, 0, now_ns=0)
    table.status_told("r", 0, bytes(flags), bytes(devices), complete=complete)
    return table


def test_places_end_at_the_first_key_that_is_not_stored() -> None:
    table = told([STORED, STORED | RESIDENT, STORED, 0, STORED], [0, 0, 3, 255, 1])
    assert [0, RESIDENT_PLACE, 3] == table.places(KEYS, now_ns=1)


def test_a_key_that_this_engine_is_storing_has_a_place_until_it_is_forgotten() -> None:
    table = told([STORED, 0, 0, 0, 0], [0, 255, 255, 255, 255])
    table.offer("r", [b"b"], now_ns=1)
    assert [0, STORING_PLACE] == table.places(KEYS, now_ns=2)
    assert [0] == table.places(KEYS, now_ns=10_000_000_000)


def test_without_a_pool_nothing_has_a_place() -> None:
    table = told([STORED] * 5, [0] * 5)
    table.pool_lost()
    assert [] == table.places(KEYS, now_ns=1)


def test_a_request_is_answered_when_all_keys_are_or_the_time_is_over() -> None:
    table = told([STORED, STORED], [0, 0], complete=False)
    assert not table.answered("r", now_ns=1)
    assert table.answered("r", now_ns=ANSWER_NS)
    table.status_told("r", 2, bytes(3), bytes([255] * 3), complete=True)
    assert table.answered("r", now_ns=1)
    assert table.answered("unknown", now_ns=1)
