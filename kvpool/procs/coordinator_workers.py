"""
The pool's I/O workers as processes: started, greeted, watched, mourned.

Theory. `core/supervision.py` decides when a device's worker is started; this does it. A run of a
worker has its own generation and goes

    started -> ready (WorkerReady came) -> ended (its pidfd is readable)

A worker that hangs up its control socket or says something wrong is killed, and its end is what the
pidfd says. The end of the *process* is not the end of its ring: the kernel may still write into its
slots. So the read end of its ring pipe outlives it here, in a `Quarantine`, which ends when that
pipe has hung up and every rank that was joined to the worker has said CopiesEnded or is proven gone.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Protocol

from kvpool.core import supervision
from kvpool.core.supervision import Child
from kvpool.errors import Exit, HostError, KvpoolError
from kvpool.io import channel, process
from kvpool.procs.coordinator_loop import Loop
from kvpool.procs.coordinator_peer import Peer
from kvpool.wire.messages import (
    DeviceState,
    Drain,
    Message,
    WorkerReady,
    WorkerSetup,
    WorkerToCoordinator,
)

#: A worker that hung up its control socket has this long to end with its own exit code.
END_GRACE_S = 1.0

log = logging.getLogger("kvpool.coordinator")


@dataclass(slots=True, kw_only=True)
class Worker:
    """
    One run of one device's I/O worker.

    Attributes:
        ready: It said WorkerReady, and its process has not ended.
        ring_pipe: Read end of its ring pipe, from WorkerReady on; the quarantine takes it over.
        joined: Clients whose sockets it has or had and whose end is not proven.
        state: What it said last of its device.
    """

    device: int
    generation: int
    popen: subprocess.Popen[bytes]
    pidfd: int
    peer: Peer
    ready: bool = False
    io_mode: str = ""
    ring_pipe: int | None = None
    joined: set[int] = field(default_factory=set)
    state: DeviceState


@dataclass(slots=True, kw_only=True)
class Quarantine:
    """A dead worker's segments, and what their proof still waits for."""

    device: int
    generation: int
    segments: list[int]
    ring_pipe: int | None
    clients: set[int]


class WorkerEvents(Protocol):
    """What the coordinator is told of its workers."""

    def worker_ready(self, worker: Worker) -> None:
        """It may be given namespaces, clients and segments."""

    def worker_said(self, worker: Worker, message: Message) -> None:
        """Anything but WorkerReady."""

    def worker_ended(self, worker: Worker) -> list[int]:
        """It is no more. Returns the segments to quarantine."""

    def worker_never_ready(self, device: int) -> None:
        """It ended before it was ready."""

    def segments_proven(self, segments: list[int]) -> None:
        """Nothing of a dead worker, and of the ranks it had, touches them any more."""

    def no_worker_left(self, failed: Exit | None) -> None:
        """No worker runs and none will be started: drained, or (with the code) none could start."""


