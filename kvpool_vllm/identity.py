"""
What makes stored KV interchangeable, worked out by one function for both roles of the connector.

Theory. Keys are hashes of tokens; that two engines may share the bytes behind a key is the promise
of the namespace. So everything that shapes the bytes goes into the identity: the weights, the parts of the
model's configuration that the forward pass reads, the KV dtype and layout, the cut into
groups, blocks and chunks, the parallel shape, how block hashes are seeded, and vLLM's minor version. What
is in doubt is in: a difference costs a miss, a missing difference costs wrong answers.

The scheduler and every worker compute it on their own, from `vllm_config` and `kv_cache_config`; only
what is equal in all of these processes is used (layer counts and sizes, not layer names or tensors).
"""

import enum
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
    get_offloading_group_ids,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvpool.wire.messages import GroupSpec, NamespaceSpec
from kvpool_vllm.weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

#: Raised when the arrangement of bytes inside an object changes.
STORAGE_FORMAT = 1
#: Keys of a model's configuration that say nothing about its arithmetic.
_CONFIG_NOISE = frozenset({"transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"})
#: Block-hash algorithms whose seed is random when PYTHONHASHSEED is not set start otherwise than this.
_STABLE_HASH_PREFIX = "sha256"


def namespace_of(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> NamespaceSpec:
    """Return the namespace of an engine's KV, the same in its scheduler and in all of its workers."""
    config = build_offloading_config(vllm_config, kv_cache_config)
    blocks_per_chunk = config.cache.blocks_per_chunk
    groups = [
        GroupSpec(group=group, object_bytes=block_bytes_of(kv_cache_config, group) * blocks_per_chunk)
        for group in get_offloading_group_ids(kv_cache_config)
    ]
    identity = _identity(vllm_config, kv_cache_config, config, groups)
    parallel = config.parallel
    return NamespaceSpec(
        fingerprint=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest(),
        model_name=model_component(vllm_config.model_config.model),
        block_size=min(group.tokens_per_block for group in config.groups),
        blocks_per_file=blocks_per_chunk,
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        pcp=parallel.pcp_size,
        dtype=_path_component(config.model.dtype),
        rank_count=parallel.world_size,
        groups=groups,
        identity=identity,
    )


def _identity(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    config: "OffloadingConfig",
    groups: list[GroupSpec],
) -> dict[str, str]:
    model = vllm_config.model_config
    parallel = config.parallel
    facts: dict[str, object] = {
        "storage_format": STORAGE_FORMAT,
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "platform": _platform(),
        "model": model_component(model.model),
        "revision": model.revision,
        "code_revision": model.code_revision,
        "model_impl": model.model_impl,
        "weights": weights_digest(model.model, model.revision),
        "weights_made": _weights_made(vllm_config),
        "drafter": _drafter(vllm_config),
        "model_config": _model_config_digest(model),
        "rope": _rope(model),
        "max_model_len": model.max_model_len,
        "model_dtype": model.dtype,
        "kv_dtype": config.model.dtype,
        "cache_dtype": vllm_config.cache_config.cache_dtype,
        "kv_scales": [sorted(vllm_config.cache_config.kv_cache_dtype_skip_layers), _kv_scales(model)],
        "quantization": model.quantization,
        "attention": _attention(vllm_config),
        "kv_layout": kv_cache_config.kv_cache_layout or config.kv_cache_layout,
        "groups": [
            [spec.group, spec.object_bytes, group.tokens_per_block, _kind(kv_cache_config, spec.group)]
            for spec, group in zip(groups, config.groups, strict=True)
        ],
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "parallel": [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size],
        "hash_algorithm": hash_algorithm(vllm_config),
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
    }
    return {name: str(value) for name, value in facts.items()}


def block_bytes_of(kv_cache_config: "KVCacheConfig", group: int) -> int:
    """
    Return the bytes of one block of *group* over all of its tensors on one rank, as stored.

    Pages count with their padding, which both roles know; a worker zeroes what it has no bytes for.
    """
    names = set(kv_cache_config.kv_cache_groups[group].layer_names)
    tensors = [tensor for tensor in kv_cache_config.kv_cache_tensors if names & set(tensor.layers)]
    if not tensors:
        spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
        return sum(layer.page_size_bytes for layer in iter_layer_specs(spec)) * (len(names) or 1)
    if any(tensor.layer_stride < tensor.block_stride for tensor in tensors):
        return tensors[0].block_stride  # all layers of a block lie together, and vLLM hands them out as one tensor
    return sum(tensor.block_stride * len(names & set(tensor.layers)) for tensor in tensors)


def _kind(kv_cache_config: "KVCacheConfig", group: int) -> str:
    """Name the attention of a group and what it keeps, from one layer's spec: the scheduler has no more."""
    spec = next(iter(iter_layer_specs(kv_cache_config.kv_cache_groups[group].kv_cache_spec)))
    layers = len(kv_cache_config.kv_cache_groups[group].layer_names)
    return f"{type(spec).__name__} x{layers} {_plain(spec)}"


def _plain(value: Any) -> str:
    """Return *value* in words that every process finds for it; of what has none, the type."""
    if is_dataclass(value) and not isinstance(value, type):
        return " ".join(f"{field.name}={_plain(getattr(value, field.name))}" for field in fields(value))
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_plain(key)}: {_plain(value[key])}" for key in sorted(value, key=str)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    if value is None or isinstance(value, (str, int, float, Fraction, torch.dtype)):
        return str(value)
    return type(value).__name__


