"""Admission of preloads: events in, what the devices are told out."""

import pytest

from kvpool.core import admission_events as ev
from kvpool.core.admission import ANSWER_NS, RETRY_NS, Admission
from kvpool.core.admission_events import RequestId
from kvpool.wire.messages import RESIDENT, STORED

S = 10**9
NAMESPACE = 1
OBJECT_BYTES = 4096 * 3


def key(name: str) -> bytes:
    """Return a key of KV group 0."""
    return name.encode() + bytes(4)


class World:
    """An admission with two devices, and the index it asks."""

    def __init__(self, *, lookahead: int = 8, expiry_s: int = 60) -> None:
        self.states: dict[bytes, tuple[int, int]] = {}
        self.admission = Admission(
            lambda _, wanted: self.states.get(wanted, (0, 255)),
            device_count=2,
            lookahead=lookahead,
            expiry_ns=expiry_s * S,
        )
        self.now_ns = 0
        self.tell(ev.NamespaceOpened(namespace=NAMESPACE, rank_count=2, object_bytes={0: OBJECT_BYTES}))

    def tell(self, event: ev.Event) -> list[ev.Action]:
        actions = self.admission.handle(event, now_ns=self.now_ns)
        self.admission.validate()
        return actions

    def store(self, device: int, *names: str, flags: int = STORED) -> None:
        self.states.update((key(name), (flags, device)) for name in names)

    def announce(self, name: str, *names: str, priority: int = 0, scheduler: int = 1, first: int = 0,
                 more: bool = False) -> list[ev.Action]:  # fmt: skip
        return self.tell(
            ev.RequestAnnounced(
                request=RequestId(scheduler, name), namespace=NAMESPACE, first=first,
                keys=[key(each) for each in names], more=more, priority=priority,
            )
        )  # fmt: skip

    def start(self, name: str) -> list[ev.Action]:
        return self.tell(ev.RequestsStarted(requests=[RequestId(1, name)]))

    def withdraw(self, name: str) -> list[ev.Action]:
        return self.tell(ev.RequestsWithdrawn(requests=[RequestId(1, name)]))

    def answer(self, admission: int, *devices: int, reserved: bool = True) -> list[ev.Action]:
        return [
            action
            for device in devices
            for action in self.tell(ev.ReserveAnswered(device=device, admission=admission, reserved=reserved))
        ]

    def land(self, admission: int, *devices: int) -> None:
        for device in devices:
            assert [] == self.tell(ev.AdmissionLanded(device=device, admission=admission))

    def counted(self, name: str) -> int:
        return self.admission.statistics()[name]


@pytest.fixture
def world() -> World:
    """Keys a, b on device 0 and c, d on device 1."""
    made = World()
    made.store(0, "a", "b")
    made.store(1, "c", "d")
    return made


def told(actions: list[ev.Action]) -> list[tuple[str, int, int]]:
    """Return actions as (kind, device, admission)."""
    return [(type(action).__name__, action.device, action.admission) for action in actions]


def test_every_device_that_has_keys_of_a_request_is_asked_for_all_of_them(world: World) -> None:
    actions = world.announce("r", "a", "c", "b", "missing")
    assert [("Reserve", 0, 1), ("Reserve", 1, 1)] == told(actions)
    assert [[key("a"), key("b")], [key("c")]] == [action.keys for action in actions if isinstance(action, ev.Reserve)]


def test_an_admission_is_committed_when_all_have_answered(world: World) -> None:
    world.announce("r", "a", "c")
    assert [] == world.answer(1, 1)
    assert [("Commit", 0, 1), ("Commit", 1, 1)] == told(world.answer(1, 0))


def test_one_refusal_withdraws_it_everywhere(world: World) -> None:
    world.announce("r", "a", "c")
    world.answer(1, 0)
    assert [("Withdraw", 0, 1)] == told(world.answer(1, 1, reserved=False))
    assert 0 == world.counted("protected_bytes")


def test_the_device_that_still_owes_an_answer_is_told_too(world: World) -> None:
    world.announce("r", "a", "c")
    assert [("Withdraw", 1, 1)] == told(world.answer(1, 0, reserved=False))


def test_what_a_device_may_have_reserved_late_is_not_asked_for_again_before_it_answered(world: World) -> None:
    world.announce("r", "a", "c")
    world.answer(1, 0, reserved=False)
    assert [] == world.tell(ev.RoomChanged(device=0))
    assert [("Reserve", 0, 2), ("Reserve", 1, 2)] == told(world.answer(1, 1))


