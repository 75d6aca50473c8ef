"""A rank's job table: event in, actions out."""

from collections.abc import Sequence

import pytest

from kvpool.core import rank_events as ev
from kvpool.core.rank_jobs import RankJobs
from kvpool.errors import Code, InvariantError
from kvpool.wire.messages import ObjectFailed, SlotGrant

KEYS = [bytes([number]) * 36 for number in range(6)]


class Table:
    """A table with two workers and one segment; `tell` returns the actions and checks the invariants."""

    def __init__(self) -> None:
        self.table = RankJobs()
        self.tell(ev.PoolJoined(load_deadline_ns=1000, store_deadline_ns=100))
        self.tell(ev.WorkerJoined(device=0, generation=10))
        self.tell(ev.WorkerJoined(device=1, generation=11))
        self.tell(ev.SegmentMapped(segment=0))

    def tell(self, event: ev.Event, now_ns: int = 0) -> list[ev.Action]:
        actions = self.table.handle(event, now_ns=now_ns)
        self.table.validate()
        return actions

    def round(self) -> list[ev.Action]:
        return self.tell(ev.RoundEnded())

    def load(self, devices: Sequence[int], wire: int = 1, now_ns: int = 0) -> list[ev.Action]:
        submitted = ev.LoadSubmitted(job=7, wire=wire, keys=KEYS[: len(devices)], devices=devices)
        return self.tell(submitted, now_ns)

    def store(
        self, devices: Sequence[int], wire: int = 1, request: str = "r", job: int = 8, now_ns: int = 0
    ) -> list[ev.Action]:
        submitted = ev.StoreSubmitted(job=job, wire=wire, request=request, keys=KEYS[: len(devices)], devices=devices)
        return self.tell(submitted, now_ns)

    def ready(self, device: int, *indices: int, wire: int = 1, segment: int = 0) -> list[ev.Action]:
        slots = [SlotGrant(index, segment, 4096 * index) for index in indices]
        return self.tell(ev.SlotsReady(device=device, wire=wire, slots=slots))

    def answer(
        self, device: int, *granted: int, exist: Sequence[int] = (), dropped: Sequence[int] = (), wire: int = 1
    ) -> list[ev.Action]:
        slots = [SlotGrant(index, 0, 4096 * index) for index in granted]
        return self.tell(ev.StoreAnswered(device=device, wire=wire, slots=slots, exist=exist, dropped=dropped))


def ended(actions: Sequence[ev.Action]) -> dict[int, tuple[tuple[int, Code], ...]]:
    return {action.wire: action.failed for action in actions if isinstance(action, ev.EndJob)}


def launched(actions: Sequence[ev.Action]) -> list[tuple[int, int]]:
    return [
        (copy.wire, copy.object_index)
        for action in actions
        if isinstance(action, ev.LaunchLoad | ev.LaunchStore)
        for copy in action.copies
    ]


def test_a_load_asks_each_device_for_its_objects_in_order() -> None:
    assert [
        ev.SendLoad(device=1, wire=1, keys=[KEYS[0], KEYS[2]]),
        ev.SendLoad(device=0, wire=1, keys=[KEYS[1]]),
    ] == Table().load([1, 0, 1])


def test_all_that_is_ready_in_a_round_is_one_launch() -> None:
    table = Table()
    table.load([0, 1, 0])
    assert [] == table.ready(0, 0, 1)
    assert [] == table.ready(1, 0)
    (action,) = table.round()
    assert isinstance(action, ev.LaunchLoad)
    assert [(1, 0, 0, 0), (1, 2, 0, 4096), (1, 1, 0, 0)] == action.copies


def test_ended_copies_end_the_job_and_are_released_in_one_message_per_worker() -> None:
    table = Table()
    table.load([0, 1, 0])
    table.ready(0, 0, 1)
    table.ready(1, 0)
    table.round()
    actions = table.tell(ev.CopiesEnded(ticket=1))
    assert [ev.EndJob(job=7, kind=ev.JobKind.LOAD, wire=1, failed=())] == actions
    assert [
        ev.SendRelease(device=0, wire=1, indices=[0, 1]),
        ev.SendRelease(device=1, wire=1, indices=[0]),
    ] == table.round()


def test_a_job_without_objects_ends_at_once() -> None:
    assert {1: ()} == ended(Table().load([]))
    assert {1: ()} == ended(Table().store([]))


