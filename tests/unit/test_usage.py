"""When a worker's need of slots is worth telling, and what of it."""

from kvpool.core.usage import TELL_NS, Usage
from kvpool.wire.messages import SlotsUsed


def test_the_first_word_tells_what_there_is() -> None:
    usage = Usage()
    assert usage.due_ns() is None
    usage.seen(8192, 100, used=0, wanted=0)
    assert [SlotsUsed(8192, 0, 0)] == usage.take(TELL_NS)


def test_the_most_since_the_last_word_counts() -> None:
    usage = Usage()
    usage.seen(8192, 100, used=60, wanted=5)
    usage.seen(8192, 100, used=10, wanted=0)
    assert [SlotsUsed(8192, 60, 5)] == usage.take(TELL_NS)


def test_after_a_burst_its_end_is_told_although_nothing_moves_any_more() -> None:
    usage = Usage()
    usage.seen(8192, 100, used=60, wanted=0)
    usage.seen(8192, 100, used=10, wanted=0)
    usage.take(TELL_NS)
    assert 2 * TELL_NS == usage.due_ns()
    assert [] == usage.take(2 * TELL_NS - 1)
    assert [SlotsUsed(8192, 10, 0)] == usage.take(2 * TELL_NS)
    assert usage.due_ns() is None


def test_small_changes_are_not_told() -> None:
    usage = Usage()
    usage.seen(8192, 100, used=50, wanted=0)
    usage.take(TELL_NS)
    usage.seen(8192, 100, used=62, wanted=0)
    assert usage.due_ns() is None
    usage.seen(8192, 100, used=63, wanted=0)
    assert [SlotsUsed(8192, 63, 0)] == usage.take(2 * TELL_NS)
