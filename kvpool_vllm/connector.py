"""
`KvPoolConnector`: vLLM's offloading connector with kvpool's spec, in both roles.

Theory. vLLM's own connector does the bookkeeping of chunks, jobs and blocks; this subclass adds what
it has no hook for. In the scheduler role that is :class:`SchedulerSide`; in a worker it reports the
blocks that a load did not bring. The two roles speak through vLLM's metadata, never directly.

A failed load, step by step. The worker's job ends as a success (vLLM allows nothing else); its blocks are reported
in the same pass: as block ids with one KV group, as a failed request with several (vLLM cannot tell their
ids apart). vLLM truncates the request there and computes. The failed keys travel with the job's completion to
the scheduler role, which gives that request no second load, and sets its store progress back so that the
recomputed chunks are offered for storing again.
"""

# ruff: noqa: E402 - the version is checked before anything of vLLM that only tested versions have is imported

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import vllm

from kvpool_vllm.versions import check_version

check_version(vllm.__version__)

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger

from kvpool.client.launch import ClientConfig
from kvpool.config_connector import staging_weight
from kvpool.config_planner import planner_settings
from kvpool.errors import unreachable
from kvpool_vllm import settings
from kvpool_vllm.guard import Guard
from kvpool_vllm.identity import namespace_of
from kvpool_vllm.logs import share_vllm_log
from kvpool_vllm.manager import KvPoolManager
from kvpool_vllm.metrics import PoolPromMetrics
from kvpool_vllm.planning import Planning
from kvpool_vllm.request_params import separate_tenant
from kvpool_vllm.scheduling import SchedulerSide, kv_bytes_per_token, main_group
from kvpool_vllm.spec import SpecInputs, inputs
from kvpool_vllm.worker import KvPoolWorker, LoadFailure

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, PromMetric
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpool.config import Settings
    from kvpool.wire.messages import NamespaceSpec

logger = init_logger(f"vllm.{__name__}")