def test_what_is_in_staging_already_is_protected_too(world: World) -> None:
    world.store(0, "a", flags=STORED | RESIDENT)
    world.store(1, "c", flags=RESIDENT)
    assert [("Reserve", 0, 1), ("Reserve", 1, 1)] == told(world.announce("r", "a", "c"))


def test_a_request_of_which_the_pool_has_nothing_is_not_asked_for(world: World) -> None:
    assert [] == world.announce("r", "missing")


def test_a_request_in_parts_is_looked_at_when_it_is_whole(world: World) -> None:
    assert [] == world.announce("r", "a", more=True)
    actions = world.announce("r", "b", first=1)
    assert [[key("a"), key("b")]] == [action.keys for action in actions if isinstance(action, ev.Reserve)]


def test_requests_are_asked_for_one_after_the_other_in_the_order_of_arrival(world: World) -> None:
    world.announce("r0", "a")
    assert [] == world.announce("r1", "b")
    assert [("Commit", 0, 1), ("Reserve", 0, 2)] == told(world.answer(1, 0))


def test_priority_comes_before_arrival(world: World) -> None:
    world.announce("r0", "a")
    world.announce("r1", "b", priority=1)
    world.announce("r2", "c", priority=-1)
    actions = world.answer(1, 0)
    assert [("Commit", 0, 1), ("Reserve", 1, 2)] == told(actions)
    reserve = actions[1]
    assert isinstance(reserve, ev.Reserve) and (-1, 3) == (reserve.priority, reserve.arrival)


def test_so_many_waiting_requests_are_looked_at_and_no_more() -> None:
    world = World(lookahead=1)
    world.store(0, "a", "b")
    world.announce("r0", "a")
    world.announce("r1", "b")
    assert [("Commit", 0, 1)] == told(world.answer(1, 0))
    assert [("Withdraw", 0, 1), ("Reserve", 0, 2)] == told(world.start("r0"))


def test_each_scheduler_has_its_own_requests_looked_at() -> None:
    world = World(lookahead=1)
    world.store(0, "a", "b")
    world.announce("r", "a", scheduler=1)
    world.announce("r", "b", scheduler=2)
    assert [("Commit", 0, 1), ("Reserve", 0, 2)] == told(world.answer(1, 0))


def head_refused_behind_another(world: World) -> None:
    """r0 has an admission on both devices; r1 was refused by device 1 and has reserved nothing."""
    world.announce("r0", "a", "c")
    world.answer(1, 0, 1)
    world.announce("r1", "b", "d")
    world.answer(2, 0)
    world.answer(2, 1, reserved=False)


def test_nothing_passes_a_refused_request_on_devices_that_it_needs(world: World) -> None:
    head_refused_behind_another(world)
    world.store(0, "e")
    assert [] == world.announce("r2", "e")


def test_a_refused_request_is_asked_for_again_when_an_admission_there_ends(world: World) -> None:
    head_refused_behind_another(world)
    assert [("Withdraw", 0, 1), ("Withdraw", 1, 1), ("Reserve", 0, 3), ("Reserve", 1, 3)] == told(world.start("r0"))


def test_a_refused_request_is_asked_for_again_when_room_comes_where_it_was_refused(world: World) -> None:
    head_refused_behind_another(world)
    assert [] == world.tell(ev.RoomChanged(device=0))
    assert [("Reserve", 0, 3), ("Reserve", 1, 3)] == told(world.tell(ev.RoomChanged(device=1)))


def test_a_refused_request_is_asked_for_again_after_a_while(world: World) -> None:
    head_refused_behind_another(world)
    assert RETRY_NS == world.admission.next_deadline_ns()
    world.now_ns = RETRY_NS
    assert [("Reserve", 0, 3), ("Reserve", 1, 3)] == told(world.tell(ev.TimePassed()))


def test_a_request_that_does_not_fit_alone_is_passed_over(world: World) -> None:
    world.announce("large", "a", "c")
    world.announce("small", "b")
    world.answer(1, 1)
    assert [("Withdraw", 1, 1), ("Reserve", 0, 2)] == told(world.answer(1, 0, reserved=False))


def test_a_refused_request_behind_another_device_is_no_hindrance(world: World) -> None:
    world.announce("r0", "a")
    world.answer(1, 0)
    world.announce("r1", "b")
    world.answer(2, 0, reserved=False)
    assert [("Reserve", 1, 3)] == told(world.announce("r2", "c"))


