"""
TOML (or vLLM's connector settings) to typed settings.

One declaration per setting: type, default, check and help text stand together, and
`config.example.toml` is printed from them.
"""

import msgspec


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[pool]"""

    run_dir: str
    staging_bytes: int = 1 << 30
    load_deadline_s: float = 30.0
    store_deadline_s: float = 1.0
    operation_deadline_s: float = 10.0
    defer_backlog_s: float = 1.0
    idle_exit_s: float = 2.0
    verify: bool = True


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[device]]"""

    name: str
    path: str
    iodepth: int = 16
    open_lookahead: int = 16
    sync_on_store: bool = False
    weight: int = 1


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of one pool."""

    pool: PoolSettings
    device: list[DeviceSettings]
