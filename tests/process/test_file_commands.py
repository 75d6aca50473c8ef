"""fsck, du, gc and purge on real directories: what they tell, what they change, how they exit."""

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.cli import main as cli
from kvpool.core import layout
from kvpool.io import snapshot_file
from tests.process.stored_files import SLOT_BYTES, Stored, key_of

Altered = Callable[[Stored], None]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    made = Stored(tmp_path / "device", ranks=2)
    made.put(*range(12))
    return made


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(list(arguments))
    return code, capsys.readouterr().out


def fsck(capsys: pytest.CaptureFixture[str], root: Path, *more: str) -> tuple[int, dict[str, object], list[str]]:
    code, out = run(capsys, "fsck", "--path", str(root), "--json", *more)
    report = json.loads(out)["devices"][0]
    return code, report, [problem["kind"] for problem in report["problems"]]


# ------------------------------------------------------------ fsck


def test_a_sound_device_is_clean(stored: Stored, capsys) -> None:
    code, report, problems = fsck(capsys, stored.root)
    assert (0, []) == (code, problems)
    assert (12, 24, 24 * SLOT_BYTES) == (report["keys"], report["objects"], report["object_bytes"])
    code, out = run(capsys, "fsck", "--path", str(stored.root))
    assert 0 == code
    assert "clean" in out


def truncate(stored: Stored) -> None:
    os.truncate(stored.path(3), SLOT_BYTES - 4096)


def empty(stored: Stored) -> None:
    os.truncate(stored.path(3), 0)


