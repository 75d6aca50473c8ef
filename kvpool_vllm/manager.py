"""
The scheduler's view of what is stored: vLLM's `OffloadingManager` over the scheduler client.

Answers come from memory; nothing here waits. A hit is a key that is complete on all ranks, and where
it lies goes with the job to the workers. A store is offered with a device beside each key; what became of it is
heard from the pool, never from vLLM's own completion.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvpool.client.scheduler import Hit, Later
from kvpool_vllm.guard import Guard
from kvpool_vllm.metrics import PoolMetrics
from kvpool_vllm.request_params import read_params, say_problem
from kvpool_vllm.transfer_specs import KvPoolLoadSpec, KvPoolStoreSpec

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    from kvpool.client.scheduler import SchedulerClient

logger = init_logger(f"vllm.{__name__}")

#: Why a lookup is "later" for the fraction of a millisecond that an answer usually takes.
UNANSWERED = "unanswered"


@dataclass(slots=True)
class RequestRecord:
    """
    What is remembered of one request until it has finished.

    Attributes:
        first_key: Key of its first chunk: where its stripes start.
        hits: What the last lookup of each key found.
        loads, stores: What may be done for it.
        failed: Keys that could not be loaded; set means: no second load, and these are offered for storing again.
    """

    loads: bool = True
    stores: bool = True
    first_key: bytes | None = None
    hits: dict[bytes, Hit] = field(default_factory=dict)
    failed: set[bytes] = field(default_factory=set)


class KvPoolManager(OffloadingManager):
    """
    See vLLM's `OffloadingManager`.

    Args:
        client: The scheduler client.
        fingerprint: Of the namespace; goes with each job.
        chunk_tokens: Tokens of a chunk, per KV group index.
        metrics: What vLLM is told for its `/metrics`.
        loads, stores: What this engine's `kv_role` lets it do.
    """

    def __init__(
        self,
        client: "SchedulerClient",
        *,
        fingerprint: str,
        chunk_tokens: dict[int, int],
        metrics: PoolMetrics,
        loads: bool = True,
        stores: bool = True,
    ) -> None:
        self.client = client
        self.guard = Guard("scheduler")
        self._fingerprint = fingerprint
        self._chunk_tokens = chunk_tokens
        self.metrics = metrics
        self._loads = loads
        self._stores = stores
        self._stopped = False
        #: Lookups so far of keys about which the pool has not answered yet.
        self.unanswered = 0
        self._requests: dict[str, RequestRecord] = {}
        #: Keys whose copies are not over yet, as vLLM tells it.
        self._storing: set[bytes] = set()
        #: Whether no request holds a GPU block; set by the connector.
        self.blocks_unused: Callable[[], bool] = lambda: True
        #: Which blocks of a chunk are present; set by the connector, which knows the block tables.
        self.mask_of: Callable[[str, bytes], tuple[bool, bytes | None]] = _all_present
        #: Whether a request's prefix can ever be worth loading; set by the connector, which knows its length.
        self.may_store: Callable[[str], bool] = _always

    # ------------------------------------------------------------ requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Start a record of what may be done for it."""
        params = read_params(req_context.kv_transfer_params)
        say_problem(params)
        self._requests[req_context.req_id] = RequestRecord(
            loads=self._loads and params.load, stores=self._stores and params.store
        )
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget it; the pool no longer needs to tell us about its keys."""
        self._requests.pop(req_context.req_id, None)
        self.guard.run(None, self.client.withdraw, req_context.req_id)

    def announce(self, request: str, keys: Sequence[bytes], *, priority: int) -> None:
        """Tell the pool which keys (more of them, if it knows the request) may be wanted, in prefix order."""
        record = self._requests.get(request)
        if record is None or not keys or self._stopped:
            return
        record.first_key = record.first_key or keys[0]
        self.guard.run(None, self.client.announce, request, list(keys), priority)
        if not record.loads:
            self.started(request)

    def started(self, request: str) -> None:
        """Tell the pool to read nothing ahead for *request* any more: its load has landed, or it runs without one."""
        self.guard.run(None, self.client.started, request)

    def waits_again(self, request: str) -> None:
        """Tell the pool that *request* was preempted."""
        if not self.has_failed(request):
            self.guard.run(None, self.client.waits_again, request)

    # ------------------------------------------------------------ loads

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from memory. A request whose load has failed finds nothing any more."""
        record = self._requests.get(req_context.req_id)
        if record is None or record.failed or self._stopped or not record.loads:
            return LookupResult.MISS
        found = self.guard.run(None, self.client.lookup, req_context.req_id, key)
        if isinstance(found, Hit):
            record.hits[key] = found
            return LookupResult.HIT
        record.hits.pop(key, None)
        if not isinstance(found, Later):
            return LookupResult.MISS
        self.unanswered += found.why == UNANSWERED
        return LookupResult.RETRY

    def may_load(self, request: str) -> bool:
        """Say whether anything may be loaded for *request*, by the engine's role and by its own word."""
        record = self._requests.get(request)
        return record is not None and record.loads

    def missing_keys(self, request: str, keys: Collection[bytes]) -> dict[int, list[bytes]]:
        """Return, by device, which of a request's hits are not in staging."""
        record = self._requests.get(request)
        missing: dict[int, list[bytes]] = {}
        for key in keys:
            hit = record.hits.get(key) if record is not None else None
            if hit is not None and not hit.resident:
                missing.setdefault(hit.device, []).append(key)
        return missing

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Name the tier that a hit comes from."""
        record = self._requests.get(req_context.req_id)
        hit = record.hits.get(key) if record is not None else None
        if hit is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.HOST if hit.resident else CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Name the keys and where each is. One that is gone meanwhile fails in the worker."""
        record = self._requests.get(req_context.req_id) or RequestRecord()
        hits = [record.hits.get(key) for key in keys]
        return KvPoolLoadSpec(
            request=req_context.req_id,
            fingerprint=self._fingerprint,
            epoch=self.client.epoch,
            keys=tuple(bytes(key) for key in keys),
            devices=tuple(hit.device if hit is not None else 0 for hit in hits),
            resident=bytes(hit is not None and hit.resident for hit in hits),
        )

    def load_failed(self, request: str, keys: Collection[bytes]) -> None:
        """Remember what could not be loaded for *request*."""
        record = self._requests.get(request)
        if record is not None:
            record.failed.update(keys)

    def has_failed(self, request: str) -> bool:
        """Say whether a load of *request* has failed."""
        record = self._requests.get(request)
        return record is not None and bool(record.failed)

    # ------------------------------------------------------------ stores

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Choose what is worth offering, and a device for each key."""
        spec = self.guard.run(None, self._offer, list(keys), req_context)
        if spec is None:
            return PrepareStoreOutput([], _nothing(req_context.req_id), [])
        self._storing.update(spec.keys)
        return PrepareStoreOutput([OffloadKey(key) for key in spec.keys], spec, [])

    def _offer(self, keys: list[OffloadKey], req_context: ReqContext) -> KvPoolStoreSpec | None:
        request = req_context.req_id
        if self._stopped or not self._stores or not self.client.connected or self.client.request_cut(request):
            return None
        record = self._requests.get(request) or RequestRecord(stores=False)
        if not record.stores or not self.may_store(request):
            return None
        first_key = record.first_key or bytes(keys[0])
        offered: list[tuple[bytes, int, int, bytes | None]] = []
        for key in keys:
            end = req_context.get_offload_key_position(key)
            storable, mask = self.mask_of(request, key)
            if end is None or not storable or key in self._storing or self._exists(record, request, key):
                continue
            position = max(0, end // self._chunk_tokens[get_offload_group_idx(key)] - 1)
            offered.append((key, self.client.place_store(request, key, position, first_key), end, mask))
        if not offered:
            return None
        names, devices, ends, masks = zip(*offered, strict=True)
        self.client.store_offered(request, names)
        return KvPoolStoreSpec(request, self._fingerprint, self.client.epoch, names, devices, ends, masks)

    def _exists(self, record: RequestRecord, request: str, key: bytes) -> bool:
        """Say whether storing *key* is pointless. What failed to load counts as not stored."""
        return key not in record.failed and isinstance(self.client.lookup(request, key), Hit)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """The bytes have left the GPU, or were dropped. Whether they are loadable is heard from the pool."""
        self._storing.difference_update(keys)

    # ------------------------------------------------------------ life

    def get_stats(self) -> "OffloadingConnectorStats | None":
        """Return what there is to tell for `/metrics`."""
        return self.guard.run(None, self.metrics.take, self.client)

    def reset_cache(self) -> None:
        """
        Load nothing from before the reset, and store nothing that was computed before it.

        The pool starts a new epoch; until it has, everything is a miss. Where vLLM could not empty its own cache,
        since requests hold blocks, it goes on to serve those, and what it computes from them is as old as they are: so
        this engine neither loads nor stores until a reset finds nothing in use, as vLLM asks for by its answer.
        """
        self._storing.clear()
        for record in self._requests.values():
            record.hits.clear()
        was_stopped, self._stopped = self._stopped, not self.blocks_unused()
        self.guard.run(None, self.client.reset)
        if self._stopped and not was_stopped:
            logger.warning(
                "kvpool: the cache was reset while requests held blocks of it: this engine neither loads nor stores "
                "until it is reset when nothing runs"
            )

    @property
    def stopped(self) -> bool:
        """The cache was reset, and vLLM still has blocks from before."""
        return self._stopped

    def shutdown(self) -> None:
        """Leave the pool."""
        self.client.close()


def _always(_request: str) -> bool:
    return True


def _all_present(_request: str, _key: bytes) -> tuple[bool, bytes | None]:
    return True, None


def _nothing(request: str) -> KvPoolStoreSpec:
    return KvPoolStoreSpec(request, "", -1, (), (), (), ())
