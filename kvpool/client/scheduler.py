"""
The scheduler client: what vLLM's scheduler asks of the pool, answered from memory.

Theory. All it knows is in `core/requests.py`; this is its shell. No thread: the socket is read inside the scheduler's
own calls (`pump`, one system call when there is nothing), and written without blocking; only `await_news` waits, for
as long as its caller says. Where no pool answers, everything is a miss at once, and every RETRY_S_MIN to RETRY_S_MAX
one of the calls tries to connect (a system call that never waits). It never starts a pool: the ranks do. When attached
again, it announces again.

Whatever goes wrong makes misses. A bug (InvariantError) or an unknown error disables the client for good: it is
logged once, and everything is a miss from then on.
"""

import contextlib
import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import kvpool
from kvpool.client.launch import GREETING_S, RETRY_S_MAX, RETRY_S_MIN, ClientConfig, connect_pool
from kvpool.core.placement import device_of
from kvpool.core.requests import AnnouncedRequests, Hit, Later, Lookup, Miss
from kvpool.errors import HostError, InvariantError, KvpoolError, PeerGone, ProtocolError
from kvpool.io.channel import Channel
from kvpool.wire import messages as msg
from kvpool.wire.codec import split

__all__ = ["Hit", "Later", "Lookup", "Miss", "SchedulerClient"]

log = logging.getLogger(__name__)

#: Rounds of reading in one pump, so that a talkative pool cannot hold the scheduler.
_READS_MAX = 4

#: Keys of so many bytes together, ITEMS_MAX of them at most, fit one message: no need to measure each.
_UNSPLIT_BYTES_MAX = msg.FRAME_BYTES_MAX * 3 // 4

_DISABLED = Miss("disabled")
_T = TypeVar("_T")


