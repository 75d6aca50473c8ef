"""Whatever the text is, reading it ends with settings or with a ConfigError that says what is wrong."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool import config, config_example
from kvpool.config import DeviceSettings, PoolSettings, Settings, fields_of, from_json, parse_settings, to_json
from kvpool.config_connector import _KEYS, settings_from_connector
from kvpool.errors import ConfigError

_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12)
    | st.sampled_from(["4GiB", "0.5 MiB", "/mnt/a", "/mnt/a/b", "/tmp/run", "nvme0", "off", "relative", 1, 16, 0.5]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
)  # fmt: skip
_pool_keys = [field.key for field in fields_of(PoolSettings)]
_device_keys = [field.key for field in fields_of(DeviceSettings)]


def _toml(value: Any) -> str:
    """A value as TOML writes it; None, which TOML lacks, as something malformed."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def _check(read: Any) -> None:
    """Call *read*; the outcome is settings that survive the way to another process, or an error that says where."""
    try:
        found = read()
    except ConfigError as error:
        assert error.context["file"]
        assert str(error).isprintable() or "reason" in error.context
        return
    assert isinstance(found, Settings)
    assert found == from_json(to_json(found))


@settings(max_examples=500, deadline=None)
@given(text=st.text())
@example(text="[" * 5000)
@example(text="a = " + "[" * 5000)
@example(text='device = [{name = "a", path = "/a"}]\n[pool]\nstaging = 0x' + "f" * 5000)
@example(text='device = [{name = "a", path = "/a"}]\n[pool]\nstaging = ' + "9" * 5000)
@example(text='[[device]]\nname = "a"\npath = "/a\\u0000b"')
@example(text='[[device]]\nname = "a"\npath = "/' + "a" * 5000 + '"')
@example(text='[[device]]\nname = "a"\npath = "/a"\niodepth = 2020-01-01')
@example(text="[device]\npath = 1")
@example(text="pool = 5")
@example(text="device = [5]")
def test_any_text_is_settings_or_a_config_error(text: str) -> None:
    _check(lambda: parse_settings(text, file="any.toml"))


@settings(max_examples=150, deadline=None)
@given(
    pool=st.dictionaries(st.sampled_from(_pool_keys) | st.text(max_size=8), _values, max_size=4),
    devices=st.lists(
        st.fixed_dictionaries(
            {
                "name": st.sampled_from(["a", "b", "c"]) | _values,
                "path": st.sampled_from(["/a", "/b", "/b/c"]) | _values,
            },
            optional=dict.fromkeys([*_device_keys[2:], "unknown"], _values),
        ),
        max_size=3,
    ),
)
def test_any_value_of_any_key_is_settings_or_a_config_error(
    pool: dict[str, Any], devices: list[dict[str, Any]]
) -> None:
    lines = ["[pool]", *(f"{json.dumps(key)} = {_toml(value)}" for key, value in pool.items())]
    for device in devices:
        lines += ["[[device]]", *(f"{json.dumps(key)} = {_toml(value)}" for key, value in device.items())]
    _check(lambda: parse_settings("\n".join(lines), file="any.toml"))


@settings(max_examples=150, deadline=None)
@given(
    extra=st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=8), _values, max_size=5),
    path=st.sampled_from(["/mnt/a", None]) | _values,
)
def test_any_connector_configuration_is_settings_or_a_config_error(extra: dict[str, Any], path: Any) -> None:
    _check(lambda: settings_from_connector({**extra, "shared_storage_path": path}))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_as_json_settings_or_as_a_file_are_settings_or_a_config_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    _check(lambda: from_json(data))
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_bytes(data)
    _check(lambda: config.load_settings(file))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_settings_within_the_declared_bounds_are_read_as_written(data: st.DataObject) -> None:
    expected = {
        section: {field.key: data.draw(_allowed(field), label=field.key) for field in fields_of(struct)}
        for section, struct in (("pool", PoolSettings), ("device", DeviceSettings))
    }
    pool, device = expected["pool"], expected["device"]
    pool["enable_preload"] &= pool["preload_lookahead_requests"] > 0
    device["low_watermark"] = min(device["low_watermark"], device["high_watermark"] / 2 + 0.005)
    lines = []
    for section, title in (("pool", "[pool]"), ("device", "[[device]]")):
        lines += [title, *(f"{key} = {_toml(value)}" for key, value in expected[section].items())]
    found = parse_settings("\n".join(lines), file="good.toml")
    for section, struct in (("pool", found.pool), ("device", found.device[0])):
        for field in fields_of(type(struct)):
            assert expected[section][field.key] == getattr(struct, field.name)


def _allowed(field: config.Field) -> st.SearchStrategy[Any]:
    if field.kind is bool:
        return st.booleans()
    if field.kind is int:
        return st.integers(int(field.rule.low), int(field.rule.high))
    if field.kind is float:
        return st.floats(field.rule.low, field.rule.high)
    if field.rule.choices:
        return st.sampled_from(field.rule.choices)
    return st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True).map(lambda text: text if field.key == "name" else f"/{text}")


@given(size=st.integers(0, 2**60))
def test_sizes_read_back_as_they_are_printed(size: int) -> None:
    assert size == config.parse_size(config.format_size(size))


def test_every_setting_is_declared_with_help_and_bounds() -> None:
    for struct in (PoolSettings, DeviceSettings):
        assert len(msgspec.structs.fields(struct)) == len(fields_of(struct))
        for field in fields_of(struct):
            assert field.rule.help.endswith("."), field.key
            if field.kind in (int, float):
                assert field.rule.low <= field.default <= field.rule.high, field.key
                assert float("inf") > field.rule.high, field.key


def test_the_example_reads_back_as_the_defaults(tmp_path: Path) -> None:
    text = config_example.example()
    found = parse_settings(text, file="example.toml")
    assert PoolSettings(run_dir=found.pool.run_dir) == found.pool
    assert [DeviceSettings(name="nvme0", path="/mnt/nvme0/kvpool")] == found.device
    uncommented = text.replace("# run_dir", "run_dir").replace("# open_lookahead", "open_lookahead")
    commented_in = parse_settings(uncommented, file="example.toml")
    assert "/run/user/1000/kvpool" == commented_in.pool.run_dir
    assert found.device == commented_in.device
