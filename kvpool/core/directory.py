"""
The coordinator's mirror of the workers' indexes, and what schedulers want to know from it.

Theory. Each worker tells the flags of its keys (STORED, RESIDENT) as they change; the mirror keeps
them per namespace and device, so that a lost device is forgotten at once. A key's *state* is the
best one over the devices: resident before stored, then the lower device; flags 0 mean a miss.

A scheduler announces requests. Each announced key is *watched* for it, and a change marks the key
in that scheduler's set of changes; the state is read when the set is taken. So however fast keys
change and however slowly a scheduler reads, what waits for it is bounded by what it announced.

While a running worker has not finished its scan of a namespace, its silence about a key means
nothing. Unknown keys of an announcement are then asked of it by name (a *probe*), the answer says
`complete=False`, and once the last probe of the request has ended the whole request is answered
again. A device without a running worker is not asked: its keys are misses until it is back. A device
that other hosts use too is asked for unknown keys at any time, but not again for ABSENT_S for those that
were not found.

    announce -> Status(complete)                    all scans ended, or all keys known
    announce -> Status(not complete) + KeysProbe    -> probed / worker_down -> Status(complete)

Covers: flags, watchers, probes, ends of stores. Does not cover: sockets, who is admitted, preload.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.core.packed_map import PackedMap
from kvpool.errors import ProtocolError, invariant
from kvpool.wire.codec import split
from kvpool.wire.messages import ITEMS_MAX, RESIDENT, KeysChanged, KeyState, Message, Status, StoresEnded

#: Announced keys of one scheduler at most; what is announced beyond is answered as a miss.
ANNOUNCED_KEYS_MAX = 1 << 20
#: Ends of stores that wait for one scheduler at most; a scheduler that lets more pile up does not read.
STORES_ENDED_MAX = 1 << 18
#: Longest key that can be announced: vLLM's have 36 bytes, and ITEMS_MAX of this size are split into few frames.
KEY_BYTES_MAX = 512
NO_DEVICE = 255
#: A key that a shared device did not have is not looked for again for so long.
ABSENT_S = 2.0
#: So many of those are remembered for each namespace.
ABSENT_MAX = 1 << 16


class SendStatus(NamedTuple):
    """Tell that scheduler."""

    scheduler: int
    status: Status


class SendProbe(NamedTuple):
    """Ask that device's worker for these keys by name."""

    device: int
    probe: int
    namespace: int
    keys: list[bytes]


@dataclass(slots=True)
class _Namespace:
    """What is known of one namespace: flags per device and key, whose scan has ended, who watches."""

    flags: list[PackedMap]
    scanned: list[bool]
    watchers: dict[bytes, dict[int, int]] = field(default_factory=dict)
    #: (device, key) of probes in flight, so that a key is asked for once.
    probed: dict[tuple[int, bytes], int] = field(default_factory=dict)
    #: (shared device, key) -> until when it counts as absent; in the order of that time.
    absent: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def note_absent(self, device: int, keys: Iterable[bytes], now_ns: int) -> None:
        """A shared device was asked for *keys*: what it still does not know is not there for now."""
        until_ns = now_ns + int(ABSENT_S * 1e9)
        for key in keys:
            self.absent.pop((device, key), None)
            if key not in self.flags[device]:
                self.absent[device, key] = until_ns
        while self.absent:
            oldest = next(iter(self.absent))
            if self.absent[oldest] > now_ns and len(self.absent) <= ABSENT_MAX:
                break
            del self.absent[oldest]


@dataclass(slots=True)
class _Request:
    """One announced request: its keys in order, and the probes its answer waits for."""

    keys: list[bytes] = field(default_factory=list)
    probes: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Scheduler:
    """One scheduler: what it announced, and what it has to be told. Keys of `changed` are all watched."""

    engine: str
    namespace: int
    requests: dict[str, _Request] = field(default_factory=dict)
    announced_keys: int = 0
    changed: dict[bytes, None] = field(default_factory=dict)
    kept: list[bytes] = field(default_factory=list)
    dropped: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Probe:
    """Keys asked of one device, and the (scheduler, request) pairs that wait."""

    device: int
    namespace: int
    keys: list[bytes]
    waiting: set[tuple[int, str]]


