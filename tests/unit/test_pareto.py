"""From samples to a break-even file and its picture; which sample is taken next."""

import math
import time
from pathlib import Path

import pytest

from kvpool.core.curves import parse_break_even
from tools import emit_break_even, plot_break_even
from tools.pareto_measure import take
from tools.pareto_samples import SAMPLES_MIN, Sample, Samples, pooled, spread

ABOUT = {"model": "m", "gpu": "GPU A", "drive": "Drive A", "engine": {"seed": 0}, "versions": {"vllm": "0.32.0"}}


def filled(path: Path) -> Samples:
    """Return samples of straight lines: f = 0.01 + n/1000, disk 0.31 + n/2000, staging 0.02 + n/10000."""
    samples = Samples.open(path, ABOUT)
    for medium, fixed, each in (("recompute", 0.01, 1e-3), ("disk", 0.31, 5e-4), ("staging", 0.02, 1e-4)):
        for tokens in (200, 1000, 2000):
            for noise in (-1e-4, 0.0, 1e-4):
                samples.add(Sample(medium, tokens, fixed + tokens * each + noise))
    return samples


def test_a_file_is_gone_on_with_when_the_machine_is_the_same(tmp_path: Path) -> None:
    first = filled(tmp_path / "s.jsonl")
    with first.path.open("a") as stream:
        stream.write('{"medium": "disk", "tok')  # the last line of a run that was killed
    again = Samples.open(first.path, ABOUT)
    assert first.found == again.found
    with pytest.raises(ValueError, match=r"other settings \(gpu\)"):
        Samples.open(first.path, ABOUT | {"gpu": "GPU B"})


def test_a_median_is_as_sure_as_its_samples_are_many_and_close() -> None:
    assert math.isinf(spread([1.0] * (SAMPLES_MIN - 1)))
    assert 0.0 == spread([1.0] * SAMPLES_MIN)
    assert math.isclose(0.5, spread([0.5, 1.0, 1.0, 1.0, 1.0, 1.5]))  # all six: the interval is from least to greatest
    many = [1.0 + 0.01 * (index % 10) for index in range(100)]
    assert spread(many) < 0.02


def test_medians_that_fall_are_pooled() -> None:
    assert [(1, 1.0), (2, 2.5), (3, 2.5), (4, 4.0)] == pooled([(1, 1.0), (2, 3.0), (3, 2.0), (4, 4.0)])


def test_samples_become_a_file_with_curves_thresholds_and_where_they_come_from(tmp_path: Path) -> None:
    filled(tmp_path / "s.jsonl")
    (tmp_path / "s.date").write_text("2026-01-02")
    emit_break_even.main([str(tmp_path / "s.jsonl"), str(tmp_path / "b.json"), "--margin-tokens", "16"])
    found = parse_break_even((tmp_path / "b.json").read_text())
    assert found.curves is not None
    assert math.isclose(1.01, found.curves.f.at(1000), rel_tol=1e-6)
    assert (600, 16, "GPU A", "Drive A") == (found.ssd_tokens, found.margin_tokens, found.gpu_model, found.ssd_model)
    assert 12 >= found.mem_tokens
    assert "2026-01-02" == found.provenance["date"]
    assert 3 == found.provenance["counts"]["disk"]["1000"]["samples"]


def test_a_medium_without_samples_is_named(tmp_path: Path) -> None:
    samples = Samples.open(tmp_path / "s.jsonl", ABOUT)
    samples.add(Sample("recompute", 100, 0.1))
    with pytest.raises(ValueError, match="no samples of disk"):
        emit_break_even.break_even_of(samples, kv_dtype="", margin_tokens=0, kv_bytes_per_token=0.0)


def test_the_picture_is_drawn_twice(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    filled(tmp_path / "s.jsonl")
    emit_break_even.main([str(tmp_path / "s.jsonl"), str(tmp_path / "b.json")])
    plot_break_even.main([str(tmp_path / "b.json"), str(tmp_path / "out" / "b")])
    assert b"\x89PNG" == (tmp_path / "out" / "b.png").read_bytes()[:4]
    assert "<svg" in (tmp_path / "out" / "b.svg").read_text()


def test_the_least_sure_length_is_measured_next_until_all_are_sure(tmp_path: Path) -> None:
    samples = Samples.open(tmp_path / "s.jsonl", ABOUT)
    calls: list[int] = []

    def measured(tokens: int) -> float:
        calls.append(tokens)
        return 1.0 if tokens == 1 else 1.0 + 0.5 / len(calls)

    told: list[float] = []
    take(samples, {"disk": measured}, [1, 2], limit=0.05, budget_s=10, told=lambda share, _: told.append(share))
    assert SAMPLES_MIN == calls.count(1)
    assert SAMPLES_MIN < calls.count(2)
    assert told == sorted(told)
    assert len(calls) == len(samples.found)


def test_a_length_that_never_comes_from_its_medium_is_given_up(tmp_path: Path) -> None:
    samples = Samples.open(tmp_path / "s.jsonl", ABOUT)
    take(samples, {"staging": lambda _: None}, [1], limit=0.05, budget_s=10, told=lambda *_: None)
    assert [] == samples.found


def test_measuring_ends_with_its_time(tmp_path: Path) -> None:
    samples, start = Samples.open(tmp_path / "s.jsonl", ABOUT), time.monotonic()
    take(samples, {"disk": lambda _: time.monotonic()}, [1], limit=0.0, budget_s=0.2, told=lambda *_: None)
    assert time.monotonic() - start < 5
    assert samples.found
