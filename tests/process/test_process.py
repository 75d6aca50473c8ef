"""Starting, following and watching real processes."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvpool.errors import HostError
from kvpool.io.process import pidfd_open, spawn


@pytest.fixture(autouse=True)
def _no_descriptor_is_left(open_descriptors: object) -> None:
    """Every test here ends with the descriptors it began with."""


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _read_all(fd: int) -> str:
    with open(fd, encoding="utf-8") as file:
        return file.read()


def test_a_spawned_program_gets_the_descriptors_named_and_no_others() -> None:
    read, write = os.pipe()
    other, other_write = os.pipe()
    os.set_inheritable(other, True)
    code = f"import os; os.write({write}, ','.join(os.listdir('/proc/self/fd')).encode())"
    process = spawn(_python(code), [write])
    os.close(write)
    names = set(_read_all(read).split(","))
    assert 0 == process.wait()
    assert {"0", "1", "2", str(write)} <= names
    assert not {str(read), str(other), str(other_write)} & names
    os.close(other)
    os.close(other_write)


def test_output_goes_where_it_is_sent(tmp_path: Path) -> None:
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    with open(tmp_path / "log", "wb") as log:
        process = spawn(_python(code), output=log.fileno())
        assert 0 == process.wait()
    assert "out\nerr\n" == (tmp_path / "log").read_text()


@pytest.mark.parametrize("detached", [False, True])
def test_a_program_that_does_not_exist_is_a_host_error(detached: bool) -> None:
    if not detached:
        with pytest.raises(HostError, match="/no/such"):
            spawn(["/no/such"], detached=detached)
    else:
        assert 0 == spawn(["/no/such"], detached=detached).returncode, "its own end is not seen through it"


def test_a_detached_program_is_nobodys_child_and_in_a_session_of_its_own() -> None:
    read, write = os.pipe()
    hold_read, hold_write = os.pipe()
    code = (
        f"import os\nos.write({write}, f'{{os.getpid()}} {{os.getsid(0)}} {{os.getppid()}}'.encode())\n"
        f"os.close({write})\n"
        f"os.read({hold_read}, 1)"
    )
    between = spawn(_python(code), [write, hold_read], detached=True)
    os.close(write)
    os.close(hold_read)
    assert 0 == between.returncode
    pid, session, parent = map(int, _read_all(read).split())
    assert os.getsid(0) != session
    assert os.getpid() != parent
    assert pid not in {child.pid for child in psutil.Process().children(recursive=True)}
    pidfd = pidfd_open(pid)
    assert pidfd is not None
    assert not select.select([pidfd], [], [], 0)[0], "alive"
    os.close(hold_write)
    assert select.select([pidfd], [], [], 10)[0], "its end makes the descriptor readable"
    os.close(pidfd)


def test_a_pidfd_of_a_process_that_ended_is_none() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert pidfd_open(process.pid) is None
    assert pidfd_open(2**22 + 1) is None


def test_a_pidfd_is_readable_on_death_even_before_the_parent_reaps() -> None:
    process = subprocess.Popen(["sleep", "60"])
    pidfd = pidfd_open(process.pid)
    assert pidfd is not None
    process.kill()
    assert select.select([pidfd], [], [], 10)[0]
    os.close(pidfd)
    process.wait()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_follows_its_parent_dies_with_it(kill: signal.Signals) -> None:
    read, write = os.pipe()
    child = (
        "import os, signal\n"
        "from kvpool.io.process import set_parent_death_signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "assert set_parent_death_signal(os.getppid())\n"
        f"os.write({write}, b'up')\n"
        "signal.pause()"
    )
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], pass_fds=[{write}]).wait()"
    parent = subprocess.Popen(_python(code), pass_fds=[write])
    os.close(write)
    assert b"up" == os.read(read, 2)
    parent.send_signal(kill)
    parent.wait()
    assert select.select([read], [], [], 10)[0]
    assert b"" == os.read(read, 1), "the child's end of the pipe is closed: it is gone"
    os.close(read)


def test_a_parent_that_is_gone_already_is_reported() -> None:
    code = (
        "import os\nfrom kvpool.io.process import set_parent_death_signal\n"
        "raise SystemExit(3 if not set_parent_death_signal(os.getppid() + 1) else 0)"
    )
    assert 3 == subprocess.run(_python(code), check=False).returncode


def test_starting_detached_takes_no_longer_than_an_interpreter() -> None:
    started = time.monotonic()
    spawn(["/bin/true"], detached=True)
    assert time.monotonic() - started < 5