def test_two_requests_that_refuse_one_another_nothing_do_not_ask_for_ever(world: World) -> None:
    world.announce("r0", "a", "c")
    world.announce("r1", "b", "d")
    assert [("Withdraw", 1, 1)] == told(world.answer(1, 0, reserved=False))
    assert [("Reserve", 0, 2), ("Reserve", 1, 2)] == told(world.answer(1, 1))
    world.answer(2, 0)
    assert [("Withdraw", 0, 2)] == told(world.answer(2, 1, reserved=False))


def test_a_finished_request_gives_everything_up(world: World) -> None:
    world.announce("r", "a", "c")
    world.answer(1, 0, 1)
    assert [("Withdraw", 0, 1), ("Withdraw", 1, 1)] == told(world.withdraw("r"))
    assert 0 == world.counted("requests_waiting")
    assert 1 == world.counted("withdrawn")


def test_a_request_that_ends_while_it_is_asked_for_gives_that_up(world: World) -> None:
    world.announce("r", "a")
    assert [("Withdraw", 0, 1)] == told(world.withdraw("r"))
    assert [] == world.answer(1, 0)


def test_a_started_request_is_admitted_no_more_until_it_waits_again(world: World) -> None:
    world.announce("r", "a")
    world.answer(1, 0)
    world.land(1, 0)
    assert [("Withdraw", 0, 1)] == told(world.start("r"))
    assert 1 == world.counted("used")
    assert [] == world.tell(ev.RoomChanged(device=0))
    assert [("Reserve", 0, 2)] == told(world.announce("r", first=1))


def test_a_request_that_waits_again_keeps_its_place(world: World) -> None:
    world.announce("r0", "a")
    world.start("r0")
    world.answer(1, 0)
    world.announce("r1", "b")
    world.announce("r0", first=1)
    world.announce("r2", "c")
    actions = world.answer(2, 0)
    assert [("Commit", 0, 2), ("Reserve", 0, 3)] == told(actions)
    assert isinstance(actions[1], ev.Reserve) and [key("a")] == actions[1].keys


def test_an_admission_expires_unused_and_its_request_is_asked_for_no_more() -> None:
    world = World(expiry_s=60)
    world.store(0, "a")
    world.announce("r", "a")
    world.answer(1, 0)
    assert 60 * S == world.admission.next_deadline_ns()
    world.now_ns = 60 * S
    assert [("Withdraw", 0, 1)] == told(world.tell(ev.TimePassed()))
    assert [] == world.tell(ev.RoomChanged(device=0))
    assert 1 == world.counted("expired")


def test_an_admission_that_a_load_took_slots_from_is_withdrawn_as_a_whole(world: World) -> None:
    world.announce("r", "a", "c")
    world.answer(1, 0, 1)
    assert [("Withdraw", 0, 1)] == told(world.tell(ev.AdmissionRevoked(device=1, admission=1)))
    assert [("Reserve", 0, 2), ("Reserve", 1, 2)] == told(world.tell(ev.RoomChanged(device=1)))


def test_the_slots_of_a_revoked_admission_are_not_asked_back_at_once(world: World) -> None:
    world.announce("r", "a")
    world.answer(1, 0)
    world.tell(ev.AdmissionRevoked(device=0, admission=1))
    assert [] == world.announce("r1", "b")


def test_what_was_reserved_and_revoked_before_the_others_answered_is_refused(world: World) -> None:
    world.announce("r", "a", "c")
    world.answer(1, 0)
    assert [("Withdraw", 1, 1)] == told(world.tell(ev.AdmissionRevoked(device=0, admission=1)))
    assert [] == world.answer(1, 1)


def test_a_lost_device_takes_the_whole_admission_with_it(world: World) -> None:
    world.announce("r", "a", "c")
    world.answer(1, 0, 1)
    world.states.pop(key("c"))
    actions = world.tell(ev.DeviceLost(device=1))
    assert [("Withdraw", 0, 1), ("Reserve", 0, 2)] == told(actions)


def test_a_lost_device_ends_what_it_was_asked_for(world: World) -> None:
    world.announce("r", "a")
    world.states.pop(key("a"))
    assert [] == world.tell(ev.DeviceLost(device=0))
    world.store(0, "a")
    changed = ev.KeysChanged(namespace=NAMESPACE, device=0, keys=[key("a")], freed=False)
    assert [("Reserve", 0, 2)] == told(world.tell(changed))


