"""Row 20: a random hash seed, no hit after a restart, while the disk fills."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

from types import SimpleNamespace

import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

from kvpool_vllm import settings
from kvpool_vllm.identity import hashes_are_stable

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.mark.parametrize(
    ("algorithm", "seed", "stable"),
    [("xxhash", None, False), ("xxhash_cbor", None, False), ("xxhash", "7", True), ("sha256", None, True)],
)
def test_row_20_hashes_that_a_restart_changes_are_warned_about(
    algorithm: str, seed: str | None, stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    said: list[str] = []
    monkeypatch.setattr(settings.logger, "warning", lambda text, *args: said.append(text % args))
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    settings.warn(config, SimpleNamespace(groups=[]))  # type: ignore[arg-type]
    assert stable is hashes_are_stable(config)  # type: ignore[arg-type]
    assert stable is not any("PYTHONHASHSEED" in line for line in said)
