"""`kvpool bench` with real pools: complete figures, checked bytes, nothing left behind."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvpool.cli import bench_cmd, bench_figures
from kvpool.cli.bench_pool import DrivenPool, Plan, cpu_seconds
from kvpool.cli.bench_work import Work
from kvpool.cli.main import main
from kvpool.errors import DeviceError, IntegrityError, KvpoolError

MIB = 1 << 20
WORK = Work(seed=3, object_bytes=256 << 10, object_count=24, devices=1, batch=4)


def plan(path: Path, *, verify: bool = True) -> Plan:
    return Plan(paths=[str(path)], queue_depth=4, staging_bytes=8 * MIB, verify=verify)


def no_progress(_done: int) -> None:
    pass


def test_two_devices_are_measured_and_every_figure_is_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    arguments = [text for path in paths for text in ("--path", str(path))]
    arguments += ["--object-mib", "0.25", "--total-gib", "0.01", "--queue-depth", "4", "--rounds", "1", "--json"]
    assert 0 == main(["bench", *arguments])
    result = json.loads(capfd.readouterr().out)
    for phase in ("store", "load"):
        for key in bench_figures.PHASE_KEYS:
            assert result[f"{phase}_{key}"] > 0, f"{phase}_{key}"
        assert result[f"{phase}_p50_ms"] <= result[f"{phase}_p99_ms"]
    assert (40, 256 << 10, [str(path) for path in paths]) == (
        result["objects"],
        result["object_bytes"],
        result["paths"],
    )
    assert result["io_mode"]
    assert [[], []] == [os.listdir(path) for path in paths]


def test_objects_that_exceed_staging_stream_through_it(tmp_path: Path) -> None:
    work = Work(seed=5, object_bytes=MIB, object_count=30, devices=1, batch=4)
    small = plan(tmp_path)
    stored, _ = bench_cmd._store_round(small, work, no_progress)
    loaded, _ = bench_cmd._load_round(small, work, no_progress)
    assert work.total_bytes > 3 * small.staging_bytes
    assert (30, 30) == (len(stored.latencies_s), len(loaded.latencies_s))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def flip(path: Path) -> None:
    """Change the first mark of the object."""
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "verify", "error"),
    [
        (truncate, True, DeviceError),
        (flip, True, DeviceError),
        (flip, False, IntegrityError),
    ],
)
def test_figures_on_wrong_bytes_cannot_be_had(
    tmp_path: Path, damage: Callable[[Path], None], verify: bool, error: type[KvpoolError]
) -> None:
    bench_cmd._store_round(plan(tmp_path), WORK, no_progress)
    damage(next(tmp_path.rglob("*.bin")))
    with pytest.raises(error):
        bench_cmd._load_round(plan(tmp_path, verify=verify), WORK, no_progress)


def runs(pid: int) -> bool:
    """Tell whether a process runs; one that ended may wait for whoever has to reap it."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_pool_of_ones_own_ends_with_its_block_and_its_cpu_is_counted(tmp_path: Path) -> None:
    with DrivenPool(plan(tmp_path), WORK, fill=False) as pool:
        pids = [*pool.pids, pool.rank.pid]
        assert 3 == len(pids)
        assert cpu_seconds(pids) > 0
    assert [] == [pid for pid in pids if runs(pid)]
    assert not os.path.exists(pool.run_dir)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert 11 == main(["bench", "--path", str(tmp_path / "file" / "below"), "--total-gib", "0.01"])
    assert "cannot make a folder to measure in" in capfd.readouterr().err


def test_the_help_explains_the_keys_of_the_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["bench", "--help"])
    text = capfd.readouterr().out
    assert [] == [name for name in bench_figures.MEANING if f"{name}:" not in text]


def test_files_of_all_rounds_are_removed_also_where_there_is_no_room_to_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(bench_cmd, "_has_room", lambda *_: False)
    monkeypatch.setattr(bench_cmd, "drop_caches", lambda: not seen.append(len(os.listdir(tmp_path))))
    small = Work(seed=0, object_bytes=64 << 10, object_count=4, devices=1, batch=4)
    bench_cmd.run([tmp_path], small, 4, 8 * MIB, rounds=2, verify=True, progress=lambda _what, _done: None)
    assert ([1, 1], []) == (seen, os.listdir(tmp_path))