def test_a_given_up_device_ends_whole_admissions_and_what_is_elsewhere_is_asked_for(world: World) -> None:
    world.announce("r", "a", "c")
    world.answer(1, 0, 1)
    c = world.states.pop(key("c"))
    actions = world.tell(ev.DeviceChanged(device=1, healthy=False))
    assert [("Withdraw", 0, 1), ("Withdraw", 1, 1), ("Reserve", 0, 2)] == told(actions)
    world.answer(2, 0)
    world.states[key("c")] = c
    assert [("Reserve", 0, 3), ("Reserve", 1, 3)] == told(world.tell(ev.DeviceChanged(device=1, healthy=True)))


def test_a_device_that_does_not_answer_counts_as_refusing_and_is_not_asked_before_it_does(world: World) -> None:
    world.announce("r0", "a")
    world.announce("r1", "b")
    world.now_ns = ANSWER_NS
    assert [("Withdraw", 0, 1)] == told(world.tell(ev.TimePassed()))
    assert [] == world.tell(ev.RoomChanged(device=0))
    assert [("Reserve", 0, 2)] == told(world.answer(1, 0))


def test_keys_that_come_to_be_known_replace_an_admission_by_a_larger_one(world: World) -> None:
    world.announce("r", "a", "new", "c")
    world.answer(1, 0, 1)
    world.store(0, "new")
    changed = ev.KeysChanged(namespace=NAMESPACE, device=0, keys=[key("new")], freed=False)
    actions = world.tell(changed)
    assert [[key("a"), key("new")], [key("c")]] == [each.keys for each in actions if isinstance(each, ev.Reserve)]
    world.answer(2, 0)
    assert [("Commit", 0, 2), ("Commit", 1, 2), ("Withdraw", 0, 1), ("Withdraw", 1, 1)] == told(world.answer(2, 1))


def test_a_larger_admission_that_is_refused_leaves_the_smaller_one(world: World) -> None:
    world.announce("r", "a", "new")
    world.answer(1, 0)
    world.store(1, "new")
    world.tell(ev.KeysChanged(namespace=NAMESPACE, device=1, keys=[key("new")], freed=False))
    world.answer(2, 0)
    assert [("Withdraw", 0, 2)] == told(world.answer(2, 1, reserved=False))
    assert 1 == world.counted("admissions")


def test_a_key_that_goes_while_a_larger_admission_waits_is_asked_for_no_more(world: World) -> None:
    world.announce("r", "a", "new")
    world.answer(1, 0)
    world.store(1, "new")
    world.tell(ev.KeysChanged(namespace=NAMESPACE, device=1, keys=[key("new")], freed=False))
    world.answer(2, 0)
    world.answer(2, 1, reserved=False)
    del world.states[key("a")]
    actions = world.tell(ev.KeysChanged(namespace=NAMESPACE, device=0, keys=[key("a")], freed=True))
    actions += world.tell(ev.RoomChanged(device=1))
    assert [[key("new")]] == [each.keys for each in actions if isinstance(each, ev.Reserve)]


def test_landing_keys_of_an_admission_ask_for_nothing(world: World) -> None:
    world.announce("r", "a")
    world.answer(1, 0)
    world.store(0, "a", flags=STORED | RESIDENT)
    assert [] == world.tell(ev.KeysChanged(namespace=NAMESPACE, device=0, keys=[key("a")], freed=False))


def test_an_admission_has_landed_when_every_device_says_so(world: World) -> None:
    world.announce("r", "a", "c")
    world.answer(1, 0, 1)
    world.land(1, 0)
    assert 0 == world.counted("admissions_landed")
    world.land(1, 1)
    assert 1 == world.counted("admissions_landed")


def test_what_refused_requests_want_is_counted_by_device_and_slot_size(world: World) -> None:
    assert {} == world.admission.waiting_bytes()
    head_refused_behind_another(world)
    slot_bytes = OBJECT_BYTES + 4096
    assert {(0, slot_bytes): 2 * slot_bytes, (1, slot_bytes): 2 * slot_bytes} == world.admission.waiting_bytes()
    world.withdraw("r1")
    assert {} == world.admission.waiting_bytes()


def test_protected_bytes_count_the_slots_of_all_ranks_and_a_shared_object_once(world: World) -> None:
    world.announce("r0", "a", "c")
    world.answer(1, 0, 1)
    world.announce("r1", "a", "b")
    world.answer(2, 0)
    slot_bytes = OBJECT_BYTES + 4096
    assert {0: 2 * 2 * slot_bytes, 1: 2 * slot_bytes} == world.admission.protected_bytes()
