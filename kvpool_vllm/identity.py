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

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from huggingface_hub import try_to_load_from_cache
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
    get_offloading_group_ids,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvpool.wire.messages import GroupSpec, NamespaceSpec

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

#: Raised when the arrangement of bytes inside an object changes.
STORAGE_FORMAT = 1
#: Of each weight file, this many pieces of this size are digested, evenly spread, beside its name, size and header.
WEIGHT_SAMPLES = 64
WEIGHT_SAMPLE_BYTES = 4096
#: Longest header of a safetensors file that is digested.
_HEADER_BYTES_MAX = 64 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
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
        "weights": weights_digest(model.model, model.revision),
        "model_config": _model_config_digest(model),
        "max_model_len": model.max_model_len,
        "model_dtype": model.dtype,
        "kv_dtype": config.model.dtype,
        "quantization": model.quantization,
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
    facts = {
        name: getattr(spec, name, None)
        for name in ("block_size", "num_kv_heads", "head_size", "dtype", "sliding_window", "attention_chunk_size")
    }
    layers = len(kv_cache_config.kv_cache_groups[group].layer_names)
    return f"{type(spec).__name__} x{layers} " + " ".join(f"{name}={value}" for name, value in facts.items())


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


def _model_config_digest(model: "ModelConfig") -> str:
    """Digest the model's own configuration: rotary embedding, windows, norms, sizes."""
    text = model.hf_text_config.to_dict()
    plain = {key: value for key, value in text.items() if key not in _CONFIG_NOISE and not key.startswith("_")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


# ------------------------------------------------------------ weights


def weights_digest(model: str, revision: str | None) -> str:
    """
    Digest the weight files of a model as far as that is quick: names, sizes, headers and samples of the content.

    Returns:
        A digest; "unknown" when no local files are found, so that name and revision have to do.
    """
    folder = _weights_folder(model, revision)
    if folder is None:
        return "unknown"
    digest = hashlib.sha256()
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES)
    for path in files:
        digest.update(path.name.encode())
        for piece in _pieces(path):
            digest.update(piece)
    return digest.hexdigest() if files else "unknown"


def _weights_folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ValueError, OSError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def _pieces(path: Path) -> Iterator[bytes]:
    """Give the size, the header if it is safetensors, and evenly spread samples of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        yield size.to_bytes(8, "little")
        if path.suffix == ".safetensors":
            file.seek(0)
            header_bytes = int.from_bytes(file.read(8), "little")
            yield file.read(min(header_bytes, _HEADER_BYTES_MAX))
        step = max(1, size // WEIGHT_SAMPLES)
        for offset in range(0, size, step):
            file.seek(offset)
            yield file.read(WEIGHT_SAMPLE_BYTES)


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
