"""
vLLM's `kv_connector_extra_config` to the pool's settings.

Theory. Without a TOML file, a few keys describe one device and one pool. Every key is one of: a setting of ours; one
that has a single allowed value, because kvpool does it no other way; vLLM's own, which is passed over; or unknown,
which is an error. `kvpool_config` names a TOML file and wins. README.md has the table of ours.

Does not cover: settings that vLLM itself reads from there, and how one engine decides (`config_planner.py`).
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvpool.config import (
    GIB,
    WEIGHT_MAX,
    DeviceSettings,
    PoolSettings,
    Settings,
    check_preload,
    check_settings,
    checked,
    default_run_dir,
    fields_of,
    load_settings,
    refuse_unknown,
    wrong,
)
from kvpool.config_planner import KEYS as PLANNER_KEYS
from kvpool.config_planner import SOURCE, planner_settings
from kvpool.errors import ConfigError

_log = logging.getLogger(__name__)

#: The one device's name.
DEVICE_NAME = "storage"

#: vLLM reads these itself, from the same dictionary.
VLLM_KEYS = (
    "spec_name",
    "spec_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "sync_load_budget_bytes",
    "canonical_layout",
    "connectors",
)

_DEVICE_KEYS = ("iodepth", "open_lookahead", "sync_on_store")
_POOL_KEYS = ("enable_preload", "preload_lookahead_requests", "staging_cache", "self_test")
_STAGING_GIB_MAX = 1 << 20


class _Refusal(NamedTuple):
    """A key that may only have a value that changes nothing."""

    harmless: Callable[[Any], bool]
    allowed: str


def _is(*values: object) -> Callable[[Any], bool]:
    return lambda value: any(value is known or (type(value) is type(known) and value == known) for known in values)


_REFUSALS = {
    "preload_share_staging": _Refusal(_is(True), "true; an object always has one read and one slot, whoever wants it"),
    "canonical_layout": _Refusal(_is(False, None), "false; kvpool stores each rank's own layout"),
}

_OURS = (
    "kvpool_config",
    "shared_storage_path",
    "staging_mem",
    "staging_weight",
    *_DEVICE_KEYS,
    *_POOL_KEYS,
    *PLANNER_KEYS,
)
_KEYS = (*_OURS, *_REFUSALS, *VLLM_KEYS)


def settings_from_connector(extra: Mapping[str, Any]) -> Settings:
    """
    Return the settings that an engine's connector configuration asks for.

    Raises:
        ConfigError: names the key, its value, and what is allowed.
    """
    if not all(isinstance(key, str) for key in extra):
        raise ConfigError("keys must be text", file=SOURCE)
    refuse_unknown(extra, _KEYS, file=SOURCE, section="")
    for key, refusal in _REFUSALS.items():
        if key in extra and not refusal.harmless(extra[key]):
            raise wrong(SOURCE, key, extra[key], refusal.allowed)
    planner_settings(extra)  # wrong ones are told at start, in every role
    staging_weight(extra)
    if extra.get("kvpool_config") is not None:
        return _from_file(extra)
    return _embedded(extra)


def staging_weight(extra: Mapping[str, Any]) -> int:
    """
    Return the engine's share of staging beside those of engines of other models.

    Raises:
        ConfigError: names the key, its value, and what is allowed.
    """
    value = extra.get("staging_weight", 1)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= WEIGHT_MAX:
        return value
    raise wrong(SOURCE, "staging_weight", value, f"a whole number from 1 to {WEIGHT_MAX}")


def _from_file(extra: Mapping[str, Any]) -> Settings:
    file = extra["kvpool_config"]
    if not isinstance(file, str) or not file.startswith("/"):
        raise wrong(SOURCE, "kvpool_config", file, "an absolute path of a TOML file")
    beside = [key for key in ("shared_storage_path", "staging_mem", *_DEVICE_KEYS, *_POOL_KEYS) if key in extra]
    if beside:
        _log.warning("%s: %s decides; not used: %s", SOURCE, file, ", ".join(beside))
    return load_settings(file)


def _embedded(extra: Mapping[str, Any]) -> Settings:
    if "shared_storage_path" not in extra:
        allowed = "an absolute path of a directory (or kvpool_config, an absolute path of a TOML file)"
        raise ConfigError("setting is missing", file=SOURCE, key="shared_storage_path", allowed=allowed)
    path = extra["shared_storage_path"]
    if not isinstance(path, str) or not path.startswith("/"):
        raise wrong(SOURCE, "shared_storage_path", path, "an absolute path of a directory")
    fields = {field.key: field for field in fields_of(DeviceSettings)}
    values = {key: checked(extra[key], fields[key], key, file=SOURCE) for key in _DEVICE_KEYS if key in extra}
    values.setdefault("open_lookahead", values.get("iodepth", fields["iodepth"].default))
    device = DeviceSettings(name=DEVICE_NAME, path=path, **values)
    fields = {field.key: field for field in fields_of(PoolSettings)}
    chosen = {key: checked(extra[key], fields[key], key, file=SOURCE) for key in _POOL_KEYS if key in extra}
    pool = PoolSettings(run_dir="", staging_bytes=_staging_bytes(extra.get("staging_mem", 1)), **chosen)
    check_preload(pool, "preload_lookahead_requests", file=SOURCE)
    pool = replace(pool, run_dir=default_run_dir(Settings(pool=pool, device=[device])))
    settings = Settings(pool=pool, device=[device])
    check_settings(settings, file=SOURCE)
    return settings


def _staging_bytes(value: object) -> int:
    """`staging_mem` is in GiB, and may be broken."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0.001 <= value <= _STAGING_GIB_MAX:
        return int(value * GIB)
    raise wrong(SOURCE, "staging_mem", value, f"a number of GiB from 0.001 to {_STAGING_GIB_MAX}")
