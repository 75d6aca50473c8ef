"""
The I/O worker: one process for one storage device.

Theory. One thread, one epoll: it sleeps until a queue, the engine, or a scan has something, or until the next
deadline; then it runs one pass. A pass turns what came in into events for the object table, performs the actions
that come out, and at its end gives the engine its new work and sends what is to be said, in few messages. The
table decides (`core/objects.py`), the engine does the I/O (`io/engine.py`); this file connects them.

    control socket ──┐                                  ┌── engine: open, read, publish
    rank sockets ────┼── events ──► ObjectTable ── actions ── outbox: ranks, coordinator
    scan, engine ────┘                                  └── files: set aside

The process ends with its coordinator: by the parent's death signal, and by the hang-up of the control socket.

Does not cover: which files a namespace has (`worker_namespaces`), batching of answers (`worker_outbox`).
"""

import argparse
import json
import logging
import os
import select
import sys
import time
from collections import deque
from typing import assert_never

import msgspec

from kvpool import config
from kvpool.core import layout
from kvpool.core import object_events as events
from kvpool.core.objects import ObjectTable
from kvpool.core.speed import SpeedMeter
from kvpool.core.usage import Usage
from kvpool.errors import Code, Exit, HostError, InvariantError, KvpoolError, ProtocolError, invariant
from kvpool.health import facts
from kvpool.io import ring_engine, shm, snapshot_file
from kvpool.io.channel import Channel, PeerGone, adopt
from kvpool.io.engine import Ended, Engine, Kind, SegmentMemory
from kvpool.io.faults import Faults
from kvpool.io.files import DeviceFiles
from kvpool.io.process import set_parent_death_signal
from kvpool.procs.worker_breaker import WorkerBreaker
from kvpool.procs.worker_namespaces import Namespaces
from kvpool.procs.worker_outbox import Outbox
from kvpool.procs.worker_room import Room
from kvpool.procs.worker_scans import Scans
from kvpool.procs.worker_snapshots import Snapshots
from kvpool.procs.worker_trials import Trials, is_trial
from kvpool.wire import messages as wire
from kvpool.wire.codec import split

log = logging.getLogger("kvpool.worker")

#: What a report says.
Facts = dict[str, str | int | float | bool]
#: The state of the device is told at most this often, and when speed or backlog moved by this much.
STATE_INTERVAL_NS = 50_000_000
STATE_CHANGE = 0.1
#: What its staging holds, and what it has read and written, is told this often: people look at it.
BYTES_INTERVAL_NS = 1_000_000_000
#: Words of an engine's mode that say that it is not the best one.
FALLBACKS = ("threads", "plain buffers", "buffered")
#: Set by tests only: what goes wrong on purpose (`io/faults.py`).
FAULTS_VARIABLE = "KVPOOL_TEST_FAULTS"


class CoordinatorGone(Exception):  # noqa: N818 - an end, not a failure
    """The control socket hung up: this process has nothing to live for."""


