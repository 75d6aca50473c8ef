"""What makes stored KV interchangeable, and what the connector makes of the user's configuration."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from kvpool.errors import ConfigError
from kvpool.wire.messages import NamespaceSpec
from kvpool_vllm import settings, weights
from kvpool_vllm.identity import block_bytes_of, model_component, namespace_of
from kvpool_vllm.versions import check_version
from kvpool_vllm.weights import weights_digest
from tests.unit.vllm_world import cache_config, full_attention, sliding_window, vllm_config

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

BLOCKS = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def base(models: Path) -> VllmConfig:
    return vllm_config(models)


def identify(config: VllmConfig, groups: Any = None) -> NamespaceSpec:
    caches = cache_config(groups or [full_attention()], blocks=BLOCKS)
    settings.prepare(config, caches, scheduler=False)
    return namespace_of(config, caches)


def variant(base: VllmConfig) -> VllmConfig:
    return copy.deepcopy(base)


def test_both_roles_and_later_processes_get_the_same_namespace(base: VllmConfig) -> None:
    scheduler, worker = variant(base), variant(base)
    worker.parallel_config.rank = 1
    worker.kv_transfer_config.engine_id = "another"  # type: ignore[union-attr]
    assert identify(scheduler) == identify(worker)


def test_the_namespace_is_what_the_path_and_the_slots_need(base: VllmConfig) -> None:
    found = identify(variant(base))
    shape = (found.model_name, found.block_size, found.blocks_per_file, found.tp, found.rank_count, found.dtype)
    assert ("llama", 128, 2, 1, 1, "bfloat16") == shape
    assert [(0, 4 * 2 * 128 * 4 * 2 * 32 * 2)] == [(group.group, group.object_bytes) for group in found.groups]
    assert 64 == len(found.fingerprint)
    assert found.identity["kv_dtype"] == "bfloat16"


def _set(path: str, value: Any) -> Callable[[VllmConfig], None]:
    def change(config: VllmConfig) -> None:
        target: Any = config
        *parents, last = path.split(".")
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)

    return change


CHANGES: dict[str, Callable[[VllmConfig], None]] = {
    "kv dtype": _set("cache_config.cache_dtype", "fp8"),
    "longest sequence": _set("model_config.max_model_len", 4096),
    "revision": _set("model_config.revision", "other"),
    "rotary embedding": _set("model_config.hf_text_config.rope_theta", 5000.0),
    "norm": _set("model_config.hf_text_config.rms_norm_eps", 1e-3),
    "quantisation": _set("model_config.quantization", "fp8"),
    "hash algorithm": _set("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    "chunk": lambda config: config.kv_transfer_config.kv_connector_extra_config.update(block_size=512),  # type: ignore[union-attr]
    "effective kv dtype": _set("cache_config.cache_dtype", "float16"),
    "layers without scales": _set("cache_config.kv_cache_dtype_skip_layers", ["0"]),
    "code revision": _set("model_config.code_revision", "other"),
    "model code": _set("model_config.model_impl", "transformers"),
    "how weights are made": _set("load_config.load_format", "dummy"),
    "attention back end": _set("attention_config.backend_per_kind", {"full_attention": "x"}),
    "model's type": _set("model_config.dtype", "float32"),
    "tensor parallel": _set("parallel_config.tensor_parallel_size", 2),
    "context parallel": _set("parallel_config.prefill_context_parallel_size", 2),
    "ranks": _set("parallel_config.world_size", 2),
    "layout": _set("cache_config.kv_cache_layout", "LBNHC"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_shapes_the_bytes_makes_another_namespace(base: VllmConfig, what: str) -> None:
    changed = variant(base)
    CHANGES[what](changed)
    assert identify(variant(base)).fingerprint != identify(changed).fingerprint


def test_a_hash_seed_makes_another_namespace(base: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    plain = identify(variant(base))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert plain.fingerprint != identify(variant(base)).fingerprint


def test_other_groups_make_another_namespace(base: VllmConfig) -> None:
    alone = identify(variant(base))
    both = identify(variant(base), [full_attention(), sliding_window()])
    other_window = identify(variant(base), [full_attention(), sliding_window(window=256)])
    assert 3 == len({alone.fingerprint, both.fingerprint, other_window.fingerprint})


def test_a_group_of_several_specs_has_the_same_size_for_the_scheduler_that_sees_only_one() -> None:
    group = full_attention()
    caches = cache_config([group], blocks=BLOCKS)
    as_worker = copy.deepcopy(caches)
    as_worker.kv_cache_groups[0].kv_cache_spec = UniformTypeKVCacheSpecs(
        block_size=group.kv_cache_spec.block_size,
        kv_cache_specs=dict.fromkeys(group.layer_names, group.kv_cache_spec),
    )
    assert block_bytes_of(caches, 0) == block_bytes_of(as_worker, 0)


def test_layers_that_share_a_block_count_once() -> None:
    caches = cache_config([full_attention()], blocks=BLOCKS)
    (tensor,) = caches.kv_cache_tensors
    page = tensor.block_stride
    tensor.layer_stride, tensor.block_stride = page, 4 * page
    assert 4 * page == block_bytes_of(caches, 0)


def test_new_weights_under_the_same_name_and_size_make_another_digest(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "llama", tmp_path / "llama")
    weights = tmp_path / "llama" / "model.safetensors"
    before = weights_digest(str(tmp_path / "llama"), None)
    data = bytearray(weights.read_bytes())
    middle = len(data) // 2
    data[middle:] = bytes(byte ^ 1 for byte in data[middle:])
    weights.write_bytes(data)
    assert before != weights_digest(str(tmp_path / "llama"), None)
    assert weights_digest(str(models / "llama"), None) == before


def test_file_times_do_not_make_another_digest(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "llama", tmp_path / "llama")
    before = weights_digest(str(tmp_path / "llama"), None)
    for path in (tmp_path / "llama").iterdir():
        os.utime(path, (1, 1))
    assert before == weights_digest(str(tmp_path / "llama"), None)
    assert before == weights_digest(str(models / "llama"), None)


@pytest.mark.parametrize("change", ["longer", "renamed", "header"])
def test_another_size_name_or_header_makes_another_digest(models: Path, tmp_path: Path, change: str) -> None:
    shutil.copytree(models / "llama", tmp_path / "llama")
    path = tmp_path / "llama" / "model.safetensors"
    before = weights_digest(str(tmp_path / "llama"), None)
    data = bytearray(path.read_bytes())
    if change == "longer":
        data += b"0"
    elif change == "header":
        data[20] ^= 1
    path.write_bytes(data)
    if change == "renamed":
        path.rename(path.with_name("other.safetensors"))
    assert before != weights_digest(str(tmp_path / "llama"), None)


def test_a_file_that_was_digested_is_not_read_again_until_it_is_written(
    models: Path, tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(models / "llama", tmp_path / "llama")
    read: list[str] = []
    digest_of = weights._file_digest
    monkeypatch.setattr(weights, "_file_digest", lambda path: read.append(path.name) or digest_of(path))
    first = weights_digest(str(tmp_path / "llama"), None)
    assert first == weights_digest(str(tmp_path / "llama"), None)
    assert ["model.safetensors"] == read
    path = tmp_path / "llama" / "model.safetensors"
    times = path.stat()
    data = path.read_bytes()
    path.write_bytes(data[:-8] + bytes(8))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    weights_digest(str(tmp_path / "llama"), None)
    assert 2 == len(read), "a change whose time was set back is a change"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1, "files": {"a": 1}}', '{"version": 0}'])
def test_a_broken_memory_of_digests_is_no_memory(models: Path, tmp_path: Path, cache_home: Path, content: str) -> None:
    expected = weights_digest(str(models / "llama"), None)
    weights.remembered_path().write_text(content)
    assert expected == weights_digest(str(models / "llama"), None)


def test_weights_that_are_not_here_have_no_digest(tmp_path: Path) -> None:
    assert "unknown" == weights_digest(str(tmp_path), None)
    assert "unknown" == weights_digest("nobody/no-such-model", None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("meta-llama/Llama-3", "meta-llama_Llama-3"),
        ("/models/./x/llama/", "llama"),
        ("..", "_"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("/", "model"),
    ],
)
def test_a_model_name_is_one_path_component(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    found = model_component(name)
    assert "/" not in found
    assert found not in ("", ".", "..")
    assert not found.startswith(".")
    if name not in ("..", "../../etc/passwd"):
        assert expected == found


# ------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ([16], ("block_size", 256)),
        ([128, 128], ("block_size", 256)),
        ([256], ("block_size", 256)),
        ([48], ("blocks_per_chunk", 5)),
        ([1056], ("blocks_per_chunk", 1)),
        ([16, 32], ("blocks_per_chunk", 8)),
    ],
)
def test_the_default_chunk_has_about_256_tokens(blocks: list[int], expected: tuple[str, int]) -> None:
    assert expected == settings.default_chunk(blocks)


@pytest.mark.parametrize("key", ["block_size", "blocks_per_chunk"])
def test_the_users_chunk_is_kept(base: VllmConfig, key: str) -> None:
    config = variant(base)
    extra = config.kv_transfer_config.kv_connector_extra_config  # type: ignore[union-attr]
    extra[key] = 512
    settings.prepare(config, cache_config([full_attention()], blocks=BLOCKS), scheduler=True)
    assert {key: 512} == {name: extra[name] for name in ("block_size", "blocks_per_chunk") if name in extra}


def test_loads_never_wait_inside_a_step(base: VllmConfig) -> None:
    config = variant(base)
    extra = config.kv_transfer_config.kv_connector_extra_config  # type: ignore[union-attr]
    extra["sync_load_budget_bytes"] = 1 << 30
    settings.prepare(config, cache_config([full_attention()], blocks=BLOCKS), scheduler=False)
    assert 0 == extra["sync_load_budget_bytes"]


@pytest.mark.parametrize(("key", "value"), [("canonical_layout", True), ("spec_name", "CPUOffloadingSpec")])
def test_what_kvpool_does_not_do_is_refused_with_the_key(base: VllmConfig, key: str, value: Any) -> None:
    config = variant(base)
    config.kv_transfer_config.kv_connector_extra_config[key] = value  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=key):
        settings.prepare(config, cache_config([full_attention()], blocks=BLOCKS), scheduler=False)


def test_pipeline_stages_are_refused(base: VllmConfig) -> None:
    config = variant(base)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="pipeline"):
        settings.prepare(config, cache_config([full_attention()], blocks=BLOCKS), scheduler=False)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1+cu130", "v0.32.9rc1", "0.32.0+cpu"])
def test_tested_versions_are_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0", "dev", "0.320.1"])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigError, match=r"0\.32 .*0\.33"):
        check_version(version)


def test_small_objects_and_unstable_hashes_are_warned_about(base: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    said: list[str] = []
    monkeypatch.setattr(settings.logger, "warning", lambda text, *args: said.append(text % args))
    config = variant(base)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    settings.warn(config, identify(config))
    assert ["524288" in said[0], "PYTHONHASHSEED" in said[1]] == [True, True]
    said.clear()
    config.cache_config.prefix_caching_hash_algo = "sha256"
    namespace = identify(config)
    settings.warn(config, NamespaceSpec(**{**_plain(namespace), "groups": []}))
    assert [] == said


def _plain(namespace: NamespaceSpec) -> dict[str, Any]:
    return {name: getattr(namespace, name) for name in namespace.__struct_fields__}


def test_the_identity_is_readable(base: VllmConfig) -> None:
    assert json.loads(json.dumps(identify(variant(base)).identity)) == identify(variant(base)).identity
