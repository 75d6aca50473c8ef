"""
What an engine's scheduler knows of the keys of its waiting requests, and how a lookup is answered from memory.

Theory. A request is announced with its keys; the pool answers with two flags and a device per key, and keeps
telling changes. Flags belong to keys, not to requests, and are kept while some announced request has the key.

    lookup    flags != 0                                        Hit(device, resident)
              this engine is storing the key, not for too long  Later
              its announcement is not answered yet, < 50 ms *   Later
              else                                              Miss(why)
                                                                * `answer_deadline_s`

So no "later" is without an end: an unanswered announcement becomes a miss after that time, and a store in flight is
forgotten after the pool's store deadline plus a margin. After SILENT_MAX announcements in a row without an answer
the pool counts as silent: everything is a miss at once, until it says anything.

When a store of a key is dropped, the requests that offered it are *cut*: none of their later keys should be offered,
since a prefix with a hole is of no use.

Does not cover: where a key is to be stored (`core/placement.py`), sockets (`client/scheduler.py`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpool.core.chunk_places import RESIDENT_PLACE, STORING_PLACE
from kvpool.errors import invariant
from kvpool.wire.messages import RESIDENT, STORED, KeyState

#: An announcement not answered by then is a miss, unless the pool says otherwise.
ANSWER_NS = 50_000_000
#: So many of those in a row, and the pool counts as silent.
SILENT_MAX = 3
#: A store in flight is waited for so much longer than the pool's store deadline, at most.
STORE_MARGIN_NS = 500_000_000
#: Requests remembered as cut; the oldest is forgotten first.
CUT_REQUESTS_MAX = 4096

#: What is counted since the start.
COUNTERS = ("lookups_hit", "lookups_missed", "answers_late", "stores_unanswered", "requests_cut")

_DEVICE_SHIFT = 2
_FLAGS = STORED | RESIDENT


@dataclass(frozen=True, slots=True)
class Hit:
    """Every rank's object can be loaded from *device*; *resident*: without touching the drive."""

    device: int
    resident: bool


@dataclass(frozen=True, slots=True)
class Miss:
    """Cannot be loaded, and *why*: unconnected, silent, unanswered, unannounced, absent."""

    why: str


@dataclass(frozen=True, slots=True)
class Later:
    """Not known yet, and *why*: unanswered, storing; known, or a miss, at *until_ns* at the latest."""

    until_ns: int
    why: str


Lookup = Hit | Miss | Later

_UNCONNECTED, _SILENT, _UNANSWERED = Miss("unconnected"), Miss("silent"), Miss("unanswered")
_UNANNOUNCED, _ABSENT = Miss("unannounced"), Miss("absent")
_MISSES = (_UNCONNECTED, _SILENT, _UNANSWERED, _UNANNOUNCED, _ABSENT)


@dataclass(slots=True)
class _Request:
    """
    An announced request.

    Attributes:
        keys: In order, as announced.
        priority: As announced, for announcing again.
        unanswered: Keys that the pool has not answered, or not finally.
        heard: The pool answered at least something of it since it was announced (again).
        until_ns: What is not answered by then is a miss.
        expired: That time was noticed and counted.
        started: It does not wait for its objects any more: nothing is to be read ahead for it.
    """

    keys: list[bytes]
    priority: int
    until_ns: int
    unanswered: set[bytes] = field(default_factory=set)
    heard: bool = False
    expired: bool = False
    started: bool = False