class IoWorker:
    """
    One device's worker after its setup.

    Args:
        control: The socket to the coordinator.
        setup: What the coordinator said first.
        settings: The pool's settings, as *setup* carried them.
        engine: The device's storage engine; closed by the caller.
        namespaces: The device's directories; closed by the caller.
    """

    def __init__(
        self,
        control: Channel,
        setup: wire.WorkerSetup,
        settings: config.Settings,
        engine: Engine,
        namespaces: Namespaces,
    ) -> None:
        self._device = settings.device[setup.device]
        self._verify = settings.pool.verify
        self._control = control
        self._engine = engine
        self._table = ObjectTable(_table_settings(setup.device, settings))
        self._outbox = Outbox(setup.device)
        self._namespaces = namespaces
        self._started_ns = time.monotonic_ns()
        self._setup = setup
        #: client -> its socket. A client that left is in the table until it is proven, but not here.
        self._ranks: dict[int, Channel] = {}
        #: Segments granted since the last SegmentsGranted: registered together when that comes.
        self._batch: list[SegmentMemory] = []
        #: segment -> bytes of its slots.
        self._slot_bytes: dict[int, int] = {}
        #: op -> the object it is about, from its action to its end.
        self._ops: dict[int, events.ObjectId] = {}
        #: Keys of admissions of which more is to come.
        self._preload_keys: dict[int, list[bytes]] = {}
        self._usage = Usage()
        self._reads = SpeedMeter()
        self._writes = SpeedMeter()
        self._errors: dict[str, int] = {}
        self._breaker = WorkerBreaker(self._device.name, settings.pool, now_ns=self._started_ns)
        #: (healthy, refusing) as the table knows them.
        self._device_told: tuple[bool, events.Dropped | None] = (True, None)
        self._state_told = (0.0, 0, True, 0)
        self._bytes_told = (0,) * 6
        #: When the state is to be told, as of the end of the last pass.
        self._state_due: int | None = None
        self._draining = False
        #: What became of actions that were not performed, told to the table after the others.
        self._deferred: deque[events.Event] = deque()
        self._poller = select.epoll()
        self._poller.register(control.fileno(), select.EPOLLIN)
        for fd in engine.fds():
            self._poller.register(fd, select.EPOLLIN)
        self._room = Room(self._device, namespaces, tell=self._handle, watch=self._watch)
        self._trials = Trials(self._forget)
        self._scans = Scans(
            namespaces, self._trials, self._poller,
            tell=self._handle, send=self._tell_and_send, index_of=self._table.index_of,
        )  # fmt: skip
        self._snapshots = Snapshots(self._device.name, self._poller, namespaces, index_of=self._table.index_of)

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """
        Serve until drained.

        Raises:
            CoordinatorGone: The control socket hung up.
        """
        try:
            while not (self._draining and self._table.drained()):
                self._sleep()
                self._handle(events.TimePassed())
                for client, message in self._trials.take_ready(self._table.is_being_stored):
                    self._handle(_rank_event(client, message))
                self._look_after_device()
                self._flush()
            if self._breaker.healthy:
                self._snapshots.finish()
        finally:
            self._snapshots.close()
            self._room.close()

    def _sleep(self) -> None:
        """Wait for something to do, and take it in."""
        engine_fds = set(self._engine.fds())
        for fd, mask in self._poller.poll(self._timeout_s()):
            if fd in engine_fds:
                continue  # reaped below, whatever woke us
            if fd == self._control.fileno():
                self._on_control(mask)
            elif fd in self._namespaces.scan_fds():
                self._scans.on_ready(fd)
            elif fd in self._snapshots.fds():
                self._snapshots.on_ready(fd)
            elif fd in self._room.fds():
                self._room.on_ready(fd)
            else:
                self._on_rank(fd, mask)
        for ended in self._engine.reap():
            self._on_ended(ended)

    def _watch(self, fd: int) -> None:
        self._poller.register(fd, select.EPOLLIN)

    def _timeout_s(self) -> float | None:
        dues = [
            self._table.next_deadline_ns(),
            self._engine.next_due_ns(),
            self._state_due,
            self._usage.due_ns(),
            self._breaker.due_ns(),
            self._room.due_ns(),
            self._scans.due_ns(walking=self._room.walking or not self._namespaces.complete()),
            self._snapshots.due_ns(),
        ]
        due = min((ns for ns in dues if ns is not None), default=None)
        return None if due is None else max(0.0, (due - time.monotonic_ns()) / 1e9)

    def _look_after_device(self) -> None:
        """Give the device up or use it again, as its breaker says; try it when that is due. Make room on it."""
        now_ns = time.monotonic_ns()
        self._breaker.note_late(self._table, now_ns)
        if self._breaker.healthy:
            self._room.look(now_ns)
        wanted = (self._breaker.healthy, self._room.refusing)
        if wanted != self._device_told:
            self._device_told = wanted
            self._handle(events.DeviceChanged(healthy=wanted[0], refusing=wanted[1]))
        due_ns = self._breaker.due_ns()
        if due_ns is not None and due_ns <= now_ns:
            self._breaker.start_probe(now_ns)
            self._engine.try_device(now_ns)

    def _look_after_index(self) -> None:
        now_ns = time.monotonic_ns()
        self._room.let_scan(
            self._scans.look(now_ns, busy=self._backlog_bytes() > 0, queue_length=self._control.queue_length)
        )
        self._snapshots.look(now_ns)

    def _flush(self) -> None:
        """End of a pass: new work to the engine, answers to their clients."""
        self._look_after_index()
        self._engine.submit()
        for client, message in self._outbox.take_for_clients():
            self._send_rank(client, message)
        self._tell_coordinator()
        self._tell_state()
        self._tell_usage()
        self._engine.submit()  # a client that turned out to be gone has freed slots, and others' work has begun
        self._update_poller()

    def _tell_coordinator(self) -> None:
        for message in self._outbox.take_for_coordinator():
            self._send_control(message)

    def _update_poller(self) -> None:
        for channel in (self._control, *self._ranks.values()):
            if channel.fileno() >= 0:
                self._poller.modify(channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if channel.wants_write else 0))

    # ------------------------------------------------------------ the coordinator

    def _on_control(self, mask: int) -> None:
        try:
            if mask & select.EPOLLOUT:
                self._control.flush()
            for message, fds in self._control.receive():
                self._on_control_message(message, fds)
        except (PeerGone, ProtocolError) as error:
            raise CoordinatorGone(str(error)) from error

    def _on_control_message(self, message: wire.Message, fds: list[int]) -> None:
        match message:
            case wire.EpochWanted():
                self._begin_epoch(message)
            case wire.NamespaceOpened(namespace=namespace, spec=spec):
                self._open_namespace(namespace, spec)
            case wire.ClientJoined():
                self._join(message, fds[0])
            case wire.ClientProven(client=client):
                self._handle(events.ClientProven(client=client))
            case wire.SegmentGranted(segment=segment, segment_bytes=segment_bytes, slot_bytes=slot_bytes):
                memory = shm.map_segment(fds[0], segment_bytes)
                os.close(fds[0])
                self._batch.append(SegmentMemory(segment, memory, slot_bytes))
            case wire.SegmentsGranted():
                self._add_batch()
            case wire.SegmentRecalled(segment=segment):
                self._handle(events.SegmentRecalled(segment=segment))
            case wire.KeysProbe(probe=probe, namespace=namespace, keys=keys):
                if not self._namespaces.begin_probe(self._engine, probe, namespace, keys):
                    self._send_control(wire.KeysProbed(probe=probe))
            case wire.PreloadReserve() | wire.PreloadCommit() | wire.PreloadWithdraw():
                self._on_preload(message)
            case wire.StoresWanted() | wire.FilesRemoved():
                self._on_admin(message)
            case wire.ReportWanted(report=report):
                self._send_control(wire.Report(report=report, facts=self._facts()))
            case wire.Drain():
                self._draining = True
                self._handle(events.DrainStarted())
            case _:
                raise ProtocolError("message not for a running worker", type=type(message).__name__)

    def _on_admin(self, message: wire.StoresWanted | wire.FilesRemoved) -> None:
        match message:
            case wire.StoresWanted(on=on):
                self._room.stores_on = on
            case wire.FilesRemoved(directory=directory, keys=keys, freed_bytes=freed_bytes):
                self._files_removed(directory, keys, freed_bytes)

    def _on_preload(self, message: wire.PreloadReserve | wire.PreloadCommit | wire.PreloadWithdraw) -> None:
        match message:
            case wire.PreloadReserve(admission=admission):
                keys = [*self._preload_keys.pop(admission, []), *message.keys]
                if message.more:
                    self._preload_keys[admission] = keys
                    return
                self._handle(
                    events.PreloadAsked(
                        admission=admission,
                        namespace=message.namespace,
                        keys=keys,
                        priority=message.priority,
                        arrival=message.arrival,
                    )
                )
            case wire.PreloadCommit(admission=admission):
                self._handle(events.PreloadCommitted(admission=admission))
            case wire.PreloadWithdraw(admission=admission):
                self._preload_keys.pop(admission, None)
                self._handle(events.PreloadWithdrawn(admission=admission))

    def _begin_epoch(self, wanted: wire.EpochWanted) -> None:
        """Keep it, and serve no older one from now on, whether it could be kept or not."""
        error = self._namespaces.epochs.keep(wanted.fingerprint, wanted.epoch)
        over = self._namespaces.retire(wanted.fingerprint, wanted.epoch)
        for client in [client for client in self._ranks if self._table.clients[client].space.namespace in over]:
            self._leave(client)
        for namespace in over:
            self._handle(events.NamespaceRetired(namespace=namespace))
            self._snapshots.retired(namespace)
        self._send_control(wire.EpochKept(fingerprint=wanted.fingerprint, epoch=wanted.epoch, error=error))

    def _open_namespace(self, namespace: int, spec: wire.NamespaceSpec) -> None:
        try:
            scan_fd = self._namespaces.open(namespace, spec)
        except (KvpoolError, OSError) as error:
            log.error("device %s: namespace %s is not served: %s", self._device.name, spec.model_name, error)
            self._count("namespace")
            self._send_control(wire.ScanEnded(namespace=namespace, objects=0))
            return
        self._handle(
            events.NamespaceAdded(
                namespace=namespace, rank_count=spec.rank_count, slot_bytes=self._namespaces.slot_bytes(namespace)
            )
        )
        self._scans.started(scan_fd)
        self._snapshots.opened(namespace)

    def _files_removed(self, directory: str, keys: list[bytes], freed_bytes: int) -> None:
        self._room.told_removed(freed_bytes)
        namespace = self._namespaces.find(directory)
        if namespace is None:
            return
        for rank in range(self._namespaces.rank_count(namespace)):
            for key in keys:
                self._handle(events.FileForgotten(object=events.ObjectId(namespace, key, rank)))

    def _add_batch(self) -> None:
        batch, self._batch = self._batch, []
        self._engine.add_segments(batch)
        for segment in batch:
            self._slot_bytes[segment.segment] = segment.slot_bytes
            count = len(segment.memory) // segment.slot_bytes
            self._handle(events.SegmentAdded(segment=segment.segment, slot_bytes=segment.slot_bytes, slot_count=count))

    def _tell_and_send(self, message: wire.Message) -> None:
        self._tell_coordinator()
        self._send_control(message)

    def _send_control(self, message: wire.Message) -> None:
        try:
            self._control.send(message)
        except PeerGone as error:
            raise CoordinatorGone(str(error)) from error

    # ------------------------------------------------------------ ranks

    def _join(self, message: wire.ClientJoined, fd: int) -> None:
        channel = Channel(adopt(fd), wire.RankToWorker)
        if self._namespaces.is_retired(message.namespace):
            channel.close()
            return
        self._ranks[message.client] = channel
        self._poller.register(channel.fileno(), select.EPOLLIN)
        self._handle(
            events.ClientJoined(
                client=message.client, engine=message.engine, namespace=message.namespace, rank=message.rank
            )
        )

    def _on_rank(self, fd: int, mask: int) -> None:
        client = next((number for number, channel in self._ranks.items() if channel.fileno() == fd), None)
        if client is None:
            return  # left earlier in this pass
        channel = self._ranks[client]
        try:
            if mask & select.EPOLLOUT:
                channel.flush()
            for message, _ in channel.receive():
                if isinstance(message, wire.Load):
                    if self._waits_for_write(client, message):
                        continue
                    self._note_use(client, message.keys)
                self._handle(_rank_event(client, message))
        except PeerGone:
            self._leave(client)
        except ProtocolError as error:
            log.warning("device %s: closing client %d: %s", self._device.name, client, error)
            self._count("protocol")
            self._leave(client)

    def _waits_for_write(self, client: int, message: wire.Load) -> bool:
        """Tell whether this is a round trip's load, whose object is still being written."""
        known = self._table.clients.get(client)
        if known is None or not message.keys or not message.keys[0].startswith(wire.TRIAL_KEY):
            return False
        target = events.ObjectId(known.space.namespace, message.keys[0], known.rank)
        return self._trials.hold(client, message, target, being_stored=self._table.is_being_stored(target))

    def _forget(self, target: events.ObjectId) -> None:
        self._handle(events.FileForgotten(object=target))
        self._room.forget(target)

    def _note_use(self, client: int, keys: list[bytes]) -> None:
        known = self._table.clients.get(client)
        if known is not None:
            self._room.used(known.space.namespace, known.rank, [key for key in keys if len(key) > layout.GROUP_BYTES])

    def _send_rank(self, client: int, message: wire.Message) -> None:
        channel = self._ranks.get(client)
        if channel is None:
            return
        try:
            channel.send(message)
        except PeerGone as error:
            log.warning("device %s: client %d is gone: %s", self._device.name, client, error)
            self._leave(client)

    def _leave(self, client: int) -> None:
        channel = self._ranks.pop(client, None)
        if channel is None:
            return
        self._poller.unregister(channel.fileno())
        channel.close()
        known = self._table.clients.get(client)
        self._handle(events.ClientLeft(client=client))
        if known is not None:
            self._trials.left(client, known.space.namespace, known.rank)

    # ------------------------------------------------------------ probes

    def _on_probed(self, ended: Ended) -> None:
        probe = self._namespaces.end_probe(ended)
        for found in probe.found:
            self._handle(events.KeysFound(namespace=probe.namespace, rank=found.rank, keys=found.keys))
        self._tell_coordinator()
        self._send_control(wire.KeysProbed(probe=probe.probe))

    # ------------------------------------------------------------ the table's events and actions

    def _handle(self, event: events.Event) -> None:
        for action in self._table.handle(event, now_ns=time.monotonic_ns()):
            if not self._is_over(action):
                self._perform(action)
        while self._deferred:
            self._handle(self._deferred.popleft())

    def _is_over(self, action: events.Action) -> bool:
        """Tell whether the action is about a namespace that was reset; its end is told after the others."""
        match action:
            case events.OpenFile(op=op, object=target) if self._namespaces.is_retired(target.namespace):
                self._deferred.append(events.FileOpened(op=op, error=Code.EPOCH))
            case events.PublishObject(op=op, object=target) if self._namespaces.is_retired(target.namespace):
                self._deferred.append(events.ObjectPublished(op=op, error=Code.EPOCH))
            case _:
                return False
        return True

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.OpenFile(op=op, object=target):
                self._ops[op] = target
                self._engine.open_file(op, self._namespaces.path(target))
            case events.ReadFile(op=op, object=target, slot=slot):
                self._reads.began(now_ns=time.monotonic_ns(), queued=self._table.reads_queued)
                self._engine.read_file(op, slot, self._namespaces.expected(target))
            case events.CloseFile(op=op):
                del self._ops[op]
                self._engine.close_file(op)
            case events.PublishObject(op=op, object=target, slot=slot):
                self._ops[op] = target
                self._writes.began(now_ns=time.monotonic_ns())
                directory, name = self._namespaces.place(target)
                self._engine.publish_object(op, directory, name, slot, self._namespaces.expected(target))
            case events.SetAside(object=target):
                self._engine.set_aside(self._namespaces.path(target))
            case events.RemoveKey(namespace=namespace, key=key):
                self._room.remove(namespace, key)
            case events.SendReady() | events.SendGranted():
                slot_bytes = self._slot_bytes[action.slot.segment]
                self._outbox.add(action, slot_offset=action.slot.index * slot_bytes)
            case (
                events.SendLoadFailed()
                | events.SendExists()
                | events.SendDropped()
                | events.TellKey()
                | events.TellKeysStored()
                | events.TellStoreEnded()
            ):
                self._outbox.add(action)
            case events.SendPreloadAnswer(admission=admission, reserved=reserved):
                self._send_control(wire.PreloadAnswer(admission=admission, reserved=reserved))
            case events.SendPreloadRevoked(admission=admission):
                self._send_control(wire.PreloadRevoked(admission=admission))
            case events.SendPreloadLanded(admission=admission):
                self._send_control(wire.PreloadLanded(admission=admission))
            case events.ReturnSegment(segment=segment):
                self._engine.drop_segment(segment)
                del self._slot_bytes[segment]
                self._send_control(wire.SegmentReturned(segment=segment))
            case _:
                assert_never(action)

    def _on_ended(self, ended: Ended) -> None:
        now_ns = time.monotonic_ns()
        if ended.kind is Kind.PROBED:
            self._on_probed(ended)
            return
        if ended.kind is Kind.TRIED:
            self._breaker.end_probe(ended, now_ns)
            return
        self._breaker.note(ended, now_ns)
        if ended.error is not None:
            self._on_error(ended)
        match ended.kind:
            case Kind.OPENED:
                if ended.error is not None:
                    del self._ops[ended.op]
                self._handle(events.FileOpened(op=ended.op, error=ended.error))
            case Kind.READ:
                target = self._ops.pop(ended.op)
                read_bytes = ended.bytes if ended.error is None else 0
                self._reads.ended(read_bytes, now_ns=now_ns, queued=self._table.reads_queued)
                self._handle(events.FileRead(op=ended.op, error=ended.error))
                if is_trial(target):
                    self._trials.read(target)
            case Kind.PUBLISHED:
                target = self._ops.pop(ended.op)
                self._note_written(ended, target)
                self._writes.ended(ended.bytes if ended.error is None else 0, now_ns=now_ns)
                self._handle(events.ObjectPublished(op=ended.op, error=ended.error))
                if is_trial(target) and ended.error is None:
                    self._trials.published(target)
            case _:
                assert_never(ended.kind)

    def _note_written(self, ended: Ended, target: events.ObjectId) -> None:
        if ended.error is Code.DEVICE_FULL:
            self._room.said_full()
        elif ended.error is None and not ended.existed:
            self._room.published(target, ended.bytes, ended.folders)

    def _on_error(self, ended: Ended) -> None:
        invariant(ended.error is not None, "an error without a code")
        name = ended.error.name.lower() if ended.error is not None else ""
        self._count(name)
        first = self._errors[name] == 1
        log.log(
            logging.WARNING if first else logging.DEBUG,
            "device %s: %s %s: %s%s",
            self._device.name,
            ended.kind.value,
            name,
            ended.detail,
            " (further ones are counted, see kvpool health)" if first else "",
        )

    def _count(self, name: str) -> None:
        self._errors[name] = self._errors.get(name, 0) + 1

    # ------------------------------------------------------------ what is told of the device

    def _backlog_bytes(self) -> int:
        return self._table.load_backlog_bytes()

    def _speed(self) -> float:
        return self._reads.queued_bytes_per_s or self._reads.bytes_per_s

    def _state_due_ns(self) -> int | None:
        """When a change of the device's state has to be told; None while there is none."""
        speed, backlog, healthy, told_ns = self._state_told
        if healthy != self._table.healthy:
            return 0
        now_speed, now_backlog = self._speed(), self._backlog_bytes()
        moved = abs(now_speed - speed) > STATE_CHANGE * max(speed, 1.0) or (
            abs(now_backlog - backlog) > STATE_CHANGE * max(backlog, 1)
        )
        if moved:
            return told_ns + STATE_INTERVAL_NS
        return told_ns + BYTES_INTERVAL_NS if self._table.bytes_now() != self._bytes_told else None

    def _tell_state(self) -> None:
        due = self._state_due = self._state_due_ns()
        now_ns = time.monotonic_ns()
        if due is None or due > now_ns:
            return
        self._state_due = None
        speed, backlog = self._speed(), self._backlog_bytes()
        healthy = self._table.healthy
        self._state_told = (speed, backlog, healthy, now_ns)
        self._bytes_told = staging, resident, pinned, staged, read, written = self._table.bytes_now()
        state = wire.DeviceState(
            device=self._setup.device,
            healthy=healthy,
            read_bytes_per_s=self._reads.bytes_per_s,
            queued_bytes_per_s=self._reads.queued_bytes_per_s,
            read_latency_s=self._reads.latency_s,
            backlog_bytes=backlog,
            staging_bytes=staging,
            resident_bytes=resident,
            pinned_bytes=pinned,
            staged_bytes=staged,
            read_bytes=read,
            written_bytes=written,
        )
        self._send_control(wire.WorkerState(state=state))

    def _tell_usage(self) -> None:
        for slot_bytes, pool in self._table.pools.items():
            self._usage.seen(slot_bytes, pool.total, used=pool.total - pool.spare(), wanted=pool.wanted)
        told = self._usage.take(time.monotonic_ns())
        if told:
            self._send_control(wire.StagingUsed(sizes=told))

    def _facts(self) -> Facts:
        space = os.statvfs(self._device.path)
        told: Facts = {
            facts.ROLE: facts.IO_WORKER,
            facts.DEVICE: self._device.name,
            facts.DEVICE_PATH: self._device.path,
            facts.PID: os.getpid(),
            facts.STATE: facts.DRAINING if self._draining else facts.RUNNING,
            facts.UPTIME_S: (time.monotonic_ns() - self._started_ns) / 1e9,
            facts.WORKER_GENERATION: self._setup.worker_generation,
            facts.IO_MODE: self._engine.mode,
            facts.IO_DEGRADED: any(word in self._engine.mode for word in FALLBACKS),
            facts.IO_ADVICE: "Run `kvpool doctor` where the pool runs: it says what is lacking and what to set.",
            facts.VERIFY: self._verify,
            facts.DEPTH_LIMIT: self._device.iodepth,
            facts.INDEX_COMPLETE: self._namespaces.complete(),
            facts.READ_BYTES_PER_S: self._reads.bytes_per_s,
            facts.WRITE_BYTES_PER_S: self._writes.bytes_per_s,
            facts.BACKLOG_BYTES: self._backlog_bytes(),
            facts.SPACE_FREE_BYTES: space.f_bavail * space.f_frsize,
            facts.SPACE_TOTAL_BYTES: space.f_blocks * space.f_frsize,
            facts.QUEUE_MESSAGES: sum(channel.queue_length for channel in (self._control, *self._ranks.values())),
        }
        told |= self._breaker.facts() | self._room.facts()
        told |= _facts_of_table(self._table.statistics())
        told |= _facts_of_engine(self._engine.statistics())
        told |= {facts.errors(name): count for name, count in self._errors.items()}
        return told


