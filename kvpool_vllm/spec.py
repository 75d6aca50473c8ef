"""
The offloading spec that vLLM constructs by name: makes the scheduler's manager and a worker's transfers.

vLLM hands a spec its own digest of the configuration only. What kvpool needs beside it (the namespace, where the
pool is) is laid down by the connector around that construction: :func:`inputs`.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvpool.client.launch import ClientConfig
from kvpool.client.rank import RankClient
from kvpool.client.scheduler import SchedulerClient
from kvpool.errors import ConfigError, invariant
from kvpool.wire.messages import NamespaceSpec
from kvpool_vllm.copies_cpu import CpuCopier
from kvpool_vllm.manager import KvPoolManager
from kvpool_vllm.metrics import PoolMetrics, definitions
from kvpool_vllm.round_trip import DeviceTrial
from kvpool_vllm.worker import DeviceCopier, KvPoolWorker, layouts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecInputs:
    """
    What the connector knows and the spec needs.

    Attributes:
        client: Where the pool is.
        namespace: What is stored.
        loads, stores: What `kv_role` allows.
    """

    client: ClientConfig
    namespace: NamespaceSpec
    loads: bool
    stores: bool


logger = init_logger(f"vllm.{__name__}")

#: The ranks came first and have started the pool: without this wait the first requests would be neither loaded nor
#: stored.
START_WAIT_S = 10.0

_inputs: ContextVar[SpecInputs] = ContextVar("kvpool_spec_inputs")


@contextlib.contextmanager
def inputs(given: SpecInputs) -> Iterator[None]:
    """Hand *given* to the spec that vLLM constructs inside this block."""
    token = _inputs.set(given)
    try:
        yield
    finally:
        _inputs.reset(token)


class KvPoolOffloadingSpec(OffloadingSpec):
    """See vLLM's `OffloadingSpec`."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        given = _inputs.get(None)
        if given is None:
            raise ConfigError(
                "KvPoolOffloadingSpec is made by KvPoolConnector; set kv_connector to that, "
                "with kv_connector_module_path kvpool_vllm.connector"
            )
        invariant(not self.replicated_layout, "every rank stores its own objects")
        self._given = given

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003
        """Name what kvpool adds to vLLM's metrics."""
        return definitions()

    def get_manager(self) -> OffloadingManager:
        """Attach the scheduler to the pool."""
        given = self._given
        client = SchedulerClient(given.client, given.namespace, engine=self.config.engine_id)
        if not client.wait_connected(START_WAIT_S):
            logger.warning("kvpool: no pool yet; the engine starts, and until there is one everything is a miss")
        chunk_tokens = {group.group_id: group.tokens_per_block * self.blocks_per_chunk for group in self.config.groups}
        return KvPoolManager(
            client,
            fingerprint=given.namespace.fingerprint,
            chunk_tokens=chunk_tokens,
            metrics=PoolMetrics(given.namespace, chunk_tokens),
            loads=given.loads,
            stores=given.stores,
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Attach this rank to the pool."""
        given = self._given
        layers = [len(group.layer_names) for group in self.config.groups]
        layouts = layouts_of(kv_caches, given.namespace, blocks_per_chunk=self.blocks_per_chunk, layers=layers)
        device = kv_caches.tensors[0].tensor.device
        copier = make_copier()
        client = RankClient(
            given.client,
            given.namespace,
            engine=self.config.engine_id,
            rank=self.config.parallel.rank,
            copier=copier,
            trial_memory=lambda: DeviceTrial(layouts[0], device),
        )
        return KvPoolWorker(layouts, fingerprint=given.namespace.fingerprint, copier=copier, client=client)


def make_copier() -> DeviceCopier:
    """
    Return the copy back end of this platform.

    Raises:
        ConfigError: There is none.
    """
    if current_platform.is_cuda():
        from kvpool_vllm.copies_cuda import CudaCopier  # noqa: PLC0415 - needs CUDA's runtime library

        return CudaCopier()
    if current_platform.is_cpu():
        return CpuCopier()
    raise ConfigError(f"kvpool has no copies for {current_platform.device_name}; it runs on CUDA GPUs and CPUs")
