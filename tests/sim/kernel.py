"""
The simulated machine: one clock, a heap of what happens when, processes, descriptors, sockets.

Theory. Everything that happens is an entry of one heap, ordered by time and, at the same time, by chance. A process
is a callback `turn` that runs when something it watches became ready, or at the time it asked for; between turns it
does nothing, so all of a turn happens at one instant. A message sent over a socket arrives after a delay: in order on
one socket, in any order across sockets. What a process sent before it died still arrives; then its peer sees the
hang-up. A descriptor is a number for a file with a count of its holders: numbers, messages under way, processes.

All chance comes from one seeded generator, so one number tells a whole schedule.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from itertools import count

US, MS, S = 1_000, 1_000_000, 1_000_000_000
READABLE, WRITABLE, HUNG_UP = 1, 4, 16


class Violation(BaseException):
    """The pool did what it must never do. No Exception: the clients' borders to their engine must not hide it."""


def check(ok: bool, what: str, /, **facts: object) -> None:
    """Raise Violation unless *ok*."""
    if not ok:
        raise Violation(" ".join([what, *(f"{name}={value!r}" for name, value in facts.items())]))


class File:
    """What a descriptor names: it is ready for something, now or later, and is closed with its last holder."""

    def __init__(self, kernel: "Kernel") -> None:
        self.kernel = kernel
        self.holders = 0
        self.owners: dict[Process, int] = {}

    def ready(self) -> int:
        """Return what epoll would report now."""
        return 0

    def hold(self) -> None:
        """One more holder."""
        self.holders += 1

    def drop(self) -> None:
        """One holder less."""
        self.holders -= 1
        if self.holders == 0:
            self.closed()

    def closed(self) -> None:
        """Nobody holds it any more."""

    def wake(self, when_ns: int) -> None:
        """Let whoever has it look at *when_ns*."""
        for process in self.owners:
            process.wake(when_ns)


class Flag(File):
    """An eventfd, a timer, a pidfd, a pipe: readable from some time on, until cleared."""

    def __init__(self, kernel: "Kernel", mask: int = READABLE) -> None:
        super().__init__(kernel)
        self.since_ns: int | None = None
        self.mask = mask

    def ready(self) -> int:
        """Ready since `since_ns`."""
        return self.mask if self.since_ns is not None and self.since_ns <= self.kernel.now_ns else 0

    def set(self, when_ns: int) -> None:
        """Readable from *when_ns* on."""
        self.since_ns = when_ns
        self.wake(when_ns)