def _rank_event(client: int, message: wire.Message) -> events.Event:
    """Return what a rank's message means for the table."""
    match message:
        case wire.Load(job=job, first=first, keys=keys):
            return events.LoadWanted(client=client, job=job, first=first, keys=keys)
        case wire.Release(job=job, indices=indices):
            return events.SlotsReleased(client=client, job=job, indices=indices)
        case wire.LoadCancel(job=job):
            return events.LoadCancelled(client=client, job=job)
        case wire.Store(job=job, store=store, first=first, keys=keys):
            return events.StoreWanted(client=client, job=job, store=store, first=first, keys=keys)
        case wire.Filled(job=job, indices=indices):
            return events.SlotsFilled(client=client, job=job, indices=indices)
        case wire.StoreCancel(job=job, indices=indices):
            return events.StoreCancelled(client=client, job=job, indices=indices)
        case _:
            raise ProtocolError("message not for a worker", type=type(message).__name__)


def _facts_of_table(counted: dict[str, int]) -> Facts:
    told: Facts = {
        facts.QUEUE_LOAD: counted["opens_queued"],
        facts.QUEUE_STORE: counted["writes_queued"],
        facts.IN_FLIGHT_OPENS: counted["opens_inflight"] + counted["files_open"],
        facts.IN_FLIGHT_READS: counted["reads_inflight"],
        facts.IN_FLIGHT_WRITES: counted["writes_inflight"],
        facts.SLOTS_FREE: counted["slots_free"],
        facts.SLOTS_FILLING: counted["slots_filling"],
        facts.SLOTS_RESIDENT: counted["slots_resident"],
        facts.SLOTS_PINNED: counted["slots_pinned"],
        facts.SLOTS_QUARANTINED: counted["slots_quarantined"],
        facts.SLOTS_CACHED: counted["slots_cached"],
        facts.SLOTS_ADMITTED: counted["slots_admitted"],
        facts.CACHE_HITS: counted["cache_hits"],
        facts.PRELOAD_HITS: counted["preload_hits"],
        facts.PRELOAD_READS: counted["preload_reads"],
        facts.EVICTED_BEFORE_USE: counted["evicted_before_use"],
        facts.INDEX_OBJECTS: counted["keys"],
        facts.LOADS: counted.get("loads_ready", 0),
        facts.LOADS_OLDER: counted.get("loads_older", 0),
        facts.LOADS_RESIDENT: counted.get("loads_resident", 0),
        facts.STORES: counted.get("writes", 0),
        facts.STORES_DROPPED: counted.get("keys_dropped", 0),
        **{f"{facts.STORES_DROPPED}_{why}": counted.get(f"keys_dropped_{why}", 0) for why in events.Dropped},
        facts.STORES_EXISTED: counted.get("keys_existing", 0),
        facts.BYTES_LOADED: counted.get("read_bytes", 0),
        facts.BYTES_STORED: counted.get("write_bytes", 0),
        facts.SET_ASIDE: counted.get("corrupt", 0),
    }
    return told | {f"table_{name}": count for name, count in counted.items()}


