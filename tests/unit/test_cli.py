"""The command: help without imports, one line for what is wrong, the exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool import __version__
from kvpool.cli import main as cli
from kvpool.config_example import example
from kvpool.errors import ConfigError, Exit, HostError, InvariantError, KvpoolError, PoolUnavailable

GOOD = '[[device]]\nname = "a"\npath = "/mnt/a"\n'


def test_help_names_every_subcommand_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from kvpool.cli.main import main; main(['--help']); print(sorted(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for name, command in cli._COMMANDS.items():
        assert name in printed
        assert command.help in printed
        assert repr(command.module) not in printed


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_every_subcommand_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == cli.main([name, "--help"])
    assert f"Usage: kvpool {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == cli.main(["--version"])
    assert f"kvpool {__version__}\n" == capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["frob"], ["config", "frob"], ["config", "check"], ["serve"], ["--frob"]])
def test_wrong_use_is_exit_code_2_without_a_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == cli.main(arguments)
    error = capsys.readouterr().err
    assert "Error" in error
    assert "Traceback" not in error


def test_config_check_shows_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(f'[pool]\nstaging = "2GiB"\n{GOOD}')
    assert 0 == cli.main(["config", "check", str(file)])
    printed = capsys.readouterr().out
    assert f"{file}: good" in printed
    assert "staging               2GiB" in printed
    assert "/mnt/a is not there" in printed


@pytest.mark.parametrize("command", [["config", "check"], ["serve", "--config"]])
def test_a_wrong_configuration_is_one_line_and_exit_code_10(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(f"{GOOD}iodepth = 0")
    assert Exit.CONFIG == cli.main([*command, str(file)])
    expected = (
        f"kvpool: {file}: device[0].iodepth: wrong value 0; allowed: a whole number of operations from 1 to 1024\n"
    )
    assert expected == capsys.readouterr().err


def test_config_example_prints_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == cli.main(["config", "example"])
    assert example() == capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("missing", file="f", key="k", allowed="text"), 10, "f: k: missing; allowed: text"),
        (HostError("no room", limit="memory"), 11, "no room limit=memory"),
        (PoolUnavailable("nobody listens", path="/x"), 2, "nobody listens path=/x"),
        (KvpoolError("two\nlines"), 1, "two lines"),
        (InvariantError("a bug"), 20, "a bug"),
    ],
)  # fmt: skip
def test_errors_become_one_line_and_an_exit_code(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert code == cli._guarded(fail)
    assert f"kvpool: {line}\n" == capsys.readouterr().err


def test_serve_becomes_the_coordinator_with_the_settings_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(f'[pool]\nrun_dir = "{tmp_path}/run"\n{GOOD}')
    ran: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: ran.append(arguments))
    assert 0 == cli.main(["serve", "--config", str(file)])
    [[program, *options, settings]] = ran
    assert sys.executable == program
    assert ["-m", "kvpool.procs.coordinator", "--config-json"] == options
    fd = int(settings.rpartition("/")[2])
    assert os.get_inheritable(fd)
    assert f'"run_dir":"{tmp_path}/run"' in Path(settings).read_text()
    os.close(fd)


def test_output_that_nobody_reads_is_no_traceback() -> None:
    command = [sys.executable, "-m", "kvpool.cli.main", "config", "example"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, check=False, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (1, "") == (done.returncode, done.stderr)
