"""
Processes: started by exec, bound to a parent or freed from it, and watched without races.

Children are never a fork that goes on in Python: the starting process may hold CUDA, threads and locks.
A detached process is started by a short-lived one in between, so that it is nobody's child: a kill of the
starter's session, process group or process tree does not find it.

Does not cover: when to start or restart what (`core/supervision.py`).
"""

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from kvpool.errors import HostError

_PR_SET_PDEATHSIG = 1
_DETACH_WAIT_S = 10.0

#: Runs in the process in between: own session, then a child that becomes the program; then it ends.
_DETACH = """
import os, sys
os.setsid()
if os.fork():
    os._exit(0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def pidfd_open(pid: int) -> int | None:
    """
    Return a descriptor that becomes readable when process *pid* ends; None when it ended already.

    Raises:
        HostError: The kernel has no pidfd (before Linux 5.3), or no descriptor is free.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a thread, or a number no process can have
            return None
        raise HostError("cannot watch a process", pid=pid, needed="Linux 5.3", reason=str(error)) from error


def set_parent_death_signal(parent_pid: int | None = None) -> bool:
    """
    Let the kernel kill this process when its parent ends.

    "Parent" is the *thread* that started it, so processes are started from their starter's main thread.

    Args:
        parent_pid: The parent as the starter knew it.

    Returns:
        False when that parent is gone already, and the signal will never come.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise HostError("cannot follow the parent's death", reason=os.strerror(ctypes.get_errno()))
    return parent_pid is None or os.getppid() == parent_pid


def lower_priority(niceness: int) -> None:
    """Let this process have the processor and the drive when nobody else wants them, as far as the system can."""
    import psutil  # noqa: PLC0415 - helpers only: whoever else is imported with this file needs none of it

    with contextlib.suppress(OSError):
        os.nice(niceness)
    with contextlib.suppress(OSError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def spawn(
    argv: Sequence[str],
    pass_fds: Sequence[int] = (),
    detached: bool = False,
    *,
    output: int | None = None,
    env: Mapping[str, str] | None = None,
    own_group: bool = False,
) -> subprocess.Popen[bytes]:
    """
    Start a program; only 0, 1, 2 and *pass_fds* stay open in it, under the same numbers.

    Args:
        argv: Program and arguments; argv[0] is a path.
        detached: In its own session and nobody's child. What is returned then is the process in between, already
            reaped; the program's own end is not seen through it.
        output: Descriptor for standard output and error; None: the starter's own, and nothing where detached.
        env: Its environment; None: the starter's own.
        own_group: In its own process group, so that a terminal's Ctrl-C reaches its starter alone.

    Raises:
        HostError: The program cannot be started.
    """
    target = subprocess.DEVNULL if output is None and detached else output
    command = [sys.executable, "-I", "-S", "-c", _DETACH, *argv] if detached else list(argv)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=target,
            close_fds=True,
            pass_fds=tuple(pass_fds),
            env=env,
            process_group=0 if own_group else None,
        )
    except OSError as error:
        raise HostError("cannot start a program", program=argv[0], reason=str(error)) from error
    if detached:
        _wait_between(process)
    return process


def _wait_between(process: subprocess.Popen[bytes]) -> None:
    try:
        status = process.wait(_DETACH_WAIT_S)
    except subprocess.TimeoutExpired as error:
        process.kill()
        process.wait()
        raise HostError("cannot detach a program", waited_s=_DETACH_WAIT_S) from error
    if status != 0:
        raise HostError("cannot detach a program", status=status)