def _facts_of_engine(counted: dict[str, int | float | str]) -> Facts:
    told: dict[str, str | int | float | bool] = {f"engine_{name}": value for name, value in counted.items()}
    return {facts.DEPTH_ACHIEVED: counted["depth_mean"], **told} if "depth_mean" in counted else told


def _table_settings(device: int, settings: config.Settings) -> events.TableSettings:
    mine, pool = settings.device[device], settings.pool
    return events.TableSettings(
        device=device,
        iodepth=mine.iodepth,
        open_lookahead=mine.open_lookahead,
        writes_inflight_beside_loads=mine.writes_beside_loads,
        client_share=pool.client_share,
        staging_cache=pool.staging_cache,
        load_patience_ns=int(pool.load_patience_s * 1e9),
        load_deadline_ns=int(pool.load_deadline_s * 1e9),
        store_deadline_ns=int(pool.store_deadline_s * 1e9),
        fill_deadline_ns=int(pool.fill_deadline_s * 1e9),
        op_deadline_ns=int(pool.operation_deadline_s * 1e9),
    )


def _receive_setup(control: Channel) -> wire.WorkerSetup:
    poller = select.poll()
    poller.register(control.fileno(), select.POLLIN)
    while True:
        poller.poll()
        for message, _ in control.receive():
            if not isinstance(message, wire.WorkerSetup):
                raise ProtocolError("first message of a coordinator", type=type(message).__name__)
            return message