def test_copies_that_end_twice_are_a_bug() -> None:
    with pytest.raises(InvariantError, match="ticket=5"):
        Table().tell(ev.CopiesEnded(ticket=5))


def test_a_failed_object_fails_alone() -> None:
    table = Table()
    table.load([0, 0])
    assert {} == ended(table.tell(ev.LoadsFailed(device=0, wire=1, objects=[ObjectFailed(1, int(Code.CORRUPT))])))
    table.ready(0, 0)
    table.round()
    assert {1: ((1, Code.CORRUPT),)} == ended(table.tell(ev.CopiesEnded(ticket=1)))


def test_what_is_ready_after_the_deadline_is_released_and_not_copied() -> None:
    table = Table()
    table.load([0])
    assert 1000 == table.table.next_deadline_ns()
    actions = table.tell(ev.TimePassed(), now_ns=1000)
    assert {1: ((0, Code.DEADLINE),)} == ended(actions)
    assert ev.SendLoadCancel(device=0, wire=1) in actions
    assert table.table.next_deadline_ns() is None
    table.ready(0, 0)
    assert [ev.SendRelease(device=0, wire=1, indices=[0])] == table.round()


def test_a_launched_copy_is_not_ended_by_the_deadline() -> None:
    table = Table()
    table.load([0, 0])
    table.ready(0, 0)
    table.round()
    assert {} == ended(table.tell(ev.TimePassed(), now_ns=5000))
    assert {1: ((1, Code.DEADLINE),)} == ended(table.tell(ev.CopiesEnded(ticket=1)))


def test_a_slot_in_an_unmapped_segment_waits_until_it_is_mapped() -> None:
    table = Table()
    table.load([0])
    table.ready(0, 0, segment=3)
    assert [] == table.round()
    table.tell(ev.SegmentMapped(segment=3))
    assert [(1, 0)] == launched(table.round())


def test_a_segment_that_cannot_be_mapped_fails_its_objects_and_gives_them_back() -> None:
    table = Table()
    table.load([0, 0])
    table.ready(0, 0, segment=3)
    table.tell(ev.SegmentUnmappable(segment=3))
    assert {1: ((0, Code.COPY_ERROR), (1, Code.COPY_ERROR))} == ended(table.ready(0, 1, segment=3))
    assert [ev.SendRelease(device=0, wire=1, indices=[0, 1])] == table.round()


def test_a_recalled_segment_is_unmapped_when_its_copies_have_ended() -> None:
    table = Table()
    table.load([0])
    table.ready(0, 0)
    table.round()
    assert [] == table.tell(ev.SegmentRecalled(segment=0))
    assert ev.UnmapSegment(segment=0) in table.tell(ev.CopiesEnded(ticket=1))


def test_a_lost_worker_fails_what_is_not_launched_and_is_told_when_copies_have_ended() -> None:
    table = Table()
    table.load([0, 0, 1])
    table.ready(0, 0)
    table.round()
    assert [] == table.tell(ev.WorkerLost(device=0, generation=10))
    table.ready(1, 0)
    table.round()
    actions = table.tell(ev.CopiesEnded(ticket=1))
    assert [ev.TellCopiesEnded(device=0, generation=10)] == actions
    assert {1: ((1, Code.WORKER_LOST),)} == ended(table.tell(ev.CopiesEnded(ticket=2)))
    assert [ev.SendRelease(device=1, wire=1, indices=[0])] == table.round(), "nothing to the lost worker"


def test_a_worker_whose_loss_is_told_twice_is_answered_twice() -> None:
    table = Table()
    told = [ev.TellCopiesEnded(device=0, generation=10)]
    assert told == table.tell(ev.WorkerLost(device=0, generation=10))
    assert told == table.tell(ev.WorkerLost(device=0, generation=10))


def test_the_loss_of_a_former_worker_does_not_touch_its_successor() -> None:
    table = Table()
    table.tell(ev.WorkerJoined(device=0, generation=12))
    table.load([0])
    assert {} == ended(table.tell(ev.WorkerLost(device=0, generation=10)))


def test_a_job_of_a_device_without_worker_fails_at_once() -> None:
    assert {1: ((0, Code.WORKER_LOST),)} == ended(Table().load([5]))
    assert {1: ((0, Code.WORKER_LOST),)} == ended(Table().store([5]))


