"""Admission against devices with few slots: whole or nothing, in order, and everything that fits in the end."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.core import admission_events as ev
from kvpool.core.admission import ANSWER_NS, RETRY_NS, Admission
from kvpool.core.admission_events import RequestId
from kvpool.wire.messages import RESIDENT, STORED

DEVICES = 3
LOOKAHEAD = 3
NAMESPACE = 1
KEYS = [b"%c" % letter + bytes(4) for letter in b"abcdefgh"]
REQUESTS = [RequestId(scheduler, name) for scheduler in (1, 2) for name in ("p", "q", "r")]
EXPIRY_NS = 100 * 10**9

_request = st.sampled_from(REQUESTS)
_device = st.integers(0, DEVICES - 1)
_keys = st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=5)


class Device:
    """A device's side: what it was asked and has not answered, and which keys of which admissions have slots."""

    def __init__(self) -> None:
        self.slots = 4
        self.inbox: list[ev.Action] = []
        self.reserved: dict[int, list[bytes]] = {}
        self.committed: set[int] = set()
        self.order: dict[int, tuple[int, int]] = {}

    def used(self) -> set[bytes]:
        return {key for keys in self.reserved.values() for key in keys}


class AdmissionMachine(RuleBasedStateMachine):
    """The model: the devices, and each request's keys, place and whether it waits, in plain dictionaries."""

    @initialize()
    def begin(self) -> None:
        self.index: dict[bytes, tuple[int, int]] = {}
        self.devices = [Device() for _ in range(DEVICES)]
        self.requests: dict[RequestId, list[bytes]] = {}
        self.places: dict[RequestId, tuple[int, int]] = {}
        self.waiting: set[RequestId] = set()
        self.owners: dict[int, RequestId] = {}
        self.arrival = 0
        self.now_ns = 0
        self.admission = Admission(
            lambda _, key: self.index.get(key, (0, 255)),
            device_count=DEVICES,
            lookahead=LOOKAHEAD,
            expiry_ns=EXPIRY_NS,
        )
        self.tell(ev.NamespaceOpened(namespace=NAMESPACE, rank_count=1, object_bytes={0: 4096}))

    def tell(self, event: ev.Event) -> None:
        for action in self.admission.handle(event, now_ns=self.now_ns):
            if isinstance(action, ev.Reserve):
                self.check_order(action)
            self.devices[action.device].inbox.append(action)
        self.admission.validate()

    def check_order(self, reserve: ev.Reserve) -> None:
        """Only who is among the first of its scheduler is asked for, and only for what the pool has."""
        found = [one for one in self.waiting if self.places[one] == (reserve.priority, reserve.arrival)]
        assert 1 == len(found)
        self.owners[reserve.admission] = found[0]
        ahead = [one for one in self.waiting if one.scheduler == found[0].scheduler]
        assert found[0] in sorted(ahead, key=lambda one: self.places[one])[:LOOKAHEAD]
        assert all(self.index[key][1] == reserve.device for key in reserve.keys)

    # ------------------------------------------------------------ schedulers

    @rule(request=_request, keys=_keys, priority=st.integers(-1, 1), more=st.booleans())
    def announce(self, request: RequestId, keys: list[bytes], priority: int, more: bool) -> None:
        known = self.requests.setdefault(request, [])
        first = len(known)
        new = [key for key in keys if key not in known]
        if request not in self.places:
            self.arrival += 1
            self.places[request] = (priority, self.arrival)
        known += new
        self.waiting.add(request)
        for part, last in ((new[:1], False), (new[1:], True)) if more else ((new, True),):
            self.tell(
                ev.RequestAnnounced(
                    request=request, namespace=NAMESPACE, first=first, keys=part, more=not last, priority=priority
                )
            )
            first += len(part)

    @rule(request=_request)
    def start(self, request: RequestId) -> None:
        self.waiting.discard(request)
        self.tell(ev.RequestsStarted(requests=[request]))

    @rule(request=_request)
    def withdraw(self, request: RequestId) -> None:
        self.waiting.discard(request)
        self.requests.pop(request, None)
        self.places.pop(request, None)
        self.tell(ev.RequestsWithdrawn(requests=[request]))

    # ------------------------------------------------------------ devices

    @rule(device=_device, keys=_keys, flags=st.sampled_from([STORED, RESIDENT, STORED | RESIDENT, 0]))
    def change_keys(self, device: int, keys: list[bytes], flags: int) -> None:
        own = [key for key in keys if key not in self.index or self.index[key][1] == device]
        for key in own:
            self.index.pop(key, None)
        if flags:
            self.index.update((key, (flags, device)) for key in own)
        self.tell(ev.KeysChanged(namespace=NAMESPACE, device=device, keys=own, freed=not flags & RESIDENT))

    @rule(device=_device)
    def answer_one(self, device: int) -> None:
        """The device takes its next message."""
        found = self.devices[device]
        if not found.inbox:
            return
        match found.inbox.pop(0):
            case ev.Reserve(admission=admission, keys=keys):
                fits = len(found.used() | set(keys)) <= found.slots
                if fits:
                    found.reserved[admission] = keys
                self.tell(ev.ReserveAnswered(device=device, admission=admission, reserved=fits))
            case ev.Commit(admission=admission):
                if admission in found.reserved:
                    found.committed.add(admission)
                    self.tell(ev.AdmissionLanded(device=device, admission=admission))
            case ev.Withdraw(admission=admission):
                found.reserved.pop(admission, None)
                found.committed.discard(admission)

    @rule(device=_device, slots=st.integers(0, 8))
    def change_room(self, device: int, slots: int) -> None:
        """Loads take slots, from the last admission in order, or give some back."""
        found = self.devices[device]
        more = slots > found.slots
        found.slots = slots
        while len(found.used()) > slots:
            last = max(found.reserved)
            del found.reserved[last]
            found.committed.discard(last)
            self.tell(ev.AdmissionRevoked(device=device, admission=last))
        if more:
            self.tell(ev.RoomChanged(device=device))

    @rule(device=_device)
    def lose(self, device: int) -> None:
        slots = self.devices[device].slots
        self.devices[device] = Device()
        self.devices[device].slots = slots
        self.index = {key: state for key, state in self.index.items() if state[1] != device}
        self.tell(ev.DeviceLost(device=device))

    @rule(for_ns=st.sampled_from([RETRY_NS, ANSWER_NS, EXPIRY_NS]))
    def pass_time(self, for_ns: int) -> None:
        self.now_ns += for_ns
        expired = [
            self.owners[number]
            for number, found in self.admission._admissions.items()
            if found.phase.value != "asked" and found.due_ns <= self.now_ns
        ]
        self.waiting -= set(expired)
        self.tell(ev.TimePassed())

    # ------------------------------------------------------------ what holds

    def settle(self) -> None:
        """Every device takes all its messages."""
        for _ in range(1000):
            busy = [number for number, device in enumerate(self.devices) if device.inbox]
            if not busy:
                return
            self.answer_one(busy[0])
        raise AssertionError("asking never ends")

    @precondition(lambda self: self.requests)
    @rule()
    def whole_or_nothing(self) -> None:
        """Once all messages have arrived, each admission is on every device that it needs, or on none."""
        self.settle()
        numbers = {number for device in self.devices for number in device.reserved}
        assert set(self.admission._admissions) == numbers
        for number in numbers:
            found = self.admission._admissions[number]
            held = {n: device.reserved[number] for n, device in enumerate(self.devices) if number in device.reserved}
            assert found.keys == held
            assert all(number in self.devices[device].committed for device in held)
            assert self.owners[number] in self.waiting

    @precondition(lambda self: self.requests)
    @rule()
    def everything_that_fits_is_admitted(self) -> None:
        """With room for all, and after the time for a retry, every candidate's known keys are protected."""
        for device in range(DEVICES):
            self.change_room(device, len(KEYS))
        self.settle()
        self.pass_time(RETRY_NS)
        self.settle()
        for scheduler in (1, 2):
            ahead = sorted((one for one in self.waiting if one.scheduler == scheduler), key=self.places.__getitem__)
            for request in ahead[:LOOKAHEAD]:
                known = {key for key in self.requests[request] if key in self.index}
                held = [found for found in self.admission._admissions.values() if self.owners[found.number] == request]
                covered = {key for found in held for key in found.covered}
                assert known <= covered

    @invariant()
    def nothing_is_admitted_for_nobody(self) -> None:
        if hasattr(self, "admission"):
            assert all(self.owners[number] in self.waiting for number in self.admission._admissions)


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