def _serve(control: Channel) -> None:
    setup = _receive_setup(control)
    settings = config.from_json(setup.config_json)
    device = settings.device[setup.device]
    files = DeviceFiles(device.path, name=device.name)
    engine, why_no_ring = ring_engine.open_engine(
        files,
        iodepth=device.iodepth,
        sync_on_store=device.sync_on_store,
        verify=settings.pool.verify,
        faults=_faults(device.name),
    )
    if why_no_ring:
        log.warning("device %s: no io_uring (%s): %s", device.name, why_no_ring, engine.mode)
    namespaces = Namespaces(files, device.name, shared=device.shared)
    try:
        _tell_epochs(control, namespaces, device)
        snapshot_file.tidy(files.private)
        pipe = engine.take_ring_pipe()
        worker = IoWorker(control, setup, settings, engine, namespaces)
        control.send(
            wire.WorkerReady(worker_generation=setup.worker_generation, io_mode=engine.mode, pid=os.getpid()), [pipe]
        )
        os.close(pipe)
        worker.run()
    finally:
        namespaces.close()
        engine.close()


def _tell_epochs(control: Channel, namespaces: Namespaces, device: config.DeviceSettings) -> None:
    """Say what was reset; a device that cannot be asked for it is not served, as it may hold bytes from before."""
    try:
        kept = namespaces.epochs.kept()
    except (OSError, msgspec.MsgspecError) as error:
        raise HostError(
            "cannot read what was reset: repair or remove that folder, and what is stored of these models with it",
            device=device.name, path=f"{device.path}/.kvpool/epochs", reason=str(error),
        ) from error  # fmt: skip
    for _, entries in split([wire.EpochEntry(fingerprint, epoch) for fingerprint, epoch in sorted(kept.items())]):
        control.send(wire.EpochsTold(entries=entries))
    namespaces.epochs.begin()


