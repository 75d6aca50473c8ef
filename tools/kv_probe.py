"""
Look at, and spoil, the KV blocks of a running vLLM worker; injected by `worker_extension_cls`.

Theory. With dummy weights outputs say nothing about the KV, so the bytes themselves are compared: a
digest of every block at the moment its store is submitted (the kernels that wrote it have ended then)
and at the moment its load is reported as finished (nothing has computed on it yet). A block is named
by its KV group and its place in the prompt, both given by vLLM's own transfer spec, so that a block
loaded to the wrong place shows as well as a wrong byte. Digests are of one request at a time: take
them before the next one.

`kvprobe_scramble` overwrites all of the KV with noise: the control that answers depend on it.

Does not cover: how kvpool moves bytes; nothing of kvpool is imported.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash


class KvProbe:
    """Methods that every worker gets; called by name through `collective_rpc`."""

    def kvprobe_watch(self: Any) -> bool:
        """Begin to digest blocks around every store and load; False when no offloading connector is there."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return False
        connector: Any = get_kv_transfer_group()
        transfers = connector.connector_worker.worker
        seen: dict[str, dict[str, str]] = {"stored": {}, "loaded": {}}
        loads: dict[int, Any] = {}
        layers = _block_views(self.model_runner)
        submit_store: Callable[..., bool] = transfers.submit_store
        submit_load: Callable[..., bool] = transfers.submit_load
        get_finished: Callable[[], list[Any]] = transfers.get_finished

        def watched_store(job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            seen["stored"] |= _digests(layers, src_spec)
            return submit_store(job_id, src_spec, dst_spec)

        def watched_load(job_id: int, src_spec: Any, dst_spec: Any, **more: Any) -> bool:
            loads[job_id] = dst_spec
            return submit_load(job_id, src_spec, dst_spec, **more)

        def watched_finished() -> list[Any]:
            results = get_finished()
            for result in results:
                if result.job_id in loads:
                    seen["loaded"] |= _digests(layers, loads.pop(result.job_id))
            return results

        transfers.submit_store, transfers.submit_load = watched_store, watched_load
        transfers.get_finished = watched_finished
        self.kvprobe_seen = seen
        return True

    def kvprobe_take(self: Any) -> dict[str, dict[str, str]]:
        """Return the digests seen since the last call: stored and loaded, by `group:block`."""
        taken = {kind: dict(digests) for kind, digests in self.kvprobe_seen.items()}
        for digests in self.kvprobe_seen.values():
            digests.clear()
        return taken

    def kvprobe_scramble(self: Any, seed: int = 1) -> int:
        """Overwrite all KV with noise; return the bytes written."""
        written = 0
        for views in _block_views(self.model_runner):
            for view in views:
                generator = torch.Generator(device=view.device).manual_seed(seed)
                noise = torch.randn(view.shape[1] // 2, generator=generator, device=view.device)
                view.copy_(noise.to(torch.bfloat16).view(torch.int8).expand(view.shape))
                written += view.numel()
        return written

    def kvprobe_pid(self: Any) -> int:
        """Return the pid of this worker."""
        import os

        return os.getpid()


def _block_views(runner: Any) -> list[list[torch.Tensor]]:
    """Return for every KV group its layers as (blocks, page bytes) byte views."""
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs, group_kernel_blocks

    config = runner.kv_cache_config
    layers = runner.compilation_config.static_forward_context
    groups = []
    for group in config.kv_cache_groups:
        views = []
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            cache = layers[name].kv_cache
            cache = group_kernel_blocks(cache[0] if isinstance(cache, list) else cache, config.num_blocks)
            size = cache.element_size()
            view = torch.tensor([], dtype=torch.int8, device=cache.device).set_(
                cache.untyped_storage(),
                cache.storage_offset() * size,
                (config.num_blocks, spec.page_size_bytes),
                (cache.stride(0) * size, 1),
            )
            views.append(view)
        groups.append(views)
    return groups


def _digests(layers: list[list[torch.Tensor]], spec: Any) -> dict[str, str]:
    """Return `group:block` -> digest over all layers, for the blocks that a transfer spec names."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {f"{group}:{block}": _digest(layers[group], block_id) for group, block, block_id in _blocks(spec)}


def _blocks(spec: Any) -> Iterator[tuple[int, int, int]]:
    """Yield (group, place in the prompt, block id) of vLLM's GPULoadStoreSpec."""
    ids = iter(spec.block_ids.tolist())
    for group, (size, first) in enumerate(zip(spec.group_sizes, spec.block_indices, strict=True)):
        for place in range(size):
            yield group, first + place, next(ids)


def _digest(views: list[torch.Tensor], block_id: int) -> str:
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view[block_id].cpu().numpy().tobytes())
    return state.hexdigest()
