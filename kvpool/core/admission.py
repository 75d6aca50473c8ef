"""
Which waiting requests have their objects read ahead: whole requests, in the scheduler's order.

Theory of operation. Staging is scarce, and a request of which only a part is in staging waits for the rest: so all
objects of a request are admitted, on every device that holds some, or none. An admission goes

              ReserveAnswered(no), time, Withdrawn
         +-------------------------------------------> gone
         |
    ASKED --all answered yes--> COMMITTED --all landed--> LANDED
                                    |                       |
                                    +-----------------------+--> gone: started, withdrawn, expired, revoked, device lost

and whatever ends it, ends it on every device (the one that revoked or died knows already). One admission is ASKED at a
time, so that an answer about an earlier request is known before a later one is asked; two of them never hold a part
each of what both need.

*Candidates* are, of every scheduler, the first `lookahead` requests that wait, in the order (priority, arrival); the
candidates of all schedulers go by the same order. A candidate is asked when it *wants* something: keys that the pool
has (stored or in staging, also those in staging already, which are protected from then on) and that its admission does
not cover. If it has an admission (more of its keys came to be known), the new one covers everything and takes the
old one's place when it is committed; objects of both are in staging once.

The order holds. A candidate that was refused waits until one of the devices that refused it may have more room
(`RoomChanged`, an admission that ended there, an object that left, or RETRY_NS, since a worker does not tell of every
slot that comes free), and keeps the devices it needs from those behind it, so that small requests cannot starve it.
There is one exception, or the largest request would stop everybody for as long as it waits: one that was refused
although no other request has an admission on the devices that refused it does not fit at all now, and is passed over.
Nobody's admission is ever taken for a request ahead of it; only loads take, from the last in order.

An admission ends unused after `expiry_ns`: its objects are cache then, and its request is a candidate again only when
it is announced again. A device that owes an answer for longer than ANSWER_NS counts as refusing, and is asked nothing
more until it answers.

Covers: order, whole admissions. Does not cover: slots and reads (`core/objects.py`), which never read ahead while the
drive has loads to do; what is stored where (`core/directory.py`).
"""

import enum
import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import assert_never

from kvpool.core import admission_events as ev
from kvpool.core.admission_events import RequestId
from kvpool.core.budget import slot_bytes_of
from kvpool.core.layout import GROUP_BYTES
from kvpool.errors import invariant

#: A device that has not answered by then counts as refusing.
ANSWER_NS = 1_000_000_000
#: A candidate that was refused is asked about again after this long, if nothing was heard that may help it.
RETRY_NS = 250_000_000

#: What is counted since the start.
COUNTERS = (
    "asked", "committed", "refused", "landed", "used", "withdrawn", "expired", "revoked", "lost", "unanswered",
    "replaced",
)  # fmt: skip

#: (priority, arrival): ascending is the scheduler's order.
_Place = tuple[int, int]


class Phase(enum.Enum):
    """Life of an admission; see the module's diagram."""

    ASKED = "asked"
    COMMITTED = "committed"
    LANDED = "landed"


@dataclass(slots=True, kw_only=True)
class _Admission:
    """
    One attempt to have a request's objects in staging.

    Attributes:
        keys: Per device, what it covers.
        covered: The same keys together.
        awaited: Devices whose answer (ASKED) or landing (COMMITTED) is still to come.
        due_ns: When it is given up: as unanswered (ASKED), as expired (else).
    """

    number: int
    request: RequestId
    keys: dict[int, list[bytes]]
    covered: set[bytes]
    awaited: set[int]
    due_ns: int
    phase: Phase = Phase.ASKED


@dataclass(slots=True, kw_only=True)
class _Request:
    """
    An announced request.

    Attributes:
        place: In the scheduler's order.
        complete: All its keys are announced.
        waits: It has neither started nor expired.
        known: Its keys that the pool had when it was last looked at.
        stale: That was before something changed.
        wanted: Per device, the keys to reserve; empty when there is nothing to ask.
        held: Its committed admission.
        refused: Devices that refused it, with the count of changes there at that time.
        alone: No other request had an admission on those.
    """

    id: RequestId
    namespace: int
    place: _Place
    keys: list[bytes] = field(default_factory=list)
    complete: bool = False
    waits: bool = True
    known: set[bytes] = field(default_factory=set)
    stale: bool = True
    wanted: dict[int, list[bytes]] = field(default_factory=dict)
    held: _Admission | None = None
    refused: dict[int, int] = field(default_factory=dict)
    alone: bool = False


