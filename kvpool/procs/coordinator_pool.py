"""
The coordinator: the pool's control plane, one process, one thread that sleeps in one epoll.

Theory. It owns the run directory, the staging memory, the I/O workers as processes, and the mirror
of their indexes; it is never on the path of a byte. This file joins its parts: an event of one part
becomes calls to the others, in the order that the protocol needs:

    a rank attaches      Welcome, segments, then a socket pair for each ready worker
    a worker is ready    namespaces, then a socket pair for each rank, then segments
    a worker ended       ranks hear WorkerDown, schedulers lose its keys; its segments wait for proof
    a client left        its announcements go; workers hear ClientProven once it is proven
    nothing left to do   no client for `idle_exit_s` (a pool started by a client): drain, then end

Decisions are elsewhere: `core/budget.py`, `core/directory.py`, `core/supervision.py`. No peer can
block it or make it grow: sends are queued with a bound, and who does not read is dropped.
"""

import logging
import os
import signal
import time

from kvpool import __version__
from kvpool.config import Settings
from kvpool.core.budget import DeviceShare
from kvpool.core.directory import Directory, SendProbe, SendStatus
from kvpool.core.epochs import Raised, epoch_of, spec_of
from kvpool.errors import ConfigError, Exit, HostError, KvpoolError, PeerGone, PoolUnavailable, ProtocolError
from kvpool.health import facts as f
from kvpool.io import channel
from kvpool.procs import coordinator_clients
from kvpool.procs.coordinator_clients import ADMIN, RANK, SCHEDULER, Client, Clients
from kvpool.procs.coordinator_epochs import Epochs
from kvpool.procs.coordinator_health import Facts, Rounds, Row
from kvpool.procs.coordinator_loop import Loop
from kvpool.procs.coordinator_namespaces import FINGERPRINT, Namespaces
from kvpool.procs.coordinator_place import LOG_NAME, SOCKET_NAME
from kvpool.procs.coordinator_preload import Preload
from kvpool.procs.coordinator_resize import Resizes
from kvpool.procs.coordinator_segments import Staging
from kvpool.procs.coordinator_workers import Worker, Workers
from kvpool.wire.messages import (
    Announce,
    ClientJoined,
    ClientProven,
    ClientSettings,
    CopiesEnded,
    DevicesChanged,
    EpochKept,
    EpochsTold,
    FilesRemoved,
    HealthWanted,
    Hello,
    KeysProbe,
    KeysProbed,
    KeysTold,
    Message,
    NamespaceOpened,
    NamespaceSpec,
    PreloadAnswer,
    PreloadLanded,
    PreloadRevoked,
    Refused,
    Report,
    ResetDone,
    ResetWanted,
    ResizeWanted,
    ScanEnded,
    SegmentForgotten,
    SegmentReturned,
    StagingUsed,
    StopWanted,
    StoresWanted,
    Welcome,
    Withdraw,
    WorkerDown,
    WorkerState,
    WorkerStoresEnded,
    WorkerUp,
)

#: A pool started by a client waits this long for its first client.
FIRST_CLIENT_S = 30.0
#: How often schedulers hear of devices while those change.
DEVICES_TOLD_S = 0.05
#: Engines remembered as having to reset.
OUTDATED_MAX = 64
#: What is filled must be written by then; after that the workers are killed.
DRAIN_S = 120.0

log = logging.getLogger("kvpool.coordinator")