@pytest.mark.parametrize("index", [-1, 1, 1000])
def test_a_worker_that_answers_what_was_not_asked_is_left(index: int) -> None:
    table = Table()
    table.load([0])
    actions = table.ready(0, index)
    assert isinstance(actions[0], ev.DropWorker)
    assert {1: ((0, Code.WORKER_LOST),)} == ended(actions)
    table.store([1], wire=2)
    assert isinstance(table.answer(1, index, wire=2)[0], ev.DropWorker)


def test_a_worker_that_gives_a_slot_twice_is_left() -> None:
    table = Table()
    table.load([0])
    table.ready(0, 0)
    assert isinstance(table.ready(0, 0)[0], ev.DropWorker)


def test_a_worker_that_answers_twice_in_one_message_is_left() -> None:
    table = Table()
    table.load([0])
    assert isinstance(table.ready(0, 0, 0)[0], ev.DropWorker)
    table.store([1], wire=2)
    assert isinstance(table.answer(1, 0, exist=[0], wire=2)[0], ev.DropWorker)


def test_a_worker_with_an_unknown_code_is_left() -> None:
    table = Table()
    table.load([0])
    actions = table.tell(ev.LoadsFailed(device=0, wire=1, objects=[ObjectFailed(0, 999)]))
    assert isinstance(actions[0], ev.DropWorker)


def test_a_store_copies_the_prefix_answered_so_far_and_fills_it() -> None:
    table = Table()
    table.store([0, 1, 0])
    table.answer(0, 0, 1)
    assert [(1, 0)] == launched(table.round()), "index 1 is not answered yet"
    table.answer(1, exist=[0])
    assert [(1, 2)] == launched(table.round())
    assert {1: ()} == ended([*table.tell(ev.CopiesEnded(ticket=1)), *table.tell(ev.CopiesEnded(ticket=2))])
    assert [ev.SendFilled(device=0, wire=1, indices=[0, 1])] == table.round()


def test_filled_is_said_in_prefix_order_whatever_order_copies_end_in() -> None:
    table = Table()
    table.store([0, 1])
    table.answer(0, 0)
    table.round()
    table.answer(1, 0)
    table.round()
    table.tell(ev.CopiesEnded(ticket=2))
    assert [] == table.round()
    table.tell(ev.CopiesEnded(ticket=1))
    assert [
        ev.SendFilled(device=0, wire=1, indices=[0]),
        ev.SendFilled(device=1, wire=1, indices=[0]),
    ] == table.round()


def test_a_dropped_key_cuts_the_store_over_all_devices() -> None:
    table = Table()
    table.store([0, 1, 0, 1])
    table.answer(0, 0, 1)
    actions = table.answer(1, 1, dropped=[0])
    assert {} == ended(actions), "index 0 is still to be filled"
    assert [(1, 0)] == launched(actions := table.round())
    assert ev.SendStoreCancel(device=0, wire=1, indices=[1]) in actions
    assert ev.SendStoreCancel(device=1, wire=1, indices=[1]) in actions
    codes = ((1, Code.NO_SLOT), (2, Code.CANCELLED), (3, Code.CANCELLED))
    assert {1: codes} == ended(table.tell(ev.CopiesEnded(ticket=1)))


def test_a_cut_request_stores_nothing_more_and_takes_its_offers_back() -> None:
    table = Table()
    table.store([0])
    table.answer(0, dropped=[0])
    actions = table.store([0, 1], wire=2)
    assert [
        ev.SendStore(device=0, wire=2, job=8, keys=[KEYS[0]]),
        ev.SendStore(device=1, wire=2, job=8, keys=[KEYS[1]]),
    ] == actions[:2]
    assert {2: ((0, Code.CANCELLED), (1, Code.CANCELLED))} == ended(actions)
    assert [
        ev.SendStoreCancel(device=0, wire=2, indices=[0]),
        ev.SendStoreCancel(device=1, wire=2, indices=[0]),
    ] == table.round()
    table.store([0], wire=3, request="another")
    table.answer(0, 0, wire=3)
    assert [(3, 0)] == launched(table.round())


