"""The doctor: each thing that can be wrong with a machine is told with what to set, and has its exit code."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from kvpool.cli import doctor_checks
from kvpool.cli import main as cli
from kvpool.cli.doctor_checks import Result, State
from kvpool.config import DeviceSettings, PoolSettings, Settings
from kvpool.errors import DeviceError
from kvpool.io.files import DeviceFiles, Features, Naming

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "device").mkdir()
    pool = PoolSettings(run_dir=str(tmp_path / "run"), staging_bytes=64 << 20)
    return Settings(pool=pool, device=[DeviceSettings(name="nvme0", path=str(tmp_path / "device"))])


def look(settings: Settings, check: str) -> Result:
    return next(result for result in doctor_checks.run(settings) if result.check == check)


def test_every_check_says_something_and_what_is_not_good_has_a_remedy(settings):
    results = doctor_checks.run(settings)
    assert len(results) >= 10
    assert [] == [result for result in results if result.state is not State.GOOD and not result.remedy]


def test_nothing_stays_on_the_device(settings):
    doctor_checks.run(settings)
    assert [] == os.listdir(settings.device[0].path)


def test_a_small_dev_shm_is_told_with_both_numbers(settings, monkeypatch):
    monkeypatch.setattr("kvpool.io.shm.shm_free_bytes", lambda *_: 32 << 20)
    found = look(settings, "/dev/shm")
    assert (State.BAD, "32MiB free, staging is 64MiB") == (found.state, found.what)
    assert "--shm-size" in found.remedy


def test_a_memory_limit_is_told_with_both_numbers(settings, monkeypatch):
    monkeypatch.setattr("kvpool.io.shm.memory_available_bytes", lambda: 16 << 20)
    found = look(settings, "memory")
    assert (State.BAD, "16MiB available to this cgroup, staging is 64MiB") == (found.state, found.what)


def test_a_locked_memory_limit_is_slower_and_names_the_setting(settings, monkeypatch):
    monkeypatch.setattr("kvpool.io.shm.memlock_bytes_max", lambda: 8 << 20)
    found = look(settings, "locked memory")
    assert State.SLOWER is found.state
    assert found.what.startswith("limit is 8MiB, staging is 64MiB")
    assert "ulimit -l unlimited" in found.remedy


@pytest.mark.parametrize(
    ("disabled", "seccomp", "remedy"),
    [("2", "0", "sysctl kernel.io_uring_disabled=0"), ("0", "2", "seccomp"), ("", "", "Linux 6.1 or later")],
)
def test_io_uring_that_is_forbidden_is_slower_and_says_by_what(settings, monkeypatch, disabled, seccomp, remedy):
    monkeypatch.setattr("kvpool.io.syscall_ring.why_not", lambda: "io_uring: Operation not permitted (EPERM)")
    monkeypatch.setattr(doctor_checks, "_read", lambda path: disabled if "disabled" in path else "")
    monkeypatch.setattr(doctor_checks, "_status_field", lambda _: seccomp)
    found = look(settings, "io_uring")
    assert State.SLOWER is found.state
    assert "I/O runs over threads" in found.what
    assert remedy in found.remedy


def test_a_binding_that_does_not_suit_the_cpu_is_no_trouble(settings, monkeypatch):
    ring = pytest.importorskip("kvpool.io.ring")
    reason = "the liburing binding is killed by SIGILL here (its wheel needs a CPU with AVX-512)"
    monkeypatch.setattr(ring, "why_not", lambda: reason)
    monkeypatch.setattr("kvpool.io.syscall_ring.why_not", lambda: None)
    found = look(settings, "liburing binding")
    assert (State.GOOD, f"{reason}; rings are made by system calls instead") == (found.state, found.what)


@pytest.mark.parametrize(
    ("release", "state"),
    [("6.1.0-generic", State.GOOD), ("5.15.0", State.SLOWER), ("4.18.0-553.el8", State.BAD), ("strange", State.BAD)],
)
def test_the_kernel_is_judged_by_its_version(settings, monkeypatch, release, state):
    monkeypatch.setattr("platform.release", lambda: release)
    assert state is look(settings, "kernel").state


@pytest.mark.parametrize(
    ("features", "state", "word"),
    [
        (Features(direct=True, unnamed=True, naming=Naming.LINK), State.GOOD, "hard links"),
        (Features(direct=False, unnamed=True, naming=Naming.LINK), State.SLOWER, "no direct I/O"),
        (Features(direct=True, unnamed=False, naming=Naming.LINK), State.GOOD, "no unnamed files"),
        (Features(direct=True, unnamed=False, naming=Naming.RENAME), State.GOOD, "no hard links"),
    ],
)
def test_what_a_filesystem_lacks_is_told(settings, monkeypatch, features, state, word):
    monkeypatch.setattr(DeviceFiles, "_try_out", lambda _: features)
    found = look(settings, "device nvme0")
    assert state is found.state
    assert word in found.what


def test_a_device_that_cannot_be_written_is_bad(settings, monkeypatch):
    def fail(_self: DeviceFiles) -> Features:
        raise DeviceError("Read-only file system", device="nvme0")

    monkeypatch.setattr(DeviceFiles, "_try_out", fail)
    assert State.BAD is look(settings, "device nvme0").state


def test_a_drive_without_room_is_bad_and_a_capacity_beyond_it_is_told(settings):
    device = settings.device[0]
    full = DeviceSettings(name="nvme0", path=device.path, min_free_bytes=1 << 60)
    assert State.BAD is look(Settings(pool=settings.pool, device=[full]), "device nvme0 space").state
    large = DeviceSettings(name="nvme0", path=device.path, capacity_bytes=1 << 60)
    assert State.SLOWER is look(Settings(pool=settings.pool, device=[large]), "device nvme0 space").state


def test_an_unset_hash_seed_is_told(settings, monkeypatch):
    assert State.GOOD is look(settings, "hash seed").state
    monkeypatch.delenv("PYTHONHASHSEED")
    found = look(settings, "hash seed")
    assert State.SLOWER is found.state
    assert "PYTHONHASHSEED=0" in found.remedy


@pytest.mark.parametrize(
    ("version", "state"), [("0.32.0", State.GOOD), ("0.33.1+cu130", State.GOOD), ("0.9.2", State.BAD)]
)
def test_a_vllm_that_was_not_tested_is_bad(settings, monkeypatch, version, state):
    monkeypatch.setattr(doctor_checks, "_version", lambda name: version if name == "vllm" else None)
    assert state is look(settings, "vLLM").state


def test_the_bounds_of_vllm_are_the_packages_own():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    low, high = (".".join(map(str, bound)) for bound in (doctor_checks.VLLM_FROM, doctor_checks.VLLM_BELOW))
    assert [f"vllm>={low},<{high}"] == extras["vllm"]


def test_a_run_directory_of_somebody_else_is_bad(settings, monkeypatch, tmp_path):
    (tmp_path / "run").mkdir()
    assert State.GOOD is look(settings, "run_dir").state
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    assert State.BAD is look(settings, "run_dir").state


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([State.GOOD, State.GOOD], 0),
        ([State.GOOD, State.SLOWER], 1),
        ([State.SLOWER, State.BAD, State.GOOD], 2),
    ],
)
def test_the_exit_code_is_that_of_the_worst_result(results, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor_checks, "run", lambda _: [Result("x", state, "is so", "set y") for state in results])
    assert code == cli.main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert ([state.value for state in results], list(State)[code].value) == (
        [check["state"] for check in told["checks"]], told["state"],
    )  # fmt: skip
    assert code == cli.main(["doctor"])
    assert 2 * len(results) == len(capsys.readouterr().out.splitlines())
