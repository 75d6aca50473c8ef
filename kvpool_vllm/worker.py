"""
One rank's transfers: vLLM's `OffloadingWorker` over the rank client.

Theory. vLLM asserts that every submission and every result is a success, and that every job is reported
exactly once. So a job always succeeds here; what failed is remembered beside it, as the GPU blocks
that do not hold what vLLM thinks they hold, and the connector reports those in the same pass. A store that was
dropped is a store that is done.

On submission only block ids are dealt out to objects; where their bytes lie is computed by the copier.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    OffloadKey,
    TransferResult,
    get_offload_group_idx,
)

from kvpool.client.copier import Copier
from kvpool.client.rank import LoadObject, StoreObject
from kvpool.errors import ConfigError, unreachable
from kvpool.wire.messages import NamespaceSpec
from kvpool_vllm.guard import Guard
from kvpool_vllm.metrics import JobCounts
from kvpool_vllm.places import (
    GeometryError,
    GroupLayout,
    Int64s,
    Place,
    TensorRef,
    chunks_of_masks,
    chunks_of_run,
)
from kvpool_vllm.transfer_specs import KvPoolLoadSpec, KvPoolStoreSpec

if TYPE_CHECKING:
    from kvpool.client.rank import JobEnded, RankClient

logger = init_logger(f"vllm.{__name__}")


class DeviceCopier(Copier, Protocol):
    """A copier that orders its copies against the model's compute."""

    def mark(self) -> object | None:
        """Return what copies submitted now have to wait for."""

    def give_back(self, event: object | None) -> None:
        """Take back what :meth:`mark` returned; no copy needs it any more."""


@dataclass(slots=True)
class LoadRecord:
    """A load in flight: keys and blocks of its objects, in the client's order. *reset*: whatever landed is stale."""

    request: str
    keys: tuple[bytes, ...]
    blocks: list[Int64s]
    after: object | None
    reset: bool = False


@dataclass(slots=True)
class LoadFailure:
    """What a load did not bring: keys, and the GPU blocks that are to be computed."""

    job: int
    request: str
    keys: set[bytes] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)


