"""Sources, documents and packaging in step with one another."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from kvpool import __version__, config_connector
from kvpool.config_example import example

ROOT = Path(__file__).parents[2]

#: Only ever lowered. A typical function has 5 to 20 lines, a typical file 100 to 500.
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 900

#: In what is installed: unfinished work, waiting by sleeping, and checks that `python -O` removes.
NOT_IN_CODE = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError|time\.sleep)\b")
#: The command measures over an interval that the user gives: that is its work, not waiting for something.
SLEEPS = "kvpool/health/process_facts.py"
#: Anywhere: places of one machine, and words about who wrote it.
NOT_ANYWHERE = re.compile(r"/(?:home|work|Users)/\w|[s]ubagent|helper [s]ession|[c]hatbot")


def _tracked(*patterns: str) -> list[Path]:
    """Files under version control; in an unpacked archive, all there are."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", *patterns], check=False, capture_output=True, text=True
    )
    if found.returncode == 0:
        return [ROOT / name for name in found.stdout.splitlines() if (ROOT / name).is_file()]
    return [path for pattern in patterns for path in ROOT.glob(f"**/{pattern}") if ".venv" not in path.parts]


CODE = sorted(path for package in ("kvpool", "kvpool_vllm") for path in (ROOT / package).rglob("*.py"))
PARSED = {path: ast.parse(path.read_text(encoding="utf-8")) for path in [*CODE, *sorted((ROOT / "tools").glob("*.py"))]}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_source_file_begins_with_its_theory() -> None:
    assert [] == [str(path) for path, tree in PARSED.items() if not ast.get_docstring(tree)]


def test_functions_stay_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, tree in PARSED.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert [] == long


def test_files_stay_about_one_thing() -> None:
    long = [str(path) for path in CODE if len(path.read_text(encoding="utf-8").splitlines()) > FILE_LINES_MAX]
    assert [] == long


def test_nothing_is_unfinished_or_waits_by_sleeping() -> None:
    assert [] == _lines_with(NOT_IN_CODE, [path for path in CODE if str(path.relative_to(ROOT)) != SLEEPS])


def test_sources_speak_of_the_project_only() -> None:
    assert [] == _lines_with(NOT_ANYWHERE, [path for path in _tracked() if path.suffix not in (".json", ".lock")])


def _lines_with(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number} {line.strip()[:80]}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def test_checks_in_code_survive_python_without_asserts() -> None:
    asserts = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in CODE
        for node in ast.walk(PARSED[path])
        if isinstance(node, ast.Assert)
    ]
    assert [] == asserts


def test_every_document_has_one_title() -> None:
    documents = _tracked("*.md")
    for path in documents:
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        assert 1 == len(re.findall(r"^# ", text, flags=re.MULTILINE)), path
        assert text.startswith("# "), path


def test_the_example_configuration_is_as_printed() -> None:
    expected = "kvpool config example > config.example.toml"
    assert example() == (ROOT / "config.example.toml").read_text(encoding="utf-8"), expected


def test_the_keys_of_an_engine_are_documented() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("**Keys of `kv_connector_extra_config`.**")[2]
    rows = re.findall(r"^\| (`.+?`) \|", text.partition("\n## ")[0], flags=re.MULTILINE)
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert {*config_connector._OURS, *config_connector._REFUSALS} == documented - {"block_size"}


def test_ruff_and_mypy_are_strict() -> None:
    assert PYPROJECT["tool"]["mypy"]["strict"] is True
    assert 120 == PYPROJECT["tool"]["ruff"]["line-length"]
    assert {"E", "F", "B", "D", "I", "BLE"} <= set(PYPROJECT["tool"]["ruff"]["lint"]["select"])
    assert "error" == PYPROJECT["tool"]["pytest"]["ini_options"]["filterwarnings"][0]


def test_every_ignored_lint_rule_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.partition("\nignore = [\n")[2].partition("\n]")[0]
    assert [] == [line for line in block.splitlines() if not re.fullmatch(r'    "\w+", # .+', line)]


@pytest.fixture
def pinned() -> dict[str, str]:
    lines = (ROOT / "requirements-e2e.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {_plain(name): version for name, version in pairs}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_test_environment_has_what_the_package_asks_for(pinned: dict[str, str]) -> None:
    project = PYPROJECT["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        needed = Requirement(text)
        assert needed.specifier.contains(pinned[_plain(needed.name)]), text


def test_the_test_environment_leaves_out_what_does_not_load_beside_torch_for_cpu(pinned: dict[str, str]) -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(pinned)
    assert pinned["torch"].endswith("+cpu")


def test_the_version_is_told_once_and_has_its_changes() -> None:
    assert {"attr": "kvpool.__version__"} == PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
