"""The mirror against a plain model: what a scheduler was told is always what is true."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.core.directory import NO_DEVICE, Directory, SendStatus
from kvpool.wire.messages import RESIDENT, STORED, KeysChanged, KeyState

DEVICES = 3
KEYS = [b"a", b"b", b"c", b"d", b"e"]
REQUESTS = ["r0", "r1", "r2"]
SCHEDULERS = {1: 10, 2: 10, 3: 11}  # scheduler -> namespace

_device = st.integers(0, DEVICES - 1)
_scheduler = st.sampled_from(sorted(SCHEDULERS))
_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)


class DirectoryMachine(RuleBasedStateMachine):
    """
    The model: flags and announced keys in plain dictionaries, and what each scheduler believes.

    It believes the last Status or KeysChanged about a key.
    """

    @initialize()
    def begin(self) -> None:
        self.directory = Directory(DEVICES)
        self.flags: dict[tuple[int, int, bytes], int] = {}
        self.announced: dict[tuple[int, str], list[bytes]] = {}
        self.believed: dict[int, dict[bytes, tuple[int, int]]] = {number: {} for number in SCHEDULERS}
        self.running = [False] * DEVICES
        self.scanned: set[tuple[int, int]] = set()
        self.open_probes: dict[int, int] = {}
        self.incomplete: set[tuple[int, str]] = set()
        for number, namespace in SCHEDULERS.items():
            self.directory.open_namespace(namespace)
            self.directory.scheduler_joined(number, f"engine{number}", namespace)
        for device in range(DEVICES):
            self.worker_up(device)

    def truth(self, namespace: int, key: bytes) -> tuple[int, int]:
        held = [(flags & RESIDENT, -device, flags) for (ns, device, k), flags in self.flags.items()
                if (ns, k) == (namespace, key)]  # fmt: skip
        if not held:
            return 0, NO_DEVICE
        _, device, flags = max(held)
        return flags, -device

    def hear(self, statuses: list[SendStatus]) -> None:
        for scheduler, status in statuses:
            keys = self.announced.get((scheduler, status.request), [])[status.first :]
            answers = zip(status.flags, status.devices, strict=True)
            self.believed[scheduler].update(zip(keys, answers, strict=False))
            if status.complete:
                self.incomplete.discard((scheduler, status.request))
            else:
                self.incomplete.add((scheduler, status.request))

    @rule(device=_device)
    def worker_up(self, device: int) -> None:
        if not self.running[device]:
            self.running[device] = True
            self.directory.worker_up(device)

    @rule(device=_device)
    def worker_down(self, device: int) -> None:
        self.running[device] = False
        self.flags = {where: flags for where, flags in self.flags.items() if where[1] != device}
        self.scanned = {where for where in self.scanned if where[1] != device}
        self.open_probes = {probe: d for probe, d in self.open_probes.items() if d != device}
        self.hear(self.directory.worker_down(device))

    @rule(device=_device, namespace=st.sampled_from([10, 11]))
    def scan_ended(self, device: int, namespace: int) -> None:
        if self.running[device]:
            self.scanned.add((namespace, device))
            self.directory.scan_ended(namespace, device)

    @rule(
        device=_device,
        namespace=st.sampled_from([10, 11]),
        entries=st.lists(
            st.tuples(st.sampled_from(KEYS), st.sampled_from([0, STORED, RESIDENT, STORED | RESIDENT])), min_size=1
        ),
    )
    def told(self, device: int, namespace: int, entries: list[tuple[bytes, int]]) -> None:
        if not self.running[device]:
            return
        for key, flags in entries:
            self.flags.pop((namespace, device, key), None)
            if flags:
                self.flags[namespace, device, key] = flags
        self.directory.told(namespace, device, [KeyState(key, flags, device) for key, flags in entries])

    @rule(scheduler=_scheduler, request=st.sampled_from(REQUESTS), keys=_keys)
    def announce(self, scheduler: int, request: str, keys: list[bytes]) -> None:
        known = self.announced.setdefault((scheduler, request), [])
        first = len(known)
        known += keys
        statuses, probes = self.directory.announce(scheduler, request, first, keys)
        self.hear(statuses)
        for probe in probes:
            assert self.running[probe.device]
            assert (probe.namespace, probe.device) not in self.scanned
            assert all(self.truth(probe.namespace, key)[0] == 0 for key in probe.keys)
            self.open_probes[probe.probe] = probe.device

    @rule(data=st.data())
    def probed(self, data: st.DataObject) -> None:
        if self.open_probes:
            probe = data.draw(st.sampled_from(sorted(self.open_probes)))
            self.hear(self.directory.probed(self.open_probes.pop(probe), probe))

    @rule(scheduler=_scheduler, requests=st.lists(st.sampled_from(REQUESTS), max_size=2))
    def withdraw(self, scheduler: int, requests: list[str]) -> None:
        self.directory.withdraw(scheduler, requests)
        for request in requests:
            self.announced.pop((scheduler, request), None)
            self.incomplete.discard((scheduler, request))

    def teardown(self) -> None:
        for scheduler in SCHEDULERS:
            self.listen(scheduler)

    @rule(scheduler=_scheduler)
    def listen(self, scheduler: int) -> None:
        for message in self.directory.take_news(scheduler):
            assert isinstance(message, KeysChanged)
            self.believed[scheduler].update({e.key: (e.flags, e.device) for e in message.entries})
        for (number, _), keys in self.announced.items():
            if number == scheduler:
                for key in keys:
                    assert self.truth(SCHEDULERS[scheduler], key) == self.believed[scheduler][key]

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "directory"):
            return
        self.directory.validate()
        if not self.open_probes:
            assert set() == self.incomplete, "an answer that may change soon has something to wait for"


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
