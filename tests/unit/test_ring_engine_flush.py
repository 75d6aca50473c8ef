"""Claim of kvpool.io.ring_engine about its rings: nothing that was made waits for a later wake-up."""

from typing import Any

from kvpool.io.ring_engine import RingEngine


class InlineRing:
    """A ring whose requests end inside submit, as those of a fast device do."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.ended: list[tuple[int, int]] = []

    def submit(self) -> None:
        self.ended += [(token, 0) for token in self.made]
        self.made = []

    def ready(self) -> bool:
        return bool(self.ended)

    def reap(self) -> list[tuple[int, int]]:
        ended, self.ended = self.ended, []
        return ended


def test_what_ends_on_one_ring_and_goes_on_on_an_earlier_one_is_submitted_at_once() -> None:
    names, data = InlineRing(), InlineRing()
    engine: Any = object.__new__(RingEngine)
    engine._rings = [names, data]
    advanced = []

    def advance_all(results: list[tuple[int, int]]) -> None:
        for token, _ in results:
            advanced.append(token)
            if token == 1:  # the write has ended: link
                names.made.append(2)

    engine._advance_all = advance_all
    data.made.append(1)
    engine._flush()

    assert [1, 2] == advanced
    assert [] == names.made + data.made
