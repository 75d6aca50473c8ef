"""Figures of the bench: from times to medians."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.cli import bench_figures
from kvpool.cli.bench_figures import Phase


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([1.0], 0.99, 1.0),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 0.5, 2.0),
        (list(range(1, 201)), 0.99, 198),
    ],
)
def test_a_percentile_is_one_of_the_values_by_nearest_rank(values: list[float], share: float, expected: float) -> None:
    assert expected == bench_figures.percentile(values, share)


@pytest.mark.parametrize(("file_ns", "expected"), [(15, 15), (25, 20), (10, 20), (7, 20), (None, 20)])
def test_a_file_that_is_older_than_its_filling_tells_nothing(file_ns: int | None, expected: int) -> None:
    assert expected == bench_figures.named_ns(10, file_ns, 20)


@given(st.lists(st.floats(0, 10), min_size=1), st.floats(0.01, 1))
def test_at_least_the_share_of_the_values_do_not_exceed_the_percentile(values: list[float], share: float) -> None:
    found = bench_figures.percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) * (1 - 1e-12)
    assert sum(value < found for value in values) < share * len(values) + 1e-9


def test_rates_are_of_payload_bytes_in_powers_of_ten() -> None:
    phase = Phase(payload_bytes=3 * 10**9, seconds=1.5, cpu_s=0.3, latencies_s=[0.001, 0.002], depth=12.5)
    expected = {"gbps": 2.0, "cpu_s_per_gb": 0.1, "p50_ms": 1.0, "p99_ms": 2.0, "depth": 12.5, "s": 1.5}
    assert expected == pytest.approx(bench_figures.phase_figures(phase))


def test_rounds_become_a_median_and_a_range() -> None:
    def made(seconds: float) -> dict[str, float | None]:
        phase = Phase(payload_bytes=10**9, seconds=seconds, cpu_s=0.1, latencies_s=[seconds])
        return bench_figures.round_figures(phase, phase)

    summary = bench_figures.over_rounds([made(1.0), made(4.0), made(2.0)])
    assert 3 == summary["rounds"]
    assert (0.5, 0.25, 1.0) == (summary["load_gbps"], summary["load_gbps_min"], summary["load_gbps_max"])
    assert (2000.0, None) == (summary["store_p50_ms"], summary["store_depth"])


def test_every_figure_has_a_documented_meaning() -> None:
    phase = Phase(payload_bytes=1, seconds=1, cpu_s=1, latencies_s=[1])
    documented = set(bench_figures.MEANING)
    for name in bench_figures.round_figures(phase, phase):
        prefix, key = name.split("_", 1)
        assert documented & {name, f"*_{key}", f"{prefix}_{key.replace('p99', 'p50')}"}, name
