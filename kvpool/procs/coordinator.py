"""
`python -m kvpool.procs.coordinator`: start a pool's coordinator in its run directory.

Covers: arguments, the lock, the log, the limits of the process, the exit code. Does not cover:
what a coordinator does (`coordinator_pool.py`).
"""

import argparse
import contextlib
import logging
import os
import resource
import sys
from pathlib import Path

from kvpool.config import Settings, from_json, to_json
from kvpool.errors import ConfigError, Exit, HostError, InvariantError
from kvpool.io import shm
from kvpool.procs import coordinator_place as place
from kvpool.procs.coordinator_pool import Coordinator

log = logging.getLogger("kvpool.coordinator")


def main(argv: list[str] | None = None) -> int:
    """Run a coordinator until its pool ends; return its exit code."""
    arguments = _parser().parse_args(argv)
    _log_to(2, cut=False)
    try:
        settings = from_json(Path(arguments.config_json).read_bytes(), file=arguments.config_json)
        return serve(settings, detached=arguments.detached, worker_module=arguments.worker_module)
    except ConfigError as error:
        log.error("%s", error)
        return Exit.CONFIG
    except OSError as error:
        log.error("cannot read the configuration: %s", error)
        return Exit.CONFIG


def serve(settings: Settings, *, detached: bool, worker_module: str = "kvpool.procs.io_worker") -> int:
    """
    Run a coordinator in this process, on its main thread, until its pool ends; return its exit code.

    Args:
        detached: Started by a client: log to the run directory, end after the last client.
        worker_module: What `python -m` runs for each device; another one only in tests.
    """
    try:
        place.prepare_run_dir(settings.pool.run_dir)
        lock = place.lock_run_dir(settings.pool.run_dir)
        if lock is None:
            log.error("another coordinator holds %s: use that pool, or give this one another run_dir",
                      settings.pool.run_dir)  # fmt: skip
            return Exit.ALREADY_RUNNING
        if detached:
            _leave_the_starter(settings.pool.run_dir)
        _raise_descriptor_limit()
        shm.remove_leftovers()
        coordinator = Coordinator(settings, to_json(settings), detached=detached, worker_module=worker_module)
        log.info("pool in %s: %d devices, pid %d", settings.pool.run_dir, len(settings.device), os.getpid())
        return coordinator.run()
    except ConfigError as error:
        log.error("%s", error)
        return Exit.CONFIG
    except HostError as error:
        log.error("%s", error)
        return Exit.HOST
    except InvariantError:
        log.exception("a bug in kvpool; please report this")
        return Exit.INVARIANT


def _leave_the_starter(run_dir: str) -> None:
    """Write to the log file from now on, the workers too: the starter's terminal or pipe may go away."""
    fd = place.open_log(run_dir)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    with contextlib.suppress(PermissionError):  # already a session of its own
        os.setsid()
    _log_to(2, cut=True)


def _log_to(fd: int, *, cut: bool) -> None:
    handler = place.BoundedHandler(fd, cut=cut)
    handler.setFormatter(logging.Formatter("%(asctime)s kvpool coordinator %(levelname)s: %(message)s"))
    root = logging.getLogger("kvpool")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(logging.INFO)


def _raise_descriptor_limit() -> None:
    """Segments, clients and workers need a descriptor each; the usual soft limit is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpool.procs.coordinator", description="A kvpool coordinator.")
    parser.add_argument("--config-json", required=True, metavar="FILE", help="the settings as JSON")
    parser.add_argument("--detached", action="store_true", help="started by a client: end after the last one")
    parser.add_argument("--worker-module", default="kvpool.procs.io_worker", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
