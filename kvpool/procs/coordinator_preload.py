"""
Preload in the coordinator: what is heard of requests, keys and workers goes to the admission, its actions to workers.

Theory. `core/admission.py` decides; this sends what it wants sent, and wakes it when time is up. With preload switched
off nothing reaches it, and no worker hears of it. A request's keys go to a worker in as many messages as they need.

Covers: the shell. Does not cover: which requests are announced (`core/directory.py`), reads (`core/objects.py`).
"""

import time
from collections.abc import Callable, Iterable

from kvpool.config import Settings
from kvpool.core import admission_events as ev
from kvpool.core.admission import Admission
from kvpool.core.admission_events import RequestId
from kvpool.core.directory import Directory
from kvpool.procs.coordinator_loop import Loop
from kvpool.wire.codec import split
from kvpool.wire.messages import (
    RESIDENT,
    KeysTold,
    Message,
    NamespaceSpec,
    PreloadAnswer,
    PreloadCommit,
    PreloadLanded,
    PreloadReserve,
    PreloadRevoked,
    PreloadWithdraw,
    WorkerState,
)


class Preload:
    """
    See the module.

    Args:
        send: Tells a device's worker, if it is ready.
        waits: Told how much staging refused requests want, by device and slot size, when that changes.
    """

    def __init__(
        self,
        loop: Loop,
        settings: Settings,
        directory: Directory,
        *,
        send: Callable[[int, Message], None],
        waits: Callable[[dict[tuple[int, int], int]], None],
    ) -> None:
        self._loop = loop
        self._directory = directory
        self._send = send
        self._waits = waits
        self._waiting: dict[tuple[int, int], int] = {}
        self.enabled = settings.pool.enable_preload
        self._backlog_bytes = [0] * len(settings.device)
        self._healthy = [True] * len(settings.device)
        self._admission = Admission(
            directory.state_of,
            device_count=len(settings.device),
            lookahead=settings.pool.preload_lookahead_requests,
            expiry_ns=int(settings.pool.preload_expiry_s * 1e9),
        )

    # ---------------------------------------------------------------- what schedulers say

    def open_namespace(self, namespace: int, spec: NamespaceSpec) -> None:
        """Objects of that namespace may be announced."""
        sizes = {group.group: group.object_bytes for group in spec.groups}
        self._handle(ev.NamespaceOpened(namespace=namespace, rank_count=spec.rank_count, object_bytes=sizes))

    def announced(self, scheduler: int, namespace: int, request: str, first: int, *, more: bool, priority: int) -> None:
        """The directory took an announcement, or a further part of one, from index *first* on."""
        if self.enabled:
            keys = self._directory.keys_of(scheduler, request)[first:]
            self._handle(
                ev.RequestAnnounced(
                    request=RequestId(scheduler, request),
                    namespace=namespace,
                    first=first,
                    keys=keys,
                    more=more,
                    priority=priority,
                )
            )

    def started(self, scheduler: int, requests: Iterable[str]) -> None:
        """These requests run: nothing is read ahead for them."""
        self._handle(ev.RequestsStarted(requests=[RequestId(scheduler, name) for name in requests]))

    def withdrawn(self, scheduler: int, requests: Iterable[str]) -> None:
        """These requests are over."""
        self._handle(ev.RequestsWithdrawn(requests=[RequestId(scheduler, name) for name in requests]))

    # ---------------------------------------------------------------- what workers say

    def keys_told(self, device: int, message: KeysTold) -> None:
        """The directory took changes of keys."""
        if self.enabled:
            self._handle(
                ev.KeysChanged(
                    namespace=message.namespace,
                    device=device,
                    keys=[entry.key for entry in message.entries],
                    freed=any(not entry.flags & RESIDENT for entry in message.entries),
                )
            )

    def worker_said(self, device: int, message: PreloadAnswer | PreloadRevoked | PreloadLanded) -> None:
        """A worker answered, or told of an admission's fate."""
        match message:
            case PreloadAnswer(admission=admission, reserved=reserved):
                self._handle(ev.ReserveAnswered(device=device, admission=admission, reserved=reserved))
            case PreloadRevoked(admission=admission):
                self._handle(ev.AdmissionRevoked(device=device, admission=admission))
            case PreloadLanded(admission=admission):
                self._handle(ev.AdmissionLanded(device=device, admission=admission))

    def state_told(self, message: WorkerState) -> None:
        """The directory knows whether the device is used; loads that ended may have left room."""
        state = message.state
        fell = state.backlog_bytes < self._backlog_bytes[state.device]
        self._backlog_bytes[state.device] = state.backlog_bytes
        if state.healthy != self._healthy[state.device]:
            self._healthy[state.device] = state.healthy
            self._handle(ev.DeviceChanged(device=state.device, healthy=state.healthy))
        elif fell:
            self.room_changed(state.device)

    def room_changed(self, device: int) -> None:
        """That device may have more free slots than before."""
        self._handle(ev.RoomChanged(device=device))

    def worker_ended(self, device: int) -> None:
        """That device's worker is gone, and the directory has forgotten its keys."""
        self._backlog_bytes[device], self._healthy[device] = 0, True
        self._handle(ev.DeviceLost(device=device))

    # ---------------------------------------------------------------- inside

    def _handle(self, event: ev.Event) -> None:
        if not self.enabled:
            return
        for action in self._admission.handle(event, now_ns=time.monotonic_ns()):
            for message in _messages(action):
                self._send(action.device, message)
        waiting = self._admission.waiting_bytes()
        if waiting != self._waiting:
            self._waiting = waiting
            self._waits(waiting)
        self._loop.set_timer("preload", self._admission.next_deadline_ns(), lambda: self._handle(ev.TimePassed()))

    def facts(self) -> dict[str, int | bool]:
        """Return preload's part of the pool's health."""
        if not self.enabled:
            return {}
        return {f"preload_{name}": value for name, value in self._admission.statistics().items()}


def _messages(action: ev.Action) -> list[Message]:
    """Return what a worker is told of an action."""
    match action:
        case ev.Reserve():
            parts = [part for _, part in split(action.keys)]
            return [
                PreloadReserve(
                    admission=action.admission,
                    namespace=action.namespace,
                    keys=part,
                    priority=action.priority,
                    arrival=action.arrival,
                    more=number < len(parts),
                )
                for number, part in enumerate(parts, 1)
            ]
        case ev.Commit(admission=admission):
            return [PreloadCommit(admission=admission)]
        case ev.Withdraw(admission=admission):
            return [PreloadWithdraw(admission=admission)]