def _faults(device: str) -> Faults | None:
    """Return the faults that a test wants on *device*: FAULTS_VARIABLE is one JSON object, or one for each name."""
    text = os.environ.get(FAULTS_VARIABLE)
    if not text:
        return None
    log.warning("device %s: faults on purpose, from %s", device, FAULTS_VARIABLE)
    by_device = json.loads(text)
    return Faults.from_json(json.dumps(by_device.get(device, by_device) if isinstance(by_device, dict) else by_device))


def main(argv: list[str] | None = None) -> int:
    """Run one I/O worker; return its exit code."""
    parser = argparse.ArgumentParser(prog="kvpool.procs.io_worker", description="One device's I/O worker of a kvpool.")
    parser.add_argument("--control-fd", type=int, required=True, help="socket to the coordinator, inherited")
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="kvpool worker[%(process)d] %(levelname)s: %(message)s", level=logging.INFO)
    if not set_parent_death_signal():
        return Exit.COORDINATOR_GONE
    control = Channel(adopt(arguments.control_fd), wire.CoordinatorToWorker)
    try:
        _serve(control)
    except (CoordinatorGone, PeerGone):
        return Exit.COORDINATOR_GONE
    except (HostError, OSError) as error:
        log.error("%s", error)
        return Exit.HOST
    except KvpoolError as error:
        log.error("%s", error)
        return Exit.CONFIG
    except InvariantError:
        log.exception("a bug in kvpool: this worker ends, its slots wait for proof, another one is started")
        return Exit.INVARIANT
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