@dataclass(slots=True, kw_only=True)
class _Namespace:
    """Staging that one key's objects take on all ranks, by KV group; and the requests that have a key."""

    rank_count: int
    key_bytes: dict[int, int]
    requests: dict[bytes, set[RequestId]] = field(default_factory=dict)


class Admission:
    """
    See the module.

    Args:
        state_of: Flags and device of a key of a namespace; flags 0: the pool has not got it.
        lookahead: Waiting requests of one scheduler that are looked at.
        expiry_ns: An admission whose request has not started by then is withdrawn.
    """

    def __init__(
        self, state_of: Callable[[int, bytes], tuple[int, int]], *, device_count: int, lookahead: int, expiry_ns: int
    ) -> None:
        self._state_of = state_of
        self._lookahead = lookahead
        self._expiry_ns = expiry_ns
        self._namespaces: dict[int, _Namespace] = {}
        self._requests: dict[RequestId, _Request] = {}
        #: scheduler -> its waiting requests in order.
        self._waiting: dict[int, list[tuple[_Place, RequestId]]] = {}
        self._admissions: dict[int, _Admission] = {}
        self._asked: _Admission | None = None
        #: Answers that a device owes for admissions that are gone.
        self._owed: list[set[int]] = [set() for _ in range(device_count)]
        #: Counts what may help a refused request, per device.
        self._changes = [0] * device_count
        self._retry_ns: int | None = None
        self._next_admission = 1
        self._next_arrival = 1
        self._counts: Counter[str] = Counter()

    # ------------------------------------------------------------ the door

    def handle(self, event: ev.Event, *, now_ns: int) -> list[ev.Action]:
        """Take in a fact; return what to tell the devices, in order."""
        actions = self._take(event, now_ns)
        return [*actions, *self._ask_next(now_ns)]

    def next_deadline_ns(self) -> int | None:
        """When TimePassed is due; None: never."""
        due = [admission.due_ns for admission in self._admissions.values()]
        if self._retry_ns is not None:
            due.append(self._retry_ns)
        return min(due, default=None)

    def _take(self, event: ev.Event, now_ns: int) -> list[ev.Action]:
        match event:
            case ev.NamespaceOpened():
                self._open_namespace(event)
            case ev.RequestAnnounced():
                self._announce(event)
            case ev.RequestsStarted(requests=requests):
                return self._each(requests, self._start)
            case ev.RequestsWithdrawn(requests=requests):
                return self._each(requests, self._forget)
            case ev.KeysChanged():
                self._keys_changed(event)
            case ev.RoomChanged(device=device):
                self._changes[device] += 1
            case ev.DeviceLost(device=device):
                return self._device_lost(device)
            case ev.DeviceChanged(device=device, healthy=healthy):
                return self._device_changed(device, healthy=healthy)
            case ev.ReserveAnswered():
                return self._answered(event, now_ns)
            case ev.AdmissionRevoked():
                return self._revoked(event)
            case ev.AdmissionLanded():
                self._landed(event)
            case ev.TimePassed():
                return self._time_passed(now_ns)
            case _:
                assert_never(event)
        return []

    # ------------------------------------------------------------ requests

    def _open_namespace(self, event: ev.NamespaceOpened) -> None:
        sizes = {group: slot_bytes_of(size) * event.rank_count for group, size in event.object_bytes.items()}
        self._namespaces.setdefault(event.namespace, _Namespace(rank_count=event.rank_count, key_bytes=sizes))

    def _announce(self, event: ev.RequestAnnounced) -> None:
        request = self._requests.get(event.request)
        if request is None:
            place = (event.priority, self._next_arrival)
            self._next_arrival += 1
            request = self._requests[event.request] = _Request(
                id=event.request, namespace=event.namespace, place=place, waits=False
            )
        replaced = request.keys[event.first :]
        self._disown(request, replaced)
        request.keys[event.first :] = event.keys
        owners = self._namespaces[request.namespace].requests
        for key in request.keys if replaced else event.keys:
            owners.setdefault(key, set()).add(request.id)
        request.complete = not event.more
        request.stale = True
        if not request.waits:
            request.waits = True
            insort(self._waiting.setdefault(request.id.scheduler, []), (request.place, request.id))

    def _disown(self, request: _Request, keys: Iterable[bytes]) -> None:
        owners = self._namespaces[request.namespace].requests
        for key in keys:
            owning = owners.get(key)
            if owning is not None:
                owning.discard(request.id)
                if not owning:
                    del owners[key]

    def _each(self, requests: Iterable[RequestId], what: Callable[[_Request], list[ev.Action]]) -> list[ev.Action]:
        found = (self._requests[name] for name in requests if name in self._requests)
        return [action for request in found for action in what(request)]

    def _start(self, request: _Request) -> list[ev.Action]:
        """It needs nothing ahead any more; what it has in staging is cache from now on."""
        self._stop_waiting(request)
        landed = request.held is not None and request.held.phase is Phase.LANDED
        return self._give_up(request, "used" if landed else "withdrawn")

    def _forget(self, request: _Request) -> list[ev.Action]:
        self._stop_waiting(request)
        actions = self._give_up(request, "withdrawn")
        self._disown(request, request.keys)
        del self._requests[request.id]
        if not self._waiting.get(request.id.scheduler, True):
            del self._waiting[request.id.scheduler]
        return actions

    def _stop_waiting(self, request: _Request) -> None:
        if request.waits:
            request.waits = False
            waiting = self._waiting[request.id.scheduler]
            del waiting[bisect_left(waiting, (request.place, request.id))]

    def _keys_changed(self, event: ev.KeysChanged) -> None:
        """Look anew at the requests for which that means something to ask for, or to ask for no more."""
        if event.freed:
            self._changes[event.device] += 1
        owners = self._namespaces[event.namespace].requests
        for key in event.keys:
            for name in owners.get(key, ()):
                request = self._requests[name]
                held = request.held.covered if request.held is not None and not request.wanted else ()
                if not request.stale and key not in held:
                    has_it = self._state_of(event.namespace, key)[0] != 0
                    request.stale = has_it != (key in request.known)

    # ------------------------------------------------------------ asking

    def _ask_next(self, now_ns: int) -> list[ev.Action]:
        """Ask for the first candidate that may be asked for; see the module about the order."""
        kept: set[int] = set()
        if self._asked is not None:
            return []
        for request in self._candidates():
            wanted = self._wanted(request)
            if not wanted:
                continue
            if self._is_refused(request):
                if not request.alone:
                    kept |= wanted.keys()
                self._retry_ns = self._retry_ns or now_ns + RETRY_NS
            elif kept.isdisjoint(wanted) and not any(self._owed[device] for device in wanted):
                return self._ask(request, now_ns)
            else:
                kept |= wanted.keys()
        return []

    def _candidates(self) -> Iterator[_Request]:
        heads = (list(islice(waiting, self._lookahead)) for waiting in self._waiting.values())
        return (self._requests[name] for _, name in heapq.merge(*heads))

    def _wanted(self, request: _Request) -> dict[int, list[bytes]]:
        """Return, per device, the keys that an admission of *request* would cover now; none if it covers them."""
        if request.stale and request.complete:
            request.stale = False
            found: dict[int, list[bytes]] = {}
            for key in dict.fromkeys(request.keys):
                flags, device = self._state_of(request.namespace, key)
                if flags:
                    found.setdefault(device, []).append(key)
            request.known = {key for keys in found.values() for key in keys}
            covered = request.held.covered if request.held is not None else set()
            wanted = {} if request.known <= covered else found
            if wanted != request.wanted:
                request.wanted, request.refused = wanted, {}
        return request.wanted if request.complete else {}

    def _is_refused(self, request: _Request) -> bool:
        return any(self._changes[device] == changes for device, changes in request.refused.items())

    def _ask(self, request: _Request, now_ns: int) -> list[ev.Action]:
        admission = _Admission(
            number=self._next_admission,
            request=request.id,
            keys=dict(request.wanted),
            covered=request.known,
            awaited=set(request.wanted),
            due_ns=now_ns + ANSWER_NS,
        )
        self._next_admission += 1
        self._asked = self._admissions[admission.number] = admission
        request.refused = {}
        self._counts["asked"] += 1
        priority, arrival = request.place
        return [
            ev.Reserve(
                device=device,
                admission=admission.number,
                namespace=request.namespace,
                keys=keys,
                priority=priority,
                arrival=arrival,
            )
            for device, keys in sorted(admission.keys.items())
        ]

    def _answered(self, event: ev.ReserveAnswered, now_ns: int) -> list[ev.Action]:
        self._owed[event.device].discard(event.admission)
        asked = self._asked
        if asked is None or asked.number != event.admission or event.device not in asked.awaited:
            return []
        asked.awaited.discard(event.device)
        if not event.reserved:
            del asked.keys[event.device]
            return self._refuse(asked, {event.device})
        return [] if asked.awaited else self._commit(asked, now_ns)

    def _commit(self, admission: _Admission, now_ns: int) -> list[ev.Action]:
        request = self._requests[admission.request]
        self._asked = None
        actions: list[ev.Action] = []
        if request.held is not None:
            self._counts["replaced"] += 1
            actions += self._end(request.held)
        admission.phase, admission.awaited = Phase.COMMITTED, set(admission.keys)
        admission.due_ns = now_ns + self._expiry_ns
        request.held, request.wanted, request.stale = admission, {}, True
        self._counts["committed"] += 1
        commits = [ev.Commit(device=device, admission=admission.number) for device in sorted(admission.keys)]
        return [*commits, *actions]  # the new one first: what both cover stays in staging

    def _refuse(self, admission: _Admission, devices: set[int]) -> list[ev.Action]:
        """Give up what is asked for, since *devices* have no room for it."""
        request = self._requests[admission.request]
        request.refused = {device: self._changes[device] for device in devices}
        others = (other for other in self._admissions.values() if other.request != admission.request)
        request.alone = all(devices.isdisjoint(other.keys) for other in others)
        self._counts["refused"] += 1
        return self._end(admission)

    # ------------------------------------------------------------ ends

    def _give_up(self, request: _Request, counter: str) -> list[ev.Action]:
        """End all of a request's admissions."""
        actions: list[ev.Action] = []
        if self._asked is not None and self._asked.request == request.id:
            actions += self._end(self._asked)
        if request.held is not None:
            self._counts[counter] += 1
            actions += self._end(request.held)
        return actions

    def _end(self, admission: _Admission) -> list[ev.Action]:
        """End an admission on the devices that have it, and see to it that its request is looked at anew."""
        del self._admissions[admission.number]
        request = self._requests[admission.request]
        if admission is self._asked:
            self._asked = None
            for device in admission.awaited & admission.keys.keys():
                self._owed[device].add(admission.number)
        else:
            request.held = None
            for device in admission.keys:  # only now: what was merely asked for leaves no more room than before
                self._changes[device] += 1
        request.stale = True
        return [ev.Withdraw(device=device, admission=admission.number) for device in sorted(admission.keys)]

    def _revoked(self, event: ev.AdmissionRevoked) -> list[ev.Action]:
        admission = self._admissions.get(event.admission)
        if admission is None or event.device not in admission.keys or admission.phase is Phase.ASKED:
            return self._answered_by_revoking(event)
        request = self._requests[admission.request]
        del admission.keys[event.device]
        self._counts["revoked"] += 1
        actions = self._end(admission)
        # A load needs that device's slots: asking at once would take them back from it.
        self._wanted(request)
        request.refused, request.alone = {event.device: self._changes[event.device]}, False
        return actions

    def _answered_by_revoking(self, event: ev.AdmissionRevoked) -> list[ev.Action]:
        """A load took the slots before the other devices had answered: the same as a refusal."""
        asked = self._asked
        if asked is None or asked.number != event.admission or event.device not in asked.keys:
            return []
        del asked.keys[event.device]
        self._counts["revoked"] += 1
        return self._refuse(asked, {event.device})

    def _landed(self, event: ev.AdmissionLanded) -> None:
        admission = self._admissions.get(event.admission)
        if admission is None or admission.phase is not Phase.COMMITTED:
            return
        admission.awaited.discard(event.device)
        if not admission.awaited:
            admission.phase = Phase.LANDED
            self._counts["landed"] += 1

    def _device_lost(self, device: int) -> list[ev.Action]:
        """All that had a part on that device loses the rest too."""
        self._owed[device].clear()
        actions: list[ev.Action] = []
        for admission in [found for found in self._admissions.values() if device in found.keys]:
            del admission.keys[device]
            self._counts["lost"] += 1
            actions += self._end(admission)
        for request in self._requests.values():
            request.stale = True
        self._changes[device] += 1
        return actions

    def _device_changed(self, device: int, *, healthy: bool) -> list[ev.Action]:
        """Its keys are misses, or hits again: look at every request anew, and keep no part of an admission."""
        actions: list[ev.Action] = []
        for admission in [found for found in self._admissions.values() if device in found.keys and not healthy]:
            self._counts["lost"] += 1
            actions += self._end(admission)
        for request in self._requests.values():
            request.stale = True
        return actions

    def _time_passed(self, now_ns: int) -> list[ev.Action]:
        if self._retry_ns is not None and self._retry_ns <= now_ns:
            self._retry_ns = None
            self._changes = [changes + 1 for changes in self._changes]
        actions: list[ev.Action] = []
        for admission in [found for found in self._admissions.values() if found.due_ns <= now_ns]:
            if admission is self._asked:
                self._counts["unanswered"] += 1
                actions += self._refuse(admission, set(admission.awaited))
            elif admission.number in self._admissions:  # not ended with another one of its request
                request = self._requests[admission.request]
                self._stop_waiting(request)
                actions += self._give_up(request, "expired")
        return actions

    # ------------------------------------------------------------ facts

    def waiting_bytes(self) -> dict[tuple[int, int], int]:
        """Return the staging that refused candidates want, by device and slot size, of shared objects once."""
        keys: dict[int, set[tuple[int, bytes]]] = {}
        for request in self._candidates():
            if request.refused:
                for device, of_device in request.wanted.items():
                    keys.setdefault(device, set()).update((request.namespace, key) for key in of_device)
        waiting: Counter[tuple[int, int]] = Counter()
        for device, wanted in keys.items():
            for namespace, key in wanted:
                rank_count = self._namespaces[namespace].rank_count
                key_bytes = self._key_bytes(namespace, key)
                waiting[(device, key_bytes // rank_count)] += key_bytes
        return dict(waiting)

    def protected_bytes(self) -> dict[int, int]:
        """Return, per device, the staging that admissions have, of objects that several have once."""
        keys: dict[int, set[tuple[int, bytes]]] = {}
        for admission in self._admissions.values():
            namespace = self._requests[admission.request].namespace
            for device, of_device in admission.keys.items():
                keys.setdefault(device, set()).update((namespace, key) for key in of_device)
        return {device: sum(self._key_bytes(*key) for key in of_device) for device, of_device in keys.items()}

    def _key_bytes(self, namespace: int, key: bytes) -> int:
        return self._namespaces[namespace].key_bytes.get(int.from_bytes(key[-GROUP_BYTES:], "big"), 0)

    def statistics(self) -> dict[str, int]:
        """Return counters since the start, and how much there is now."""
        held = [admission for admission in self._admissions.values() if admission.phase is not Phase.ASKED]
        return {
            "requests_waiting": sum(map(len, self._waiting.values())),
            "admissions": len(held),
            "admissions_landed": sum(admission.phase is Phase.LANDED for admission in held),
            "protected_bytes": sum(self.protected_bytes().values()),
            **{name: self._counts[name] for name in COUNTERS},
        }

    def validate(self) -> None:
        """Check every invariant."""
        for number, admission in self._admissions.items():
            request = self._requests.get(admission.request)
            invariant(request is not None, "an admission has a request", admission=number)
            invariant(number == admission.number, "an admission stands under its number", admission=number)
            if request is None:
                continue
            invariant(request.waits, "nothing is admitted for a request that does not wait", request=request.id)
            is_asked = admission.phase is Phase.ASKED
            invariant(is_asked == (admission is self._asked), "one admission is asked for", admission=number)
            invariant(is_asked or request.held is admission, "a request has one committed admission", admission=number)
            whole = {key for keys in admission.keys.values() for key in keys}
            invariant(whole == admission.covered, "an admission is whole", admission=number)
            invariant(admission.awaited <= admission.keys.keys(), "only its devices are awaited", admission=number)
            landed = admission.phase is Phase.LANDED
            invariant(landed == (not admission.awaited), "landed: nothing is awaited", admission=number)
        for request in self._requests.values():
            found = request.held is None or request.held.number in self._admissions
            invariant(found, "a request's admission is known", request=request.id)
            waiting = (request.place, request.id) in self._waiting.get(request.id.scheduler, [])
            invariant(waiting == request.waits, "who waits stands in the queue", request=request.id)
        for waiting_list in self._waiting.values():
            invariant(waiting_list == sorted(waiting_list), "the queue is in order")
        for namespace in self._namespaces.values():
            for key, names in namespace.requests.items():
                invariant(bool(names), "a key without a request", key=key)
                owned = all(key in self._requests[name].keys for name in names)
                invariant(owned, "a key's requests have it", key=key)
