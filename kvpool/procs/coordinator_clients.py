"""
The pool's clients: let in or refused, known by number, and proven gone.

Theory. A peer that connects has `HELLO_S` to say Hello and is told Welcome or Refused, with the
reason. Only processes of the pool's own user are heard at all.

A client goes   greeting -> attached -> left -> proven.   It has *left* when its socket is gone; a
rank may still be copying then. It is *proven* when nothing of it can touch a slot any more: its
process has ended (its pidfd is readable), or the same process greets again for the same rank, which
a client does only after it has ended its copies and unmapped the old staging.

Covers: greeting, identity, proof. Does not cover: what clients want (`coordinator.py`).
"""

import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import Protocol

from kvpool.config import WEIGHT_MAX
from kvpool.errors import ConfigError, HostError, KvpoolError, PoolUnavailable, ProtocolError
from kvpool.io import channel, process
from kvpool.procs.coordinator_loop import Loop
from kvpool.procs.coordinator_namespaces import Namespaces
from kvpool.procs.coordinator_peer import Peer
from kvpool.wire.messages import (
    PROTOCOL_VERSION,
    ClientToCoordinator,
    Hello,
    Message,
    NamespaceSpec,
    Refused,
)

ADMIN, RANK, SCHEDULER = "admin", "rank", "scheduler"
#: A peer that has not said Hello by then is dropped.
HELLO_S = 5.0
#: A greeting that has to wait, for the workers' start or for a reset, is refused then.
WAIT_S = 12.0
#: Peers that may be greeting at the same time, and clients in all.
GREETING_MAX = 64
CLIENTS_MAX = 1024
ENGINE_BYTES_MAX = 200
#: How long to leave new peers waiting when no descriptor is free.
ACCEPT_PAUSE_S = 1.0

log = logging.getLogger("kvpool.coordinator")


@dataclass(slots=True, kw_only=True, eq=False)
class Client:
    """
    One attached client.

    Attributes:
        number: The pool's number for it; never given twice.
        role: ADMIN, RANK or SCHEDULER.
        namespace: The pool's number, 0 for an admin.
        pidfd: Of its process; kept by ranks until they are proven, None for others.
        attached_ns: When it was let in.
    """

    number: int
    role: str
    engine: str
    namespace: int
    rank: int
    pid: int
    peer: Peer
    pidfd: int | None
    attached_ns: int

    def __str__(self) -> str:
        rank = f" {self.rank}" if self.role == RANK else ""
        return f"{self.role}{rank} of engine {self.engine!r}, pid {self.pid}"


class ClientEvents(Protocol):
    """What the coordinator is told of clients."""

    draining: bool

    def epoch_for(self, hello: Hello) -> int | Hello:
        """Return the epoch to let it in to, or what it says again later; raises KvpoolError if it is not let in."""

    def open_namespace(self, spec: NamespaceSpec, *, weight: int) -> int:
        """Make a namespace usable and return its number; raises HostError if staging has no room for it."""

    def client_joined(self, client: Client) -> None:
        """It was let in, and waits for its Welcome."""

    def client_said(self, client: Client, message: Message) -> None:
        """Anything but Hello; may raise KvpoolError, which ends that client."""

    def client_left(self, client: Client) -> None:
        """Its socket is gone."""

    def client_proven(self, client: Client) -> None:
        """A rank that left touches no slot any more."""


class _Greeting:
    """A peer that has not said Hello."""

    def __init__(self, peer: Peer, uid: int, pid: int, deadline_ns: int) -> None:
        self.peer, self.uid, self.pid, self.deadline_ns = peer, uid, pid, deadline_ns
        self.client: Client | None = None
        #: What it said, while it has to wait for its answer.
        self.hello: Hello | None = None