class SchedulerClient:
    """
    One engine's scheduler side of the pool. Used from one thread; no call raises.

    Args:
        config: Where the pool is; a pool is never started from here.
        namespace: What this engine stores.
        engine: Identifies the engine; the same on its ranks.
    """

    def __init__(self, config: ClientConfig, namespace: msg.NamespaceSpec, *, engine: str) -> None:
        self._config = config
        self._namespace = namespace
        self._engine = engine
        self._table = AnnouncedRequests()
        self._channel: Channel | None = None
        self._welcome: msg.Welcome | None = None
        self._devices: dict[int, msg.DeviceState] = {}
        self._healthy: tuple[bool, ...] = ()
        self._withdrawn: list[str] = []
        self._started: list[str] = []
        self._retry_s = RETRY_S_MIN
        #: When to attempt a connection, or, while greeting, to give it up.
        self._due_ns = 0
        self._trouble = ""
        self._silence_said = False
        self._disabled = False
        #: The namespace's epoch that this engine's KV is of, -1 while unknown; and that it wants to leave it.
        self._epoch = -1
        self._resetting = False
        self._started_ns = time.monotonic_ns()
        #: What else the engine's scheduler tells for health.
        self.more_facts: Callable[[], dict[str, str | int | float | bool]] = dict
        self.pump()

    # ------------------------------------------------------------ requests

    def announce(self, request: str, keys: Sequence[bytes], priority: int = 0) -> None:
        """A request arrived that may want *keys*, in order; for a known request, these come behind the others."""
        self._guarded(lambda: self._announce(request, keys, priority), None)

    def withdraw(self, request: str) -> None:
        """A request finished, was aborted, or no longer waits. Told to the pool at the next `pump`."""
        self._guarded(lambda: self._withdraw(request), None)

    def started(self, request: str) -> None:
        """A request needs nothing read ahead any more; its keys are told of as before. Told at the next `pump`."""
        self._guarded(lambda: self._start(request), None)

    def waits_again(self, request: str) -> None:
        """A request that had started is back in the queue."""
        self._guarded(lambda: self._wait_again(request), None)

    def lookup(self, request: str, key: bytes) -> Lookup:
        """Answer for one key of an announced request, from memory."""
        if self._disabled:
            return _DISABLED
        return self._table.lookup(request, key, now_ns=time.monotonic_ns())

    def places(self, keys: Sequence[bytes]) -> list[int]:
        """Return where the stored beginning of *keys* lies, up to the first miss: see `core/chunk_places.py`."""
        return self._guarded(lambda: self._table.places(keys, now_ns=time.monotonic_ns()), [])

    def answered(self, request: str) -> bool:
        """Tell whether the pool has answered the announcement of *request*, or will not."""
        return self._guarded(lambda: self._table.answered(request, now_ns=time.monotonic_ns()), True)

    def pump(self) -> None:
        """Take in what the pool said, tell it what has to be told, look after time and connection. Once per step."""
        self._guarded(self._pump, None)

    def await_news(self, timeout_s: float) -> None:
        """Wait until the pool says something, at most *timeout_s*, and take it in: where lookups say "later"."""
        self._guarded(lambda: self._await_news(timeout_s), None)

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until the pool has welcomed this scheduler, at most *timeout_s*: at the engine's start, nowhere else."""
        due_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        while not self.connected and not self._disabled and time.monotonic_ns() < due_ns:
            poll = select.poll()
            if self._channel is not None:
                poll.register(self._channel.fileno(), select.POLLIN)
            poll.poll(RETRY_S_MIN * 1000)
            self.pump()
        return self.connected

    def reset(self) -> None:
        """
        The engine has dropped all its KV: load nothing from before, ever.

        Returns at once. Until the pool says that the reset is durable, everything is a miss; where no pool answers now,
        the next one is told before anything else.
        """
        self._guarded(self._reset, None)

    # ------------------------------------------------------------ stores

    def place_store(self, request: str, key: bytes, position: int, first_key: bytes) -> int:
        """
        Return the device to store *key* on: where the index has it, else by the rule of placement.

        Args:
            request: The request that stores it.
            position: Index of the chunk in its prefix.
            first_key: Key of the prefix's first chunk.
        """
        found = self.lookup(request, key)
        if isinstance(found, Hit):
            return found.device
        if self._welcome is None or not self._healthy:
            return 0
        return device_of(self._welcome.device_weights, self._healthy, first_key, position) or 0

    def store_offered(self, request: str, keys: Sequence[bytes]) -> None:
        """*request*'s stores of *keys* were handed to the ranks: until they end, the keys are "later"."""
        self._guarded(lambda: self._table.offer(request, keys, now_ns=time.monotonic_ns()), None)

    def request_cut(self, request: str) -> bool:
        """Tell whether a store of *request* was dropped: nothing behind it is worth storing."""
        return self._disabled or self._table.request_cut(request)

    # ------------------------------------------------------------ the pool

    @property
    def connected(self) -> bool:
        """A pool has welcomed this scheduler, and answers."""
        return self._welcome is not None and not self._disabled and not self._table.silent

    @property
    def epoch(self) -> int:
        """The namespace's epoch that this engine's KV is of: jobs name it; -1 while unknown."""
        return -1 if self._resetting else self._epoch

    @property
    def changes(self) -> int:
        """A counter that moves whenever a lookup may answer differently, save for the deadlines in `Later`."""
        return self._table.changes

    @property
    def settings(self) -> msg.ClientSettings | None:
        """What the pool's configuration says to clients; None while unconnected."""
        return self._welcome.settings if self._welcome is not None else None

    @property
    def devices(self) -> list[str]:
        """Names of the devices, in index order; empty while unconnected."""
        return self._welcome.devices if self._welcome is not None else []

    def device_states(self) -> dict[int, msg.DeviceState]:
        """Return the latest state of each device that the pool told."""
        return self._devices

    def counters(self) -> dict[str, int]:
        """Return what lookups and announcements came to, since the start."""
        return self._table.statistics()

    def facts(self) -> dict[str, str | int | float | bool]:
        """Return what this client tells about itself for health."""
        return {
            "role": "scheduler",
            "pid": os.getpid(),
            "state": "down" if self._disabled else "running" if self.connected else "starting",
            "engine": self._engine,
            "epoch": self.epoch,
            "model": self._namespace.model_name,
            "uptime_s": (time.monotonic_ns() - self._started_ns) / 1e9,
            **self._table.statistics(),
            **self.more_facts(),
        }

    def close(self) -> None:
        """Leave the pool."""
        self._drop_channel()
        self._disabled = True

    # ------------------------------------------------------------ inside

    def _guarded(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Run *call* at the border to the engine: nothing is raised into it."""
        if self._disabled:
            return otherwise
        try:
            return call()
        except Exception as error:  # border: the engine's scheduler must go on
            self._disabled = True
            self._table.changes += 1
            kind = "a bug in kvpool" if isinstance(error, InvariantError) else "an unexpected error"
            log.error("kvpool is disabled in the scheduler by %s; %r", kind, self.facts(), exc_info=error)
            with contextlib.suppress(Exception):
                self._drop_channel()
            return otherwise

    def _reset(self) -> None:
        self._resetting = True
        self._drop_channel()
        self._due_ns = 0
        self._pump()

    def _announce(self, request: str, keys: Sequence[bytes], priority: int) -> None:
        first = self._table.announce(request, keys, priority, now_ns=time.monotonic_ns())
        if self._welcome is not None:
            self._send_withdrawn()
            self._send_announce(request, first, keys, priority)

    def _withdraw(self, request: str) -> None:
        if self._table.withdraw(request) and self._welcome is not None:
            self._withdrawn.append(request)

    def _start(self, request: str) -> None:
        if self._table.start(request) and self._welcome is not None:
            self._started.append(request)

    def _wait_again(self, request: str) -> None:
        waiting = self._table.wait_again(request)
        if waiting is not None and self._welcome is not None:
            self._send_withdrawn()
            first, priority = waiting
            self._send_announce(request, first, [], priority)

    def _pump(self) -> None:
        now_ns = time.monotonic_ns()
        if self._channel is None:
            if now_ns >= self._due_ns:
                self._connect(now_ns)
        else:
            self._read(self._channel)
        if self._channel is not None and self._welcome is None and now_ns >= self._due_ns:
            self._lose("it does not answer the greeting")
        self._send_withdrawn()
        if self._channel is not None and self._channel.wants_write:
            self._written(self._channel.flush)
        self._table.time_passed(now_ns=now_ns)
        if self._table.silent != self._silence_said:
            self._say_silence()

    def _say_silence(self) -> None:
        """Say once that the pool counts as gone although it is connected, and once that it is back."""
        self._silence_said = self._table.silent
        if self._silence_said:
            log.warning("kvpool: the pool does not answer, everything is a miss until it does; %r", self.facts())
        else:
            log.info("kvpool: the pool answers again")

    def _await_news(self, timeout_s: float) -> None:
        if self._channel is not None:
            poll = select.poll()
            poll.register(self._channel.fileno(), select.POLLIN)
            poll.poll(timeout_s * 1000)
            self._pump()

    def _connect(self, now_ns: int) -> None:
        try:
            self._channel = Channel(connect_pool(self._config.run_dir), msg.CoordinatorToClient)
        except KvpoolError as error:
            self._later(f"no pool, everything is a miss: {error}")
            return
        self._due_ns = now_ns + int(GREETING_S * 1e9)
        hello = msg.Hello(
            protocol=msg.PROTOCOL_VERSION,
            version=kvpool.__version__,
            role="scheduler",
            engine=self._engine,
            rank=-1,
            pid=os.getpid(),
            namespace=self._namespace,
            epoch=self._epoch,
            reset=self._resetting,
            weight=self._config.weight,
        )
        self._send(hello)

    def _read(self, channel: Channel) -> None:
        try:
            for _ in range(_READS_MAX):
                received = channel.receive()
                for message, fds in received:
                    for fd in fds:  # none is meant for a scheduler
                        os.close(fd)
                    self._hear(message)
                if not received or self._channel is None:
                    return
        except (PeerGone, ProtocolError) as error:
            self._lose(str(error))

    def _hear(self, message: msg.Message) -> None:
        match message:
            case msg.Welcome():
                self._join(message)
            case msg.Refused():
                self._lose(f"refused: {message.message} {message.context}")
            case msg.Status():
                self._table.status_told(
                    message.request, message.first, message.flags, message.devices, complete=message.complete
                )
            case msg.KeysChanged(entries=entries):
                self._table.keys_changed(entries)
            case msg.StoresEnded(kept=kept, dropped=dropped):
                self._table.stores_ended(kept, dropped)
            case msg.DevicesChanged(devices=devices):
                self._table.heard()
                self._devices.update((state.device, state) for state in devices)
                self._weigh()
            case msg.ReportWanted(report=report):
                self._table.heard()
                self._send(msg.Report(report=report, facts=self.facts()))

    def _join(self, welcome: msg.Welcome) -> None:
        self._welcome = welcome
        self._epoch, self._resetting = welcome.epoch, False
        self._retry_s, self._trouble = RETRY_S_MIN, ""
        self._weigh()
        log.info("kvpool: scheduler joined pool generation %d as client %d", welcome.generation, welcome.client)
        again = self._table.pool_joined(
            int(welcome.settings.store_deadline_s * 1e9),
            now_ns=time.monotonic_ns(),
            answer_deadline_ns=int(welcome.settings.answer_deadline_s * 1e9),
        )
        for request, keys, priority in again:
            self._send_announce(request, 0, keys, priority)
        self._started = self._table.started_requests()

    def _weigh(self) -> None:
        count = len(self._welcome.devices) if self._welcome is not None else 0
        self._healthy = tuple(device not in self._devices or self._devices[device].healthy for device in range(count))

    def _send_announce(self, request: str, first: int, keys: Sequence[bytes], priority: int) -> None:
        if len(keys) <= msg.ITEMS_MAX and sum(map(len, keys)) <= _UNSPLIT_BYTES_MAX:
            parts = [(0, list(keys))]
        else:
            parts = list(split(keys))
        for number, (offset, part) in enumerate(parts):
            more = number + 1 < len(parts)
            self._send(msg.Announce(request=request, first=first + offset, keys=part, more=more, priority=priority))

    def _send_withdrawn(self) -> None:
        for started in (True, False):
            names = self._started if started else self._withdrawn
            if names and self._welcome is not None:
                told, names[:] = list(names), []
                for part in range(0, len(told), msg.ITEMS_MAX // 8):
                    self._send(msg.Withdraw(requests=told[part : part + msg.ITEMS_MAX // 8], started=started))

    def _send(self, message: msg.Message) -> None:
        channel = self._channel
        if channel is not None:
            self._written(lambda: channel.send(message))

    def _written(self, write: Callable[[], object]) -> None:
        try:
            write()
        except (PeerGone, ProtocolError, HostError) as error:
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        self._drop_channel()
        self._later(f"pool lost, everything is a miss until it is back: {why}")

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = self._welcome = None
        self._devices = {}
        self._withdrawn.clear()
        self._started.clear()
        self._table.pool_lost()

    def _later(self, what: str) -> None:
        """Attempt again after a while; say so once for each change."""
        self._due_ns = time.monotonic_ns() + int(self._retry_s * 1e9)
        self._retry_s = min(self._retry_s * 2, RETRY_S_MAX)
        if what != self._trouble:
            self._trouble = what
            log.warning("kvpool: %s", what)
