"""
What the user wrote into vLLM's configuration, and what kvpool sets there before vLLM reads it.

`kv_connector_extra_config` holds vLLM's own keys beside kvpool's. This module sets the former and checks
what it may not allow; the latter go to :func:`kvpool.config.settings_from_connector`.
"""

import inspect
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

from kvpool.client.break_even import drive_model, load_break_even
from kvpool.config import Settings
from kvpool.config_connector import settings_from_connector
from kvpool.config_planner import PlannerSettings
from kvpool.core.curves import BreakEven
from kvpool.errors import ConfigError
from kvpool.wire.messages import NamespaceSpec
from kvpool_vllm.identity import hash_algorithm, hashes_are_stable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")

SPEC_NAME = "KvPoolOffloadingSpec"
SPEC_MODULE = "kvpool_vllm.spec"
#: Tokens of a stored chunk when the user says nothing.
CHUNK_TOKENS = 256
#: Objects smaller than this spend more time on being files than on being read.
OBJECT_BYTES_WARN = 1 << 20


def prepare(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", *, scheduler: bool) -> "KVTransferConfig":
    """
    Write kvpool's choices into *vllm_config*, before vLLM's own connector reads it; return its part about connectors.

    Raises:
        ConfigError: The configuration asks for what kvpool does not do; the message names the key and what is allowed.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ConfigError("kv_transfer_config is missing: kvpool runs as vLLM's KV connector")
    extra = transfer.kv_connector_extra_config
    _refuse_unsupported(vllm_config, extra)
    name_spec(extra)
    extra["sync_load_budget_bytes"] = 0  # loads never wait inside a step
    if "block_size" not in extra and "blocks_per_chunk" not in extra:
        key, value = default_chunk(block_tokens(vllm_config, kv_cache_config))
        extra[key] = value
    if scheduler:
        # Read by vLLM's scheduler right after it made the connector.
        transfer.kv_load_failure_policy = "recompute"
    return transfer


def name_spec(extra: dict[str, Any]) -> None:
    """Name kvpool's spec in *extra*, by which vLLM makes the connector's parts and its metrics."""
    extra["spec_name"] = SPEC_NAME
    extra["spec_module_path"] = SPEC_MODULE


def pool_settings(extra: dict[str, Any]) -> Settings:
    """
    Return the settings of the pool this engine uses, and starts if it does not run.

    Raises:
        ConfigError: A key or value is wrong; the message names it and what is allowed.
    """
    return settings_from_connector(extra)


def block_tokens(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> list[int]:
    """Return the tokens of one GPU block, per KV group that is stored."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return [
        resolve_dcp_kv_block_size(kv_cache_config.kv_cache_groups[group].kv_cache_spec, dcp)
        for group in get_offloading_group_ids(kv_cache_config)
    ]


def default_chunk(tokens_per_block: list[int]) -> tuple[str, int]:
    """
    Return vLLM's key and value for a chunk of about CHUNK_TOKENS tokens.

    Args:
        tokens_per_block: Per KV group; vLLM takes a chunk size in tokens only when they are all equal.
    """
    largest = max(tokens_per_block, default=CHUNK_TOKENS)
    if len(set(tokens_per_block)) == 1 and CHUNK_TOKENS % largest == 0:
        return "block_size", CHUNK_TOKENS
    return "blocks_per_chunk", max(1, CHUNK_TOKENS // largest)


def _refuse_unsupported(vllm_config: "VllmConfig", extra: dict[str, Any]) -> None:
    if extra.get("canonical_layout"):
        raise ConfigError(
            "canonical_layout is not supported: kvpool stores each rank's own layout; remove the key",
            key="kv_connector_extra_config.canonical_layout",
        )
    for key, expected in (("spec_name", SPEC_NAME), ("spec_module_path", SPEC_MODULE)):
        if extra.get(key, expected) != expected:
            raise ConfigError(
                f"{key} is set by kvpool to {expected}; remove it", key=f"kv_connector_extra_config.{key}"
            )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages != 1:
        raise ConfigError(
            "pipeline parallelism is not supported: stages may hold objects of different sizes",
            key="pipeline_parallel_size",
            value=stages,
            allowed=1,
        )


def break_even(planner: PlannerSettings, vllm_config: "VllmConfig", pool: Settings) -> BreakEven:
    """
    Read the user's break-even file; warn where it was measured on something else than what runs here.

    Raises:
        ConfigError: It cannot be read, is of another model, or says what cannot have been measured.
    """
    model = vllm_config.model_config
    served = [name for name in (model.served_model_name, model.model) if isinstance(name, str)]
    found = load_break_even(planner.break_even_path, served)
    drives = {drive_model(device.path) for device in pool.device}
    here = {
        "kv_dtype": str(vllm_config.cache_config.cache_dtype).replace("auto", ""),
        "gpu_model": current_platform.get_device_name() if current_platform.is_cuda() else "",
        "ssd_model": drives.pop() if len(drives) == 1 else "",
    }
    for text in found.warnings(**here):
        logger.warning("kvpool: %s", text)
    return found


def warn(vllm_config: "VllmConfig", namespace: NamespaceSpec) -> None:
    """Say at start what will make the cache less useful than it could be."""
    small = [group for group in namespace.groups if group.object_bytes < OBJECT_BYTES_WARN]
    if small:
        logger.warning(
            "kvpool: objects of KV group %d hold only %d bytes; below 1 MiB files cost more than they save. "
            "Set a larger block_size or blocks_per_chunk in kv_connector_extra_config",
            small[0].group,
            small[0].object_bytes,
        )
    if not hashes_are_stable(vllm_config):
        logger.warning(
            "kvpool: block hashes (%s) have a random seed in each process, so nothing stored is found after a restart. "
            "Set PYTHONHASHSEED, or --prefix-caching-hash-algo sha256",
            hash_algorithm(vllm_config),
        )
    if _inside_multi_connector():
        logger.warning(
            "kvpool: inside MultiConnector a failed load ends its request with an error, as vLLM reads the outer "
            'configuration only; set "kv_load_failure_policy": "recompute" there'
        )


def _inside_multi_connector() -> bool:
    """Say whether a MultiConnector is making this connector: its children are given no sign of it."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), MultiConnector):
            return True
        frame = frame.f_back
    return False
