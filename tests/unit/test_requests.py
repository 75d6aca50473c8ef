"""What a scheduler knows of announced requests: lookups from memory, with an end to every "later"."""

from kvpool.core.requests import (
    ANSWER_NS,
    CUT_REQUESTS_MAX,
    SILENT_MAX,
    STORE_MARGIN_NS,
    AnnouncedRequests,
    Hit,
    Later,
    Lookup,
    Miss,
)
from kvpool.wire.messages import RESIDENT, STORED, KeyState

A, B, C = (bytes([number]) * 36 for number in range(3))
STORE_NS = 1_000_000_000


class Table(AnnouncedRequests):
    """A connected table with short calls."""

    def __init__(self) -> None:
        super().__init__()
        self.pool_joined(STORE_NS, now_ns=0)

    def hear(self, request: str, flags: bytes, devices: bytes, *, first: int = 0, complete: bool = True) -> None:
        self.status_told(request, first, flags, devices, complete=complete)
        self.validate()

    def look(self, request: str, key: bytes, now_ns: int = 0) -> Lookup:
        return self.lookup(request, key, now_ns=now_ns)


def test_a_key_is_a_hit_with_either_flag_and_resident_with_one() -> None:
    table = Table()
    table.announce("r", [A, B, C], 0, now_ns=0)
    table.hear("r", bytes([STORED, STORED | RESIDENT, RESIDENT]), bytes([0, 1, 2]))
    assert Hit(0, resident=False) == table.look("r", A)
    assert Hit(1, resident=True) == table.look("r", B)
    assert Hit(2, resident=True) == table.look("r", C)


def test_what_was_not_announced_is_a_miss_that_says_so() -> None:
    table = Table()
    assert Miss("unannounced") == table.look("r", A)
    table.announce("r", [A], 0, now_ns=0)
    assert Miss("unannounced") == table.look("r", B)
    assert Miss("unannounced") == table.look("other", A)


def test_an_answer_is_later_for_50_ms_then_a_miss_and_good_when_it_comes_late() -> None:
    table = Table()
    table.announce("r", [A], 0, now_ns=10)
    assert Later(10 + ANSWER_NS, "unanswered") == table.look("r", A, 10)
    assert Later(10 + ANSWER_NS, "unanswered") == table.look("r", A, 9 + ANSWER_NS)
    assert Miss("unanswered") == table.look("r", A, 10 + ANSWER_NS)
    assert 1 == table.statistics()["answers_late"]
    table.hear("r", bytes([STORED]), bytes([0]))
    assert Hit(0, resident=False) == table.look("r", A, 11 + ANSWER_NS)


def test_an_incomplete_answer_is_later_for_what_it_did_not_find() -> None:
    table = Table()
    table.announce("r", [A, B], 0, now_ns=0)
    table.hear("r", bytes([STORED, 0]), bytes([0, 255]), complete=False)
    assert Hit(0, resident=False) == table.look("r", A)
    assert isinstance(table.look("r", B), Later)
    table.hear("r", bytes([STORED, 0]), bytes([0, 255]))
    assert Miss("absent") == table.look("r", B)


def test_parts_of_a_long_request_are_answered_one_by_one() -> None:
    table = Table()
    assert 0 == table.announce("r", [A, B], 0, now_ns=0)
    assert 2 == table.announce("r", [C], 0, now_ns=0)
    table.hear("r", bytes([STORED]), bytes([3]), first=2)
    assert Hit(3, resident=False) == table.look("r", C)
    assert isinstance(table.look("r", A), Later)


def test_three_unanswered_in_a_row_make_the_pool_silent_until_it_speaks() -> None:
    table = Table()
    for number in range(SILENT_MAX):
        table.announce(f"r{number}", [A], 0, now_ns=0)
        assert not table.silent
    table.time_passed(now_ns=ANSWER_NS)
    assert table.silent
    table.announce("late", [B], 0, now_ns=ANSWER_NS)
    assert Miss("silent") == table.look("late", B, ANSWER_NS)
    table.heard()
    assert isinstance(table.look("late", B, ANSWER_NS), Later)


def test_slow_but_speaking_is_not_silent() -> None:
    """Answers that say "not complete yet" are answers."""
    table = Table()
    for number in range(SILENT_MAX + 1):
        table.announce(f"r{number}", [A], 0, now_ns=0)
        table.hear(f"r{number}", bytes([0]), bytes([255]), complete=False)
    table.time_passed(now_ns=ANSWER_NS)
    assert not table.silent
    assert Miss("unanswered") == table.look("r0", A, ANSWER_NS)


