"""The scheduler's view of what is stored, over a pool that answers from a table."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool.client.scheduler import Hit, Later, Lookup, Miss
from kvpool.wire.messages import GroupSpec, NamespaceSpec
from kvpool_vllm.manager import KvPoolManager
from kvpool_vllm.metrics import PoolMetrics
from kvpool_vllm.transfer_specs import KvPoolLoadSpec, KvPoolStoreSpec

CHUNK = 256


class FakePool:
    """What the manager calls of a scheduler client."""

    def __init__(self) -> None:
        self.known: dict[bytes, Lookup] = {}
        self.connected = True
        self.changes = 0
        self.cut: set[str] = set()
        self.announced: list[tuple[str, list[bytes], int]] = []
        self.withdrawn: list[str] = []
        self.offered: list[tuple[str, tuple[bytes, ...]]] = []
        self.placed: list[tuple[bytes, int, bytes]] = []
        self.closed = False
        self.epoch = 0
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    def announce(self, request: str, keys: list[bytes], priority: int) -> None:
        self.announced.append((request, keys, priority))

    def withdraw(self, request: str) -> None:
        self.withdrawn.append(request)

    def lookup(self, request: str, key: bytes) -> Lookup:
        return self.known.get(key, Miss("absent"))

    def place_store(self, request: str, key: bytes, position: int, first_key: bytes) -> int:
        self.placed.append((key, position, first_key))
        return position % 2

    def store_offered(self, request: str, keys: tuple[bytes, ...]) -> None:
        self.offered.append((request, keys))

    def request_cut(self, request: str) -> bool:
        return request in self.cut

    def close(self) -> None:
        self.closed = True


def key_of(index: int, group: int = 0) -> OffloadKey:
    return make_offload_key(bytes([index]) * 32, group)


def metrics() -> PoolMetrics:
    groups = [GroupSpec(group=0, object_bytes=1000)]
    namespace = NamespaceSpec(
        fingerprint="f", model_name="m", block_size=128, blocks_per_file=2, tp=2, pp=1, pcp=1, dtype="d", rank_count=2,
        groups=groups, identity={},
    )  # fmt: skip
    return PoolMetrics(namespace, {0: CHUNK})


def context_of(request: str = "r", *, keys: int = 4) -> ReqContext:
    context = ReqContext(req_id=request)
    for index in range(keys):
        context.set_offload_key_position(key_of(index), (index + 1) * CHUNK)
    return context


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def manager(pool: FakePool) -> KvPoolManager:
    made = KvPoolManager(pool, fingerprint="f", chunk_tokens={0: CHUNK}, metrics=metrics())  # type: ignore[arg-type]
    made.on_new_request(context_of())
    made.announce("r", [key_of(index) for index in range(4)], priority=3)
    return made


def stored_keys(manager: KvPoolManager, context: ReqContext, *indices: int) -> list[bytes]:
    output = manager.prepare_store([key_of(index) for index in indices], context)
    assert output is not None
    spec = output.store_spec
    assert isinstance(spec, KvPoolStoreSpec)
    assert list(spec.keys) == output.keys_to_store
    return list(spec.keys)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Hit(0, True), LookupResult.HIT),
        (Hit(1, False), LookupResult.HIT),
        (Later(9, "unanswered"), LookupResult.RETRY),
        (Miss("absent"), LookupResult.MISS),
    ],
)
def test_a_lookup_says_what_the_pool_says(
    manager: KvPoolManager, pool: FakePool, found: Lookup, expected: LookupResult
) -> None:
    pool.known[key_of(0)] = found
    assert expected == manager.lookup(key_of(0), context_of())


def test_a_request_is_announced_with_its_priority_and_withdrawn_at_its_end(
    manager: KvPoolManager, pool: FakePool
) -> None:
    manager.on_request_finished(context_of())
    assert [("r", [key_of(index) for index in range(4)], 3)] == pool.announced
    assert ["r"] == pool.withdrawn


def test_a_hit_names_the_tier_it_comes_from(manager: KvPoolManager, pool: FakePool) -> None:
    pool.known = {key_of(0): Hit(0, True), key_of(1): Hit(0, False)}
    for index in range(3):
        manager.lookup(key_of(index), context_of())
    sources = [manager.get_load_source(key_of(index), context_of()) for index in range(3)]
    assert [CacheHitSource.HOST, CacheHitSource.DISK, CacheHitSource.EXTERNAL_UNSPECIFIED] == sources


def test_a_load_carries_the_device_of_each_key(manager: KvPoolManager, pool: FakePool) -> None:
    pool.known = {key_of(0): Hit(2, True), key_of(1): Hit(1, False)}
    for index in range(2):
        manager.lookup(key_of(index), context_of())
    spec = manager.prepare_load([key_of(0), key_of(1)], context_of())
    assert KvPoolLoadSpec("r", "f", 0, (key_of(0), key_of(1)), (2, 1), bytes([1, 0])) == spec
    assert {1: [key_of(1)]} == manager.missing_keys("r", [key_of(0), key_of(1)])


def test_a_request_whose_load_failed_finds_nothing_any_more(manager: KvPoolManager, pool: FakePool) -> None:
    pool.known = {key_of(0): Hit(0, True)}
    manager.on_new_request(context_of("other"))
    manager.load_failed("r", [key_of(0)])
    assert LookupResult.MISS == manager.lookup(key_of(0), context_of())
    assert LookupResult.HIT == manager.lookup(key_of(0), context_of("other"))


def test_what_failed_to_load_is_offered_for_storing_although_the_index_has_it(
    manager: KvPoolManager, pool: FakePool
) -> None:
    pool.known = {key_of(0): Hit(0, False), key_of(1): Hit(0, False)}
    manager.load_failed("r", [key_of(1)])
    assert [key_of(1)] == stored_keys(manager, context_of(), 0, 1)


def test_stored_keys_and_keys_being_stored_are_not_offered(manager: KvPoolManager, pool: FakePool) -> None:
    pool.known = {key_of(0): Hit(0, False)}
    assert [key_of(1)] == stored_keys(manager, context_of(), 0, 1)
    assert [key_of(2)] == stored_keys(manager, context_of(), 1, 2)
    manager.complete_store([key_of(1)], context_of())
    assert [key_of(1)] == stored_keys(manager, context_of(), 1, 2)


def test_vllms_completion_of_a_store_makes_no_hit(manager: KvPoolManager) -> None:
    stored_keys(manager, context_of(), 0)
    manager.complete_store([key_of(0)], context_of())
    assert LookupResult.MISS == manager.lookup(key_of(0), context_of())


def test_a_store_is_placed_by_the_position_of_its_chunk_and_the_first_key(
    manager: KvPoolManager, pool: FakePool
) -> None:
    output = manager.prepare_store([key_of(1), key_of(2)], context_of())
    assert output is not None
    assert [(key_of(1), 1, key_of(0)), (key_of(2), 2, key_of(0))] == pool.placed
    spec = KvPoolStoreSpec("r", "f", 0, (key_of(1), key_of(2)), (1, 0), (2 * CHUNK, 3 * CHUNK), (None, None))
    assert spec == output.store_spec
    assert [("r", (key_of(1), key_of(2)))] == pool.offered


def test_a_cut_request_offers_nothing_more(manager: KvPoolManager, pool: FakePool) -> None:
    pool.cut.add("r")
    assert [] == stored_keys(manager, context_of(), 0, 1)


def test_nothing_is_offered_without_a_pool(manager: KvPoolManager, pool: FakePool) -> None:
    pool.connected = False
    assert [] == stored_keys(manager, context_of(), 0, 1)


def test_a_chunk_that_may_not_be_stored_is_left_out_and_a_mask_goes_with_one_that_has_holes(
    manager: KvPoolManager,
) -> None:
    masks = {key_of(0): (False, None), key_of(1): (True, b"\0\1"), key_of(2): (True, None)}
    manager.mask_of = lambda request, key: masks[OffloadKey(key)]
    output = manager.prepare_store([key_of(index) for index in range(3)], context_of())
    assert output is not None
    spec = output.store_spec
    assert isinstance(spec, KvPoolStoreSpec)
    assert ((key_of(1), key_of(2)), (b"\0\1", None)) == (spec.keys, spec.masks)


def test_a_reset_forgets_hits_and_tells_the_pool(manager: KvPoolManager, pool: FakePool) -> None:
    pool.known = {key_of(0): Hit(3, True)}
    assert LookupResult.HIT == manager.lookup(key_of(0), context_of())
    manager.reset_cache()
    assert [1, False] == [pool.resets, manager.stopped]
    assert {} == manager.missing_keys("r", [key_of(0)])
    spec = manager.prepare_load([key_of(0)], context_of())
    assert isinstance(spec, KvPoolLoadSpec)
    assert (0,) == spec.devices


def test_jobs_name_the_epoch_of_the_scheduler(manager: KvPoolManager, pool: FakePool) -> None:
    pool.epoch = 7
    pool.known = {key_of(0): Hit(0, True)}
    output = manager.prepare_store([key_of(1)], context_of())
    assert output is not None
    assert [7, 7] == [output.store_spec.epoch, manager.prepare_load([key_of(0)], context_of()).epoch]


def test_a_reset_with_blocks_in_use_stops_loads_and_stores_until_one_without(
    manager: KvPoolManager, pool: FakePool
) -> None:
    manager.blocks_unused = lambda: False
    manager.reset_cache()
    pool.known = {key_of(0): Hit(0, True)}
    assert [1, True] == [pool.resets, manager.stopped]
    assert LookupResult.MISS == manager.lookup(key_of(0), context_of())
    assert [] == stored_keys(manager, context_of(), 1)
    manager.blocks_unused = lambda: True
    manager.reset_cache()
    assert [2, False] == [pool.resets, manager.stopped]
    assert LookupResult.HIT == manager.lookup(key_of(0), context_of())


@pytest.mark.parametrize(("loads", "stores"), [(True, False), (False, True)])
def test_a_role_that_only_loads_or_only_stores_does_just_that(pool: FakePool, loads: bool, stores: bool) -> None:
    told = metrics()
    manager = KvPoolManager(pool, fingerprint="f", chunk_tokens={0: CHUNK}, metrics=told, loads=loads, stores=stores)  # type: ignore[arg-type]
    manager.on_new_request(context_of())
    pool.known = {key_of(0): Hit(0, True)}
    assert loads == (manager.lookup(key_of(0), context_of()) is LookupResult.HIT)
    assert stores == bool(stored_keys(manager, context_of(), 1))


def test_an_error_of_ours_becomes_a_miss_and_switches_the_role_off(
    manager: KvPoolManager, pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: str, key: bytes) -> Lookup:
        raise RuntimeError("broken")

    monkeypatch.setattr(pool, "lookup", broken)
    assert LookupResult.MISS == manager.lookup(key_of(0), context_of())
    monkeypatch.undo()
    pool.known = {key_of(0): Hit(0, True)}
    assert LookupResult.MISS == manager.lookup(key_of(0), context_of())
    assert [] == stored_keys(manager, context_of(), 1)


def test_shutdown_leaves_the_pool(manager: KvPoolManager, pool: FakePool) -> None:
    manager.shutdown()
    assert pool.closed
