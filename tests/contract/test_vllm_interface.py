"""What kvpool_vllm uses of vLLM is there: in the installed one by its source, in 0.33 by the committed result."""

import ast
import importlib.util
import json
from pathlib import Path

import pytest

from kvpool_vllm.versions import TESTED
from tools import check_vllm_interface as interface

RESULT_0_33 = interface.ROOT / "docs" / "results" / "vllm-0.33-interface.json"

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


class Text:
    """A vLLM that is the installed one with some files replaced."""

    def __init__(self, **files: str) -> None:
        self._below = interface.Installed()
        self._files = files

    def text(self, path: str) -> str | None:
        return self._files.get(path, self._below.text(path))

    def version(self) -> str:
        return "changed"


def changed(path: str, old: str, new: str) -> Text:
    text = interface.Installed().text(path)
    assert text is not None
    assert old in text
    return Text(**{path: text.replace(old, new)})


@needs_vllm
def test_the_installed_vllm_has_everything_that_kvpool_uses() -> None:
    report = interface.check(interface.Installed())
    assert [] == report.problems
    assert report.imports > 50
    assert report.overrides > 20


@needs_vllm
@pytest.mark.parametrize(
    ("path", "old", "new", "problem"),
    [
        ("vllm/v1/kv_offload/base.py", "class LookupResult", "class LookupAnswer", "has no LookupResult"),
        ("vllm/v1/kv_offload/base.py", "RETRY = auto()", "AGAIN = auto()", "LookupResult.RETRY is not there"),
        (
            "vllm/v1/kv_offload/base.py",
            "def wait(self, job_ids: set[int]) -> None: ...",
            "def wait(self, job_ids: set[int], timeout: float) -> None: ...",
            "KvPoolWorker.wait does not take timeout",
        ),
        (
            "vllm/v1/kv_offload/base.py",
            "def get_finished(self) -> list[TransferResult]: ...",
            "def get_finished(self) -> list[TransferResult]: ...\n\n    @abstractmethod\n    def drain(self): ...",
            "KvPoolWorker lacks drain",
        ),
        ("vllm/_custom_ops.py", "is_src_access_order_any", "any_order", "swap_blocks_batch does not take"),
    ],
)
def test_a_vllm_that_lacks_something_is_reported(path: str, old: str, new: str, problem: str) -> None:
    report = interface.check(changed(path, old, new))
    assert any(problem in told for told in report.problems), report.problems


def test_the_untested_version_was_checked_with_the_present_tool() -> None:
    result = json.loads(RESULT_0_33.read_text())
    assert [] == result["problems"]
    assert result["vllm"].startswith("0.33.")
    assert (0, 33) in TESTED
    assert result["members"] == sum(map(len, interface.MEMBERS.values())) + len(interface.FUNCTIONS)


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        ("def f(self, a, b): ...", "def f(self, a, b): ...", None),
        ("def f(self, a, b=0): ...", "def f(self, a): ...", None),
        ("def f(self, a): ...", "def f(self, a, b=0): ...", "does not take b"),
        ("def f(self, b, a): ...", "def f(self, a, b): ...", "takes ('b', 'a'), vLLM gives ('a', 'b')"),
        ("def f(self, a, c): ...", "def f(self, a): ...", "needs c, which vLLM does not give"),
        ("def f(self, a): ...", "def f(self, a, *, c): ...", "does not take c by name"),
        ("def f(self, *args, **kwargs): ...", "def f(self, a, *, c): ...", None),
    ],
)
def test_an_override_takes_what_it_replaces_takes(ours: str, theirs: str, problem: str | None) -> None:
    own, other = (ast.parse(text).body[0] for text in (ours, theirs))
    assert isinstance(own, ast.FunctionDef)
    assert isinstance(other, ast.FunctionDef)
    assert problem == interface.Signature.of(own).replaces(interface.Signature.of(other))


def test_a_version_that_is_not_to_be_had_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "vllm-9.9.9-py3-none-any.whl").write_bytes(b"")
    assert tmp_path / "vllm-9.9.9-py3-none-any.whl" == interface.wheel_of("9.9.9", tmp_path)
