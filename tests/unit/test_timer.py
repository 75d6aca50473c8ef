"""A timer behind a descriptor: becomes readable once, no sooner than asked."""

import select
import time

from kvpool.io.timer import Timer


def test_it_expires_once_and_not_too_soon(open_descriptors: None) -> None:
    timer = Timer()
    poll = select.poll()
    poll.register(timer.fileno(), select.POLLIN)
    begin = time.monotonic_ns()
    timer.arm(500_000)
    assert [(timer.fileno(), select.POLLIN)] == poll.poll(5000)
    assert time.monotonic_ns() - begin >= 500_000
    timer.clear()
    assert [] == poll.poll(0)
    timer.close()
    timer.close()


def test_what_is_past_expires_at_once_and_disarmed_never(open_descriptors: None) -> None:
    timer = Timer()
    poll = select.poll()
    poll.register(timer.fileno(), select.POLLIN)
    timer.arm(-5)
    assert poll.poll(5000)
    timer.arm(None)
    timer.clear()
    assert [] == poll.poll(5)
    timer.close()
