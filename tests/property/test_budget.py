"""The division of staging under random namespaces, returns, deaths and proofs, against what must always hold."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.core.budget import (
    QUARANTINE_PATIENCE_S,
    SEGMENT_BYTES_MAX,
    Budget,
    Create,
    DeviceShare,
    Pair,
    Recall,
    State,
    slot_bytes_of,
)
from kvpool.errors import HostError

MIB = 1 << 20


class BudgetMachine(RuleBasedStateMachine):
    """Peers answer in any order, or late; workers die at any time."""

    @initialize(
        total=st.integers(1, 512),
        devices=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 32)), min_size=1, max_size=3),
    )
    def begin(self, total: int, devices: list[tuple[int, int]]) -> None:
        self.total = total * MIB
        self.budget = Budget(self.total, [DeviceShare(weight=w, iodepth=depth) for w, depth in devices])
        self.uses: list[tuple[int, list[int]]] = []
        self.now_ns = 0
        self.most = self.total

    @precondition(lambda self: len(self.uses) < 4)
    @rule(rank_count=st.integers(1, 8), sizes=st.lists(st.integers(4096, 20 * MIB), min_size=1, max_size=2))
    def open_namespace(self, rank_count: int, sizes: list[int]) -> None:
        try:
            self.budget.open_namespace(len(self.uses), rank_count, sizes)
        except HostError as error:
            assert error.context["needed_bytes"] > self.total
        else:
            self.uses.append((rank_count, sizes))

    @rule(total=st.integers(1, 512))
    def resize(self, total: int) -> None:
        try:
            self.budget.resize(total * MIB)
        except HostError as error:
            assert error.context["needed_bytes"] > total * MIB
        else:
            self.total = total * MIB

    @rule(data=st.data(), used=st.integers(0, 512))
    def demand_is_told(self, data: st.DataObject, used: int) -> None:
        pairs = sorted(self.budget.targets(None))
        if pairs:
            self.budget.lending.used(data.draw(st.sampled_from(pairs)), used * MIB, self.now_ns)

    @rule()
    def plan(self) -> None:
        before = self.budget.free_bytes
        steps, _ = self.budget.plan(self.now_ns)
        created = sum(step.segment_bytes for step in steps if isinstance(step, Create))
        assert created <= max(0, before)
        again, _ = self.budget.plan(self.now_ns)
        assert not any(isinstance(step, Recall) for step in again), "one plan recalls all that is missing"

    @rule(data=st.data())
    def segment_goes_on(self, data: st.DataObject) -> None:
        segments = [
            s for s in self.budget.segments.values() if s.state in (State.CREATING, State.RECALLED, State.CLOSING)
        ]
        if not segments:
            return
        found = data.draw(st.sampled_from(segments))
        if found.state is State.CREATING:
            self.budget.created(found.segment)
        elif found.state is State.RECALLED:
            assert self.budget.returned(found.segment)
        else:
            self.budget.gone(found.segment)

    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        device = data.draw(st.integers(0, len(self.budget.devices) - 1))
        for segment in self.budget.worker_down(device, self.now_ns):
            assert self.budget.segments[segment].pair.device == device
        left = {s.state for s in self.budget.segments.values() if s.pair.device == device}
        assert left <= {State.CREATING, State.CLOSING, State.QUARANTINED}, "the dead hold nothing"

    @rule(data=st.data())
    def proof_comes(self, data: st.DataObject) -> None:
        waiting = [s.segment for s in self.budget.segments.values() if s.state is State.QUARANTINED]
        if waiting:
            proven = data.draw(st.lists(st.sampled_from(waiting), unique=True))
            again, close = self.budget.proven(proven)
            assert sorted(proven) == sorted([*again, *close])

    @rule(seconds=st.integers(1, int(QUARANTINE_PATIENCE_S)))
    def time_passes(self, seconds: int) -> None:
        self.now_ns += seconds * 10**9

    @rule()
    def everything_settles(self) -> None:
        """With obedient peers the division reaches a rest in which every pair has its minimum."""
        for _ in range(300):
            waiting = [s.segment for s in self.budget.segments.values() if s.state is State.QUARANTINED]
            self.budget.proven(waiting)
            steps, _ = self.budget.plan(self.now_ns)
            moving = [s for s in self.budget.segments.values() if s.state is not State.GRANTED]
            if not steps and not moving:
                break
            assert not self.budget.is_settled or not moving
            for found in moving:
                if found.state is State.CREATING:
                    self.budget.created(found.segment)
                elif found.state is State.RECALLED:
                    self.budget.returned(found.segment)
                elif found.state is State.CLOSING:
                    self.budget.gone(found.segment)
        else:
            raise AssertionError("the division does not settle")
        assert self.budget.is_settled
        for rank_count, sizes in self.uses:
            for size in sizes:
                for device in range(len(self.budget.devices)):
                    assert self.budget.held_slots(Pair(device, slot_bytes_of(size))) >= max(2, rank_count)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "budget"):
            return
        self.budget.validate()
        made = sum(s.segment_bytes for s in self.budget.segments.values())
        self.most = min(max(self.most, self.total), max(made, self.total))  # after a shrinking, until it is done
        assert made <= self.most
        assert all(s.segment_bytes <= SEGMENT_BYTES_MAX for s in self.budget.segments.values())
        assert sum(self.budget.targets(None).values()) <= self.total
        numbers = self.budget.statistics()
        assert self.total - self.budget.free_bytes == sum(
            value for name, value in numbers.items() if name != "staging_bytes"
        )


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
