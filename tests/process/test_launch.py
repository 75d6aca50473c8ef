"""Finding and starting a real pool: one coordinator, however many ask, and a reason where none comes up."""

import fcntl
import os
import socket
import threading
from pathlib import Path

import psutil
import pytest

from kvpool.client import admin, launch
from kvpool.client.launch import ClientConfig, connect_pool, ensure_pool
from kvpool.config import DeviceSettings, PoolSettings, Settings
from kvpool.errors import HostError, KvpoolError, PoolUnavailable
from kvpool.io.channel import peer_pid


def settings(tmp_path: Path) -> Settings:
    device = tmp_path / "device"
    device.mkdir()
    pool = PoolSettings(run_dir=str(tmp_path / "run"), staging_bytes=8 << 20, idle_exit_s=1.0)
    return Settings(pool=pool, device=[DeviceSettings(name="nvme0", path=str(device))])


def test_one_coordinator_is_started_however_many_ask(tmp_path: Path, open_descriptors: None) -> None:
    """It is nobody's child and in a session of its own, answers health, and ends when asked to."""
    config = ClientConfig(run_dir=str(tmp_path / "run"), settings=settings(tmp_path), autostart=True)
    found: list[socket.socket] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_pool(config))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pids = {peer_pid(sock) for sock in found}
    for sock in found:
        sock.close()
    assert 3 == len(found)
    assert 1 == len(pids)
    coordinator = psutil.Process(pids.pop())
    assert os.getsid(coordinator.pid) != os.getsid(0)
    assert coordinator not in psutil.Process().children(recursive=True)
    health = admin.health(config.run_dir)
    assert coordinator.pid in {row.get("pid") for row in health.rows}
    admin.stop(config.run_dir)
    assert [] == psutil.wait_procs([coordinator], timeout=10)[1]
    with pytest.raises(PoolUnavailable):
        connect_pool(config.run_dir)


def test_a_coordinator_that_cannot_start_is_an_error_with_its_last_words(
    tmp_path: Path, open_descriptors: None
) -> None:
    config = ClientConfig(run_dir=str(tmp_path / "run"), settings=settings(tmp_path), autostart=True)
    os.mkdir(config.run_dir, 0o700)
    with open(tmp_path / "run" / "pool.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(PoolUnavailable, match="ended at its start") as raised:
            ensure_pool(config)
    assert config.run_dir in str(raised.value.context["log"])


def test_nothing_is_started_without_leave(tmp_path: Path) -> None:
    config = ClientConfig(run_dir=str(tmp_path / "run"), settings=settings(tmp_path), autostart=False)
    with pytest.raises(PoolUnavailable):
        ensure_pool(config)
    assert not (tmp_path / "run").exists()


def test_a_start_by_somebody_else_is_waited_for_but_not_without_end(tmp_path: Path, open_descriptors: None) -> None:
    config = ClientConfig(run_dir=str(tmp_path / "run"), settings=settings(tmp_path), autostart=True)
    os.mkdir(config.run_dir, 0o700)
    with launch._open_lock(config.run_dir) as lock:
        assert launch._try_lock(lock)
        with pytest.raises(PoolUnavailable, match="without end"):
            ensure_pool(config, deadline_s=0.3)


def test_a_run_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    config = ClientConfig(run_dir=str(tmp_path / "run"), settings=settings(tmp_path), autostart=True)
    os.mkdir(config.run_dir, 0o755)
    with pytest.raises(HostError, match="ours alone"):
        ensure_pool(config)


def test_a_pool_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "pool.sock"))
    listener.listen()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PoolUnavailable, match="another user"):
        connect_pool(str(tmp_path))
    listener.close()


def test_health_of_a_pool_that_does_not_answer_ends(tmp_path: Path, open_descriptors: None) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "pool.sock"))
    listener.listen()
    with pytest.raises(PoolUnavailable, match="does not answer"):
        admin.health(str(tmp_path), timeout_s=0.1)
    with pytest.raises(KvpoolError, match="does not end"):
        admin.stop(str(tmp_path), timeout_s=0.1)
    listener.close()
