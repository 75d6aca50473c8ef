"""Schedules of the whole pool with faults, and proof that the checks find what they are there for."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor

import pytest

from kvpool.core.admission import Admission
from kvpool.core.loads import Loads
from kvpool.core.rank_base import Ground, Job
from kvpool.core.rank_copies import Copies
from kvpool.core.rank_events import JobKind
from kvpool.core.residency import Residency
from kvpool.core.slots import Slot, SlotStep
from kvpool.errors import Code
from kvpool.procs.coordinator_workers import Workers

from .engines import Request
from .kernel import MS, Violation
from .world import Plan, World, chunk_name, run_seed

SHORT_SEEDS = 300
LONG_SEEDS = 10_000
#: A planted bug has to be found within so many schedules.
FOUND_WITHIN = 150
BATCH = 20


@pytest.mark.parametrize("first", range(0, SHORT_SEEDS, BATCH))
def test_schedules_with_faults_break_nothing(first: int) -> None:
    for seed in range(first, first + BATCH):
        run_seed(seed)


def _run_range(seeds: Iterable[int]) -> int:
    return sum(bool(run_seed(seed)) for seed in seeds)


@pytest.fixture
def only_when_asked_for(request: pytest.FixtureRequest) -> None:
    """Minutes of all processors: run by `pytest -m long`."""
    if "long" not in (request.config.getoption("markexpr") or ""):
        pytest.skip("takes minutes: pytest -m long")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("only_when_asked_for")
def test_ten_thousand_schedules_break_nothing() -> None:
    parts = [range(first, first + 100) for first in range(0, LONG_SEEDS, 100)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        assert LONG_SEEDS == sum(pool.map(_run_range, parts))


def test_a_seed_is_a_schedule() -> None:
    once, again = run_seed(5), run_seed(5)
    assert (once.kernel.happened, once.kernel.now_ns, once.counts) == (
        again.kernel.happened, again.kernel.now_ns, again.counts
    )  # fmt: skip


# ------------------------------------------------------------ planted bugs


def _free_at_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A departed client's slots are used again without proof that its copies have ended."""

    def haunt(self: Residency, _client: object, slot: Slot) -> None:
        self.unpin(slot)

    monkeypatch.setattr(Residency, "haunt", haunt)


def _reuse_after_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead worker's segments are used again though its ring has not hung up."""
    quarantine = Workers._quarantine

    def without_ring(self: Workers, worker: object) -> None:
        quarantine(self, worker)  # type: ignore[arg-type]
        found = self._quarantines[-1]
        self._ring_gone(found)

    monkeypatch.setattr(Workers, "_quarantine", without_ring)


def _spoil_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read past its deadline gives its slot back while the drive still writes into it."""
    late = Loads.read_late

    def freed(self: Loads, read: object) -> None:
        late(self, read)  # type: ignore[arg-type]
        slot = read.slot  # type: ignore[attr-defined]
        if slot is not None:
            slot.step(SlotStep.SPOIL)

    monkeypatch.setattr(Loads, "read_late", freed)


def _copies_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank says that its copies of a lost worker have ended while they run."""

    def let_go(self: Copies) -> None:
        self._owner_copies.clear()
        original(self)

    original = Copies.let_go
    monkeypatch.setattr(Copies, "let_go", let_go)


def _release_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank does not release every slot that it copied out of."""
    gather = Ground.gather

    def lossy(self: Ground, message: type, device: int, wire: int, wire_index: int) -> None:
        if wire_index != 1:
            gather(self, message, device, wire, wire_index)

    monkeypatch.setattr(Ground, "gather", lossy)


def _half_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admission that ends is withdrawn from all devices but the last."""
    end = Admission._end

    def partly(self: Admission, admission: object) -> list[object]:
        return end(self, admission)[:-1]  # type: ignore[arg-type]

    monkeypatch.setattr(Admission, "_end", partly)


def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are not what was published are served."""
    file_read = Loads.file_read

    def trusting(self: Loads, op: int, error: Code | None) -> None:
        file_read(self, op, None if error is Code.CORRUPT else error)

    monkeypatch.setattr(Loads, "file_read", trusting)


def _end_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of which something failed is not reported."""
    end = Ground.end

    def silent(self: Ground, job: Job, kind: JobKind) -> None:
        if not job.codes:
            end(self, job, kind)

    monkeypatch.setattr(Ground, "end", silent)


@pytest.mark.parametrize(
    ("plant", "faults"),
    [
        (_free_at_death, {"engine_death", "slow_death"}),
        (_reuse_after_ring, {"worker_death", "late_landing"}),
        (_spoil_is_free, {"stalls"}),
        (_copies_not_awaited, {"worker_death", "slow_copies"}),
        (_release_forgotten, set()),
        (_half_withdrawn, set()),
        (_unverified, {"corruption"}),
        (_end_untold, {"read_errors"}),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], faults: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation, match=r"repeat: python -m tests\.sim \d+"):
        for seed in range(FOUND_WITHIN):
            run_seed(seed, frozenset(faults))


# ------------------------------------------------------------ figures


@pytest.mark.parametrize(("cache", "preload"), [("lru", True), ("arc", False)])
def test_fifty_requests_with_the_same_prefix_read_each_object_once(cache: str, preload: bool) -> None:
    chunks, requests = 4, 50
    plan = Plan(
        seed=1, devices=2, ranks=2, engines=2, object_bytes=[4096], warm=1.0, slots=40, cache=cache,
        preload=preload, requests=0, chunks_max=chunks, conversations=1,
    )  # fmt: skip
    world = SamePrefix(plan, requests)
    world.run()
    reads = [count for drive in world.drives for count in drive.reads_of.values()]
    assert [1] * (chunks * len(plan.object_bytes) * plan.ranks) == reads
    assert requests == world.counts["loads"]


class SamePrefix(World):
    """Requests of two engines for all of one conversation, that is on the drives, within a moment."""

    def __init__(self, plan: Plan, requests: int) -> None:
        super().__init__(plan)
        self._requests = requests

    def draw(self) -> None:
        super().draw()
        chunks = [chunk_name(0, position) for position in range(self.plan.chunks_max)]
        for number in range(self._requests):
            at_ns = self.kernel.now_ns + 200 * MS + self.rng.randrange(100 * MS)
            self.expect(at_ns, f"engine-{number % self.plan.engines}", Request(f"same-{number}", chunks))


def test_a_read_that_was_late_serves_a_preload_that_came_since() -> None:
    # Its object was read twice, and the second copy took the place of the first.
    assert 0 < run_seed(8413).counts["loads"]