class Directory:
    """See the module. *device_count* devices, none running at first; other hosts use those that are *shared* too."""

    def __init__(self, device_count: int, shared: Iterable[int] = ()) -> None:
        self._shared = frozenset(shared)
        self._running = [False] * device_count
        #: Devices whose workers say that they are given up for now: all their keys are misses.
        self._given_up: set[int] = set()
        self._namespaces: dict[int, _Namespace] = {}
        #: Namespaces that were reset: what workers still say of them is not heard.
        self._retired: set[int] = set()
        self._schedulers: dict[int, _Scheduler] = {}
        self._probes: dict[int, _Probe] = {}
        self._next_probe = 1

    # ---------------------------------------------------------------- what workers say

    def open_namespace(self, namespace: int) -> None:
        """Start a mirror for a namespace; again is fine."""
        count = len(self._running)
        self._namespaces.setdefault(namespace, _Namespace([PackedMap(1) for _ in range(count)], [False] * count))

    def retire_namespace(self, namespace: int) -> None:
        """Forget a namespace that no scheduler is in any more, for good."""
        invariant(
            all(scheduler.namespace != namespace for scheduler in self._schedulers.values()),
            "a namespace in use is not retired", namespace=namespace,
        )  # fmt: skip
        self._retired.add(namespace)
        del self._namespaces[namespace]
        for number in [number for number, probe in self._probes.items() if probe.namespace == namespace]:
            del self._probes[number]

    def worker_up(self, device: int) -> None:
        """That device's worker runs; it has told nothing yet."""
        self._running[device] = True
        self._given_up.discard(device)

    def device_changed(self, device: int, *, healthy: bool) -> None:
        """A worker said whether its device is used; while it is not, its keys are misses."""
        if healthy == (device not in self._given_up):
            return
        self._given_up ^= {device}
        for found in self._namespaces.values():
            for key in found.watchers:
                if key in found.flags[device]:
                    self._mark(found, key)

    def worker_down(self, device: int) -> list[SendStatus]:
        """That device's keys are gone until its next worker tells them again."""
        self._running[device] = False
        for found in self._namespaces.values():
            lost, found.flags[device] = found.flags[device], PackedMap(1)
            found.scanned[device] = False
            for key in found.watchers:
                if key in lost:
                    self._mark(found, key)
        ended = [number for number, probe in self._probes.items() if probe.device == device]
        return [status for number in ended for status in self.probed(device, number)]

    def told(self, namespace: int, device: int, entries: Iterable[KeyState]) -> None:
        """
        A worker told flags of its keys.

        Raises:
            ProtocolError: The namespace was never opened.
        """
        if namespace in self._retired:
            return
        found = self._namespaces.get(namespace)
        if found is None:
            raise ProtocolError("keys of a namespace that is not open", namespace=namespace)
        flags, watchers = found.flags[device], found.watchers
        for entry in entries:
            if entry.flags:
                flags[entry.key] = entry.flags
            else:
                flags.pop(entry.key)
            if entry.key in watchers:
                self._mark(found, entry.key)

    def scan_ended(self, namespace: int, device: int) -> None:
        """That worker has told every key of the namespace."""
        found = self._namespaces.get(namespace)
        if found is not None:
            found.scanned[device] = True

    def probed(self, device: int, number: int, *, now_ns: int = 0) -> list[SendStatus]:
        """A probe has ended: answer the requests that waited for no other."""
        probe = self._probes.get(number)
        if probe is None or probe.device != device:
            return []
        del self._probes[number]
        found = self._namespaces[probe.namespace]
        for key in probe.keys:
            found.probed.pop((device, key), None)
        if device in self._shared and self._running[device]:
            found.note_absent(device, probe.keys, now_ns)
        statuses: list[SendStatus] = []
        for scheduler, name in sorted(probe.waiting):
            request = self._schedulers[scheduler].requests[name]
            request.probes.discard(number)
            if not request.probes:
                statuses += self._statuses(scheduler, name, 0, request.keys, complete=True)
        return statuses

    def stores_ended(self, engine: str, kept: Sequence[bytes], dropped: Sequence[bytes]) -> list[int]:
        """Stores of an engine ended. Returns the schedulers that let too many pile up: they do not read."""
        overrun = []
        for number, scheduler in self._schedulers.items():
            if scheduler.engine != engine:
                continue
            scheduler.kept += kept
            scheduler.dropped += dropped
            if len(scheduler.kept) + len(scheduler.dropped) > STORES_ENDED_MAX:
                overrun.append(number)
        return overrun

    # ---------------------------------------------------------------- what schedulers say

    def scheduler_joined(self, scheduler: int, engine: str, namespace: int) -> None:
        """A scheduler attached; its namespace is open."""
        invariant(namespace in self._namespaces, "a scheduler's namespace is open", namespace=namespace)
        self._schedulers[scheduler] = _Scheduler(engine, namespace)

    def scheduler_left(self, scheduler: int) -> None:
        """A scheduler is gone, and so is all it announced."""
        self.withdraw(scheduler, list(self._schedulers[scheduler].requests))
        del self._schedulers[scheduler]

    def announce(
        self, scheduler: int, request: str, first: int, keys: Sequence[bytes], *, now_ns: int = 0
    ) -> tuple[list[SendStatus], list[SendProbe]]:
        """
        A request, or a further part of it, arrived: watch its keys, answer now, probe what is not known.

        A part that overlaps what was announced replaces it from *first* on.

        Raises:
            ProtocolError: *first* leaves a gap, or a key is too long.
        """
        if any(len(key) > KEY_BYTES_MAX for key in keys):
            raise ProtocolError("announced key is too long", key_bytes_max=KEY_BYTES_MAX)
        found = self._schedulers[scheduler]
        announced = found.requests.setdefault(request, _Request())
        if not 0 <= first <= len(announced.keys):
            if first > 0 and found.announced_keys >= ANNOUNCED_KEYS_MAX:
                return self._statuses(scheduler, request, first, keys, complete=True), []
            raise ProtocolError("announced keys leave a gap", first=first, announced=len(announced.keys))
        self._unwatch(scheduler, found, announced.keys[first:])
        room = max(0, ANNOUNCED_KEYS_MAX - found.announced_keys)
        announced.keys[first:] = keys[:room]
        self._watch(scheduler, found, keys[:room])
        waits, probes = self._probe(scheduler, request, announced, keys[:room], now_ns)
        return self._statuses(scheduler, request, first, keys, complete=not waits), probes

    def withdraw(self, scheduler: int, requests: Iterable[str]) -> None:
        """Forget these requests; unknown ones are fine (they were withdrawn before)."""
        found = self._schedulers[scheduler]
        for name in requests:
            request = found.requests.pop(name, None)
            if request is None:
                continue
            self._unwatch(scheduler, found, request.keys)
            for number in request.probes:
                self._probes[number].waiting.discard((scheduler, name))

    # ---------------------------------------------------------------- what the mirror says

    def state_of(self, namespace: int, key: bytes) -> tuple[int, int]:
        """Return a key's flags and device: (0, NO_DEVICE) for a miss."""
        return _state(self._namespaces[namespace], key, self._given_up)

    def requests_of(self, scheduler: int) -> list[str]:
        """Return the names of a scheduler's announced requests."""
        return list(self._schedulers[scheduler].requests)

    def keys_of(self, scheduler: int, request: str) -> list[bytes]:
        """Return a request's keys in order, as far as there was room for them; none if it is not announced."""
        announced = self._schedulers[scheduler].requests.get(request)
        return announced.keys if announced is not None else []

    # ---------------------------------------------------------------- what schedulers are told

    def has_news(self, scheduler: int) -> bool:
        """Whether `take_news` would return anything."""
        found = self._schedulers[scheduler]
        return bool(found.changed or found.kept or found.dropped)

    def take_news(self, scheduler: int) -> list[Message]:
        """Return, once, what changed for a scheduler since the last call: key states first, then ends of stores."""
        found = self._schedulers[scheduler]
        index = self._namespaces[found.namespace]
        changed = [KeyState(key, *_state(index, key, self._given_up)) for key in found.changed]
        news: list[Message] = [KeysChanged(entries=part) for _, part in split(changed)]
        news += [StoresEnded(kept=part, dropped=[]) for _, part in split(found.kept)]
        news += [StoresEnded(kept=[], dropped=part) for _, part in split(found.dropped)]
        found.changed, found.kept, found.dropped = {}, [], []
        return news

    # ---------------------------------------------------------------- inside

    def _probe(
        self, scheduler: int, name: str, request: _Request, keys: Sequence[bytes], now_ns: int
    ) -> tuple[bool, list[SendProbe]]:
        """
        Ask for unknown keys wherever a scan runs, or other hosts store.

        Returns whether *keys* wait for a probe, and the new probes.
        """
        namespace = self._schedulers[scheduler].namespace
        found = self._namespaces[namespace]
        asked = [
            device
            for device, running in enumerate(self._running)
            if running and (device in self._shared or not found.scanned[device]) and device not in self._given_up
        ]
        if not asked:
            return False, []
        unknown = [key for key in dict.fromkeys(keys) if not _state(found, key, self._given_up)[0]]
        joined: set[int] = set()
        probes: list[SendProbe] = []
        for device in asked:
            joined.update(number for key in unknown if (number := found.probed.get((device, key))) is not None)
            wanted = [
                key
                for key in unknown
                if (device, key) not in found.probed and now_ns >= found.absent.get((device, key), 0)
            ]
            for _, part in split(wanted):
                probes.append(SendProbe(device, self._next_probe, namespace, part))
                self._probes[self._next_probe] = _Probe(device, namespace, part, set())
                found.probed.update(((device, key), self._next_probe) for key in part)
                self._next_probe += 1
        joined.update(probe.probe for probe in probes)
        for number in joined:
            self._probes[number].waiting.add((scheduler, name))
        request.probes |= joined
        return bool(joined), probes

    def _statuses(
        self, scheduler: int, request: str, first: int, keys: Sequence[bytes], *, complete: bool
    ) -> list[SendStatus]:
        index = self._namespaces[self._schedulers[scheduler].namespace]
        answers = []
        for start in range(0, len(keys) or 1, ITEMS_MAX):
            states = [_state(index, key, self._given_up) for key in keys[start : start + ITEMS_MAX]]
            status = Status(
                request=request,
                first=first + start,
                flags=bytes(flags for flags, _ in states),
                devices=bytes(device for _, device in states),
                complete=complete,
            )
            answers.append(SendStatus(scheduler, status))
        return answers

    def _watch(self, number: int, scheduler: _Scheduler, keys: Sequence[bytes]) -> None:
        watchers = self._namespaces[scheduler.namespace].watchers
        for key in keys:
            watching = watchers.setdefault(key, {})
            watching[number] = watching.get(number, 0) + 1
        scheduler.announced_keys += len(keys)

    def _unwatch(self, number: int, scheduler: _Scheduler, keys: Sequence[bytes]) -> None:
        watchers = self._namespaces[scheduler.namespace].watchers
        for key in keys:
            watching = watchers[key]
            watching[number] -= 1
            if watching[number]:
                continue
            del watching[number]
            scheduler.changed.pop(key, None)
            if not watching:
                del watchers[key]
        scheduler.announced_keys -= len(keys)

    def _mark(self, namespace: _Namespace, key: bytes) -> None:
        for number in namespace.watchers[key]:
            self._schedulers[number].changed[key] = None

    def statistics(self) -> dict[str, int]:
        """Return sizes: keys in the mirror, announced requests and keys, probes in flight."""
        return {
            "keys": sum(len(flags) for found in self._namespaces.values() for flags in found.flags),
            "requests_announced": sum(len(found.requests) for found in self._schedulers.values()),
            "keys_announced": sum(found.announced_keys for found in self._schedulers.values()),
            "probes_in_flight": len(self._probes),
        }

    def validate(self) -> None:
        """Check every invariant."""
        for number, scheduler in self._schedulers.items():
            watchers = self._namespaces[scheduler.namespace].watchers
            count = sum(len(request.keys) for request in scheduler.requests.values())
            invariant(count == scheduler.announced_keys, "announced keys are counted", scheduler=number)
            watched = sum(watching.get(number, 0) for watching in watchers.values())
            invariant(watched == count, "every announced key is watched once", scheduler=number)
            invariant(
                all(number in watchers[key] for key in scheduler.changed), "changes are watched", scheduler=number
            )
            for request in scheduler.requests.values():
                invariant(all(probe in self._probes for probe in request.probes), "probes waited for are in flight")
        for probe in self._probes.values():
            invariant(self._running[probe.device], "only a running worker is probed", device=probe.device)


def _state(index: _Namespace, key: bytes, given_up: set[int]) -> tuple[int, int]:
    """Return a key's flags and device, *given_up* devices left out: (0, NO_DEVICE) for a miss."""
    best_flags, best_device = 0, NO_DEVICE
    for device, flags_of in enumerate(index.flags):
        flags = flags_of.get(key)
        if flags and device not in given_up and (not best_flags or (flags & RESIDENT) > (best_flags & RESIDENT)):
            best_flags, best_device = flags, device
    return best_flags, best_device