def test_changes_move_flags_of_wanted_keys_only() -> None:
    table = Table()
    table.announce("r", [A], 0, now_ns=0)
    table.hear("r", bytes([0]), bytes([255]))
    table.keys_changed([KeyState(A, STORED, 1), KeyState(B, STORED, 1)])
    assert Hit(1, resident=False) == table.look("r", A)
    table.keys_changed([KeyState(A, 0, 255)])
    assert Miss("absent") == table.look("r", A)
    table.validate()


def test_flags_live_as_long_as_a_request_wants_the_key() -> None:
    table = Table()
    table.announce("r", [A], 0, now_ns=0)
    table.announce("s", [A], 0, now_ns=0)
    table.hear("r", bytes([STORED]), bytes([0]))
    assert table.withdraw("r")
    assert Hit(0, resident=False) == table.look("s", A)
    assert table.withdraw("s")
    assert not table.withdraw("s")
    table.validate()
    assert 0 == table.statistics()["keys_wanted"]


def test_a_key_being_stored_is_later_with_an_end() -> None:
    table = Table()
    table.announce("r", [A], 0, now_ns=0)
    table.hear("r", bytes([0]), bytes([255]))
    table.offer("s", [A], now_ns=0)
    until_ns = STORE_NS + STORE_MARGIN_NS
    assert Later(until_ns, "storing") == table.look("r", A)
    assert Miss("absent") == table.look("r", A, until_ns)
    table.time_passed(now_ns=until_ns)
    assert (0, 1) == (table.statistics()["stores_in_flight"], table.statistics()["stores_unanswered"])
    assert not table.request_cut("s"), "nobody said that it was dropped"


def test_an_ended_store_is_a_hit_or_cuts_those_who_offered_it() -> None:
    table = Table()
    table.announce("r", [A, B], 0, now_ns=0)
    table.hear("r", bytes([0, 0]), bytes([255, 255]))
    table.offer("s", [A, B], now_ns=0)
    table.offer("t", [B], now_ns=1)
    table.keys_changed([KeyState(A, RESIDENT, 0)])
    table.stores_ended(kept=[A], dropped=[B])
    assert Hit(0, resident=True) == table.look("r", A)
    assert Miss("absent") == table.look("r", B)
    assert (True, True, False) == (table.request_cut("s"), table.request_cut("t"), table.request_cut("r"))
    table.validate()


def test_a_request_starts_once_and_may_wait_again() -> None:
    table = AnnouncedRequests()
    table.announce("r", [b"a", b"b"], 3, now_ns=0)
    assert [True, False] == [table.start("r"), table.start("r")]
    assert ["r"] == table.started_requests()
    assert (2, 3) == table.wait_again("r")
    assert table.wait_again("r") is None
    assert not table.start("unknown")
    table.validate()


def test_cut_requests_are_bounded() -> None:
    table = Table()
    for number in range(CUT_REQUESTS_MAX + 1):
        table.offer(f"r{number}", [A], now_ns=0)
        table.stores_ended(kept=[], dropped=[A])
    assert (False, True) == (table.request_cut("r0"), table.request_cut(f"r{CUT_REQUESTS_MAX}"))


def test_a_lost_pool_is_a_miss_at_once_and_cuts_what_was_being_stored() -> None:
    table = Table()
    table.announce("r", [A], 7, now_ns=0)
    table.hear("r", bytes([STORED]), bytes([0]))
    table.offer("s", [B], now_ns=0)
    table.pool_lost()
    table.validate()
    assert Miss("unconnected") == table.look("r", A)
    assert table.request_cut("s")
    table.announce("q", [B], 0, now_ns=5)
    assert [("r", [A], 7), ("q", [B], 0)] == table.pool_joined(STORE_NS, now_ns=10)
    assert Later(10 + ANSWER_NS, "unanswered") == table.look("r", A, 10)


def test_changes_stand_still_while_answers_do() -> None:
    table = Table()
    table.announce("r", [A], 0, now_ns=0)
    before = table.changes
    table.time_passed(now_ns=1)
    table.look("r", A, 1)
    assert before == table.changes
    for happening in (
        lambda: table.hear("r", bytes([0]), bytes([255])),
        lambda: table.keys_changed([KeyState(A, STORED, 0)]),
        lambda: table.offer("s", [B], now_ns=0),
        lambda: table.stores_ended(kept=[B], dropped=[]),
        table.pool_lost,
        lambda: table.pool_joined(STORE_NS, now_ns=0),
    ):
        before = table.changes
        happening()
        assert before < table.changes