class Socket(File):
    """One end of a connected pair."""

    def __init__(self, kernel: "Kernel", pid: int) -> None:
        super().__init__(kernel)
        self.pid = pid
        self.peer: Socket | None = None
        self.inbox: deque[tuple[int, bytes, list[File]]] = deque()
        self.last_ns = 0
        self.hung_up_ns: int | None = None

    def ready(self) -> int:
        """Readable with a message that arrived, or when the peer is gone and everything was read."""
        now_ns = self.kernel.now_ns
        if self.inbox:
            return READABLE if self.inbox[0][0] <= now_ns else 0
        return READABLE | HUNG_UP if self.hung_up_ns is not None and self.hung_up_ns <= now_ns else 0

    def send(self, frame: bytes, files: list[File]) -> bool:
        """Let *frame* arrive at the peer some time; False where nobody would read it."""
        peer = self.peer
        if peer is None or peer.holders == 0:
            return False
        for file in files:
            file.hold()
        arrive_ns = max(peer.last_ns, self.kernel.now_ns + self.kernel.delay_ns())
        peer.last_ns = arrive_ns
        peer.inbox.append((arrive_ns, frame, files))
        peer.wake(arrive_ns)
        return True

    def closed(self) -> None:
        """What was not read is lost; the peer hears of the end after what was sent."""
        for _, _, files in self.inbox:
            for file in files:
                file.drop()
        self.inbox.clear()
        peer = self.peer
        if peer is not None and peer.holders:
            peer.hung_up_ns = max(peer.last_ns, self.kernel.now_ns + self.kernel.delay_ns())
            peer.wake(peer.hung_up_ns)

    def arrive_now(self) -> None:
        """Everything under way to this end is there now: what a real socket does at once."""
        now_ns = self.kernel.now_ns
        self.inbox = deque((min(at_ns, now_ns), frame, files) for at_ns, frame, files in self.inbox)
        self.last_ns = min(self.last_ns, now_ns)

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way to this end."""
        return not self.inbox


class Listener(File):
    """A listening socket."""

    def __init__(self, kernel: "Kernel") -> None:
        super().__init__(kernel)
        self.waiting: deque[tuple[int, Socket]] = deque()

    def ready(self) -> int:
        """Readable when somebody connected."""
        return READABLE if self.waiting and self.waiting[0][0] <= self.kernel.now_ns else 0

    def closed(self) -> None:
        """Those who wait are hung up on."""
        for _, sock in self.waiting:
            sock.drop()
        self.waiting.clear()


class Process:
    """
    A process: it holds descriptors, runs in turns, can be killed.

    Attributes:
        turn: What it does when woken; None for one that only does what it is called for.
        ended: Readable once it is reaped: its pidfd.
        children: End with it (the death signal).
        at_exit: Called when it is really gone.
        stopped_until_ns: It takes no turns before (SIGSTOP).
    """

    def __init__(self, kernel: "Kernel", name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.pid = kernel.new_number()
        self.alive = True
        self.gone = False
        self.exit_code: int | None = None
        self.fds: dict[int, File] = {}
        self.turn: Callable[[], None] | None = None
        self.children: list[Process] = []
        self.at_exit: list[Callable[[], None]] = []
        self.ended = Flag(kernel)
        self.ended.hold()
        self._next_ns: int | None = None
        self.stopped_until_ns = 0
        kernel.processes[self.pid] = self

    def wake(self, when_ns: int) -> None:
        """Run `turn` at *when_ns*, or now if that is past; an earlier wake-up makes a later one needless."""
        when_ns = max(when_ns, self.kernel.now_ns)
        if self.turn is not None and self.alive and (self._next_ns is None or when_ns < self._next_ns):
            self._next_ns = when_ns
            self.kernel.at(when_ns, lambda: self._run(when_ns))

    def _run(self, when_ns: int) -> None:
        if self.turn is not None and self.alive and self._next_ns == when_ns:
            self._next_ns = None
            if when_ns < self.stopped_until_ns:
                self.wake(self.stopped_until_ns)
                return
            self.kernel.run_as(self, self.turn)
            if self.alive:
                self._wake_for_ready()

    def _wake_for_ready(self) -> None:
        """What is still ready, or will be, wakes it again: epoll is level-triggered."""
        now_ns = self.kernel.now_ns
        for file in self.fds.values():
            if file.ready():
                self.wake(now_ns + 10 * US)
            elif isinstance(file, Socket):
                if file.inbox:
                    self.wake(file.inbox[0][0])
                elif file.hung_up_ns is not None:
                    self.wake(file.hung_up_ns)
            elif isinstance(file, Listener) and file.waiting:
                self.wake(file.waiting[0][0])
            elif isinstance(file, Flag) and file.since_ns is not None:
                self.wake(file.since_ns)

    def die(self, exit_code: int, *, linger_ns: int = 0) -> None:
        """End now: descriptors are closed; it is reaped *linger_ns* later, when nothing of it runs any more."""
        if not self.alive:
            return
        self.alive = False
        self.exit_code = exit_code
        for fd in list(self.fds):
            self.kernel.close(fd, owner=self)
        for child in self.children:
            child.die(-9, linger_ns=self.kernel.delay_ns())
        self.kernel.after(linger_ns, self._exit)

    def _exit(self) -> None:
        self.gone = True
        for call in self.at_exit:
            call()
        self.ended.set(self.kernel.now_ns + self.kernel.delay_ns())


class Kernel:
    """
    See the module.

    Attributes:
        now_ns: The time.
        current: Whose turn it is.
        happened: Entries of the heap run so far.
        after_each: Called after each of them.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_ns = S
        self.current: Process | None = None
        self.processes: dict[int, Process] = {}
        self.happened = 0
        self.after_each: Callable[[], None] = lambda: None
        self.delay_us_max = 200
        self._heap: list[tuple[int, float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._fds: dict[int, tuple[File, Process]] = {}
        self._numbers = count(1_000_000)

    def new_number(self) -> int:
        """Return a number never returned before."""
        return next(self._numbers)

    def delay_ns(self) -> int:
        """Return how long a message, or a wake-up, takes: mostly short, now and then long."""
        rng = self.rng
        longest = self.delay_us_max * (20 if rng.random() < 0.02 else 1)
        return rng.randrange(1, longest + 1) * US

    # ---------------------------------------------------------------- what happens when

    def at(self, when_ns: int, call: Callable[[], None]) -> None:
        """Call at *when_ns*."""
        heapq.heappush(self._heap, (when_ns, self.rng.random(), next(self._sequence), call))

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Call after *delay_ns*."""
        self.at(self.now_ns + delay_ns, call)

    def step(self) -> bool:
        """Let the next thing happen; False when nothing will."""
        if not self._heap:
            return False
        when_ns, _, _, call = heapq.heappop(self._heap)
        self.now_ns = max(self.now_ns, when_ns)
        call()
        self.happened += 1
        self.after_each()
        return True

    def run_as(self, process: Process, call: Callable[[], None]) -> None:
        """Call as *process*: descriptors made meanwhile are its own."""
        before, self.current = self.current, process
        try:
            call()
        finally:
            self.current = before

    # ---------------------------------------------------------------- descriptors

    def open(self, file: File, owner: Process | None = None) -> int:
        """Return a new descriptor of *file* for *owner*, or whose turn it is."""
        process = owner or self.current
        if process is None:
            raise RuntimeError("a descriptor belongs to a process")
        fd = self.new_number()
        file.hold()
        file.owners[process] = file.owners.get(process, 0) + 1
        process.fds[fd] = file
        self._fds[fd] = (file, process)
        if file.ready():
            process.wake(self.now_ns)
        return fd

    def file(self, fd: int) -> File:
        """Return what *fd* names."""
        return self._fds[fd][0]

    def close(self, fd: int, owner: Process | None = None) -> None:
        """Close a descriptor; twice is a bug of whoever does it."""
        check(fd in self._fds, "a descriptor is closed that is not open", fd=fd)
        file, process = self._fds.pop(fd)
        check(owner is None or owner is process, "a process closes its own descriptors", fd=fd)
        del process.fds[fd]
        file.owners[process] -= 1
        if not file.owners[process]:
            del file.owners[process]
        file.drop()

    def socket_pair(self, pid: int = 0) -> tuple[Socket, Socket]:
        """Return two connected ends, held by nobody."""
        left, right = Socket(self, pid), Socket(self, pid)
        left.peer, right.peer = right, left
        return left, right


class Epoll:
    """What `select.epoll` does, without waiting."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._masks: dict[int, int] = {}

    def register(self, fd: int, mask: int) -> None:
        """Watch."""
        check(fd not in self._masks or not self._open(fd), "a descriptor is registered twice", fd=fd)
        self._kernel.file(fd)
        self._masks[fd] = mask

    def modify(self, fd: int, mask: int) -> None:
        """Watch for something else."""
        check(fd in self._masks, "an unregistered descriptor is modified", fd=fd)
        self._masks[fd] = mask

    def unregister(self, fd: int) -> None:
        """Watch no more."""
        del self._masks[fd]

    def poll(self, _timeout: float | None = None) -> list[tuple[int, int]]:
        """Return what is ready now, in any order."""
        found = []
        for fd in list(self._masks):
            if not self._open(fd):
                del self._masks[fd]  # closing a descriptor ends its registration
                continue
            ready = self._kernel.file(fd).ready() & (self._masks[fd] | HUNG_UP)
            if ready:
                found.append((fd, ready))
        self._kernel.rng.shuffle(found)
        return found

    def close(self) -> None:
        """Forget all."""
        self._masks.clear()

    def _open(self, fd: int) -> bool:
        return fd in self._kernel._fds