@dataclass
class KvPoolWorkerMetadata(OffloadingWorkerMetadata):
    """Completions of one step, with the keys that loads did not bring (job -> keys), and what jobs came to."""

    failed_loads: dict[int, set[bytes]] = field(default_factory=dict)
    counted: dict[tuple[bool, int, bool, int, int], int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join what two workers say."""
        base = super().aggregate(other)
        if not isinstance(base, OffloadingWorkerMetadata):
            unreachable("completions join to completions", base=base)
        failed = {job: set(keys) for job, keys in self.failed_loads.items()}
        for job, keys in getattr(other, "failed_loads", {}).items():
            failed.setdefault(job, set()).update(keys)
        counted = Counter(self.counted)
        counted.update(getattr(other, "counted", {}))
        return KvPoolWorkerMetadata(base.completed_jobs, base.transfer_stats, failed, dict(counted))


class KvPoolConnector(OffloadingConnector):
    """See vLLM's `KVConnectorBase_V1`; constructed once in each role."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        share_vllm_log()
        is_scheduler = role == KVConnectorRole.SCHEDULER
        transfer = settings.prepare(vllm_config, kv_cache_config, scheduler=is_scheduler)
        namespace = namespace_of(vllm_config, kv_cache_config)
        pool = settings.pool_settings(transfer.kv_connector_extra_config)
        given = SpecInputs(
            client=ClientConfig(
                run_dir=pool.pool.run_dir,
                settings=pool,
                autostart=True,
                weight=staging_weight(transfer.kv_connector_extra_config),
            ),
            namespace=namespace,
            loads=transfer.is_kv_consumer,
            stores=transfer.is_kv_producer,
        )
        with inputs(given):
            super().__init__(vllm_config, role, kv_cache_config)
        self._group_count = len(kv_cache_config.kv_cache_groups)
        self._failed_blocks: set[int] = set()
        self._failed_loads: dict[int, set[bytes]] = {}
        self._side: SchedulerSide | None = None
        if is_scheduler:
            settings.warn(vllm_config, namespace)
            by_priority = vllm_config.scheduler_config.policy == "priority"
            planning = self._planning(vllm_config, namespace, pool)
            self._side = self._scheduler_side(
                namespace, pool.pool.defer_backlog_s, by_priority=by_priority, planning=planning
            )

    # ============================================================ the process of vLLM's metrics

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type["PromMetric"], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics":
        """Register vLLM's metrics of offloading, and kvpool's beside them."""
        settings.name_spec(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ============================================================ worker role

    @property
    def _worker(self) -> KvPoolWorker | None:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        return worker if isinstance(worker, KvPoolWorker) else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report ended loads, and beside them what they did not bring."""
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            for failure in self._worker.take_failures():
                self._report(failure, results)
        return results

    def _report(self, failure: LoadFailure, results: KVConnectorTransferResults) -> None:
        logger.info("kvpool: %d objects of request %s did not load", len(failure.keys), failure.request)
        self._failed_loads[failure.job] = failure.keys
        if self._group_count == 1:
            self._failed_blocks |= failure.blocks
        elif failure.request in results.finished_recving:
            results.failed_recving.add(failure.request)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks to recompute, of the loads reported in this pass."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Add the failed keys to vLLM's completions; always in our kind, as the first rank's joins all."""
        meta = super().build_connector_worker_meta()
        if meta is None:
            return None
        failed, self._failed_loads = self._failed_loads, {}
        counted = self._worker.counts.take() if self._worker is not None else {}
        return KvPoolWorkerMetadata(meta.completed_jobs, meta.transfer_stats, failed, counted)

    # ============================================================ scheduler role

    def _scheduler_side(
        self, namespace: "NamespaceSpec", backlog_s_max: float, *, by_priority: bool, planning: Planning | None
    ) -> SchedulerSide:
        manager = self._manager
        return SchedulerSide(
            self.scheduler,
            manager,
            namespace,
            backlog_s_max=backlog_s_max,
            by_priority=by_priority,
            planning=planning,
        )

    @property
    def _manager(self) -> KvPoolManager:
        manager = self.scheduler.manager
        if not isinstance(manager, KvPoolManager):
            unreachable("a manager that is not ours", manager=manager)
        return manager

    def _planning(self, vllm_config: "VllmConfig", namespace: "NamespaceSpec", pool: "Settings") -> Planning | None:
        """Return what decides by cost; None where it is switched off and no break-even file says what is too short."""
        found = planner_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if found.mode == "off" and not found.break_even_path:
            return None
        break_even = settings.break_even(found, vllm_config, pool) if found.break_even_path else None
        configs = self.scheduler.config.kv_group_configs
        return Planning(
            found,
            break_even,
            chunk_tokens=configs[main_group(configs)].tokens_per_chunk,
            kv_bytes_per_token=kv_bytes_per_token(configs, namespace),
            device_count=len(pool.device),
            places=self._manager.client.places,
            answered=self._manager.client.answered,
            several_groups=len(configs) > 1,
            preloads=pool.pool.preload_lookahead_requests if pool.pool.enable_preload else 0,
            async_steps=bool(vllm_config.scheduler_config.async_scheduling),
        )

    @property
    def _guard(self) -> Guard:
        return self.side.guard

    @property
    def side(self) -> SchedulerSide:
        """State of the scheduler role."""
        if self._side is None:
            unreachable("called in the worker role")
        return self._side

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Get to know vLLM's blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._guard.run(None, self.side.bind, kv_cache_manager)

    def on_new_request(self, request: "Request") -> None:
        """Announce the request: what is stored of it is known before vLLM asks."""
        self._guard.run(None, separate_tenant, request)
        super().on_new_request(request)
        self._guard.run(None, self.side.announce, request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded now; (None, False): ask later."""
        lookup = partial(super().get_num_new_matched_tokens, request, num_computed_tokens)
        answer = self._guard.run(None, self.side.answer, request, num_computed_tokens, lookup)
        return lookup() if answer is None else answer

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The request has its blocks."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._guard.run(None, self.side.allocated, request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """Choose what to store, and close the scheduling pass."""
        self._guard.run(None, self.side.before_stores)
        meta = super().build_connector_meta(scheduler_output)
        self._guard.run(None, self.side.step_built, scheduler_output)
        return meta

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take note of ended jobs, and of what loads did not bring."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, KvPoolWorkerMetadata):
            self._guard.run(None, self.side.failed_keys, meta.failed_loads)
            self._guard.run(None, self._manager.metrics.jobs_counted, meta.counted)
        super().update_connector_output(connector_output)
        if meta is not None:
            self._guard.run(None, self.side.jobs_ended)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a finished request."""
        self._guard.run(None, self.side.finished, request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a finished request."""
        self._guard.run(None, self.side.finished, request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool | None:
        """Serve nothing from before now; False: vLLM's own cache is not empty, so reset again when nothing runs."""
        done = super().reset_cache()
        self._guard.run(None, self.side.reset)
        return False if self.side.stopped else done