class AnnouncedRequests:
    """The table; plain calls instead of events, since each is a fact of one of two sides with one effect."""

    def __init__(self) -> None:
        self._connected = False
        self._store_wait_ns = STORE_MARGIN_NS
        self._answer_ns = ANSWER_NS
        self._silent = 0
        self._requests: dict[str, _Request] = {}
        #: Requests whose answer is awaited, in order of time.
        self._waiting: dict[str, None] = {}
        #: How many announced requests have a key.
        self._wanted: Counter[bytes] = Counter()
        #: Flags and device of the keys that are hits: device << 2 | flags.
        self._states: dict[bytes, int] = {}
        #: Hits by packed state, made once.
        self._hits: dict[int, Hit] = {}
        #: Stores in flight: key -> (until_ns, requests that offered it), in order of time.
        self._storing: dict[bytes, tuple[int, tuple[str, ...]]] = {}
        self._cut: dict[str, None] = {}
        self._counts: Counter[str] = Counter()
        #: Moves with all that can change an answer: while it stands still, the same lookup answers as before, but
        #: for the deadlines in `Later`.
        self.changes = 0

    # ------------------------------------------------------------ the engine's side

    def announce(self, request: str, keys: Sequence[bytes], priority: int, *, now_ns: int) -> int:
        """A request arrived with *keys* (more of them, if it is known); return the index of the first of them."""
        known = self._requests.get(request)
        if known is None:
            known = self._requests[request] = _Request([], priority, 0)
        first = len(known.keys)
        known.started = False
        known.keys.extend(keys)
        known.unanswered.update(keys)
        self._wanted.update(keys)
        self._await(request, known, now_ns)
        return first

    def start(self, request: str) -> bool:
        """A request does not wait for its objects any more; tell whether that is news."""
        known = self._requests.get(request)
        if known is None or known.started:
            return False
        known.started = True
        return True

    def wait_again(self, request: str) -> tuple[int, int] | None:
        """A started request is back in the queue: return how many keys it has, and its priority; None if it was not."""
        known = self._requests.get(request)
        if known is None or not known.started:
            return None
        known.started = False
        return len(known.keys), known.priority

    def started_requests(self) -> list[str]:
        """Return the announced requests that do not wait for their objects any more."""
        return [request for request, known in self._requests.items() if known.started]

    def withdraw(self, request: str) -> bool:
        """A request is over, or no longer waits; tell whether it was announced."""
        known = self._requests.pop(request, None)
        if known is None:
            return False
        self._waiting.pop(request, None)
        wanted = self._wanted
        for key in known.keys:
            left = wanted.pop(key) - 1
            if left:
                wanted[key] = left
            else:
                self._states.pop(key, None)
        return True

    def lookup(self, request: str, key: bytes, *, now_ns: int) -> Lookup:
        """Answer from memory; the same for each key of each poll until something was told."""
        state = self._states.get(key)
        if state is not None:
            self._counts["lookups_hit"] += 1
            return self._hits[state]
        return self._no_hit(request, key, now_ns)

    def answered(self, request: str, *, now_ns: int) -> bool:
        """Tell whether a lookup of *request* would not say "later" for want of the pool's answer."""
        known = self._requests.get(request)
        return not self._connected or known is None or not known.unanswered or now_ns >= known.until_ns

    def places(self, keys: Sequence[bytes], *, now_ns: int) -> list[int]:
        """
        Return where the stored beginning of *keys* lies, up to the first miss: see `chunk_places.py`.

        Unlike :meth:`lookup` it counts nothing, and an unanswered key is a miss.
        """
        places: list[int] = []
        for key, state in zip(keys, map(self._states.get, keys), strict=True):
            if state is not None:
                places.append(RESIDENT_PLACE if state & RESIDENT else state >> _DEVICE_SHIFT)
            elif self._connected and now_ns < self._storing.get(key, (0, ()))[0]:
                places.append(STORING_PLACE)
            else:
                break
        return places

    def offer(self, request: str, keys: Iterable[bytes], *, now_ns: int) -> None:
        """This engine stores *keys* for *request* from now on."""
        until_ns = now_ns + self._store_wait_ns
        self.changes += 1
        if self._connected:
            for key in keys:
                _, others = self._storing.pop(key, (0, ()))
                self._storing[key] = (until_ns, (*(other for other in others if other != request), request))

    def request_cut(self, request: str) -> bool:
        """Tell whether a store of *request* was dropped."""
        return request in self._cut

    # ------------------------------------------------------------ the pool's side

    def pool_joined(
        self, store_deadline_ns: int, *, now_ns: int, answer_deadline_ns: int = ANSWER_NS
    ) -> list[tuple[str, list[bytes], int]]:
        """The pool welcomed us: return what to announce (again), as (request, keys, priority)."""
        self._connected = True
        self._silent = 0
        self.changes += 1
        self._store_wait_ns = store_deadline_ns + STORE_MARGIN_NS
        self._answer_ns = answer_deadline_ns
        for request, known in self._requests.items():
            known.unanswered = set(known.keys)
            self._await(request, known, now_ns)
        return [(request, known.keys, known.priority) for request, known in self._requests.items()]

    def pool_lost(self) -> None:
        """Nothing is known any more; stores in flight count as dropped."""
        self._connected = False
        self._states.clear()
        self.changes += 1
        self._waiting.clear()
        self.stores_ended([], list(self._storing))

    def status_told(self, request: str, first: int, flags: bytes, devices: bytes, *, complete: bool) -> None:
        """The pool answered for the keys of *request* from index *first* on."""
        self.changes += 1
        self._heard()
        known = self._requests.get(request)
        if known is None:
            return  # withdrawn meanwhile
        known.heard = True
        keys = known.keys[first : first + len(flags)]
        told = zip(keys, flags, devices, strict=False)
        hits = {key: device << _DEVICE_SHIFT | f & _FLAGS for key, f, device in told if f & _FLAGS}
        for state in set(hits.values()) - self._hits.keys():
            self._hits[state] = Hit(state >> _DEVICE_SHIFT, bool(state & RESIDENT))
        self._states.update(hits)
        if len(hits) < len(keys):
            for key in self._states.keys() & (set(keys) - hits.keys()):
                del self._states[key]
        known.unanswered.difference_update(keys if complete else hits)
        if not known.unanswered:
            self._waiting.pop(request, None)

    def keys_changed(self, entries: Iterable[KeyState]) -> None:
        """Flags of keys changed."""
        self.changes += 1
        self._heard()
        for entry in entries:
            if entry.key in self._wanted:
                self._tell(entry.key, entry.flags, entry.device)

    def stores_ended(self, kept: Iterable[bytes], dropped: Iterable[bytes]) -> None:
        """Stores of this engine ended."""
        self.changes += 1
        self._heard()
        for key in kept:
            self._storing.pop(key, None)
        for key in dropped:
            _, requests = self._storing.pop(key, (0, ()))
            for request in requests:
                self._cut[request] = None
                self._counts["requests_cut"] += 1
        while len(self._cut) > CUT_REQUESTS_MAX:
            del self._cut[next(iter(self._cut))]

    def heard(self) -> None:
        """The pool said something, whatever it was: it is not silent."""
        self._heard()

    def time_passed(self, *, now_ns: int) -> None:
        """Look at the deadlines."""
        while self._waiting:
            request = next(iter(self._waiting))
            if not self._expire(request, self._requests[request], now_ns):
                break
        while self._storing:
            key = next(iter(self._storing))
            if self._storing[key][0] > now_ns:
                break
            del self._storing[key]
            self._counts["stores_unanswered"] += 1

    # ------------------------------------------------------------ facts

    @property
    def silent(self) -> bool:
        """The pool is connected and does not answer."""
        return self._silent >= SILENT_MAX

    def statistics(self) -> dict[str, int]:
        """Return counters since the start, and how much is open now."""
        return {
            "requests_announced": len(self._requests),
            "keys_wanted": len(self._wanted),
            "stores_in_flight": len(self._storing),
            **{name: self._counts[name] for name in COUNTERS},
            **{f"missed_{miss.why}": self._counts[f"missed_{miss.why}"] for miss in _MISSES},
        }

    def validate(self) -> None:
        """Check that the parts of the table agree."""
        wanted = Counter(key for known in self._requests.values() for key in known.keys)
        invariant(wanted == self._wanted, "wanted keys are miscounted")
        invariant(self._states.keys() <= wanted.keys(), "flags of a key that nobody wants")
        invariant(all(state & _FLAGS for state in self._states.values()), "a state without flags")
        invariant(self._waiting.keys() <= self._requests.keys(), "an answer is awaited for nobody")
        for name in self._waiting:
            invariant(bool(self._requests[name].unanswered), "an answered request waits", request=name)
        times = [until_ns for until_ns, _ in self._storing.values()]
        invariant(times == sorted(times), "stores in flight are out of order")
        invariant(self._connected or not (self._states or self._storing), "facts of a lost pool")

    # ------------------------------------------------------------ inside

    def _await(self, request: str, known: _Request, now_ns: int) -> None:
        known.until_ns, known.expired, known.heard = now_ns + self._answer_ns, False, False
        self._waiting.pop(request, None)
        if self._connected and known.unanswered:
            self._waiting[request] = None

    def _no_hit(self, request: str, key: bytes, now_ns: int) -> Lookup:
        verdict = self._later_or_miss(request, key, now_ns)
        if isinstance(verdict, Miss):
            self._counts["lookups_missed"] += 1
            self._counts[f"missed_{verdict.why}"] += 1
        return verdict

    def _later_or_miss(self, request: str, key: bytes, now_ns: int) -> Later | Miss:
        if not self._connected:
            return _UNCONNECTED
        if self.silent:
            return _SILENT
        storing = self._storing.get(key)
        if storing is not None and now_ns < storing[0]:
            return Later(storing[0], "storing")
        known = self._requests.get(request)
        if known is None or key not in self._wanted:
            return _UNANNOUNCED
        if key not in known.unanswered:
            return _ABSENT
        if self._expire(request, known, now_ns):
            return _UNANSWERED
        return Later(known.until_ns, "unanswered")

    def _expire(self, request: str, known: _Request, now_ns: int) -> bool:
        """Tell whether the time for an answer is over; count it once."""
        if now_ns < known.until_ns:
            return False
        if not known.expired:
            known.expired = True
            self._waiting.pop(request, None)
            self._counts["answers_late"] += 1
            if not known.heard:
                self._silent += 1
                self.changes += 1
        return True

    def _heard(self) -> None:
        if self._silent:
            self._silent = 0
            self.changes += 1

    def _tell(self, key: bytes, flags: int, device: int) -> None:
        flags &= _FLAGS
        if not flags:
            self._states.pop(key, None)
            return
        state = device << _DEVICE_SHIFT | flags
        if state not in self._hits:
            self._hits[state] = Hit(device, bool(flags & RESIDENT))
        self._states[key] = state
