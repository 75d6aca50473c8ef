"""
Engines and models for end-to-end tests; each starts once, in the background, when first asked for.

Answers are compared in float32: in bfloat16 the order of additions, which depends on how much of a prompt is
computed at once, decides near ties, and even vLLM's own prefix cache then changes an answer now and then.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.register_assert_rewrite("tests.e2e.answers", "tests.e2e.pool")

from tests.e2e.answers import Reference, StartEngine  # noqa: E402 - the line above comes first
from tests.e2e.pool import Pool  # noqa: E402
from tools.engine_process import Engine, cpu_environment, engine_settings  # noqa: E402
from tools.tiny_models import tiny_model  # noqa: E402


@pytest.fixture(autouse=True)
def no_children() -> None:
    """Engines and pools here outlive a test, unlike elsewhere; `engines` looks at the end of the run instead."""


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny models, kept from run to run."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("tiny-models")) if cache else tmp_path_factory.mktemp("tiny-models")


@pytest.fixture(scope="session")
def engines(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Start an engine: `engines("llama", name="a", connector=…, tp=2, …)`. All trees have ended after the run."""
    started: list[Engine] = []
    logs = tmp_path_factory.mktemp("engines")

    def start(model: str, *, name: str, connector: dict[str, Any] | None = None, tp: int = 1, **changes: Any) -> Engine:
        if connector is not None:
            changes["kv_transfer_config"] = connector
        if tp > 1:
            changes["tensor_parallel_size"] = tp
        settings = engine_settings(tiny_model(model, models), dtype="float32", **changes)
        engine = Engine(settings, log=logs / f"{name}.log", environment=cpu_environment(tp=tp))
        started.append(engine)
        return engine

    yield start
    trees = [psutil.Process(pid) for engine in started for pid in engine.tree()]
    for engine in started:
        engine.close()
    _, alive = psutil.wait_procs(trees, timeout=20)
    assert [] == alive


@pytest.fixture(scope="session")
def reference(engines: StartEngine) -> Reference:
    """Answers without kvpool."""
    return Reference(engines)


@pytest.fixture(scope="module")
def pools() -> Iterator[list[Pool]]:
    """Put pools here to have them stopped after the module, however it ends."""
    running: list[Pool] = []
    yield running
    for pool in running:
        pool.stop()
        pool.let_engines_start()
