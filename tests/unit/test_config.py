"""What is allowed, what errors say, where a pool lives."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvpool import config
from kvpool.config import GIB, MIB, DeviceSettings, PoolSettings, Settings, load_settings, parse_settings
from kvpool.config_connector import settings_from_connector
from kvpool.errors import ConfigError
from kvpool.io.channel import PATH_BYTES_MAX
from kvpool.procs.io_worker import _table_settings

DEVICE = '[[device]]\nname = "a"\npath = "/mnt/a"\n'


def _error(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, file="pool.toml")
    assert "pool.toml" == caught.value.context["file"]
    return caught.value


def test_one_device_is_enough() -> None:
    found = parse_settings(DEVICE, file="pool.toml")
    assert PoolSettings(run_dir=found.pool.run_dir) == found.pool
    assert [DeviceSettings(name="a", path="/mnt/a")] == found.device


def test_devices_keep_their_order() -> None:
    text = "".join(f'[[device]]\nname = "{name}"\npath = "/mnt/{name}"\n' for name in "cab")
    assert ["c", "a", "b"] == [device.name for device in parse_settings(text, file="pool.toml").device]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"4GiB"', 4 * GIB),
        ('"1.5 GiB"', 3 * GIB // 2),
        ('"512MiB"', 512 * MIB),
        (str(GIB), GIB),
        ('"2097152B"', 2 * MIB),
    ],
)
def test_sizes_are_written_for_people(written: str, expected: int) -> None:
    assert expected == parse_settings(f"[pool]\nstaging = {written}\n{DEVICE}", file="pool.toml").pool.staging_bytes


@pytest.mark.parametrize(
    "written", ['"4GB"', '"4"', '"4 gib"', '"-1GiB"', '""', "1.5", "true", "[]", '"1KiB"', '"2048TiB"', "nan"]
)
def test_other_sizes_are_refused_with_what_is_allowed(written: str) -> None:
    error = _error(f"[pool]\nstaging = {written}\n{DEVICE}")
    assert "pool.staging" == error.context["key"]
    assert 'a size such as "4GiB", from 1MiB to 1024TiB' == error.context["allowed"]


def test_open_lookahead_follows_iodepth_unless_given() -> None:
    assert 64 == parse_settings(f"{DEVICE}iodepth = 64", file="pool.toml").device[0].open_lookahead
    text = f"{DEVICE}iodepth = 64\nopen_lookahead = 8"
    assert 8 == parse_settings(text, file="pool.toml").device[0].open_lookahead


OPERATIONS = "a whole number of operations from 1 to 1024"
SECONDS = "a number of seconds from 0.01 to 3600"


@pytest.mark.parametrize(
    ("text", "key", "value", "allowed"),
    [
        (f"{DEVICE}iodepth = 0", "device[0].iodepth", "0", OPERATIONS),
        (f"{DEVICE}iodepth = true", "device[0].iodepth", "True", OPERATIONS),
        (f"{DEVICE}iodepth = 16.0", "device[0].iodepth", "16.0", OPERATIONS),
        (f"{DEVICE}sync_on_store = 1", "device[0].sync_on_store", "1", "true or false"),
        (f"[pool]\nload_deadline_s = nan\n{DEVICE}", "pool.load_deadline_s", "nan", SECONDS),
        (f"[pool]\nload_deadline_s = inf\n{DEVICE}", "pool.load_deadline_s", "inf", SECONDS),
        (f'[pool]\nrun_dir = "run"\n{DEVICE}', "pool.run_dir", "'run'", "an absolute path"),
        (f'[pool]\nrun_dir = ""\n{DEVICE}', "pool.run_dir", "''", "an absolute path"),
        ('[[device]]\nname = "a"\npath = "mnt"', "device[0].path", "'mnt'", "an absolute path of a directory"),
        ('[[device]]\nname = "a"\npath = "~/x"', "device[0].path", "'~/x'", "an absolute path of a directory"),
        ('[[device]]\nname = "a"\npath = "/"', "device[0].path", "'/'", "an absolute path of a directory"),
        ('[[device]]\nname = "/a"\npath = "/a"', "device[0].name", "'/a'", "1 to 32 letters, digits, '.', '_', '-'"),
        (f'{DEVICE}[[device]]\nname = "a"\npath = "/b"', "device[1].name", "'a'", "another name than device[0] has"),
        ("", "device", "[]", "1 to 64 tables: [[device]]"),
        ('[device]\nname = "a"', "device", "{'name': 'a'}", "1 to 64 tables: [[device]]"),
        (f"pool = 1\n{DEVICE}", "pool", "1", "a table: [pool]"),
    ],
)  # fmt: skip
def test_errors_name_key_value_and_what_is_allowed(text: str, key: str, value: str, allowed: str) -> None:
    context = _error(text).context
    assert (key, value, allowed) == (context["key"], context["value"], context["allowed"])


@pytest.mark.parametrize("other", ["/mnt/a", "/mnt/a/", "/mnt/./a", "/mnt/b/../a", "/mnt/a/below", "/mnt", "//mnt/a"])
def test_devices_in_one_another_are_refused(other: str) -> None:
    error = _error(f'{DEVICE}[[device]]\nname = "b"\npath = "{other}"')
    assert "device[1].path" == error.context["key"]
    assert "a directory neither in nor above device[0]'s" == error.context["allowed"]


def test_devices_that_are_one_by_a_symbolic_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    text = "".join(f'[[device]]\nname = "{name}"\npath = "{tmp_path / name}"\n' for name in ("real", "link"))
    assert "device[1].path" == _error(text).context["key"]


def test_names_that_only_begin_alike_are_no_nesting() -> None:
    parse_settings(f'{DEVICE}[[device]]\nname = "b"\npath = "/mnt/ab"', file="pool.toml")


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        (f"{DEVICE}iodpeth = 4", "device[0].iodpeth", "'iodepth'"),
        (f"[pool]\nstagin = 4\n{DEVICE}", "pool.stagin", "'staging'"),
        (f"[pool]\nstaging_bytes = 4\n{DEVICE}", "pool.staging_bytes", "'staging'"),
        (f"[pol]\n{DEVICE}", "pol", "'pool'"),
        (f'{DEVICE}"a\\nb" = 4', "device[0].a\\nb", "'"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(text: str, key: str, nearest: str) -> None:
    error = _error(text)
    assert "unknown key" == error.message
    assert key == error.context["key"]
    assert nearest in str(error.context["allowed"])


def test_a_missing_setting_is_named() -> None:
    assert "device[0].path" == _error('[[device]]\nname = "a"').context["key"]


def test_more_devices_than_staging_can_serve_are_refused() -> None:
    devices = "".join(f'[[device]]\nname = "{name}"\npath = "/mnt/{name}"\n' for name in "abc")
    error = _error(f'[pool]\nstaging = "2MiB"\n{devices}')
    assert ("'2MiB'", "at least 3MiB for 3 devices") == (error.context["value"], error.context["allowed"])


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    for file in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load_settings(file)
    (tmp_path / "latin.toml").write_bytes(b"# \xe4")
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(tmp_path / "latin.toml")
    (tmp_path / "long.toml").write_bytes(b"#" * (MIB + 1))
    with pytest.raises(ConfigError, match="too long"):
        load_settings(tmp_path / "long.toml")


def test_settings_from_another_process_are_checked_again() -> None:
    good = parse_settings(DEVICE, file="pool.toml")
    assert good == config.from_json(config.to_json(good))
    for bad in (
        config.to_json(good).replace('"iodepth":16', '"iodepth":0'),
        config.to_json(good).replace('"iodepth":16', '"iodepth":16,"x":1'),
        config.to_json(good).replace("/mnt/a", "mnt"),
        "{}",
        "",
    ):
        with pytest.raises(ConfigError):
            config.from_json(bad)


# ------------------------------------------------------------ where a pool lives


def test_equal_settings_live_in_one_place_and_others_elsewhere() -> None:
    first = parse_settings(DEVICE, file="one.toml")
    again = parse_settings(f"# the same\n[pool]\nstaging = '1024MiB'\n{DEVICE}", file="two.toml")
    other = parse_settings(f"[pool]\nverify = false\n{DEVICE}", file="one.toml")
    assert first.pool.run_dir == again.pool.run_dir
    assert first.pool.run_dir != other.pool.run_dir
    assert f"kvpool-{os.getuid()}-" in first.pool.run_dir


def test_the_runtime_directory_of_the_user_is_used_where_it_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4242 if tmp_path.stat().st_uid != 4242 else 4243)
    assert "/tmp" == _place(monkeypatch, tmp_path), "another user's"
    monkeypatch.undo()
    tmp_path.chmod(0o755)
    assert str(tmp_path) != _place(monkeypatch, tmp_path), "open to others"
    tmp_path.chmod(0o700)
    assert _place(monkeypatch, tmp_path) in (str(tmp_path), f"/run/user/{os.getuid()}")
    assert _place(monkeypatch, Path("relative")) in ("/tmp", f"/run/user/{os.getuid()}")
    assert _place(monkeypatch, tmp_path / "none") in ("/tmp", f"/run/user/{os.getuid()}")


def _place(monkeypatch: pytest.MonkeyPatch, runtime: Path) -> str:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return os.path.dirname(parse_settings(DEVICE, file="pool.toml").pool.run_dir)


def test_a_run_directory_too_long_for_its_socket_is_refused() -> None:
    assert PATH_BYTES_MAX == config.SOCKET_PATH_BYTES_MAX
    longest = "/" + "x" * (config.RUN_DIR_BYTES_MAX - 1)
    parse_settings(f'[pool]\nrun_dir = "{longest}"\n{DEVICE}', file="pool.toml")
    error = _error(f'[pool]\nrun_dir = "{longest}x"\n{DEVICE}')
    assert "at most 97 bytes, as a Unix socket lies in it" == error.context["allowed"]


# ------------------------------------------------------------ vLLM's connector settings

EMBEDDED = {"shared_storage_path": "/mnt/a"}


def _connector_error(**extra: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        settings_from_connector({**EMBEDDED, **extra})
    assert "kv_connector_extra_config" == caught.value.context["file"]
    return caught.value


def test_the_connectors_keys_describe_one_device() -> None:
    found = settings_from_connector(
        {
            **EMBEDDED,
            "iodepth": 32,
            "staging_mem": 0.5,
            "sync_on_store": True,
            "block_size": 256,
            "spec_name": "x",
            "enable_preload": False,
            "preload_lookahead_requests": 0,
            "preload_share_staging": True,
            "staging_cache": "off",
            "prefix_cache_break_even_path": None,
            "load_planner": "off",
        }
    )
    device = DeviceSettings(name="storage", path="/mnt/a", iodepth=32, open_lookahead=32, sync_on_store=True)
    assert Settings(pool=PoolSettings(run_dir=found.pool.run_dir, staging_bytes=GIB // 2), device=[device]) == found


def test_the_connector_asks_for_preload_and_cache() -> None:
    keys = {"enable_preload": True, "preload_lookahead_requests": 8, "staging_cache": "arc"}
    pool = settings_from_connector({**EMBEDDED, **keys}).pool
    assert keys == {key: getattr(pool, key) for key in keys}


def test_preload_that_looks_at_no_request_is_refused() -> None:
    error = _connector_error(enable_preload=True)
    assert "preload_lookahead_requests" == error.context["key"]
    assert "at least 1, as enable_preload is true" == error.context["allowed"]
    in_toml = _error(f"[pool]\nenable_preload = true\n{DEVICE}")
    assert "pool.preload_lookahead_requests" == in_toml.context["key"]


def test_preload_without_shared_slots_is_refused_with_the_reason() -> None:
    error = _connector_error(preload_share_staging=False)
    assert "an object always has one read and one slot" in str(error)


def test_engines_with_different_staging_do_not_meet() -> None:
    places = {settings_from_connector({**EMBEDDED, "staging_cache": cache}).pool.run_dir for cache in ("lru", "arc")}
    assert 2 == len(places)


def test_all_processes_of_an_engine_find_the_same_pool() -> None:
    places = {settings_from_connector(dict(EMBEDDED)).pool.run_dir for _ in range(3)}
    assert 1 == len(places)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("preload_share_staging", False),
        ("enable_preload", 1),
        ("preload_lookahead_requests", -1),
        ("preload_lookahead_requests", True),
        ("staging_cache", "mru"),
        ("staging_cache", False),
        ("canonical_layout", True),
        ("load_planner", "maybe"),
        ("load_planner", True),
        ("prefix_cache_break_even_path", "relative.json"),
        ("prefix_cache_break_even_path", 5),
        ("load_planner_defer_tolerance", -1),
        ("load_planner_defer_tolerance", float("nan")),
        ("load_planner_defer_deadline_max_s", 0.01),
        ("load_planner_defer_deadline_max_s", "2"),
        ("iodepth", "16"),
        ("iodepth", True),
        ("staging_weight", 0),
        ("staging_weight", 1001),
        ("staging_weight", True),
        ("staging_weight", 2.0),
        ("staging_mem", 0),
        ("staging_mem", "1"),
        ("staging_mem", True),
        ("staging_mem", float("nan")),
        ("staging_mem", float("inf")),
        ("sync_on_store", "yes"),
        ("shared_storage_path", "relative"),
        ("shared_storage_path", None),
        ("kvpool_config", "relative.toml"),
        ("kvpool_config", 5),
    ],
)
def test_wrong_values_of_the_connector_are_refused(key: str, value: object) -> None:
    error = _connector_error(**{key: value})
    assert key == error.context["key"]
    assert error.context["allowed"]


def test_unknown_keys_of_the_connector_name_the_nearest() -> None:
    assert "the nearest known one is 'shared_storage_path'" == _connector_error(shared_storage=1).context["allowed"]


def test_a_path_is_needed_without_a_toml_file() -> None:
    with pytest.raises(ConfigError, match="shared_storage_path"):
        settings_from_connector({"iodepth": 4})


def test_a_toml_file_wins_and_says_what_it_overrides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(DEVICE)
    assert load_settings(file) == settings_from_connector({"kvpool_config": str(file), "block_size": 256})
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        settings_from_connector({"kvpool_config": str(file), "iodepth": 4})
    assert "iodepth" in caplog.text
    with pytest.raises(ConfigError, match="unknown key"):
        settings_from_connector({"kvpool_config": str(file), "iodpth": 4})


def test_every_time_limit_of_the_object_table_is_the_settings_one() -> None:
    written = {"load_deadline_s": 7, "load_patience_s": 0.5, "store_deadline_s": 3, "fill_deadline_s": 4}
    lines = "".join(f"{key} = {value}\n" for key, value in written.items())
    found = _table_settings(0, parse_settings(f"[pool]\n{lines}operation_deadline_s = 5\n{DEVICE}", file="pool.toml"))
    expected = (7.0, 0.5, 3.0, 4.0, 5.0)
    got = (
        found.load_deadline_ns, found.load_patience_ns, found.store_deadline_ns, found.fill_deadline_ns,
        found.op_deadline_ns,
    )  # fmt: skip
    assert expected == tuple(value / 1e9 for value in got)