class KvPoolWorker(OffloadingWorker):
    """
    See vLLM's `OffloadingWorker`.

    Args:
        layouts: Per KV group that is stored, in vLLM's order.
        fingerprint: Of the namespace as this rank sees it.
        copier, client: Shared; the client drives the copier.
    """

    def __init__(
        self, layouts: Sequence[GroupLayout], *, fingerprint: str, copier: DeviceCopier, client: "RankClient"
    ) -> None:
        self._layouts = list(layouts)
        self._fingerprint = fingerprint
        self._copier = copier
        self._client = client
        self._guard = Guard("worker")
        self._loads: dict[int, LoadRecord] = {}
        self._stores: dict[int, object | None] = {}
        self._ended: list[TransferResult] = []
        self._failures: list[LoadFailure] = []
        self._complaints: set[str] = set()
        self.counts = JobCounts()

    # ------------------------------------------------------------ submission

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Offer a job's objects. Never fails: what cannot be stored is dropped."""
        if not self._guard.run(False, self._submit_store, job_id, src_spec, dst_spec):
            self._stores.pop(job_id, None)
            self._ended.append(TransferResult(job_id, True))
        return True

    def _submit_store(self, job: int, gpu: GPULoadStoreSpec, spec: LoadStoreSpec) -> bool:
        if not isinstance(spec, KvPoolStoreSpec):
            unreachable("a store that is not ours", spec=spec)
        if not spec.keys or not self._same_namespace(spec.fingerprint):
            return False
        chunks = self._maybe_deal(gpu, spec.keys, spec.masks, load=False)
        if chunks is None:
            return False
        after = self._copier.mark()
        self._stores[job] = after
        objects = [
            (end, group, StoreObject(key, device, Place(self._layouts[group], blocks, after)))
            for key, device, end, (group, blocks) in zip(spec.keys, spec.devices, spec.ends, chunks, strict=True)
        ]
        objects.sort(key=lambda item: item[:2])  # prefix order: a cut leaves every group with whole prefixes
        self.counts.submitted(job, [item[2].key for item in objects], [item[2].device for item in objects])
        self._client.submit_store(job, spec.request, [item[2] for item in objects], after, epoch=spec.epoch)
        return True

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """
        Ask for a job's objects. Never fails: blocks that get no bytes are reported for recomputing.

        *expedited* (0.33) asks for a wait inside the step, which kvpool's settings rule out.
        """
        if not self._guard.run(False, self._submit_load, job_id, src_spec, dst_spec):
            self._loads.pop(job_id, None)
            self._fail_whole(job_id, src_spec, dst_spec)
            self._ended.append(TransferResult(job_id, True))
        return True

    def _submit_load(self, job: int, spec: LoadStoreSpec, gpu: GPULoadStoreSpec) -> bool:
        if not isinstance(spec, KvPoolLoadSpec):
            unreachable("a load that is not ours", spec=spec)
        if not spec.keys or not self._same_namespace(spec.fingerprint):
            return False
        chunks = self._maybe_deal(gpu, spec.keys, [None] * len(spec.keys), load=True)
        if chunks is None:
            return False
        after = self._copier.mark()
        self._loads[job] = LoadRecord(spec.request, spec.keys, [blocks for _, blocks in chunks], after)
        objects = [
            LoadObject(key, device, Place(self._layouts[group], blocks, after))
            for key, device, (group, blocks) in zip(spec.keys, spec.devices, chunks, strict=True)
        ]
        self.counts.submitted(job, spec.keys, spec.devices, spec.resident or bytes(len(spec.keys)))
        self._client.submit_load(job, objects, epoch=spec.epoch)
        return True

    def _maybe_deal(
        self, gpu: GPULoadStoreSpec, keys: Sequence[bytes], masks: Sequence[bytes | None], *, load: bool
    ) -> list[tuple[int, Int64s]] | None:
        """Return what :meth:`_deal` does; None where blocks and keys do not fit together."""
        try:
            return self._deal(gpu, keys, masks, load=load)
        except GeometryError as error:
            self._complain(f"a job is not {'loaded' if load else 'stored'}, as its blocks and keys do not fit: {error}")
            return None

    def _deal(
        self, gpu: GPULoadStoreSpec, keys: Sequence[bytes], masks: Sequence[bytes | None], *, load: bool
    ) -> list[tuple[int, Int64s]]:
        """Return, per key, the index of its group's layout and the block ids of its chunk."""
        counts = [0] * len(self._layouts)
        index_of = {layout.group: index for index, layout in enumerate(self._layouts)}
        groups = [index_of[get_offload_group_idx(OffloadKey(key))] for key in keys]
        if groups != sorted(groups) or len(gpu.group_sizes) != len(self._layouts):
            raise GeometryError("keys do not come group by group")
        for group in groups:
            counts[group] += 1
        dealt: list[tuple[int, Int64s]] = []
        block_start = key_start = 0
        for index, (size, first, count) in enumerate(zip(gpu.group_sizes, gpu.block_indices, counts, strict=True)):
            blocks = gpu.block_ids[block_start : block_start + size]
            group_masks = masks[key_start : key_start + count]
            chunks = _chunks(blocks, first, group_masks, self._layouts[index].blocks_per_chunk, load=load)
            dealt.extend((index, chunk) for chunk in chunks)
            block_start += size
            key_start += count
        return dealt

    def _same_namespace(self, fingerprint: str) -> bool:
        """Say whether scheduler and worker mean the same bytes; they are computed apart."""
        if fingerprint == self._fingerprint:
            return True
        self._complain("scheduler and worker disagree about the identity of the KV cache: nothing is loaded or stored")
        return False

    def _complain(self, what: str) -> None:
        """Log an error, the first time."""
        if what not in self._complaints:
            self._complaints.add(what)
            logger.error("kvpool: %s", what)

    # ------------------------------------------------------------ ends

    def get_finished(self) -> list[TransferResult]:
        """Return each ended job once."""
        for ended in self._guard.run([], self._client.take_ended):
            self._guard.run(None, self._end, ended)
        if self._guard.broken:
            self._end_all()
        results, self._ended = self._ended, []
        return results

    def _end(self, ended: "JobEnded") -> None:
        self.counts.ended(ended.job, ended.failed)
        if ended.kind == "load":
            self._end_load(ended.job, (index for index, _ in ended.failed))
        else:
            self._copier.give_back(self._stores.pop(ended.job, None))
        self._ended.append(TransferResult(ended.job, True, transfer_size=ended.bytes, transfer_time=ended.seconds))

    def _end_load(self, job: int, failed: Iterable[int]) -> None:
        record = self._loads.pop(job)
        self._copier.give_back(record.after)
        indices = range(len(record.keys)) if record.reset else failed
        failure = LoadFailure(job, record.request)
        for index in indices:
            failure.keys.add(record.keys[index])
            failure.blocks.update(int(block) for block in record.blocks[index] if block >= 0)
        if failure.keys:
            self._failures.append(failure)

    def _fail_whole(self, job: int, spec: LoadStoreSpec, gpu: GPULoadStoreSpec) -> None:
        """Report every block of a load that could not be submitted."""
        blocks = {int(block) for block in gpu.block_ids if block != 0}
        request, keys = (spec.request, set(spec.keys)) if isinstance(spec, KvPoolLoadSpec) else ("", set())
        self._failures.append(LoadFailure(job, request, keys, blocks))

    def _end_all(self) -> None:
        """Something of ours broke: end every job, so that vLLM gets its blocks back; copies end before."""
        jobs = {*self._loads, *self._stores}
        if not jobs or not self._flushed(jobs):
            return
        for job, record in list(self._loads.items()):
            record.reset = True
            self._end_load(job, ())
        self._stores.clear()
        self._ended.extend(TransferResult(job, True) for job in sorted(jobs))

    def _flushed(self, jobs: set[int]) -> bool:
        """Wait for the copies of *jobs*; False: not known to have ended, so their blocks must not be used again."""
        try:
            self._client.flush(jobs)
        except Exception:  # the border to the engine: what can be done about it was done
            logger.exception("kvpool: transfers cannot be ended; their requests will not finish")
            return False
        return True

    def take_failures(self) -> list[LoadFailure]:
        """Return the failures of the jobs that :meth:`get_finished` has returned since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def wait(self, job_ids: set[int]) -> None:
        """
        Return when no copy of these jobs runs any more; blocks only for copies already launched.

        vLLM waits for a load only when its cache was reset: what such a load brought is stale.
        """
        for job in job_ids:
            if job in self._loads:
                self._loads[job].reset = True
        self._guard.run(None, self._client.flush, job_ids)

    def shutdown(self) -> None:
        """Leave the pool; copies in flight are waited for."""
        self._client.close()


def _chunks(
    blocks: npt.NDArray[np.int32], first: int, masks: Sequence[bytes | None], blocks_per_chunk: int, *, load: bool
) -> Int64s:
    """Cut one group's blocks: by masks where the scheduler gave some, else as one run."""
    if not load and any(mask is not None for mask in masks):
        return chunks_of_masks(blocks, masks=masks, blocks_per_chunk=blocks_per_chunk)
    return chunks_of_run(blocks, first_index=int(first), keys=len(masks), blocks_per_chunk=blocks_per_chunk)


