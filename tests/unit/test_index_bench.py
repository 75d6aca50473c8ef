"""The tool that measures a device of a million objects: the files that it makes, and what it says of its figures."""

import os
from pathlib import Path
from typing import Any

import pytest

from kvpool.core import trailer
from kvpool.core.trailer import Expected
from kvpool.errors import IntegrityError
from kvpool.io.checksum import payload_checksum
from kvpool.io.inventory import Walk, find_spaces
from tools import index_bench, index_files
from tools.index_files import OBJECT_BYTES, key_of, make_files, namespace_of, remove_files


def test_it_makes_objects_some_whole_and_the_others_without_a_byte_and_removes_them(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    device = tmp_path / "device"
    for _ in range(2):  # again finds them there
        make_files(device, 20, 2, lambda *said: told.append(said))
    assert (20, 20) == told[-1]
    (space,) = find_spaces(str(device))
    files = {found.key: found for found in Walk().keys_of(space)}
    assert {key_of(number) for number in range(20)} == set(files)
    for number in range(20):
        path, stored_bytes = files[key_of(number)].files[0]
        assert trailer.slot_bytes(OBJECT_BYTES) == os.stat(path).st_size
        raw = Path(path).read_bytes()
        expected = Expected(key_of(number), 0, bytes.fromhex(namespace_of().fingerprint), OBJECT_BYTES)
        if number < 2:
            assert payload_checksum(raw[:OBJECT_BYTES]) == trailer.check(raw[-trailer.TRAILER_BYTES :], expected)
        else:
            assert stored_bytes < 1 << 16
            with pytest.raises(IntegrityError):
                trailer.check(raw[-trailer.TRAILER_BYTES :], expected)
    remove_files(device, lambda *said: told.append(said), 20)
    assert not device.exists()


def test_progress_says_what_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([100.0, 110.0, 140.0])
    monkeypatch.setattr(index_files.time, "monotonic", lambda: next(now))
    bar = index_files.Bar("making")
    bar(1, 4)
    assert "making: 1 of 4, 30 s left" in capsys.readouterr().out
    bar(4, 4)
    assert capsys.readouterr().out.endswith("\n")


def figures(**changed: Any) -> dict[str, Any]:
    took = {"count": 10, "median": 1.0, "p90": 2.0, "p99": 3.0}
    second = {
        "connected_s": 0.7, "answered_s": 0.8, "loaded_s": 0.9, "known_s": 4.0, "walk_ended_s": 100.0, "windows": 20,
        "failed": 0, "with_ms": took, "without_ms": took, "memory": {"kvpool.procs.io_worker": 60.0},
        "memory_mb": 60.0, "memory_after_mb": 50.0,
    } | changed  # fmt: skip
    about = {"objects": 1000, "command": "c", "date": "d", "machine": "m", "versions": "v"}
    first = {"walked_s": 26.0, "memory_mb": 50.0, "snapshot_bytes": 1, "ended_s": 1.0}
    return {"about": about, "first": first, "second": second}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, 0),
        ({"known_s": 5.1}, 1),
        ({"memory_mb": 301.0}, 1),
        ({"with_ms": {"count": 10, "median": 1.0, "p90": 2.0, "p99": 3.7}}, 1),
    ],
)
def test_a_figure_that_is_not_reached_is_said(changed: dict[str, Any], missed: int) -> None:
    assert missed == index_bench.text(figures(**changed)).count("**missed**")


def test_quantiles_are_of_all_samples() -> None:
    assert {"count": 1000, "median": 500.5, "p90": 900.9, "p99": 990.99} == index_bench.quantiles(range(1, 1001))
    assert 0.0 == index_bench.quantiles([1.0])["p99"]