class Workers:
    """
    See the module.

    Args:
        device_names: In index order.
        module: What `python -m` runs for a worker; another one only in tests.
    """

    def __init__(
        self,
        loop: Loop,
        events: WorkerEvents,
        *,
        device_names: list[str],
        generation: int,
        config_json: str,
        module: str,
    ) -> None:
        self._loop = loop
        self._events = events
        self._names = device_names
        self._generation = generation
        self._config_json = config_json
        self._module = module
        self._next_generation = 1
        self._quarantines: list[Quarantine] = []
        self.children = [Child(device=device) for device in range(len(device_names))]
        self.running: dict[int, Worker] = {}
        self.draining = False

    @property
    def ready(self) -> list[Worker]:
        """Workers that take messages, by device."""
        return [worker for _, worker in sorted(self.running.items()) if worker.ready]

    def find_ready(self, device: int) -> Worker | None:
        """Return a device's worker if it is ready."""
        worker = self.running.get(device)
        return worker if worker is not None and worker.ready else None

    def device_states(self) -> list[DeviceState]:
        """Return the state of every device, in index order; without a ready worker it is not healthy."""
        states = []
        for device in range(len(self._names)):
            worker = self.find_ready(device)
            states.append(worker.state if worker else _unknown_state(device, healthy=False))
        return states

    # ---------------------------------------------------------------- starting

    def go_on(self) -> None:
        """Do what supervision wants done now."""
        if self.draining:
            return
        actions, wake_ns = supervision.plan(self.children, time.monotonic_ns())
        for action in actions:
            match action:
                case supervision.Start(device):
                    self._start(device)
                case supervision.Kill(device):
                    log.error("worker of device %s was not ready after %g s: killing it",
                              self._names[device], supervision.BOOT_S_MAX)  # fmt: skip
                    self.running[device].popen.kill()
        self._loop.set_timer("supervision", wake_ns, self.go_on)
        if not self.running and all(child.failed is not None for child in self.children):
            self._events.no_worker_left(self.children[0].failed)

    def _start(self, device: int) -> None:
        ours, theirs = channel.pair()
        try:
            # A terminal's Ctrl-C is for the coordinator, which lets the workers write what is filled first.
            control = theirs.fileno()
            popen = process.spawn(
                [sys.executable, "-m", self._module, "--control-fd", str(control)], [control], own_group=True
            )
        except HostError as error:
            ours.close()
            log.error("cannot start the worker of device %s: %s", self._names[device], error)
            self._not_started(device)
            return
        finally:
            theirs.close()
        self._started(device, popen, ours)

    def _not_started(self, device: int) -> None:
        now_ns = time.monotonic_ns()
        child = supervision.started(self.children[device], now_ns)
        self.children[device] = supervision.ended(child, -1, now_ns)
        self._loop.soon(self.go_on)

    def _started(self, device: int, popen: subprocess.Popen[bytes], ours: socket.socket) -> None:
        pidfd = process.pidfd_open(popen.pid)
        if pidfd is None:  # our own child is there until we reap it
            raise HostError("a child has no pidfd", pid=popen.pid)
        peer = Peer(
            self._loop, ours, WorkerToCoordinator,
            on_message=lambda message, fds: self._said(worker, message, fds),
            on_gone=lambda reason: self._hung_up(worker, reason),
        )  # fmt: skip
        worker = Worker(
            device=device, generation=self._next_generation, popen=popen, pidfd=pidfd, peer=peer,
            state=_unknown_state(device, healthy=True),
        )  # fmt: skip
        self._next_generation += 1
        self.running[device] = worker
        self.children[device] = supervision.started(self.children[device], time.monotonic_ns())
        self._loop.watch(pidfd, lambda _: self._process_ended(worker))
        setup = WorkerSetup(
            generation=self._generation,
            worker_generation=worker.generation,
            device=device,
            config_json=self._config_json,
        )
        peer.send(setup)

    # ---------------------------------------------------------------- living

    def _said(self, worker: Worker, message: Message, fds: list[int]) -> None:
        if not isinstance(message, WorkerReady):
            self._events.worker_said(worker, message)
            return
        if worker.ready or message.worker_generation != worker.generation:
            _close_all(fds)
            return
        worker.ready, worker.io_mode, worker.ring_pipe = True, message.io_mode, fds[0]
        self.children[worker.device] = supervision.ready(self.children[worker.device], time.monotonic_ns())
        log.info("device %s: worker %d ready (%s)", self._names[worker.device], worker.popen.pid, worker.io_mode)
        self._events.worker_ready(worker)

    def _hung_up(self, worker: Worker, reason: KvpoolError) -> None:
        """Its socket is gone, so it is of no use. It is most likely ending; if not, end it."""
        if self.running.get(worker.device) is not worker or self.draining:
            return
        log.warning("device %s: lost worker %d: %s", self._names[worker.device], worker.popen.pid, reason)
        until_ns = time.monotonic_ns() + int(END_GRACE_S * 1e9)
        self._loop.set_timer(f"end-{worker.generation}", until_ns, worker.popen.kill)

    # ---------------------------------------------------------------- ending

    def _process_ended(self, worker: Worker) -> None:
        exit_code = worker.popen.wait()
        self._loop.cancel_timer(f"end-{worker.generation}")
        self._loop.forget(worker.pidfd)
        os.close(worker.pidfd)
        worker.peer.read_last_words()
        worker.peer.close()
        del self.running[worker.device]
        child = supervision.ended(self.children[worker.device], exit_code, time.monotonic_ns())
        self.children[worker.device] = child
        self._tell_end(worker, exit_code)
        was_ready, worker.ready = worker.ready, False
        if was_ready:
            self._quarantine(worker)
        else:
            self._events.worker_never_ready(worker.device)
        if self.draining:
            if not self.running:
                self._events.no_worker_left(None)
        else:
            self.go_on()

    def _tell_end(self, worker: Worker, exit_code: int) -> None:
        name, pid, child = self._names[worker.device], worker.popen.pid, self.children[worker.device]
        if self.draining and exit_code == 0:
            log.info("device %s: worker %d has written everything and ended", name, pid)
        elif child.failed is not None:
            log.error("device %s: worker %d cannot start (%s): see its message above, change what it names, "
                      "and start the pool again", name, pid, child.failed.name)  # fmt: skip
        else:
            log.warning("device %s: worker %d ended (%s), next start in %.1f s", name, pid, _in_words(exit_code),
                        supervision.backoff_s(child.crashes_in_row))  # fmt: skip

    def _quarantine(self, worker: Worker) -> None:
        segments = self._events.worker_ended(worker)
        quarantine = Quarantine(
            device=worker.device,
            generation=worker.generation,
            segments=segments,
            ring_pipe=worker.ring_pipe,
            clients=set(worker.joined),
        )
        self._quarantines.append(quarantine)
        if worker.ring_pipe is not None:
            # Without events asked for, epoll reports the hang-up alone.
            self._loop.watch(worker.ring_pipe, lambda _: self._ring_gone(quarantine), 0)

    def _ring_gone(self, quarantine: Quarantine) -> None:
        if quarantine.ring_pipe is not None:
            self._loop.forget(quarantine.ring_pipe)
            os.close(quarantine.ring_pipe)
            quarantine.ring_pipe = None
        self._end_if_proven(quarantine)

    def copies_ended(self, client: int, device: int, generation: int) -> None:
        """A rank's copies from and to that run of the device's worker have ended."""
        for quarantine in list(self._quarantines):
            if quarantine.device == device and quarantine.generation == generation:
                quarantine.clients.discard(client)
                self._end_if_proven(quarantine)

    def client_proven(self, client: int) -> None:
        """A departed client touches nothing any more."""
        for worker in self.running.values():
            worker.joined.discard(client)
        for quarantine in list(self._quarantines):
            quarantine.clients.discard(client)
            self._end_if_proven(quarantine)

    def _end_if_proven(self, quarantine: Quarantine) -> None:
        if quarantine.ring_pipe is None and not quarantine.clients and quarantine in self._quarantines:
            self._quarantines.remove(quarantine)
            self._events.segments_proven(quarantine.segments)

    # ---------------------------------------------------------------- the end of the pool

    def drain(self) -> None:
        """Let every worker write what is filled and end; start none any more."""
        self.draining = True
        self._loop.cancel_timer("supervision")
        for worker in self.running.values():
            if worker.ready:
                worker.peer.send(Drain())
            else:
                worker.popen.kill()
        if not self.running:
            self._events.no_worker_left(None)

    def kill(self) -> None:
        """End every worker at once and reap it."""
        self.draining = True
        for worker in list(self.running.values()):
            with contextlib.suppress(ProcessLookupError):
                worker.popen.kill()
        for worker in list(self.running.values()):
            worker.popen.wait()


def _unknown_state(device: int, *, healthy: bool) -> DeviceState:
    return DeviceState(device=device, healthy=healthy, read_bytes_per_s=0.0, backlog_bytes=0)


def _in_words(exit_code: int) -> str:
    if exit_code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-exit_code).name
    elif exit_code in list(Exit):
        return f"exit code {exit_code}, {Exit(exit_code).name}"
    return f"exit code {exit_code}"


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
