"""What is made of the times that the sweep of the promise takes."""

import pytest

from tools.promise_sweep import MORE_S, near_share, summary, text

TIMES = {
    "1000": {"planned": [0.100, 0.109, 9.0], "always": [0.2, 0.3, 0.4], "without": [0.100, 0.050, 0.100]},
    "2000": {"planned": [0.430, 0.430, 0.430], "always": [0.4, 0.4, 0.4], "without": [0.9, 0.9, 0.9]},
}


def test_the_promise_is_kept_within_a_twentieth_and_five_milliseconds_of_the_better_way() -> None:
    short, long = summary(TIMES)
    assert (1000, 0.109, 0.3, 0.1) == tuple(short[name] for name in ("tokens", "planned_s", "always_s", "without_s"))
    assert (True, False) == (short["kept"], long["kept"])
    assert (1.09, 1.075) == (short["ratio"], long["ratio"])


def test_at_the_limit_it_is_kept() -> None:
    limit_s = 1.05 * 0.4 + MORE_S
    ways = {"always": [0.4], "without": [0.9]}
    assert [True, False] == [
        summary({"1": {"planned": [seconds], **ways}})[0]["kept"] for seconds in (limit_s, limit_s + 1e-6)
    ]


def test_a_wait_is_near_within_a_quarter_of_what_it_took() -> None:
    waits = [(1, 1.25, 1.0), (1, 0.75, 1.0), (1, 1.26, 1.0), (1, 0.74, 1.0)]
    assert 0.5 == near_share(waits)
    assert 0.0 == near_share([])


@pytest.mark.parametrize("waits", [[], [(2000, 0.5, 0.4)]])
def test_the_page_tells_each_length_and_what_was_not_kept(waits: list[tuple[int, float, float]]) -> None:
    about = dict.fromkeys(("command", "date", "machine", "storage", "versions"), "x")
    run = {"about": about, "waits": waits, "times": TIMES, "rounds": 3, "loaded": {"1000": 0, "2000": 3}}
    page = text({"slow": run})
    assert "| 1000 | 0.109 | 0.300 | 0.100 | 1.09 | yes | 0 of 3 |" in page
    assert "| 2000 | 0.430 | 0.400 | 0.900 | 1.07 | **no** | 3 of 3 |" in page
    assert "Kept at 1 of 2 lengths" in page
    assert (f"{len(waits)} predicted" in page, "1.25 to 1.25" in page) == (True, bool(waits))