def flip(stored: Stored) -> None:
    with open(stored.path(3), "r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))


def zero(stored: Stored) -> None:
    stored.path(3).write_bytes(bytes(SLOT_BYTES))


def swap(stored: Stored) -> None:
    stored.path(3).write_bytes(stored.content(4))


def swap_ranks(stored: Stored) -> None:
    stored.path(3).write_bytes(stored.content(3, rank=1))


def foreign(stored: Stored) -> None:
    stored.path(3).write_bytes(Stored(stored.root.parent / "elsewhere", "b", ranks=2).content(3))


def longer(stored: Stored) -> None:
    stored.path(3).write_bytes(bytes(4096) + stored.content(3))


@pytest.mark.parametrize("alter", [truncate, empty, flip, zero, swap, swap_ranks, foreign, longer])
def test_an_altered_object_is_found_and_repaired_to_a_miss(stored: Stored, alter: Altered, capsys) -> None:
    alter(stored)
    code, report, problems = fsck(capsys, stored.root)
    assert (1, ["corrupt"]) == (code, problems)
    assert str(stored.path(3)) == report["problems"][0]["path"]
    assert stored.path(3).exists()
    code, report, _ = fsck(capsys, stored.root, "--repair")
    assert (1, True) == (code, report["problems"][0]["repaired"])
    assert not stored.path(3).exists()
    assert 1 == len(stored.files.quarantined())
    code, report, problems = fsck(capsys, stored.root)
    assert (0, [], 1) == (code, problems, report["incomplete"])


def test_files_that_others_may_read_are_found_and_closed(stored: Stored, capsys) -> None:
    stored.path(1).chmod(0o644)
    stored.path(2).parent.chmod(0o755)
    assert {"mode"} == set(fsck(capsys, stored.root)[2])
    assert 2 == len(fsck(capsys, stored.root, "--repair")[2])
    assert 0o600 == stat.S_IMODE(stored.path(1).stat().st_mode)
    assert 0o700 == stat.S_IMODE(stored.path(2).parent.stat().st_mode)
    assert 0 == fsck(capsys, stored.root)[0]


def test_leftovers_of_dead_processes_go_and_young_ones_stay(stored: Stored, capsys) -> None:
    old = stored.path(1).parent / layout.temporary_name("1", 1)
    new = Path(stored.files.private, layout.temporary_name("1", 2))
    for path in (old, new):
        path.write_bytes(b"part")
    os.utime(old, (time.time() - 3600,) * 2)
    assert ["leftover"] == fsck(capsys, stored.root, "--repair")[2]
    assert (False, True) == (old.exists(), new.exists())


def test_a_manifest_of_another_fingerprint_is_told(stored: Stored, capsys) -> None:
    other = Stored(stored.root.parent / "elsewhere", "b", ranks=2)
    manifest = Path(stored.directories[1], "manifest.json")
    manifest.write_bytes(Path(other.directories[1], "manifest.json").read_bytes())
    assert (1, ["manifest"]) == fsck(capsys, stored.root)[::2]
    manifest.write_text("{")
    assert (1, ["manifest"]) == fsck(capsys, stored.root)[::2]


def test_what_is_not_kvpools_is_counted_and_stays(stored: Stored, capsys) -> None:
    stranger = stored.path(1).parent / "README"
    stranger.write_text("mine")
    code, report, _ = fsck(capsys, stored.root, "--repair")
    assert (0, 1) == (code, report["strangers"])
    assert stranger.exists()


@pytest.mark.parametrize("command", ["fsck", "du", "gc"])
def test_a_directory_that_is_not_there_is_exit_code_2(tmp_path: Path, command: str, capsys) -> None:
    assert 2 == cli.main([command, "--path", str(tmp_path / "absent")])
    assert 2 == cli.main([command])


# ------------------------------------------------------------ du


def test_du_tells_bytes_by_namespace_and_age(stored: Stored, capsys) -> None:
    other = Stored(stored.root, "b", model="large")
    other.put(1, 2, hours=30)
    code, out = run(capsys, "du", "--path", str(stored.root), "--json")
    assert 0 == code
    told = {row["model"]: row for row in json.loads(out)["namespaces"]}
    assert (12, 24) == (told["tiny"]["keys"], told["tiny"]["objects"])
    assert (
        told["tiny"]["stored_bytes"]
        == told["tiny"]["age_bytes"]["1h"]
        == sum(stored.path(number, rank).stat().st_blocks * 512 for number in range(12) for rank in range(2))
    )
    assert told["large"]["stored_bytes"] == told["large"]["age_bytes"]["7d"] > 0
    code, out = run(capsys, "du", "--path", str(stored.root))
    assert "large" in out


# ------------------------------------------------------------ gc


def test_gc_removes_what_was_not_used_for_so_long(stored: Stored, capsys) -> None:
    stored.put(20, 21, hours=50)
    code, out = run(capsys, "gc", "--path", str(stored.root), "--older-than", "2d", "--dry-run")
    assert (0, [20, 21]) == (code, stored.there(20, 21))
    assert "2 keys would go" in out
    code, out = run(capsys, "gc", "--path", str(stored.root), "--older-than", "2d")
    assert 0 == code
    assert "2 keys removed" in out
    assert list(range(12)) == stored.there(*range(12), 20, 21)
    assert not stored.path(20, 1).parent.exists()


def test_gc_goes_down_to_the_low_mark_of_the_configuration_the_oldest_first(stored: Stored, tmp_path, capsys) -> None:
    for number in range(12):
        stored.put(number, hours=100 - number)
    total = json.loads(run(capsys, "du", "--path", str(stored.root), "--json")[1])["total_bytes"][str(stored.root)]
    file = tmp_path / "pool.toml"
    file.write_text(
        f'[[device]]\nname = "d"\npath = "{stored.root}"\ncapacity = "{total}B"\n'
        "high_watermark = 0.9\nlow_watermark = 0.6\n"
    )
    assert 0 == run(capsys, "gc", "--config", str(file))[0]
    left = stored.there(*range(12))
    assert list(range(left[0], 12)) == left
    assert 4 <= len(left) <= 8


@pytest.mark.parametrize("wrong", [["--older-than", "soon"], ["--to", "much"]])
def test_gc_says_what_is_wrong_with_its_options(stored: Stored, wrong: list[str], capsys) -> None:
    assert 10 == cli.main(["gc", "--path", str(stored.root), *wrong])
    assert 2 == cli.main(["gc", "--path", str(stored.root)])
    assert list(range(12)) == stored.there(*range(12))


# ------------------------------------------------------------ purge


def test_purge_removes_one_namespace_and_nothing_else(stored: Stored, capsys) -> None:
    other = Stored(stored.root, "b", model="large")
    other.put(1, 2)
    assert 0 == run(capsys, "purge", "--path", str(stored.root), "--namespace", "a" * 8, "--yes")[0]
    assert [] == stored.there(*range(12))
    assert [1, 2] == other.there(1, 2)


def test_purge_without_a_pool_leaves_no_folder_of_that_model(stored: Stored, tmp_path, capsys) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(f'[pool]\nrun_dir = "{tmp_path}/run"\n[[device]]\nname = "d"\npath = "{stored.root}"\n')
    assert 0 == run(capsys, "purge", "--config", str(file), "--model", "tiny", "--yes")[0]
    assert [layout.PRIVATE_NAME] == os.listdir(stored.root)


def test_what_gc_and_purge_remove_is_not_named_by_a_snapshot_any_more(stored: Stored, capsys) -> None:
    path = Path(snapshot_file.path_of(f"{stored.root}/.kvpool", stored.spec.fingerprint))
    path.parent.mkdir()
    path.write_bytes(b"names all of it")
    stored.put(7, hours=100)
    assert 0 == run(capsys, "gc", "--path", str(stored.root), "--older-than", "200h")[0]
    assert path.exists(), "nothing went"
    assert 0 == run(capsys, "gc", "--path", str(stored.root), "--older-than", "50h", "--dry-run")[0]
    assert path.exists(), "nothing went"
    assert 0 == run(capsys, "gc", "--path", str(stored.root), "--older-than", "50h")[0]
    assert not path.exists()
    path.write_bytes(b"names all of it")
    assert 0 == run(capsys, "purge", "--path", str(stored.root), "--namespace", "a" * 8, "--yes")[0]
    assert not path.exists()


def test_purge_asks_and_takes_no_for_an_answer(stored: Stored, monkeypatch, capsys) -> None:
    monkeypatch.setattr("typer.confirm", lambda *_args, **_kwargs: (_ for _ in ()).throw(SystemExit(1)))
    assert 1 == cli.main(["purge", "--path", str(stored.root), "--model", "tiny"])
    assert list(range(12)) == stored.there(*range(12))
    assert 1 == cli.main(["purge", "--path", str(stored.root), "--model", "absent", "--yes"])
    assert 2 == cli.main(["purge", "--path", str(stored.root)])


def test_keys_of_these_tests_differ() -> None:
    assert 12 == len({key_of(number) for number in range(12)})
