"""
vLLM's real scheduler with the connector's scheduler role, over a pool that answers from a table.

No model runs: a test says what the workers would have reported.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvpool.client.scheduler import Hit, Later, Lookup, Miss
from kvpool.core.chunk_places import RESIDENT_PLACE
from kvpool.wire.messages import DeviceState
from kvpool_vllm.connector import KvPoolConnector, KvPoolWorkerMetadata
from kvpool_vllm.transfer_specs import KvPoolLoadSpec, KvPoolStoreSpec
from tools.tiny_models import tiny_model

BLOCK = 128
CHUNK = 256


class FakePool:
    """What the scheduler role calls of a scheduler client; a test writes `known` and calls `changed`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.known: dict[bytes, Lookup] = {}
        self.default: Lookup = Miss("absent")
        self.connected = True
        self.changes = 0
        self.announced: dict[str, list[bytes]] = {}
        self.priorities: dict[str, int] = {}
        self.withdrawn: list[str] = []
        #: Requests that wait for what is read ahead, as told.
        self.waiting: set[str] = set()
        self.lookups = self.misses = 0
        self.devices = ["nvme0", "nvme1"]
        self.states: dict[int, DeviceState] = {}
        self.on_wait: Any = None
        self.more_facts: Any = dict
        self.epoch = 0

    def reset(self) -> None:
        self.known.clear()
        self.default = Miss("absent")
        self.epoch += 1

    def wait_connected(self, timeout_s: float) -> bool:
        return self.connected

    def announce(self, request: str, keys: list[bytes], priority: int) -> None:
        self.announced.setdefault(request, []).extend(keys)
        self.priorities[request] = priority
        self.waiting.add(request)

    def withdraw(self, request: str) -> None:
        self.withdrawn.append(request)
        self.waiting.discard(request)

    def started(self, request: str) -> None:
        self.waiting.discard(request)

    def waits_again(self, request: str) -> None:
        self.waiting.add(request)

    def pump(self) -> None:
        pass

    def await_news(self, timeout_s: float) -> None:
        if self.on_wait is not None:
            self.on_wait()

    def lookup(self, request: str, key: bytes) -> Lookup:
        self.lookups += 1
        return self.known.get(key, self.default)

    def answered(self, request: str) -> bool:
        return not any(isinstance(self.known.get(key, self.default), Later) for key in self.announced.get(request, []))

    def places(self, keys: Sequence[bytes]) -> list[int]:
        found = itertools.takewhile(
            lambda hit: isinstance(hit, Hit), (self.known.get(key, self.default) for key in keys)
        )
        return [RESIDENT_PLACE if hit.resident else hit.device for hit in found if isinstance(hit, Hit)]

    def place_store(self, request: str, key: bytes, position: int, first_key: bytes) -> int:
        return 0

    def store_offered(self, request: str, keys: tuple[bytes, ...]) -> None:
        pass

    def request_cut(self, request: str) -> bool:
        return False

    def counters(self) -> dict[str, int]:
        return {"lookups_hit": 0, "missed_absent": self.misses}

    def device_states(self) -> dict[int, DeviceState]:
        return self.states

    def close(self) -> None:
        pass


def vllm_config(models: Path, **changes: Any) -> VllmConfig:
    """Return the configuration of an engine on a tiny model."""
    extra = {"shared_storage_path": "/nowhere/kvpool", **changes.pop("extra", {})}
    transfer = KVTransferConfig(
        kv_connector="KvPoolConnector", kv_connector_module_path="kvpool_vllm.connector", kv_role="kv_both",
        kv_connector_extra_config=extra,
    )  # fmt: skip
    settings: dict[str, Any] = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 16, **changes}
    return EngineArgs(
        model=str(tiny_model("llama", models)), skip_tokenizer_init=True, kv_transfer_config=transfer, **settings
    ).create_engine_config()


def full_attention(layers: int = 4) -> KVCacheGroupSpec:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.bfloat16)
    return KVCacheGroupSpec([f"full.{layer}" for layer in range(layers)], spec)