def test_a_request_s_next_store_waits_for_the_one_before() -> None:
    table = Table()
    table.store([0])
    table.store([1], wire=2, job=9)
    table.answer(1, 0, wire=2)
    assert [] == launched(table.round())
    table.answer(0, 0)
    assert [(1, 0)] == launched(table.round())
    table.tell(ev.CopiesEnded(ticket=1))
    assert [(2, 0)] == launched(table.round())


def test_a_cut_store_cuts_those_that_wait_behind_it() -> None:
    table = Table()
    table.store([0])
    table.store([1], wire=2, job=9)
    table.answer(1, 0, wire=2)
    assert {1: ((0, Code.NO_SLOT),), 2: ((0, Code.CANCELLED),)} == ended(table.answer(0, dropped=[0]))
    assert [ev.SendStoreCancel(device=1, wire=2, indices=[0])] == table.round()


def test_a_failed_copy_cuts_at_its_first_object() -> None:
    table = Table()
    table.store([0, 0, 0])
    table.answer(0, 0)
    table.round()
    table.answer(0, 1, 2)
    table.round()
    table.tell(ev.CopiesEnded(ticket=1))
    actions = table.tell(ev.CopiesEnded(ticket=2, failed=True))
    assert {1: ((1, Code.COPY_ERROR), (2, Code.COPY_ERROR))} == ended(actions)
    assert [
        ev.SendFilled(device=0, wire=1, indices=[0]),
        ev.SendStoreCancel(device=0, wire=1, indices=[1, 2]),
    ] == table.round()


def test_an_unanswered_store_is_dropped_at_its_deadline() -> None:
    table = Table()
    table.store([0, 1])
    table.answer(1, 0)
    actions = table.tell(ev.TimePassed(), now_ns=100)
    assert {1: ((0, Code.DEADLINE), (1, Code.CANCELLED))} == ended(actions)
    assert [
        ev.SendStoreCancel(device=0, wire=1, indices=[0]),
        ev.SendStoreCancel(device=1, wire=1, indices=[0]),
    ] == table.round()
    assert [] == table.answer(0, 0), "crossed the cancel, which takes it back"


def test_flush_drops_stores_that_are_not_launched_and_names_what_to_wait_for() -> None:
    table = Table()
    table.store([0, 0])
    table.answer(0, 0)
    table.round()
    assert {} == ended(table.tell(ev.JobsFlushed(jobs=frozenset([8, 99]))))
    assert [1] == table.table.tickets_of([8])
    assert {1: ((1, Code.CANCELLED),)} == ended(table.tell(ev.CopiesEnded(ticket=1)))


def test_a_flushed_load_fails_as_a_whole_and_launches_nothing_more() -> None:
    table = Table()
    table.load([0, 0, 0])
    table.ready(0, 0)
    table.round()
    table.tell(ev.CopiesEnded(ticket=1))
    table.ready(0, 1)
    table.round()
    table.ready(0, 2)
    table.tell(ev.JobsFlushed(jobs=frozenset([7])))
    assert [] == launched(table.round())
    codes = ((0, Code.CANCELLED), (1, Code.CANCELLED), (2, Code.CANCELLED))
    assert {1: codes} == ended(table.tell(ev.CopiesEnded(ticket=2)))


def test_a_lost_pool_ends_what_is_not_launched_and_unmaps_when_copies_have_ended() -> None:
    table = Table()
    table.load([0])
    table.ready(0, 0)
    table.round()
    table.load([1], wire=2)
    table.store([1], wire=3)
    actions = table.tell(ev.PoolLost())
    assert {2: ((0, Code.WORKER_LOST),), 3: ((0, Code.WORKER_LOST),)} == ended(actions)
    assert not [action for action in actions if isinstance(action, ev.UnmapSegment | ev.TellCopiesEnded)]
    actions = table.tell(ev.CopiesEnded(ticket=1))
    assert {1: ()} == ended(actions)
    assert ev.UnmapSegment(segment=0) in actions
    assert {4: ((0, Code.WORKER_LOST),)} == ended(table.load([0], wire=4))


def test_what_the_table_counts() -> None:
    table = Table()
    table.load([0])
    table.store([1], wire=2)
    statistics = table.table.statistics()
    assert (2, 1, 1, 0) == tuple(
        statistics[name] for name in ("jobs", "loads_submitted", "stores_submitted", "copies_in_flight")
    )
