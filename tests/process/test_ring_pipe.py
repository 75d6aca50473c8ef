"""The proof of quiet memory after a kill, and the choice of a ring where there may be none."""

import os
import select
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.io import ring_engine
from kvpool.io.files import DeviceFiles
from tests.process.engine_bench import ring_kinds

ring = pytest.importorskip("kvpool.io.ring")

HANG_UP_S = 30
CHILD = """
import sys
from pathlib import Path
from tests.process.engine_bench import Bench
bench = Bench(Path(sys.argv[1]), sys.argv[2], payload_bytes=4 << 20, slots=16)
for number in range(16):
    bench.store(number, number)
opened = [bench.open(number) for number in range(16)]
bench.wait(16)
for number, op in enumerate(opened):
    bench.read(op, number, number)
bench.engine.submit()
print(bench.engine.take_ring_pipe(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ring_kinds())
def test_the_pipe_hangs_up_after_a_kill_and_not_before(tmp_path, kind):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
    )  # fmt: skip
    with child.stdin, child.stdout:
        number = int(child.stdout.readline())
        pipe = os.open(f"/proc/{child.pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            poll = select.poll()
            poll.register(pipe, 0)
            assert [] == poll.poll(50)
            child.kill()
            child.wait()
            assert [(pipe, select.POLLHUP)] == poll.poll(HANG_UP_S * 1000)
        finally:
            child.kill()
            child.wait()
            os.close(pipe)


def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize(
    ("script", "words"),
    [("kill -ILL $$", "SIGILL here (its wheel needs a CPU with AVX-512)"), ("kill -SYS $$", "SIGSYS"),
     ("echo 'io_uring: Operation not permitted (EPERM)'; exit 1", "Operation not permitted (EPERM)"),
     ("exit 1", "failed")],
)  # fmt: skip
def test_a_binding_that_does_not_run_here_is_found_out_in_a_child(tmp_path, monkeypatch, script, words):
    fake_python(tmp_path, monkeypatch, script)
    assert words in ring.why_not()


def test_a_try_out_that_works_gives_no_reason(tmp_path, monkeypatch):
    fake_python(tmp_path, monkeypatch, "exit 0")
    assert ring.why_not() is None


def test_where_the_binding_does_not_run_the_system_calls_make_the_ring(tmp_path, monkeypatch):
    if "syscalls" not in ring_kinds():
        pytest.skip("no io_uring here")
    fake_python(tmp_path, monkeypatch, "kill -ILL $$")
    engine, why_not = ring_engine.open_engine(DeviceFiles(str(tmp_path / "device")))
    engine.close()
    assert why_not is None
    assert engine.mode.startswith("io_uring")


def test_where_the_kernel_refuses_threads_do_the_same_and_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_engine.syscall_ring, "why_not", lambda: "io_uring: not permitted (EPERM)")
    engine, why_not = ring_engine.open_engine(DeviceFiles(str(tmp_path)))
    engine.close()
    assert "io_uring: not permitted (EPERM)" == why_not
    assert engine.mode.startswith("threads")


def test_io_uring_can_be_switched_off(tmp_path):
    engine, why_not = ring_engine.open_engine(DeviceFiles(str(tmp_path)), io_uring=False)
    engine.close()
    assert "switched off" == why_not
    assert engine.mode.startswith("threads")