def hash_algorithm(vllm_config: "VllmConfig") -> str:
    """Return vLLM's name of the block-hash algorithm."""
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def hashes_are_stable(vllm_config: "VllmConfig") -> bool:
    """Say whether another process gives the same tokens the same keys."""
    return hash_algorithm(vllm_config).startswith(_STABLE_HASH_PREFIX) or "PYTHONHASHSEED" in os.environ


def _platform() -> str:
    """Name what chooses kernels, hence the arrangement inside a page."""
    capability = current_platform.get_device_capability()
    return f"{current_platform.device_type} {capability.as_version_str() if capability is not None else ''}".strip()


def _attention(vllm_config: "VllmConfig") -> str:
    """Name the attention back ends that the user chose: they arrange pages, and round, each in their way."""
    chosen = vllm_config.attention_config
    return f"{_plain(chosen.backend)} {_plain(chosen.backend_per_kind)}"


def _weights_made(vllm_config: "VllmConfig") -> str:
    """Say how weights come from their files: some ways make others of them, or make them up."""
    load = vllm_config.load_config
    seed = f" seed={vllm_config.model_config.seed}" if str(load.load_format) == "dummy" else ""
    return f"{load.load_format}{seed} {_plain(load.model_loader_extra_config)}"


def _drafter(vllm_config: "VllmConfig") -> str:
    """Identify a speculative draft model: its layers' KV is stored beside the model's own."""
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    if speculative is None or draft is None:
        return "none"
    digests = f"{weights_digest(draft.model, draft.revision)} {_model_config_digest(draft)}"
    return f"{speculative.method} {model_component(draft.model)} {draft.revision} {digests}"


def _rope(model: "ModelConfig") -> str:
    """Return the rotary embedding's settings in words: what people change most, and want to see named."""
    text = model.hf_text_config.to_dict()
    return _plain({key: text[key] for key in text if key.startswith("rope_")})


def _kv_scales(model: "ModelConfig") -> str:
    """Return what the checkpoint says about scales of the KV cache; the scales themselves are among its weights."""
    quantization = getattr(model.hf_config, "quantization_config", None)
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    return _plain(scheme)


def _model_config_digest(model: "ModelConfig") -> str:
    """Digest the model's own configuration: rotary embedding, windows, norms, sizes, encoders, quantisation."""
    both = [_quiet(config.to_dict()) for config in (model.hf_text_config, model.hf_config)]
    return hashlib.sha256(json.dumps(both, sort_keys=True, default=_plain).encode()).hexdigest()


def _quiet(value: Any) -> Any:
    """Return a configuration without what says nothing about arithmetic, on all its levels."""
    if isinstance(value, Mapping):
        return {
            str(key): _quiet(item)
            for key, item in value.items()
            if str(key) not in _CONFIG_NOISE and not str(key).startswith("_")
        }
    return [_quiet(item) for item in value] if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------ path components


def model_component(model: str) -> str:
    """Return the model's name as one path component: the last part of a path, or `org_name` of a hub name."""
    if os.path.isabs(model) or Path(model).is_dir():
        return _path_component(Path(os.path.abspath(model)).name)
    return _path_component(model.replace("/", "_"))


def _path_component(text: Any) -> str:
    """Return *text* with everything odd replaced; never empty, hidden, `.` or `..`."""
    safe = re.sub(r"[^A-Za-z0-9._+-]", "_", str(text)).lstrip(".")
    return safe[:128] or "model"
