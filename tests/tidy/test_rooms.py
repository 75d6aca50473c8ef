"""Which part may import which, and which parts of Python: a wrong import fails here, with its line."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

#: Room -> rooms it may import from. What lies beside the rooms (`errors`, `config`, `__version__`) is named too.
ARROWS = {
    "errors": set(),
    "config": {"errors"},
    "wire": {"errors"},
    "core": {"errors", "wire"},
    "io": {"errors", "wire", "core"},
    "procs": {"errors", "config", "wire", "core", "io", "health", "__version__"},
    "client": {"errors", "config", "wire", "core", "io", "health", "__version__"},
    "health": {"errors", "wire", "core"},
    "cli": {"errors", "config", "wire", "core", "io", "client", "health", "__version__"},
    "kvpool_vllm": {"errors", "config", "wire", "core", "client", "__version__"},
}

#: Rooms without clock, chance, files, sockets, processes, environment: these modules, and no others.
PURE = {"core", "wire"}
PURE_MODULES = {
    "abc", "array", "bisect", "binascii", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "json", "math", "operator", "re", "struct", "types", "typing", "zlib", "msgspec", "xxhash", "numpy",
    "scipy",
}  # fmt: skip
PURE_BUILTINS_NOT = {"open", "print", "input"}

#: What the engine's package never imports: it runs in processes that have neither.
NEVER_IN_KVPOOL = {"vllm", "torch"}


class Import(NamedTuple):
    """One import: where it stands, and what it names."""

    place: str
    room: str
    module: str


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "kvpool_vllm":
        return "kvpool_vllm"
    return parts[1] if len(parts) > 2 else "config" if parts[1].startswith("config") else parts[1]


def _target_room(module: str) -> str:
    package, _, rest = module.partition(".")
    if package == "kvpool_vllm":
        return "kvpool_vllm"
    room = rest.partition(".")[0]
    return "config" if room.startswith("config") else room or "__version__"


def _sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def _imports_of(path: Path) -> Iterator[Import]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: imports are written from the top"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            yield Import(f"{path.relative_to(ROOT)}:{node.lineno}", _room(path), module)


#: Every import of what is installed.
ENGINE = [found for path in _sources("kvpool", "kvpool_vllm") for found in _imports_of(path)]


def test_rooms_import_only_along_the_arrows() -> None:
    wrong = [
        found
        for found in ENGINE
        if found.module.split(".")[0] in ("kvpool", "kvpool_vllm")
        and found.room != "__init__"
        and _target_room(found.module) not in {found.room, *ARROWS[found.room]}
    ]
    assert [] == wrong


def test_decisions_and_messages_use_pure_modules_only() -> None:
    wrong = [
        found for found in ENGINE if found.room in PURE and found.module.split(".")[0] not in PURE_MODULES | {"kvpool"}
    ]
    assert [] == wrong


def test_decisions_and_messages_open_and_print_nothing() -> None:
    calls = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.func.id}"
        for path in _sources("kvpool/core", "kvpool/wire")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PURE_BUILTINS_NOT
    ]
    assert [] == calls


def test_the_engine_needs_neither_vllm_nor_torch() -> None:
    wrong = [found for found in ENGINE if found.room != "kvpool_vllm" and found.module.split(".")[0] in NEVER_IN_KVPOOL]
    assert [] == wrong


def test_tools_and_tests_are_imported_by_nothing_that_is_installed() -> None:
    assert [] == [found for found in ENGINE if found.module.split(".")[0] in ("tools", "tests")]


def test_dependencies_are_those_that_are_declared(declared: set[str]) -> None:
    outside = {
        found.module.split(".")[0]
        for found in ENGINE
        if found.room != "kvpool_vllm" and found.module.split(".")[0] not in sys.stdlib_module_names
    }
    assert set() == outside - declared - {"kvpool"}


@pytest.fixture
def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {name.partition(">")[0].partition("=")[0] for name in project["dependencies"]}


@pytest.mark.parametrize(
    ("path", "line", "fails"),
    [
        ("kvpool/core/x.py", "import time", test_decisions_and_messages_use_pure_modules_only),
        ("kvpool/wire/x.py", "from kvpool.io import channel", test_rooms_import_only_along_the_arrows),
        ("kvpool/io/x.py", "from kvpool.procs.io_worker import main", test_rooms_import_only_along_the_arrows),
        ("kvpool/client/x.py", "import torch", test_the_engine_needs_neither_vllm_nor_torch),
        ("kvpool/procs/x.py", "import tools.demo", test_tools_and_tests_are_imported_by_nothing_that_is_installed),
    ],
)  # fmt: skip
def test_a_wrong_import_is_seen(
    path: str, line: str, fails: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    planted = tmp_path / path
    planted.parent.mkdir(parents=True)
    planted.write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "ENGINE", list(_imports_of(planted)))
    assert callable(fails)
    with pytest.raises(AssertionError):
        fails()
