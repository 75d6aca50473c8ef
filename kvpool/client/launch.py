"""
Finding a pool, and starting one where none answers.

Theory. Whoever needs a pool connects to `<run_dir>/pool.sock`. Where nobody listens and the configuration allows it,
one of the processes that want a pool starts it: the one that holds `<run_dir>/start.lock`; the others wait for the
socket. The coordinator is started by exec, detached (nobody's child, its own session), so that it survives its
starter; its output goes to `<run_dir>/coordinator.log`. It answers or ends: both are seen.

Blocks, for at most the deadline: call it from a thread of its own.
"""

import contextlib
import fcntl
import os
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpool.config import Settings, to_json
from kvpool.errors import HostError, PoolUnavailable
from kvpool.io import channel, process

#: Time from the start of a coordinator until its socket answers, at most.
START_DEADLINE_S = 15.0
#: Time for a coordinator to answer a client's Hello: its workers may be starting, or keep a reset.
GREETING_S = 15.0
#: Back-off of a client between attempts to reach a pool.
RETRY_S_MIN = 0.2
RETRY_S_MAX = 5.0
#: Time between two attempts while somebody's coordinator starts.
_ATTEMPT_EVERY_S = 0.05
#: How much of a failed coordinator's log goes into the error.
_LOG_TAIL_BYTES = 2000

SOCKET_NAME = "pool.sock"
LOCK_NAME = "start.lock"
CONFIG_NAME = "pool.json"
LOG_NAME = "coordinator.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """
    Where the pool is.

    Attributes:
        run_dir: The pool's directory of sockets and locks.
        settings: What to start a pool with; None: only use one that runs.
        autostart: Start a pool if none answers (needs *settings*).
        weight: This engine's share of staging beside engines of other models; 1 to `config.WEIGHT_MAX`.
    """

    run_dir: str
    settings: Settings | None = None
    autostart: bool = False
    weight: int = 1


def connect_pool(run_dir: str) -> socket.socket:
    """
    Return a connection to the pool of *run_dir*, if one listens now; never waits.

    Raises:
        PoolUnavailable: Nobody listens, or somebody of another user.
        HostError: The path cannot be used.
    """
    sock = channel.connect(os.path.join(run_dir, SOCKET_NAME))
    if channel.peer_uid(sock) != os.geteuid():
        sock.close()
        raise PoolUnavailable("the pool belongs to another user", run_dir=run_dir)
    return sock


def ensure_pool(config: ClientConfig, *, deadline_s: float = START_DEADLINE_S) -> socket.socket:
    """
    Return a connection to the pool; start one if none answers and *config* allows it.

    Raises:
        PoolUnavailable: None answers within *deadline_s*; the coordinator's last words are in it.
        HostError: The run directory cannot be used.
    """
    try:
        return connect_pool(config.run_dir)
    except PoolUnavailable:
        if not config.autostart or config.settings is None:
            raise
    deadline = time.monotonic() + deadline_s
    _make_run_dir(config.run_dir)
    with _open_lock(config.run_dir) as lock:
        while not _try_lock(lock):
            with contextlib.suppress(PoolUnavailable):
                return connect_pool(config.run_dir)
            if time.monotonic() > deadline:
                raise PoolUnavailable("another process starts the pool, without end", run_dir=config.run_dir)
            threading.Event().wait(_ATTEMPT_EVERY_S)
        # The one before us may have started it while we waited for the lock.
        with contextlib.suppress(PoolUnavailable):
            return connect_pool(config.run_dir)
        alive = _start(config.run_dir, config.settings)
        try:
            return _await_socket(config.run_dir, alive, deadline)
        finally:
            os.close(alive)


def _make_run_dir(run_dir: str) -> None:
    try:
        os.makedirs(run_dir, mode=0o700, exist_ok=True)
        facts = os.stat(run_dir)
    except OSError as error:
        raise HostError("cannot make the run directory", path=run_dir, reason=str(error)) from error
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
        mode = oct(stat.S_IMODE(facts.st_mode))
        raise HostError("run directory must be ours alone", path=run_dir, mode=mode, needed="0o700", uid=facts.st_uid)


@contextlib.contextmanager
def _open_lock(run_dir: str) -> Iterator[int]:
    lock = os.open(os.path.join(run_dir, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield lock
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start(run_dir: str, settings: Settings) -> int:
    """Start a coordinator; return the read end of a pipe that hangs up when it ends. The caller owns it."""
    path = os.path.join(run_dir, CONFIG_NAME)
    temporary = f"{path}.{os.getpid()}"
    Path(temporary).write_text(to_json(settings), encoding="utf-8")
    os.replace(temporary, path)
    argv = [sys.executable, "-m", "kvpool.procs.coordinator", "--config-json", path, "--detached"]
    # The engine may have found kvpool by its own sys.path; the pool's processes have to find the same one.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
    log = os.open(os.path.join(run_dir, LOG_NAME), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    alive, alive_child = os.pipe()
    try:
        process.spawn(argv, pass_fds=(alive_child,), detached=True, output=log, env=env)
    except HostError:
        os.close(alive)
        raise
    finally:
        os.close(alive_child)
        os.close(log)
    return alive


def _await_socket(run_dir: str, alive: int, deadline: float) -> socket.socket:
    """Connect as soon as the coordinator listens; give up when it ends, or at the deadline."""
    poll = select.poll()
    poll.register(alive, 0)  # hang-up is always reported
    while True:
        ended = bool(poll.poll(_ATTEMPT_EVERY_S * 1000))
        with contextlib.suppress(PoolUnavailable):
            return connect_pool(run_dir)
        if ended:
            raise PoolUnavailable("the coordinator ended at its start", log=_log_tail(run_dir))
        if time.monotonic() > deadline:
            raise PoolUnavailable("the coordinator does not answer", log=_log_tail(run_dir))


def _log_tail(run_dir: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(run_dir, LOG_NAME), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
    return ""