def layouts_of(
    kv_caches: CanonicalKVCaches, namespace: NamespaceSpec, *, blocks_per_chunk: int, layers: Sequence[int]
) -> list[GroupLayout]:
    """
    Return where each KV group's bytes lie on this rank.

    Args:
        layers: Layers of each group: there must be one tensor for each, or one for whole blocks.

    Raises:
        ConfigError: The tensors are not what the namespace was computed for, or do not cover the cache.
    """
    layouts = []
    for group, refs, layer_count in zip(namespace.groups, kv_caches.group_data_refs, layers, strict=True):
        tensors = tuple(_tensor_of(kv_caches, ref) for ref in refs)
        filled = blocks_per_chunk * sum(tensor.bytes for tensor in tensors)
        whole = len(tensors) == layer_count or (len(tensors) == 1 and filled == group.object_bytes)
        if not whole or filled > group.object_bytes:
            raise ConfigError(
                "this arrangement of KV tensors is not supported",
                group=group.group,
                layers=layer_count,
                tensors=len(tensors),
                bytes=filled,
                object_bytes=group.object_bytes,
            )
        layouts.append(GroupLayout(group.group, blocks_per_chunk, group.object_bytes, tensors))
    return layouts


def _tensor_of(kv_caches: CanonicalKVCaches, ref: CanonicalKVCacheRef) -> TensorRef:
    tensor = kv_caches.tensors[ref.tensor_idx].tensor
    return TensorRef(tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), ref.page_size_bytes)
