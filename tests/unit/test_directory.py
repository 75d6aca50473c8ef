"""Directory: the mirror of the indexes and what schedulers hear of it."""

import pytest

from kvpool.core import directory as d
from kvpool.core.directory import NO_DEVICE, Directory, SendProbe
from kvpool.errors import ProtocolError
from kvpool.wire.messages import ITEMS_MAX, RESIDENT, STORED, KeysChanged, KeyState, Status, StoresEnded

NS, SCHED = 1, 7


@pytest.fixture
def index() -> Directory:
    """Two running devices whose scans have ended, and one scheduler."""
    index = Directory(2)
    index.open_namespace(NS)
    for device in (0, 1):
        index.worker_up(device)
        index.scan_ended(NS, device)
    index.scheduler_joined(SCHED, "engine", NS)
    return index


def tell(index: Directory, device: int, **flags: int) -> None:
    index.told(NS, device, [KeyState(key.encode(), value, device) for key, value in flags.items()])
    index.validate()


def announce(index: Directory, request: str, *keys: str, first: int = 0) -> Status:
    statuses, probes = index.announce(SCHED, request, first, [key.encode() for key in keys])
    index.validate()
    assert (1, []) == (len(statuses), probes)
    return statuses[0].status


def news(index: Directory) -> dict[str, tuple[int, int]]:
    changes = [message for message in index.take_news(SCHED) if isinstance(message, KeysChanged)]
    return {state.key.decode(): (state.flags, state.device) for message in changes for state in message.entries}


def test_an_announcement_is_answered_with_flags_and_devices(index: Directory) -> None:
    tell(index, 0, a=STORED)
    tell(index, 1, b=STORED | RESIDENT)
    status = announce(index, "r", "a", "b", "c")
    assert bytes([STORED, STORED | RESIDENT, 0]) == status.flags
    assert bytes([0, 1, NO_DEVICE]) == status.devices
    assert status.complete


def test_a_change_of_an_announced_key_is_told_once(index: Directory) -> None:
    announce(index, "r", "a", "b")
    tell(index, 0, a=RESIDENT)
    tell(index, 0, a=RESIDENT | STORED)
    assert {"a": (RESIDENT | STORED, 0)} == news(index)
    assert not index.has_news(SCHED)


def test_a_key_that_nobody_announced_is_not_told(index: Directory) -> None:
    announce(index, "r", "a")
    tell(index, 0, b=STORED)
    assert not index.has_news(SCHED)


def test_a_withdrawn_request_is_told_nothing_unless_another_wants_the_key(index: Directory) -> None:
    announce(index, "r", "a", "b")
    announce(index, "q", "b")
    tell(index, 0, a=STORED, b=STORED)
    index.withdraw(SCHED, ["r", "unknown"])
    index.validate()
    assert {"b": (STORED, 0)} == news(index)


def test_a_key_on_two_devices_is_resident_before_stored(index: Directory) -> None:
    tell(index, 0, a=STORED)
    tell(index, 1, a=STORED | RESIDENT)
    assert bytes([1]) == announce(index, "r", "a").devices
    tell(index, 1, a=0)
    assert {"a": (STORED, 0)} == news(index)


def test_a_lost_device_turns_its_keys_into_misses(index: Directory) -> None:
    tell(index, 0, a=STORED)
    tell(index, 1, b=STORED, c=STORED)
    announce(index, "r", "a", "b")
    assert [] == index.worker_down(1)
    assert {"b": (0, NO_DEVICE)} == news(index)
    assert 1 == index.statistics()["keys"]


def test_parts_of_a_request_append(index: Directory) -> None:
    announce(index, "r", "a", "b")
    assert 2 == announce(index, "r", "c", first=2).first
    tell(index, 0, c=STORED)
    assert {"c": (STORED, 0)} == news(index)


def test_a_gap_between_parts_is_an_error_of_the_peer(index: Directory) -> None:
    announce(index, "r", "a")
    with pytest.raises(ProtocolError, match="gap"):
        index.announce(SCHED, "r", 2, [b"c"])


