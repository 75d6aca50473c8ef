"""
What the walks over a worker's namespaces bring to its index, and when they may go on.

Theory. A walk's helper first tells what the snapshot names, then what is there. Its pipe is read a little at a time,
and only while the coordinator takes in what it is told. Once a whole walk has ended, what only the snapshot knows is
dropped, a few keys a pass. Walks wait while loads do (`core/scan_pace.py`).

Does not cover: starting helpers and cutting their frames (`worker_namespaces`), what the index believes
(`core/key_index.py`).
"""

import select
from collections import defaultdict, deque
from collections.abc import Callable

from kvpool.core.key_index import Namespace
from kvpool.core.object_events import Event, KeysFound, KeysRemembered, KeysUnseen
from kvpool.core.scan_pace import ScanPace
from kvpool.procs.worker_namespaces import Namespaces, Scanned
from kvpool.procs.worker_trials import Trials
from kvpool.wire.messages import Message, ScanEnded

#: Messages that may wait for the coordinator while scans are read.
QUEUE_MAX = 8
#: Keys dropped in one pass.
DROP_MAX = 256


class Scans:
    """
    See the module.

    Args:
        tell: Hands an event to the object table, and performs what it asks for.
        send: Sends to the coordinator, after everything that was told before.
        index_of: What the table knows of a namespace's keys.
    """

    def __init__(
        self,
        namespaces: Namespaces,
        trials: Trials,
        poller: select.epoll,
        *,
        tell: Callable[[Event], None],
        send: Callable[[Message], None],
        index_of: Callable[[int], Namespace | None],
    ) -> None:
        self._namespaces = namespaces
        self._trials = trials
        self._poller = poller
        self._tell = tell
        self._send = send
        self._index_of = index_of
        #: namespace -> objects its scan has found so far.
        self._objects_found: defaultdict[int, int] = defaultdict(int)
        #: Descriptors that are not listened to meanwhile.
        self._deaf: set[int] = set()
        #: (namespace, next part of its index) to look through for what no walk has seen.
        self._sweeps: deque[tuple[int, int]] = deque()
        #: The coordinator has enough to read.
        self._full = False
        self._pace = ScanPace()

    def started(self, fd: int) -> None:
        """A scan began; its descriptor polls readable as it goes on."""
        self._poller.register(fd, select.EPOLLIN)

    def on_ready(self, fd: int) -> None:
        """A scan has said something."""
        scanned = self._namespaces.read_scan(fd)
        namespace = scanned.namespace
        for known in scanned.remembered:
            self._tell(KeysRemembered(namespace=namespace, keys=known.keys, masks=known.masks))
        for found in scanned.found:
            keys = self._trials.found(namespace, found.rank, found.keys)
            self._tell(KeysFound(namespace=namespace, rank=found.rank, keys=keys))
            self._objects_found[namespace] += len(keys)
        if scanned.ended:  # epoll forgets a descriptor that is closed
            self._end(scanned)

    def _end(self, scanned: Scanned) -> None:
        namespace = scanned.namespace
        if scanned.whole:
            self._sweeps.append((namespace, 0))
        self._send(ScanEnded(namespace=namespace, objects=self._objects_found.pop(namespace, 0)))

    def look(self, now_ns: int, *, busy: bool, queue_length: int) -> bool:
        """
        Let walks go on or wait, and drop what none has seen; return whether walks go on.

        Args:
            busy: A load waits or runs.
            queue_length: Messages that wait for the coordinator.
        """
        full, self._full = self._full, queue_length > QUEUE_MAX
        if full or self._full:
            self._listen()
        if self._sweeps and not self._full:
            self._sweep()
        going = self._pace.look(now_ns, busy=busy)
        self._namespaces.let_scans(going)
        return going

    def due_ns(self, *, walking: bool) -> int | None:
        """Return when :meth:`look` has to be called at the latest; *walking*: some helper walks."""
        if self._sweeps and not self._full:
            return 0
        return self._pace.due_ns() if walking else None

    def _listen(self) -> None:
        fds = self._namespaces.scan_fds()
        for fd in fds - self._deaf if self._full else fds & self._deaf:
            if self._full:
                self._poller.unregister(fd)
            else:
                self._poller.register(fd, select.EPOLLIN)
        self._deaf = set(fds) if self._full else set()

    def _sweep(self) -> None:
        """Drop some of what only a snapshot knows of one part of an index."""
        namespace, part = self._sweeps[0]
        space = self._index_of(namespace)
        if space is None or part >= space.masks.part_count:
            self._sweeps.popleft()
            return
        keys = space.masks.above(part, space.full, DROP_MAX)
        if keys:
            self._tell(KeysUnseen(namespace=namespace, keys=keys))
        if len(keys) < DROP_MAX:
            self._sweeps[0] = (namespace, part + 1)
