"""The comparison's table: pure functions from peerbench's rows to Markdown."""

import shutil
from pathlib import Path

import pytest

from tools import compare


def row(number: int, peer: str, gbps: float, **more: object) -> compare.Result:
    figures = {"gbps": gbps, "cpu_s_per_gb": 0.05, "p50_ms": 10.0, "p99_ms": None, "peak_rss_mib": 31.0}
    return {"round": number, "peer": peer, "load": figures, **more}


RESULT: compare.Result = {
    "block_bytes": 4 << 20,
    "nblocks": 512,
    "rows": [
        row(1, "fio", 2.0),
        row(1, "kvpool", 1.0),
        row(2, "kvpool", 3.0),
        row(2, "fio", 4.0),
        row(3, "kvpool", 2.0),
        {"round": 3, "peer": "fio", "error": "store: no space"},
        {"round": 1, "peer": "other", "error": "reset: it | broke"},
    ],
}


def test_a_ratio_is_to_the_base_of_the_same_round() -> None:
    assert [0.5, 0.75] == compare.ratios(RESULT["rows"], "kvpool", "fio", "load")


def test_the_table_has_medians_with_their_range_and_the_failures() -> None:
    lines = list(compare.table_lines(RESULT, "load", "fio"))
    assert "| kvpool | 2.00 (1.00 to 3.00) | 0.62 (0.50 to 0.75) | 0.050 (0.050 to 0.050) | 10.0 | - | 31 |" in lines
    assert any(line.startswith("| other | failed: reset: it / broke |") for line in lines)
    assert {len(compare.HEADINGS) + 1} == {line.count("|") for line in lines}


def test_the_page_names_what_was_measured_on_what() -> None:
    page = compare.markdown([RESULT], {"machine": "a box", "command": "`x`"}, "fio")
    for text in ("- machine: a box", "## load, 4 MiB blocks (512 of them, 2 GiB), 3 rounds", "## store, 4 MiB"):
        assert text in page


def test_a_single_round_has_no_range() -> None:
    assert ("1.50", "-") == (compare.spread([1.5], ".2f"), compare.spread([], ".2f"))


def test_without_fio_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert 2 == compare.main(["--peers", "kvpool,fio"])
    assert "apt-get install -y fio" in capsys.readouterr().err


def test_without_peerbench_it_says_how_to_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == compare.main(["--peers", "kvpool", "--peerbench", str(tmp_path)])
    assert "--peerbench" in capsys.readouterr().err


def test_our_adapter_takes_the_place_of_the_one_that_is_there(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "adapters").mkdir(parents=True)
    (theirs / "bench.py").write_text("bench")
    (theirs / "adapters" / "kvpool_adapter.py").write_text("stub")
    (theirs / "pb").mkdir()
    (theirs / "pb" / "staging.py").write_text(f"before\n        {compare.TOUCHING}\nafter")
    for path in theirs.rglob("*"):
        path.chmod(0o555)
    copy = compare.install(theirs, tmp_path)
    assert "bench" == (copy / "bench.py").read_text()
    assert "class PeerAdapter" in (copy / "adapters" / "kvpool_adapter.py").read_text()
    assert f"before\n        {compare.POPULATING}\nafter" == (copy / "pb" / "staging.py").read_text()
    assert "stub" == (theirs / "adapters" / "kvpool_adapter.py").read_text()
    (copy / "data").mkdir()
