"""Lending: what pairs borrow from those that need less than their share."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.lending import LOAN_NS, PEAK_NS, Lending

S = 10**9
SHARES = {"a": 1000, "b": 1000}
FLOORS = {"a": 100, "b": 100}


def divided(lending: Lending[str], now_ns: int = 0, **used: int) -> dict[str, int]:
    for pair, used_bytes in used.items():
        lending.used(pair, used_bytes, now_ns)
    lending.divide(SHARES, FLOORS, now_ns)
    lending.validate()
    return lending.loans(SHARES)


def test_without_a_word_of_needs_nobody_lends() -> None:
    assert {} == divided(Lending())


def test_who_needs_more_borrows_from_who_needs_less() -> None:
    assert {"a": 500, "b": -500} == divided(Lending(), a=1600, b=0)


def test_no_more_is_borrowed_than_needed_with_headroom() -> None:
    assert {"a": 300, "b": -300} == divided(Lending(), a=1040, b=0)


def test_a_pair_of_which_nothing_was_told_lends_nothing() -> None:
    assert {} == divided(Lending(), a=1600)


def test_the_floor_is_never_lent() -> None:
    lending: Lending[str] = Lending()
    lending.used("a", 1600, 0)
    lending.used("b", 0, 0)
    lending.divide(SHARES, {"a": 900, "b": 900}, 0)
    assert {} == lending.loans(SHARES)  # a tenth of the share is not worth moving segments
    lending = Lending()
    lending.used("a", 1600, 0)
    lending.used("b", 0, 0)
    lending.divide(SHARES, {"a": 800, "b": 800}, 0)
    assert {"a": 200, "b": -200} == lending.loans(SHARES)


def test_loans_do_not_change_before_their_time() -> None:
    lending: Lending[str] = Lending()
    before = divided(lending, a=1600, b=0)
    assert before == divided(lending, LOAN_NS - 1, a=0)
    assert LOAN_NS == lending.due_ns(LOAN_NS - 1)


def test_a_burst_counts_for_a_while_after_it() -> None:
    lending: Lending[str] = Lending()
    divided(lending, a=1600, b=0)
    assert {"a": 500, "b": -500} == divided(lending, LOAN_NS, a=0)
    assert PEAK_NS == lending.due_ns(LOAN_NS)
    assert {} == divided(lending, PEAK_NS)
    assert lending.due_ns(PEAK_NS) is None


def test_a_lender_gets_back_what_it_needs() -> None:
    lending: Lending[str] = Lending()
    divided(lending, a=1600, b=0)
    assert {"a": 250, "b": -250} == divided(lending, LOAN_NS, b=600)


def test_small_changes_move_nothing() -> None:
    lending: Lending[str] = Lending()
    before = divided(lending, a=1200, b=0)
    assert before == divided(lending, LOAN_NS, a=1210)


def test_other_shares_end_the_loans() -> None:
    lending: Lending[str] = Lending()
    divided(lending, a=1600, b=0)
    assert {} == lending.loans({"a": 2000, "b": 1000})


def test_what_waits_counts_beside_what_is_used() -> None:
    lending: Lending[str] = Lending()
    divided(lending, a=400, b=0)
    lending.waiting({"a": 1200})
    assert {"a": 500, "b": -500} == divided(lending, LOAN_NS)


def test_a_pair_whose_worker_ended_lends_nothing() -> None:
    lending: Lending[str] = Lending()
    divided(lending, a=1600, b=0)
    lending.forget("b")
    assert {} == divided(lending, LOAN_NS)


_bytes = st.integers(0, 10**6)


@settings(max_examples=200, deadline=None)
@given(
    pairs=st.dictionaries(st.integers(0, 9), st.tuples(st.integers(1, 10**6), _bytes), min_size=1),
    told=st.lists(st.tuples(st.integers(0, 9), _bytes, st.integers(0, 5 * S)), max_size=12),
)
def test_nobody_lends_its_floor_or_more_than_half_and_nothing_is_made(
    pairs: dict[int, tuple[int, int]], told: list[tuple[int, int, int]]
) -> None:
    lending: Lending[int] = Lending()
    shares = {pair: share for pair, (share, _) in pairs.items()}
    floors = {pair: min(share, floor) for pair, (share, floor) in pairs.items()}
    now_ns = 0
    for pair, used, passed_ns in told:
        now_ns += passed_ns
        lending.used(pair, used, now_ns)
        lending.divide(shares, floors, now_ns)
        lending.validate()
        for lender, loan in lending.loans(shares).items():
            assert shares[lender] + loan >= min(floors[lender], shares[lender] + 1) - 1
            assert 2 * (shares[lender] + loan) >= shares[lender] - 2