def sliding_window(layers: int = 4, *, window: int = 512) -> KVCacheGroupSpec:
    spec = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.bfloat16, sliding_window=window
    )
    return KVCacheGroupSpec([f"window.{layer}" for layer in range(layers)], spec)


def cache_config(groups: list[KVCacheGroupSpec], *, blocks: int) -> KVCacheConfig:
    """Return vLLM's layer-outer arrangement, in which groups overlay each other."""
    page = groups[0].kv_cache_spec.page_size_bytes
    layers = max(len(group.layer_names) for group in groups)
    tensors = [
        KVCacheTensor(
            size=page * blocks * layers, layers=group.layer_names, layer_stride=page * blocks, block_stride=page
        )
        for group in groups
    ]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


@dataclass
class Step:
    """One scheduling pass, and what the connector gave the workers in it."""

    output: SchedulerOutput
    loads: dict[int, tuple[KvPoolLoadSpec, list[int]]] = field(default_factory=dict)
    stores: dict[int, KvPoolStoreSpec] = field(default_factory=dict)


class World:
    """The scheduler; `step` runs one pass, `report` is what the workers say after it."""

    def __init__(self, config: VllmConfig, groups: list[KVCacheGroupSpec], *, blocks: int = 200) -> None:
        self.config = config
        config.cache_config.num_gpu_blocks = blocks
        caches = cache_config(groups, blocks=blocks)
        self.scheduler = Scheduler(
            config, caches, StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK, log_stats=True
        )
        connector = self.scheduler.connector
        assert isinstance(connector, KvPoolConnector)
        self.connector = connector
        pool = connector.side._manager.client
        assert isinstance(pool, FakePool)
        self.pool: FakePool = pool
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK, hash_function)

    def add(self, name: str, tokens: int, *, seed: int | None = None, max_tokens: int = 4,
            priority: int = 0, params: dict[str, Any] | None = None) -> Request:  # fmt: skip
        """Let a request arrive; the same *seed* means the same prefix; *params*: its `kv_transfer_params`."""
        first = sum(name.encode()) if seed is None else seed
        prompt = [(first * 7919 + index) % 2000 for index in range(tokens)]
        request = Request(
            name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), None, block_hasher=self.hasher,
            priority=priority,
        )  # fmt: skip
        request.kv_transfer_params = params
        self.scheduler.add_request(request)
        return request

    def hit(self, name: str, *, resident: bool = False, device: int = 0, chunks: int | None = None) -> None:
        """Let the pool have the request's keys, or the first *chunks* of each group's."""
        for key in self.pool.announced[name][:chunks]:
            self.pool.known[key] = Hit(device, resident)
        self.pool.changes += 1

    def step(self) -> Step:
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        assert isinstance(meta, OffloadingConnectorMetadata)
        loads = {job: (entry.src_spec, entry.dst_spec.block_ids.tolist()) for job, entry in meta.load_jobs.items()}
        return Step(output, loads, {job: entry.dst_spec for job, entry in meta.store_jobs.items()})

    def report(
        self,
        step: Step,
        *,
        loaded: dict[int, str] | None = None,
        failed: dict[int, set[bytes]] | None = None,
        counted: dict[tuple[bool, int, bool, int, int], int] | None = None,
        invalid: set[int] | None = None,
        failed_requests: set[str] | None = None,
        stored: tuple[int, ...] = (),
    ) -> None:
        """Give the scheduler the model's tokens of *step*, and the ends of jobs."""
        names = list(step.output.num_scheduled_tokens)
        sampled = [[1] if self._samples(name) else [] for name in names]
        done = dict.fromkeys([*(loaded or {}), *stored], 1)
        kv = KVConnectorOutput(
            finished_recving=set((loaded or {}).values()) or None,
            kv_connector_worker_meta=KvPoolWorkerMetadata(done, failed_loads=failed or {}, counted=counted or {})
            if done
            else None,
            invalid_block_ids=invalid or set(),
            failed_recving=failed_requests or set(),
        )
        result = ModelRunnerOutput(
            names, {name: index for index, name in enumerate(names)}, sampled, kv_connector_output=kv
        )
        self.scheduler.update_from_output(step.output, result)

    def _samples(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens
