"""
The simulated kernel in the place of the real one, for kvpool's own shells.

Theory. The processes' code (`kvpool.procs`, `kvpool.client`) runs as it is. While a world is installed, the names
through which it reaches the system (`time`, `os`, `select`, `socket`, `threading`, `channel`, `shm`, `process`, ...)
are bound, in those modules only, to the stand-ins below; afterwards they are what they were. Messages are encoded and
decoded by the real codec.
"""

import contextlib
import importlib
import logging
import os
import pkgutil
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, TracebackType, UnionType
from typing import Any, Self, cast

import kvpool.client
import kvpool.procs
from kvpool.errors import PeerGone, PoolUnavailable
from kvpool.io.channel import Channel as RealChannel
from kvpool.procs.coordinator_clients import _Greeting as Greeting
from kvpool.wire.codec import Decoder, encode
from kvpool.wire.messages import Message

from .kernel import HUNG_UP, US, Epoll, Flag, Kernel, Listener, Process, S, Socket, check
from .memory import Memory, MemoryFile

#: Frames that one `receive` takes, as the real channel's default.
FRAMES_MAX = 64


class _Over:
    """A module with some names replaced."""

    def __init__(self, real: ModuleType, **names: object) -> None:
        self.__dict__.update(names)
        self._real = real

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


class Sock:
    """What stands for a `socket.socket`: one descriptor."""

    def __init__(self, kernel: Kernel, fd: int) -> None:
        self.kernel = kernel
        self._fd = fd

    def fileno(self) -> int:
        """The descriptor, -1 once closed."""
        return self._fd

    def close(self) -> None:
        """Close it; twice is fine."""
        if self._fd >= 0:
            self.kernel.close(self._fd)
            self._fd = -1

    def setblocking(self, _flag: bool) -> None:
        """Nothing here blocks."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


class Channel:
    """`kvpool.io.channel.Channel` over a simulated socket."""

    _decoders: dict[Any, Decoder] = {}  # noqa: RUF012 - shared on purpose

    def __init__(self, sock: Sock, decoder: type[Message] | UnionType) -> None:
        self._kernel = sock.kernel
        self._sock = sock
        found = self._decoders.get(decoder)
        self._decoder = found or self._decoders.setdefault(decoder, Decoder(decoder))
        self._ended: PeerGone | None = None

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._sock.fileno()

    wants_write = False
    queue_length = 0

    def _file(self) -> Socket:
        return cast(Socket, self._kernel.file(self._sock.fileno()))

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send; raises PeerGone where nobody listens."""
        check(len(fds) == message.fd_count, "descriptors do not match the message", type=type(message).__name__)
        frame = encode(message)
        if self._ended is not None:
            raise self._ended
        if not self._file().send(frame, [self._kernel.file(fd) for fd in fds]):
            self._ended = PeerGone("peer hung up")
            raise self._ended

    def flush(self) -> bool:
        """Nothing ever waits here."""
        return True

    def receive(self, frames_max: int = FRAMES_MAX) -> list[tuple[Message, list[int]]]:
        """Return what has arrived; raises PeerGone once all of it was returned."""
        received: list[tuple[Message, list[int]]] = []
        if self._sock.fileno() < 0:
            raise PeerGone("channel is closed")
        end = self._file()
        while len(received) < frames_max and end.inbox and end.inbox[0][0] <= self._kernel.now_ns:
            _, frame, files = end.inbox.popleft()
            fds = [self._kernel.open(file) for file in files]
            for file in files:
                file.drop()
            received.append((self._decoder.decode(frame), fds))
        if not received and end.ready() & HUNG_UP:
            self._ended = PeerGone("peer hung up")
            raise self._ended
        return received

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
        self._ended = self._ended or PeerGone("channel is closed")


class Popen:
    """A child process, as `subprocess.Popen` shows it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.pid

    def kill(self) -> None:
        """SIGKILL."""
        self._process.die(-signal.SIGKILL, linger_ns=self._process.kernel.delay_ns())

    def wait(self) -> int:
        """Return the exit code; called only when it is known."""
        if self._process.exit_code is None:
            self.kill()
        return -signal.SIGKILL if self._process.exit_code is None else self._process.exit_code


class _Future:
    def __init__(self) -> None:
        self._calls: list[Callable[[_Future], None]] = []
        self._value: object = None

    def add_done_callback(self, call: Callable[["_Future"], None]) -> None:
        self._calls.append(call)

    def result(self) -> object:
        return self._value

    def cancelled(self) -> bool:
        return False

    def exception(self) -> None:
        """What a call raises ends the schedule."""

    def run(self, call: Callable[[], object]) -> None:
        self._value = call()
        for done in self._calls:
            done(self)


class _Executor:
    """Runs each call a while later, as the process that asked."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def submit(self, function: Callable[..., object], *arguments: object) -> _Future:
        future, process = _Future(), self._kernel.current
        if process is None:
            raise RuntimeError("a thread belongs to a process")

        def run() -> None:
            if process.alive:
                self._kernel.run_as(process, lambda: future.run(lambda: function(*arguments)))

        self._kernel.after(self._kernel.rng.randrange(1, 5000) * US, run)
        return future

    def shutdown(self, **_how: bool) -> None:
        """Nothing runs at the end of a process."""


