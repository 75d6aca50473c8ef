"""Measuring a machine with a real vLLM, from samples to the picture."""

import json
from pathlib import Path

import pytest

from kvpool.core.curves import parse_break_even
from tools import emit_break_even, pareto_measure, plot_break_even
from tools.engine_process import cpu_environment
from tools.pareto_samples import MEDIA, Samples
from tools.tiny_models import tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

LENGTHS = (512, 1536)


def test_a_machine_is_measured_into_a_break_even_file_and_its_picture(models: Path, tmp_path: Path) -> None:
    model = tiny_model("llama", models)
    samples = tmp_path / "samples.jsonl"
    pareto_measure.main([
        str(samples), "--model", str(model), "--model-name", "tiny", "--storage", str(tmp_path / "storage"),
        "--environment", json.dumps(cpu_environment()), "--lengths", *map(str, LENGTHS),
        "--spread", "0.8", "--budget-s", "160", "--staging-gib", "0.25",
    ])  # fmt: skip
    found = Samples.read(samples)
    for medium in MEDIA:
        assert list(LENGTHS) == found.lengths(medium), medium
    emit_break_even.main([str(samples), str(tmp_path / "b.json")])
    curves = parse_break_even((tmp_path / "b.json").read_text()).curves
    assert curves is not None
    assert curves.f.at(1536) > curves.f.at(512) > 0
    plot_break_even.main([str(tmp_path / "b.json"), str(tmp_path / "b")])
    assert (tmp_path / "b.png").stat().st_size > 1000