class Clients:
    """See the module."""

    def __init__(self, loop: Loop, listener: socket.socket, events: ClientEvents, namespaces: Namespaces) -> None:
        self._loop = loop
        self._listener = listener
        self._events = events
        self._namespaces = namespaces
        self._greeting: dict[_Greeting, None] = {}  # in the order of their arrival
        self._next_number = 1
        self.attached: dict[int, Client] = {}
        #: Ranks that left and are not proven, by number.
        self.unproven: dict[int, Client] = {}
        self.refused_count = 0
        self.dropped_count = 0
        loop.watch(listener.fileno(), self._accept)

    def with_role(self, role: str) -> list[Client]:
        """Return the attached clients of one role, by number."""
        return [client for client in self.attached.values() if client.role == role]

    @property
    def engine_side_count(self) -> int:
        """Attached ranks and schedulers."""
        return sum(client.role != ADMIN for client in self.attached.values())

    # ---------------------------------------------------------------- greeting

    def _accept(self, _events: int) -> None:
        while True:
            try:
                sock = channel.accept(self._listener)
            except HostError as error:
                log.error("new clients must wait: %s", error)
                self._pause()
                return
            if sock is None:
                return
            self._greet(sock)

    def _pause(self) -> None:
        fd = self._listener.fileno()
        self._loop.forget(fd)
        until_ns = time.monotonic_ns() + int(ACCEPT_PAUSE_S * 1e9)
        self._loop.set_timer("accept", until_ns, lambda: self._loop.watch(fd, self._accept))

    def _greet(self, sock: socket.socket) -> None:
        uid, pid = channel.peer_uid(sock), channel.peer_pid(sock)
        peer = Peer(
            self._loop, sock, Hello | ClientToCoordinator,
            on_message=lambda message, _fds: self._said(greeting, message),
            on_gone=lambda reason: self._gone(greeting, reason),
        )  # fmt: skip
        greeting = _Greeting(peer, uid, pid, time.monotonic_ns() + int(HELLO_S * 1e9))
        self._greeting[greeting] = None
        if uid != os.geteuid():
            self._refuse(greeting, ConfigError("the pool serves its own user only", uid=uid, pool_uid=os.geteuid()))
        elif len(self._greeting) > GREETING_MAX or len(self.attached) >= CLIENTS_MAX:
            self._refuse(greeting, PoolUnavailable("too many clients at once: try again", clients_max=CLIENTS_MAX))
        self._set_timer()

    def _set_timer(self) -> None:
        first_ns = min((greeting.deadline_ns for greeting in self._greeting), default=None)
        self._loop.set_timer("hello", first_ns, self._expire)

    def _expire(self) -> None:
        now_ns = time.monotonic_ns()
        for greeting in list(self._greeting):
            if greeting.deadline_ns > now_ns:
                continue
            if greeting.hello is None:
                self._refuse(greeting, ProtocolError("no Hello came", waited_s=HELLO_S))
            else:
                self._refuse(greeting, PoolUnavailable("the pool was not ready in time: try again", waited_s=WAIT_S))
        self._set_timer()

    def _refuse(self, greeting: _Greeting, error: KvpoolError) -> None:
        """Tell a peer why it is not served, and serve it no more."""
        self._greeting.pop(greeting, None)
        self.refused_count += 1
        log.warning("refused a peer (pid %d, uid %d): %s", greeting.pid, greeting.uid, error)
        greeting.peer.send(Refused(code=error.code, message=error.message, context=error.context))
        greeting.peer.close()

    def _said(self, greeting: _Greeting, message: Message) -> None:
        if greeting.client is not None:
            if isinstance(message, Hello):
                raise ProtocolError("a second Hello")
            self._events.client_said(greeting.client, message)
        elif not isinstance(message, Hello) or greeting.hello is not None:
            self._refuse(greeting, ProtocolError("the first message must be one Hello", type=type(message).__name__))
        else:
            self._hear(greeting, message)

    def _hear(self, greeting: _Greeting, hello: Hello) -> None:
        """Let a peer in, refuse it, or let it wait."""
        try:
            client = self._admit(greeting, hello)
        except KvpoolError as error:
            self._refuse(greeting, error)
            return
        if client is None:
            return
        self._greeting.pop(greeting, None)
        greeting.client = self.attached[client.number] = client
        if client.role != ADMIN:
            log.info("client %d attached: %s", client.number, client)
        self._events.client_joined(client)

    def hear_waiting(self) -> None:
        """Look again at the greetings that wait."""
        for greeting in list(self._greeting):
            if greeting.hello is not None and greeting in self._greeting:
                self._hear(greeting, greeting.hello)
        self._set_timer()

    def refuse_waiting(self, fingerprint: str, error: KvpoolError) -> None:
        """What greetings of that namespace wait for will not come."""
        for greeting in list(self._greeting):
            spec = greeting.hello.namespace if greeting.hello is not None else None
            if spec is not None and spec.fingerprint == fingerprint:
                self._refuse(greeting, error)

    def dismiss(self, client: Client, error: KvpoolError) -> None:
        """Serve a client no more, and tell it why: it may come again. One that has left is left alone."""
        if client.number not in self.attached:
            return
        log.info("client %d, %s, is sent away: %s", client.number, client, error)
        client.peer.send(Refused(code=error.code, message=error.message, context=error.context))
        client.peer.close()
        self._leave(client)

    def _wait(self, greeting: _Greeting, hello: Hello) -> None:
        if greeting.hello is None:
            greeting.deadline_ns = time.monotonic_ns() + int(WAIT_S * 1e9)
        greeting.hello = hello
        self._set_timer()

    def _admit(self, greeting: _Greeting, hello: Hello) -> Client | None:
        """Return the client that *hello* makes of a peer, None where it has to wait; or raise why not."""
        if hello.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                "protocol versions differ: use the same kvpool on both sides",
                pool_protocol=PROTOCOL_VERSION, client_protocol=hello.protocol, client_version=hello.version,
            )  # fmt: skip
        if self._events.draining and hello.role != ADMIN:
            raise PoolUnavailable("the pool is ending: start a new one when it is gone")
        self._check_identity(greeting, hello)
        epoch = self._events.epoch_for(hello)
        if isinstance(epoch, Hello):
            self._wait(greeting, epoch)
            return None
        pidfd = self._watch_process(greeting) if hello.role == RANK else None
        try:
            # Last: a namespace is opened for clients that are let in.
            namespace = (
                0 if hello.namespace is None else self._events.open_namespace(hello.namespace, weight=hello.weight)
            )
        except KvpoolError:
            if pidfd is not None:
                os.close(pidfd)
            raise
        number = self._next_number
        self._next_number += 1
        return Client(
            number=number, role=hello.role, engine=hello.engine, namespace=namespace, rank=hello.rank,
            pid=greeting.pid or hello.pid, peer=greeting.peer, pidfd=pidfd, attached_ns=time.monotonic_ns(),
        )  # fmt: skip

    def _check_identity(self, greeting: _Greeting, hello: Hello) -> None:
        """Raise unless a peer may be what it says."""
        if hello.role not in (ADMIN, RANK, SCHEDULER):
            raise ProtocolError("unknown role", role=hello.role)
        spec = hello.namespace
        if hello.role == ADMIN:
            if spec is not None:
                raise ProtocolError("an admin has no namespace")
            return
        if spec is None:
            raise ProtocolError("a rank or scheduler must name its namespace", role=hello.role)
        if not 0 < len(hello.engine.encode()) <= ENGINE_BYTES_MAX:
            raise ProtocolError("engine must be named in 1 to 200 bytes", engine=hello.engine[:ENGINE_BYTES_MAX])
        if not 1 <= hello.weight <= WEIGHT_MAX:
            raise ProtocolError("weight of an engine is out of range", weight=hello.weight, weight_max=WEIGHT_MAX)
        namespace = self._namespaces.find(spec)
        if hello.role == RANK and not 0 <= hello.rank < spec.rank_count:
            raise ConfigError("rank is not below rank_count", rank=hello.rank, rank_count=spec.rank_count)
        self._check_engine(greeting, hello, namespace)

    def _check_engine(self, greeting: _Greeting, hello: Hello, namespace: int | None) -> None:
        for other in [*self.attached.values(), *self.unproven.values()]:
            if other.role == ADMIN or other.engine != hello.engine:
                continue
            if other.namespace != namespace and other.number in self.attached:
                raise ConfigError(
                    "this engine is attached with another namespace: its ranks and scheduler must agree",
                    engine=hello.engine, rank=hello.rank,
                )  # fmt: skip
            if (other.role, other.rank) != (hello.role, hello.rank):
                continue
            if other.pid != greeting.pid and other.number in self.attached:
                raise ConfigError(
                    "that rank or scheduler of this engine is attached already",
                    engine=hello.engine, role=hello.role, rank=hello.rank, pid=other.pid,
                )  # fmt: skip
            if other.pid == greeting.pid:
                self._replaced(other)

    def _replaced(self, old: Client) -> None:
        """The process of *old* greets anew: it has ended all copies of the old session."""
        if old.number in self.attached:
            old.peer.close()
            self._leave(old)
        self._prove(old)

    def _watch_process(self, greeting: _Greeting) -> int:
        if greeting.pid <= 0:
            raise HostError("the rank's process is not visible here: let it share the pool's PID namespace")
        pidfd = process.pidfd_open(greeting.pid)
        if pidfd is None:
            raise PoolUnavailable("the rank's process has ended", pid=greeting.pid)
        return pidfd

    # ---------------------------------------------------------------- leaving

    def _gone(self, greeting: _Greeting, reason: KvpoolError) -> None:
        client = greeting.client
        if client is None:
            if greeting in self._greeting:
                self._greeting.pop(greeting, None)
                self.refused_count += isinstance(reason, ProtocolError)
                log.warning("dropped a peer before its Hello (pid %d): %s", greeting.pid, reason)
            self._set_timer()
            return
        if client.number not in self.attached:
            return
        if isinstance(reason, ProtocolError):
            self.refused_count += 1
            log.error("dropped client %d, %s: %s", client.number, client, reason)
        elif client.role != ADMIN:
            self.dropped_count += reason.message == "peer does not read"
            log.info("client %d left, %s: %s", client.number, client, reason)
        self._leave(client)

    def _leave(self, client: Client) -> None:
        del self.attached[client.number]
        if client.pidfd is not None:
            self.unproven[client.number] = client
            self._loop.watch(client.pidfd, lambda _: self._prove(client))
        self._events.client_left(client)

    def _prove(self, client: Client) -> None:
        if self.unproven.pop(client.number, None) is None or client.pidfd is None:
            return
        self._loop.forget(client.pidfd)
        os.close(client.pidfd)
        client.pidfd = None
        self._events.client_proven(client)

    def close(self) -> None:
        """Hang up on everybody."""
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for greeting in self._greeting:
            greeting.peer.close()
        for client in [*self.attached.values(), *self.unproven.values()]:
            client.peer.close()
            if client.pidfd is not None:
                os.close(client.pidfd)