class Coordinator:
    """
    See the module.

    Args:
        settings: The pool's configuration, checked.
        config_json: The same as JSON, for the workers.
        detached: Started by a client: ends after the last one.
        worker_module: What `python -m` runs as a worker; another one only in tests.
    """

    def __init__(self, settings: Settings, config_json: str, *, detached: bool, worker_module: str) -> None:
        self._settings = settings
        self._detached = detached
        self._started_ns = time.monotonic_ns()
        self._generation = time.time_ns()
        self.draining = False
        self.loop = Loop()
        self._namespaces = Namespaces()
        self._directory = Directory(
            len(settings.device), shared=[number for number, device in enumerate(settings.device) if device.shared]
        )
        shares = [DeviceShare(weight=device.weight, iodepth=device.iodepth) for device in settings.device]
        self._staging = Staging(self.loop, settings.pool.staging_bytes, shares, self._granted)
        self._resizes = Resizes(self.loop, self._staging, device_count=len(settings.device))
        names = [device.name for device in settings.device]
        self._workers = Workers(
            self.loop,
            self,
            device_names=names,
            generation=self._generation,
            config_json=config_json,
            module=worker_module,
        )
        listener = channel.listen(os.path.join(settings.pool.run_dir, SOCKET_NAME))
        self._clients = Clients(self.loop, listener, self, self._namespaces)
        self._preload = Preload(
            self.loop, settings, self._directory, send=self._send_worker, waits=self._staging.waiting
        )
        self._epochs = Epochs(self.loop, self, len(settings.device))
        #: False: somebody told the pool to store nothing for now.
        self._stores_on = True
        #: Engines that have to reset since another one did, in order.
        self._outdated: dict[str, None] = {}
        self._rounds = Rounds(self.loop, self._health_rows, self._pool_facts)
        self._devices_told_ns = 0
        self.loop.at_turn_end(self._tell_schedulers)
        self.loop.on_signals([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], self._signalled)

    # ---------------------------------------------------------------- running

    def run(self) -> int:
        """Serve until the pool ends; return the exit code."""
        self._workers.go_on()
        if self._detached:
            self._end_when_idle(FIRST_CLIENT_S)
        try:
            return self.loop.run()
        finally:
            self._close()

    def _close(self) -> None:
        self._workers.kill()
        os.unlink(os.path.join(self._settings.pool.run_dir, SOCKET_NAME))
        self._clients.close()
        self._staging.close()
        self.loop.close()

    def _signalled(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP and self._detached:
            return
        if self.draining:
            log.warning("%s again: ending at once; what was not written is lost", name)
            self.loop.stop(Exit.OK)
        else:
            self.drain(name)

    def drain(self, why: str) -> None:
        """Let the workers write what is filled, then end."""
        if self.draining:
            return
        log.info("ending (%s): writing what is filled first", why)
        self.draining = True
        self.loop.cancel_timer("idle")
        self.loop.set_timer("drain", time.monotonic_ns() + int(DRAIN_S * 1e9), self._drain_too_long)
        self._workers.drain()

    def _drain_too_long(self) -> None:
        log.error("workers did not write everything within %g s: ending without it", DRAIN_S)
        self.loop.stop(Exit.DEGRADED)

    def _end_when_idle(self, after_s: float) -> None:
        if self._detached and not self.draining and self._clients.engine_side_count == 0:
            when_ns = time.monotonic_ns() + int(after_s * 1e9)
            self.loop.set_timer("idle", when_ns, lambda: self.drain("no client is left"))

    # ---------------------------------------------------------------- workers (WorkerEvents)

    def worker_ready(self, worker: Worker) -> None:
        """Tell it the namespaces, join it with every rank, grant it staging."""
        self._epochs.worker_ready(worker.device)
        self._directory.worker_up(worker.device)
        for number, spec in self._namespaces.specs.items():
            worker.peer.send(NamespaceOpened(namespace=number, spec=spec))
        for client in self._clients.with_role(RANK):
            self._join(client, worker)
        if not self._stores_on:
            worker.peer.send(StoresWanted(on=False))
        self._staging.worker_up(worker.device, worker.peer)
        self._devices_changed()

    def worker_said(self, worker: Worker, message: Message) -> None:
        """Handle any message of a worker but WorkerReady."""
        match message:
            case EpochsTold():
                self._epochs.told(worker.device, message)
            case EpochKept():
                self._epochs.kept(worker.device, message)
            case KeysTold():
                self._directory.told(message.namespace, worker.device, message.entries)
                self._preload.keys_told(worker.device, message)
            case WorkerStoresEnded():
                self._stores_ended(message)
            case WorkerState():
                worker.state = message.state
                self._directory.device_changed(worker.device, healthy=message.state.healthy)
                self._preload.state_told(message)
                self._devices_changed()
            case KeysProbed():
                self._send_statuses(self._directory.probed(worker.device, message.probe, now_ns=time.monotonic_ns()))
            case ScanEnded():
                self._directory.scan_ended(message.namespace, worker.device)
            case PreloadAnswer() | PreloadRevoked() | PreloadLanded():
                self._preload.worker_said(worker.device, message)
            case StagingUsed(sizes=sizes):
                self._staging.used(worker.device, sizes)
            case SegmentReturned():
                self._staging.returned(message.segment)
            case Report():
                self._rounds.reported(worker.peer, message.report, message.facts)
            case _:
                raise ProtocolError("not a worker's message", type=type(message).__name__)

    def worker_ended(self, worker: Worker) -> list[int]:
        """Tell its clients; return the segments that wait for proof."""
        for number in worker.joined:
            client = self._clients.attached.get(number)
            if client is not None:
                client.peer.send(WorkerDown(device=worker.device, worker_generation=worker.generation))
        self._send_statuses(self._directory.worker_down(worker.device))
        self._preload.worker_ended(worker.device)
        self._epochs.worker_gone(worker.device)
        self._devices_changed()
        return self._staging.worker_down(worker.device)

    def worker_never_ready(self, device: int) -> None:
        """What its device keeps is not known, and not waited for."""
        self._epochs.worker_gone(device)

    def segments_proven(self, segments: list[int]) -> None:
        """A dead worker's segments may be used again."""
        self._staging.proven(segments)

    def no_worker_left(self, failed: Exit | None) -> None:
        """Nothing can be served any more: end."""
        if failed is not None:
            log.error("no device can be used: the pool ends")
            reason = HostError("no device can be used", log=os.path.join(self._settings.pool.run_dir, LOG_NAME))
            for client in self._clients.attached.values():
                client.peer.send(Refused(code=reason.code, message=reason.message, context=reason.context))
        self.loop.stop(Exit.OK if failed is None else failed)

    def _granted(self, device: int) -> None:
        self._preload.room_changed(device)

    def _stores_ended(self, message: WorkerStoresEnded) -> None:
        for number in self._directory.stores_ended(message.engine, message.kept, message.dropped):
            self._clients.attached[number].peer.hang_up(PeerGone("peer does not read", waiting="ends of stores"))

    def _join(self, client: Client, worker: Worker) -> None:
        """Give a rank and a worker a socket between them."""
        try:
            rank_end, worker_end = channel.pair()
        except OSError as error:
            raise HostError("no descriptor is free", limit="RLIMIT_NOFILE", reason=str(error)) from error
        with rank_end, worker_end:
            joined = ClientJoined(
                client=client.number, engine=client.engine, namespace=client.namespace, rank=client.rank, pid=client.pid
            )
            worker.joined.add(client.number)
            worker.peer.send(joined, [worker_end.fileno()])
            up = WorkerUp(device=worker.device, worker_generation=worker.generation)
            client.peer.send(up, [rank_end.fileno()])

    # ---------------------------------------------------------------- clients (ClientEvents)

    def epoch_for(self, hello: Hello) -> int | Hello:
        """Return the epoch to let it in to, or what it says again later."""
        return self._epochs.admit(hello)

    def open_namespace(self, spec: NamespaceSpec, *, weight: int) -> int:
        """Make a namespace usable everywhere; raise HostError if staging has no room for it."""
        known = self._namespaces.find(spec)
        number = self._namespaces.next_number if known is None else known
        sizes = [group.object_bytes for group in spec.groups]
        self._staging.open_namespace(number, spec.rank_count, sizes, weight=weight)
        if known is None:
            served = spec_of(spec, self._epochs.book.current(spec.fingerprint))
            self._namespaces.open(spec, served)
            log.info("namespace %d: model %s, %d ranks, %d groups, fingerprint %s, epoch %d", number, spec.model_name,
                     spec.rank_count, len(spec.groups), spec.fingerprint[:8], epoch_of(served))  # fmt: skip
            self._directory.open_namespace(number)
            self._preload.open_namespace(number, served)
            for worker in self._workers.ready:
                worker.peer.send(NamespaceOpened(namespace=number, spec=served))
        return number

    def client_joined(self, client: Client) -> None:
        """Welcome it and give it what its role needs."""
        client.peer.send(self._welcome(client))
        if client.role == ADMIN:
            return
        self.loop.cancel_timer("idle")
        if client.role == RANK:
            self._staging.rank_joined(client.number, client.peer)
            for worker in self._workers.ready:
                self._join(client, worker)
        else:
            self._outdated.pop(client.engine, None)
            self._directory.scheduler_joined(client.number, client.engine, client.namespace)
            client.peer.send(DevicesChanged(devices=self._workers.device_states()))

    def client_said(self, client: Client, message: Message) -> None:
        """Handle any message of a client but Hello."""
        match message, client.role:
            case Announce(), coordinator_clients.SCHEDULER:
                self._announced(client, message)
            case Withdraw(started=True), coordinator_clients.SCHEDULER:
                self._preload.started(client.number, message.requests)
            case Withdraw(), coordinator_clients.SCHEDULER:
                self._preload.withdrawn(client.number, message.requests)
                self._directory.withdraw(client.number, message.requests)
            case CopiesEnded(), coordinator_clients.RANK:
                self._workers.copies_ended(client.number, message.device, message.worker_generation)
            case SegmentForgotten(), coordinator_clients.RANK:
                self._staging.forgotten(client.number, message.segment)
            case Report(), _:
                self._rounds.reported(client.peer, message.report, message.facts)
            case _, coordinator_clients.ADMIN:
                self._admin_said(client, message)
            case _:
                raise ProtocolError("not a message of that role", type=type(message).__name__, role=client.role)

    def _admin_said(self, client: Client, message: Message) -> None:
        match message:
            case HealthWanted():
                self._rounds.asked(client.peer)
            case ResizeWanted(staging_bytes=staging_bytes):
                self._resizes.asked(client.peer, staging_bytes, draining=self.draining)
            case ResetWanted():
                self._try_reset(client, message.name)
            case StoresWanted():
                self._switch_stores(client, message)
            case FilesRemoved():
                for device, settings in enumerate(self._settings.device):
                    if os.path.realpath(settings.path) == os.path.realpath(message.device_path):
                        self._send_worker(device, message)
            case StopWanted():
                self.drain("asked to stop")
            case _:
                raise ProtocolError("not a message of that role", type=type(message).__name__, role=client.role)

    def _switch_stores(self, client: Client, message: StoresWanted) -> None:
        if message.on != self._stores_on:
            log.warning("stores are turned %s by `kvpool stores`; loads go on", "on" if message.on else "off")
        self._stores_on = message.on
        for worker in self._workers.ready:
            worker.peer.send(message)
        client.peer.send(message)

    def _announced(self, client: Client, message: Announce) -> None:
        statuses, probes = self._directory.announce(
            client.number, message.request, message.first, message.keys, now_ns=time.monotonic_ns()
        )
        self._send_statuses(statuses)
        self._send_probes(probes)
        self._preload.announced(
            client.number,
            client.namespace,
            message.request,
            message.first,
            more=message.more,
            priority=message.priority,
        )

    def client_left(self, client: Client) -> None:
        """Forget what it announced; end the pool some time after the last one."""
        if client.role == SCHEDULER:
            self._preload.withdrawn(client.number, self._directory.requests_of(client.number))
            self._directory.scheduler_left(client.number)
        elif client.role == RANK:
            self._staging.rank_left(client.number)
        if all(other.namespace != client.namespace for other in self._clients.attached.values()):
            self._staging.close_namespace(client.namespace)
        self._end_when_idle(self._settings.pool.idle_exit_s)

    def client_proven(self, client: Client) -> None:
        """A departed rank touches no slot and maps no segment any more."""
        for worker in self._workers.ready:
            if client.number in worker.joined:
                worker.peer.send(ClientProven(client=client.number))
        self._workers.client_proven(client.number)
        self._staging.rank_proven(client.number)

    # ---------------------------------------------------------------- resets (EpochEvents)

    def epoch_moved(self, fingerprint: str) -> None:
        """Everybody under the old epoch must come again; schedulers that did not ask for it are not let in then."""
        number = self._namespaces.close(fingerprint)
        if number is None:
            return
        reason = PoolUnavailable("the model's cache was reset: come again")
        for client in [client for client in self._clients.attached.values() if client.namespace == number]:
            if client.role == SCHEDULER and len(self._outdated) < OUTDATED_MAX:
                self._outdated[client.engine] = None
            self._clients.dismiss(client, reason)
        self._staging.close_namespace(number)
        self._directory.retire_namespace(number)

    def greetings_may_go_on(self) -> None:
        """Look at those who wait."""
        self._clients.hear_waiting()

    def reset_failed(self, fingerprint: str, error: KvpoolError) -> None:
        """Those who wait for a reset wait in vain."""
        self._clients.refuse_waiting(fingerprint, error)

    def tell_worker(self, device: int, message: Message) -> None:
        """Send to a device's worker, if it is ready."""
        self._send_worker(device, message)

    def devices_ready(self) -> list[int]:
        """Return the devices whose workers are ready."""
        return [worker.device for worker in self._workers.ready]

    def _try_reset(self, admin: Client, name: str) -> None:
        try:
            self._reset(admin, name)
        except KvpoolError as error:
            self._clients.dismiss(admin, error)

    def _reset(self, admin: Client, name: str) -> None:
        """Reset by hand: nobody moves by it, as nobody's KV is known to be of after it."""
        known = {base.fingerprint: base.model_name for base in self._namespaces.named(name)}
        if not known and FINGERPRINT.fullmatch(name):
            known = {name: "(no engine attached)"}
        if not known:
            raise ConfigError("no open namespace has that model name or fingerprint", name=name[:200])
        said = [f"{model} {fingerprint[:8]}" for fingerprint, model in known.items()]
        waiting = set(known)

        def ended(raised: Raised) -> None:
            waiting.discard(raised.fingerprint)
            if not raised.kept:
                self._clients.dismiss(admin, HostError("no device could keep the reset durably"))
            elif not waiting:
                admin.peer.send(ResetDone(namespaces=said, engines=sorted(self._outdated)))

        for fingerprint in known:
            if self._epochs.book.rising(fingerprint):
                raise PoolUnavailable("a reset of it is under way: try again")
            self._epochs.raise_to(fingerprint, self._epochs.book.current(fingerprint) + 1, ended)

    def _engines_outdated(self) -> list[str]:
        """Return the engines that are here and have to reset before they load or store again."""
        here = {client.engine for client in self._clients.attached.values()}
        return sorted(engine for engine in self._outdated if engine in here)

    def _welcome(self, client: Client) -> Welcome:
        pool = self._settings.pool
        return Welcome(
            generation=self._generation,
            client=client.number,
            namespace=client.namespace,
            devices=[device.name for device in self._settings.device],
            device_weights=[device.weight for device in self._settings.device],
            epoch=epoch_of(self._namespaces.specs[client.namespace]) if client.namespace else 0,
            settings=ClientSettings(
                load_deadline_s=pool.load_deadline_s,
                store_deadline_s=pool.store_deadline_s,
                defer_backlog_s=pool.defer_backlog_s,
                answer_deadline_s=pool.answer_deadline_s,
                self_test=pool.self_test,
            ),
        )

    # ---------------------------------------------------------------- what schedulers hear

    def _send_statuses(self, statuses: list[SendStatus]) -> None:
        for number, status in statuses:
            client = self._clients.attached.get(number)
            if client is not None:
                client.peer.send(status)

    def _send_worker(self, device: int, message: Message) -> None:
        worker = self._workers.find_ready(device)
        if worker is not None:
            worker.peer.send(message)

    def _send_probes(self, probes: list[SendProbe]) -> None:
        for device, number, namespace, keys in probes:
            self._send_worker(device, KeysProbe(probe=number, namespace=namespace, keys=keys))

    def _tell_schedulers(self) -> None:
        """Once a turn: tell each scheduler that has read what it was told before."""
        for client in self._clients.with_role(SCHEDULER):
            if client.peer.queued == 0 and not client.peer.gone and self._directory.has_news(client.number):
                for message in self._directory.take_news(client.number):
                    client.peer.send(message)

    def _devices_changed(self) -> None:
        """Tell the schedulers of the devices, now or when DEVICES_TOLD_S have passed since the last time."""
        due_ns = max(time.monotonic_ns(), self._devices_told_ns + int(DEVICES_TOLD_S * 1e9))
        self.loop.set_timer("devices", due_ns, self._tell_devices)

    def _tell_devices(self) -> None:
        self._devices_told_ns = time.monotonic_ns()
        message = DevicesChanged(devices=self._workers.device_states())
        for client in self._clients.with_role(SCHEDULER):
            client.peer.send(message)

    # ---------------------------------------------------------------- health

    def _pool_facts(self) -> Facts:
        return {
            f.VERSION: __version__,
            f.RUN_DIR: self._settings.pool.run_dir,
            f.GENERATION: self._generation,
            f.STARTED_BY: "client" if self._detached else "serve",
            f.DEVICES: len(self._settings.device),
            f.DEVICES_HEALTHY: sum(state.healthy for state in self._workers.device_states()),
            f.CLIENTS: self._clients.engine_side_count,
            f.KEYS: self._directory.statistics()["keys"],
            f.STORES_ON: self._stores_on,
            f.ENGINES_OUTDATED: ", ".join(self._engines_outdated()),
            f.PEERS_REFUSED: self._clients.refused_count,
            f.PEERS_DROPPED: self._clients.dropped_count,
            **self._staging.facts(),
            **self._preload.facts(),
        }

    def _health_rows(self) -> list[Row]:
        clients = [client for client in self._clients.attached.values() if client.role != ADMIN]
        return [
            self._coordinator_row(),
            *(self._worker_row(device) for device in range(len(self._settings.device))),
            *(self._client_row(client) for client in clients),
        ]

    def _coordinator_row(self) -> Row:
        peers = [client.peer for client in self._clients.attached.values()]
        peers += [worker.peer for worker in self._workers.ready]
        return Row(
            {
                f.ROLE: f.COORDINATOR,
                f.PID: os.getpid(),
                f.STATE: f.DRAINING if self.draining else f.RUNNING,
                f.UPTIME_S: _seconds_since(self._started_ns),
                f.QUEUE_MESSAGES: sum(peer.queued for peer in peers),
            }
        )

    def _worker_row(self, device: int) -> Row:
        child, worker = self._workers.children[device], self._workers.running.get(device)
        known: Facts = {
            f.ROLE: f.IO_WORKER,
            f.DEVICE: self._settings.device[device].name,
            f.DEVICE_PATH: self._settings.device[device].path,
            f.RESTARTS: child.restarts,
        }
        if worker is None:
            return Row({**known, f.STATE: f.DOWN})
        known |= {f.PID: worker.popen.pid, f.WORKER_GENERATION: worker.generation}
        if child.started_ns is not None:
            known[f.UPTIME_S] = _seconds_since(child.started_ns)
        if not worker.ready:
            return Row({**known, f.STATE: f.STARTING})
        known[f.STATE] = f.DRAINING if self.draining else f.RUNNING
        return Row(known, worker.peer, {f.IO_MODE: worker.io_mode})

    def _client_row(self, client: Client) -> Row:
        return Row(
            {
                f.ROLE: client.role,
                f.PID: client.pid,
                f.STATE: f.RUNNING,
                f.UPTIME_S: _seconds_since(client.attached_ns),
                f.CLIENT: client.number,
                f.ENGINE: client.engine,
                f.RANK: client.rank,
                f.NAMESPACE: client.namespace,
                f.MODEL: self._namespaces.specs[client.namespace].model_name,
            },
            client.peer,
            awaited=client.role != SCHEDULER,
        )


def _seconds_since(when_ns: int) -> float:
    return round((time.monotonic_ns() - when_ns) / 1e9, 3)