class _Thread:
    """A background thread: runs a while later, at one instant. The rank client's own thread is its process's turn."""

    def __init__(self, kernel: Kernel, target: Callable[[], None], name: str) -> None:
        self._kernel, self._target, self._name = kernel, target, name
        self._alive = True

    def start(self) -> None:
        process = self._kernel.current
        if self._name == "kvpool-rank" or process is None:
            return

        def run() -> None:
            if process.alive:
                self._kernel.run_as(process, self._target)
            self._alive = False

        self._kernel.after(self._kernel.rng.randrange(1, 3000) * US, run)

    def join(self, _timeout_s: float | None = None) -> None:
        """The simulated caller never waits for one."""

    def is_alive(self) -> bool:
        return self._alive


class _Timer:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._flag = Flag(kernel)
        self._fd = kernel.open(self._flag)

    def fileno(self) -> int:
        return self._fd

    def arm(self, delay_ns: int | None) -> None:
        if delay_ns is None:
            self._flag.since_ns = None
        else:
            self._flag.set(self._kernel.now_ns + max(1, delay_ns))

    def clear(self) -> None:
        self._flag.since_ns = None

    def close(self) -> None:
        self._kernel.close(self._fd)


class Sandbox:
    """
    The stand-ins of one world.

    Args:
        spawn: Starts a worker with this control socket, for the process whose turn it is.
        room, snapshots: What workers have in the place of `Room` and `Snapshots`.
    """

    def __init__(self, kernel: Kernel, spawn: Callable[[Socket], Process], room: object, snapshots: object) -> None:
        self.kernel = kernel
        self.listener: Listener | None = None
        self._spawn = spawn
        self.memories: list[Memory] = []
        #: Called with a process that connects to the pool anew.
        self.greets: Callable[[Process], None] = lambda _process: None
        self.names: dict[str, object] = {
            "time": _Over(time, monotonic_ns=lambda: kernel.now_ns, monotonic=lambda: kernel.now_ns / S,
                          time_ns=lambda: kernel.now_ns, time=lambda: kernel.now_ns / S),
            "os": _Over(os, close=kernel.close, eventfd=lambda *_: kernel.open(Flag(kernel)), unlink=lambda _path: None,
                        eventfd_write=self._event_write, eventfd_read=self._event_read, getpid=self._getpid),
            "select": _Over(select, epoll=lambda: Epoll(kernel)),
            "socket": _Over(socket, socketpair=self._pair),
            "signal": _Over(signal, signal=lambda *_: None, set_wakeup_fd=lambda *_a, **_k: None),
            "threading": _Over(threading, Thread=lambda target, name, daemon: _Thread(kernel, target, name)),
            "channel": _Over(importlib.import_module("kvpool.io.channel"), Channel=Channel, pair=self._pair,
                             adopt=self._adopt, listen=self._listen, accept=self._accept, connect=self._connect,
                             peer_uid=lambda _sock: os.geteuid(), peer_pid=self._peer_pid),
            "Channel": Channel,
            "adopt": self._adopt,
            "process": _Over(importlib.import_module("kvpool.io.process"), pidfd_open=self._pidfd_open,
                             spawn=self._spawn_worker),
            "shm": _Over(importlib.import_module("kvpool.io.shm"), create_segment=self._create_segment,
                         prefault=lambda _fd, _bytes, _go_on=None: None, punch_out=self._punch_out,
                         map_segment=self._map_segment, check_staging=lambda _bytes: None),
            "Room": room,
            "Snapshots": snapshots,
            "Timer": lambda: _Timer(kernel),
            "ThreadPoolExecutor": lambda *_a, **_k: _Executor(kernel),
        }  # fmt: skip

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The shells use the stand-ins meanwhile, and log nothing."""
        logged = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        replaced = [
            (module, name, getattr(module, name), fake)
            for module in SHELLS
            for name, fake in self.names.items()
            if _is_replaced(module, name)
        ]
        for module, name, _, fake in replaced:
            setattr(module, name, fake)
        # A set of peers that greet has an order that is not this process's memory layout.
        by_identity, Greeting.__hash__ = Greeting.__hash__, lambda greeting: greeting.pid  # type: ignore[method-assign]
        try:
            yield
        finally:
            Greeting.__hash__ = by_identity  # type: ignore[method-assign]
            for module, name, real, _ in replaced:
                setattr(module, name, real)
            logging.disable(logged)

    # ---------------------------------------------------------------- os

    def _event_write(self, fd: int, _value: int) -> None:
        cast(Flag, self.kernel.file(fd)).set(self.kernel.now_ns)

    def _event_read(self, fd: int) -> int:
        flag = cast(Flag, self.kernel.file(fd))
        if flag.since_ns is None:
            raise BlockingIOError
        flag.since_ns = None
        return 1

    def _getpid(self) -> int:
        return self.kernel.current.pid if self.kernel.current is not None else 0

    # ---------------------------------------------------------------- sockets

    def _pair(self) -> tuple[Sock, Sock]:
        left, right = self.kernel.socket_pair(self._getpid())
        return Sock(self.kernel, self.kernel.open(left)), Sock(self.kernel, self.kernel.open(right))

    def _adopt(self, fd: int) -> Sock:
        return Sock(self.kernel, fd)

    def _listen(self, _path: str) -> Sock:
        self.listener = Listener(self.kernel)
        return Sock(self.kernel, self.kernel.open(self.listener))

    def _accept(self, sock: Sock) -> Sock | None:
        listener = cast(Listener, self.kernel.file(sock.fileno()))
        if not listener.waiting or listener.waiting[0][0] > self.kernel.now_ns:
            return None
        _, end = listener.waiting.popleft()
        fd = self.kernel.open(end)
        end.drop()
        return Sock(self.kernel, fd)

    def _connect(self, _path: str) -> Sock:
        listener = self.listener
        if listener is None or not listener.holders or self.kernel.current is None:
            raise PoolUnavailable("nobody listens")
        ours, theirs = self.kernel.socket_pair(self._getpid())
        arrive_ns = self.kernel.now_ns + self.kernel.delay_ns()
        theirs.hold()
        listener.waiting.append((arrive_ns, theirs))
        listener.wake(arrive_ns)
        self.greets(self.kernel.current)
        return Sock(self.kernel, self.kernel.open(ours))

    def _peer_pid(self, sock: Sock) -> int:
        return cast(Socket, self.kernel.file(sock.fileno())).pid

    # ---------------------------------------------------------------- processes, memory

    def _pidfd_open(self, pid: int) -> int | None:
        process = self.kernel.processes[pid]
        return None if process.gone else self.kernel.open(process.ended)

    def _spawn_worker(self, _argv: list[str], pass_fds: list[int], **_how: object) -> Popen:
        if self.kernel.current is None:
            raise RuntimeError("a child has a parent")
        control = cast(Socket, self.kernel.file(pass_fds[0]))
        child = self._spawn(control)
        self.kernel.current.children.append(child)
        return Popen(child)

    def _create_segment(self, segment_bytes: int) -> int:
        memory = Memory(self.kernel, segment_bytes)
        self.memories.append(memory)
        return self.kernel.open(MemoryFile(self.kernel, memory))

    def _punch_out(self, fd: int, _segment_bytes: int) -> None:
        memory = cast(MemoryFile, self.kernel.file(fd)).memory
        memory.punch_out()
        self.memories.remove(memory)

    def _map_segment(self, fd: int, segment_bytes: int) -> Memory:
        memory = cast(MemoryFile, self.kernel.file(fd)).memory
        check(len(memory) == segment_bytes, "a segment is mapped in another size", segment_bytes=segment_bytes)
        return memory


def _shells() -> list[ModuleType]:
    return [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for package in (kvpool.client, kvpool.procs)
        for found in pkgutil.iter_modules(package.__path__)
    ]


SHELLS = _shells()
_REAL = {
    "time": time, "os": os, "select": select, "socket": socket, "signal": signal, "threading": threading,
    "Channel": RealChannel,
}  # fmt: skip


def _is_replaced(module: ModuleType, name: str) -> bool:
    """Whether *module* has that name, and for a module's name means that module."""
    return hasattr(module, name) and (name not in _REAL or getattr(module, name) is _REAL[name])