def test_announcing_again_from_an_earlier_key_replaces_the_rest(index: Directory) -> None:
    announce(index, "r", "a", "b", "c")
    announce(index, "r", "x", first=1)
    assert 2 == index.statistics()["keys_announced"]
    tell(index, 0, b=STORED, x=STORED)
    assert {"x": (STORED, 0)} == news(index)


def test_more_than_the_bound_is_answered_as_a_miss_and_not_watched(
    index: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(d, "ANNOUNCED_KEYS_MAX", 2)
    announce(index, "r", "a", "b", "c")
    assert bytes([0]) == announce(index, "r", "d", first=3).flags
    assert 2 == index.statistics()["keys_announced"]


def test_unknown_keys_are_probed_while_a_scan_runs(index: Directory) -> None:
    index.worker_down(1)
    index.worker_up(1)
    tell(index, 0, a=STORED)
    statuses, probes = index.announce(SCHED, "r", 0, [b"a", b"b"])
    assert [False] == [status.status.complete for status in statuses]
    assert [SendProbe(1, probes[0].probe, NS, [b"b"])] == probes
    tell(index, 1, b=STORED)
    answer = [send.status for send in index.probed(1, probes[0].probe)]
    assert [Status(request="r", first=0, flags=b"\1\1", devices=b"\0\1", complete=True)] == answer
    index.validate()


def test_two_requests_share_a_probe_and_are_both_answered(index: Directory) -> None:
    index.worker_down(1)
    index.worker_up(1)
    _, probes = index.announce(SCHED, "r", 0, [b"a"])
    statuses, more = index.announce(SCHED, "q", 0, [b"a"])
    assert (False, []) == (statuses[0].status.complete, more)
    assert ["q", "r"] == sorted(send.status.request for send in index.probed(1, probes[0].probe))
    assert [] == index.probed(1, probes[0].probe)


def test_a_shared_device_is_asked_for_unknown_keys_and_not_again_for_a_while() -> None:
    index = Directory(2, shared=[1])
    index.open_namespace(NS)
    for device in (0, 1):
        index.worker_up(device)
        index.scan_ended(NS, device)
    index.scheduler_joined(SCHED, "engine", NS)
    statuses, probes = index.announce(SCHED, "r", 0, [b"a", b"b"], now_ns=1)
    assert [SendProbe(1, probes[0].probe, NS, [b"a", b"b"])] == probes
    assert not statuses[0].status.complete
    tell(index, 1, b=STORED)
    answers = index.probed(1, probes[0].probe, now_ns=1)
    assert [bytes([0, STORED])] == [send.status.flags for send in answers]
    later = 1 + int(d.ABSENT_S * 1e9)
    statuses, probes = index.announce(SCHED, "q", 0, [b"a", b"b"], now_ns=later - 1)
    assert (True, []) == (statuses[0].status.complete, probes)
    _, probes = index.announce(SCHED, "p", 0, [b"a", b"b"], now_ns=later)
    assert [[b"a"]] == [probe.keys for probe in probes]
    tell(index, 1, a=STORED)
    index.probed(1, probes[0].probe, now_ns=later)
    tell(index, 1, a=0)
    _, probes = index.announce(SCHED, "o", 0, [b"a"], now_ns=later)
    assert [[b"a"]] == [probe.keys for probe in probes], "another host may have stored what was evicted"


def test_no_more_absent_keys_are_remembered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(d, "ABSENT_MAX", 2)
    index = Directory(1, shared=[0])
    index.open_namespace(NS)
    index.worker_up(0)
    index.scheduler_joined(SCHED, "engine", NS)
    _, probes = index.announce(SCHED, "r", 0, [b"a", b"b", b"c"])
    index.probed(0, probes[0].probe)
    _, probes = index.announce(SCHED, "q", 0, [b"a", b"b", b"c"])
    assert [[b"a"]] == [probe.keys for probe in probes]


def test_a_worker_that_dies_ends_its_probes(index: Directory) -> None:
    index.worker_down(1)
    index.worker_up(1)
    index.announce(SCHED, "r", 0, [b"a"])
    assert [True] == [send.status.complete for send in index.worker_down(1)]
    index.validate()


def test_a_device_without_a_worker_is_not_waited_for(index: Directory) -> None:
    index.worker_down(1)
    assert announce(index, "r", "a").complete


def test_a_probe_of_a_withdrawn_request_answers_nobody(index: Directory) -> None:
    index.worker_down(1)
    index.worker_up(1)
    _, probes = index.announce(SCHED, "r", 0, [b"a"])
    index.scheduler_left(SCHED)
    assert [] == index.probed(1, probes[0].probe)
    index.validate()


def test_ends_of_stores_go_to_the_scheduler_of_that_engine(index: Directory) -> None:
    index.scheduler_joined(8, "another", NS)
    assert [] == index.stores_ended("engine", [b"a"], [b"b"])
    assert [StoresEnded(kept=[b"a"], dropped=[]), StoresEnded(kept=[], dropped=[b"b"])] == index.take_news(SCHED)
    assert [] == index.take_news(8)


def test_a_scheduler_that_lets_ends_pile_up_is_named(index: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(d, "STORES_ENDED_MAX", 3)
    assert [] == index.stores_ended("engine", [b"a"], [b"b", b"c"])
    assert [SCHED] == index.stores_ended("engine", [b"d"], [])


def test_long_answers_and_changes_are_split(index: Directory) -> None:
    keys = [b"%05d" % number for number in range(ITEMS_MAX + 5)]
    statuses, _ = index.announce(SCHED, "r", 0, keys)
    assert [(0, ITEMS_MAX), (ITEMS_MAX, 5)] == [(send.status.first, len(send.status.flags)) for send in statuses]
    index.told(NS, 0, [KeyState(key, STORED, 0) for key in keys])
    changes = [message for message in index.take_news(SCHED) if isinstance(message, KeysChanged)]
    assert keys == [state.key for message in changes for state in message.entries]
    assert len(changes) > 1


def test_keys_of_an_unknown_namespace_are_an_error_of_the_worker(index: Directory) -> None:
    with pytest.raises(ProtocolError):
        index.told(99, 0, [])


def test_keys_of_a_device_that_is_given_up_are_misses_until_it_is_used_again() -> None:
    directory = Directory(2)
    directory.open_namespace(1)
    directory.worker_up(0)
    directory.worker_up(1)
    directory.scan_ended(1, 0)
    directory.told(1, 0, [KeyState(b"a", STORED, 0)])
    directory.told(1, 1, [KeyState(b"b", STORED, 1)])
    directory.scheduler_joined(5, "e", 1)
    directory.announce(5, "r", 0, [b"a", b"b"])
    directory.device_changed(1, healthy=False)
    assert [KeysChanged(entries=[KeyState(b"b", 0, NO_DEVICE)])] == directory.take_news(5)
    directory.device_changed(1, healthy=False)
    assert not directory.has_news(5)
    statuses, probes = directory.announce(5, "s", 0, [b"b", b"c"])
    assert bytes(2) == statuses[0].status.flags
    assert [] == probes
    directory.device_changed(1, healthy=True)
    assert [KeysChanged(entries=[KeyState(b"b", STORED, 1)])] == directory.take_news(5)
    directory.validate()


def test_a_new_worker_uses_a_device_that_was_given_up() -> None:
    directory = Directory(1)
    directory.open_namespace(1)
    directory.worker_up(0)
    directory.device_changed(0, healthy=False)
    directory.worker_down(0)
    directory.worker_up(0)
    directory.told(1, 0, [KeyState(b"a", STORED, 0)])
    directory.scan_ended(1, 0)
    directory.scheduler_joined(5, "e", 1)
    statuses, _ = directory.announce(5, "r", 0, [b"a"])
    assert bytes([STORED]) == statuses[0].status.flags
