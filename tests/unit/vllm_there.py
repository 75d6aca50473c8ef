"""Import vLLM for tests, or skip them: its modules warn while they are imported, and warnings are errors here."""

import importlib
import warnings

import pytest

_MODULES = ("vllm", "vllm.engine.arg_utils", "vllm.v1.core.sched.scheduler", "kvpool_vllm.connector")


def import_vllm() -> None:
    """Import what the tests of `kvpool_vllm` need; skip the module where vLLM is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
        pytest.importorskip("vllm", exc_type=ImportError)
        for module in _MODULES:
            importlib.import_module(module)
