"""
A pool's place in the file system: its run directory, its lock, its log.

Theory. The run directory belongs to one user and nobody else may enter it: whoever can reach the
socket can read every prompt. `pool.lock` is locked for as long as the coordinator lives, by the
kernel, so that no crash leaves it behind; whoever holds it may remove a left-over socket.

Covers: `run_dir`, `pool.lock`, `coordinator.log`. Does not cover: the socket's use.
"""

import fcntl
import logging
import os
import stat

from kvpool.errors import ConfigError, HostError

SOCKET_NAME = "pool.sock"
LOCK_NAME = "pool.lock"
LOG_NAME = "coordinator.log"
#: The log is cut down to its last quarter when it grows beyond this.
LOG_BYTES_MAX = 4 << 20


def prepare_run_dir(run_dir: str) -> None:
    """
    Create *run_dir* if it is missing, with mode 0700, and check that it is ours alone.

    Raises:
        ConfigError: Not absolute, not a directory, another user's, or open to others.
        HostError: It cannot be created.
    """
    if not os.path.isabs(run_dir):
        raise ConfigError("run_dir must be an absolute path", key="pool.run_dir", value=run_dir)
    try:
        os.makedirs(os.path.dirname(run_dir), exist_ok=True)
        os.mkdir(run_dir, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise HostError("run_dir cannot be created", run_dir=run_dir, reason=str(error)) from error
    facts = os.lstat(run_dir)
    if not stat.S_ISDIR(facts.st_mode):
        raise ConfigError("run_dir must be a directory (no link)", key="pool.run_dir", value=run_dir)
    if facts.st_uid != os.geteuid():
        raise ConfigError(
            "run_dir belongs to another user: name one of your own",
            key="pool.run_dir", value=run_dir, owner=facts.st_uid, uid=os.geteuid(),
        )  # fmt: skip
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(
            "run_dir is open to other users: chmod 700 it",
            key="pool.run_dir", value=run_dir, mode=oct(stat.S_IMODE(facts.st_mode)),
        )  # fmt: skip


def lock_run_dir(run_dir: str) -> int | None:
    """Take the pool's lock; return its descriptor, to be kept open, or None if another coordinator holds it."""
    fd = os.open(os.path.join(run_dir, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def open_log(run_dir: str) -> int:
    """Return a descriptor of the log file, appending, private."""
    return os.open(os.path.join(run_dir, LOG_NAME), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class BoundedHandler(logging.Handler):
    """
    Writes log lines to a descriptor; where *cut*, it is our log file, and is cut when it grew too long.

    Others (the I/O workers) append to the same file: it is cut in place, not replaced.
    """

    def __init__(self, fd: int, *, cut: bool) -> None:
        super().__init__()
        self._fd = fd
        self._cuts = cut

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            os.write(self._fd, (self.format(record) + "\n").encode(errors="replace"))
            if self._cuts and os.fstat(self._fd).st_size > LOG_BYTES_MAX:
                self._cut()
        except OSError:
            self.handleError(record)

    def _cut(self) -> None:
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, LOG_BYTES_MAX // 4, size - LOG_BYTES_MAX // 4)
        os.ftruncate(self._fd, 0)
        os.write(self._fd, tail[tail.find(b"\n") + 1 :])
