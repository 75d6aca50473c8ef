"""
Check a vLLM against what kvpool_vllm imports, overrides and reads, without importing it.

Theory. A vLLM that differs from the tested one breaks kvpool at three places, and each is read from source text:

    imports     every name that kvpool_vllm imports from vllm exists there
    overrides   a method of ours that replaces one of vLLM's takes what vLLM's takes; abstract methods are all there
    members     what kvpool_vllm reads, calls or constructs of vLLM's classes is there (MEMBERS below)

The source is an installed package or a wheel, which is a zip: a version that this machine cannot run (0.33 has no
CPU build) is checked all the same. What a check cannot see is behaviour; that is what the end-to-end tests are for.

    python tools/check_vllm_interface.py                      the installed vLLM
    python tools/check_vllm_interface.py --version 0.33.0     downloads that wheel (some 300 MB) into --cache, once
    python tools/check_vllm_interface.py --wheel FILE
"""

import argparse
import ast
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent
OURS = ROOT / "kvpool_vllm"
CACHE = Path.home() / ".cache" / "kvpool" / "wheels"

#: Python versions and platforms that vLLM's wheels are tagged for.
_PIP_TARGET = [
    "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--abi", "cp312",
    "--abi", "abi3", *(
        arg for name in ("_2_35", "_2_34", "_2_31", "_2_28", "2014", "1")
        for arg in ("--platform", f"manylinux{name}_x86_64")
    ),
]  # fmt: skip

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

#: Class -> members that kvpool_vllm reads or calls, with the parameters it gives (None: an attribute or property).
#: For a constructor the parameters of `__init__`, or the fields of a dataclass.
MEMBERS: dict[str, dict[str, list[str] | None]] = {
    "vllm.v1.request.Request": {
        "request_id": None, "num_tokens": None, "num_prompt_tokens": None, "num_computed_tokens": None,
        "block_hashes": None, "priority": None,
    },
    "vllm.v1.core.sched.output.SchedulerOutput": {"preempted_req_ids": None},
    "vllm.v1.outputs.KVConnectorOutput": {"kv_connector_worker_meta": None},
    "vllm.v1.core.kv_cache_manager.KVCacheManager": {
        "block_pool": None, "coordinator": None, "max_model_len": None, "empty_kv_cache_blocks": None,
    },
    "vllm.v1.core.kv_cache_manager.KVCacheBlocks": {"blocks": None},
    "vllm.v1.core.block_pool.BlockPool": {"get_num_free_blocks": []},
    "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator": {
        "find_longest_cache_hit": ["block_hashes", "max_cache_hit_length"],
        "get_num_blocks_to_allocate": [
            "request_id", "num_tokens", "new_computed_blocks", "num_encoder_tokens", "total_computed_tokens",
            "num_local_computed_tokens", "num_tokens_main_model", "apply_admission_cap", "prefill_end",
        ],
    },
    "vllm.v1.kv_offload.base.GPULoadStoreSpec": {"block_ids": None, "group_sizes": None, "block_indices": None},
    "vllm.v1.kv_offload.base.TransferResult": {
        "__init__": ["job_id", "success", "transfer_size", "transfer_time"],
    },
    "vllm.v1.kv_offload.base.PrepareStoreOutput": {"__init__": ["keys_to_store", "store_spec", "evicted_keys"]},
    "vllm.v1.kv_offload.base.ReqContext": {"req_id": None, "get_offload_key_position": ["key"]},
    "vllm.v1.kv_offload.base.LookupResult": {"HIT": None, "MISS": None, "RETRY": None},
    "vllm.v1.kv_offload.base.CanonicalKVCaches": {"tensors": None, "group_data_refs": None},
    "vllm.v1.kv_offload.base.CanonicalKVCacheTensor": {"tensor": None, "page_size_bytes": None},
    "vllm.v1.kv_offload.base.CanonicalKVCacheRef": {"tensor_idx": None, "page_size_bytes": None},
    "vllm.v1.kv_offload.base.OffloadingSpec": {
        "config": None, "replicated_layout": None, "blocks_per_chunk": None, "extra_config": None,
    },
    "vllm.v1.kv_offload.config.OffloadingConfig": {
        "groups": None, "model": None, "cache": None, "parallel": None, "engine_id": None, "kv_cache_layout": None,
    },
    "vllm.v1.kv_offload.config.OffloadingGroupConfig": {"group_id": None, "tokens_per_block": None},
    "vllm.v1.kv_offload.config.OffloadingParallelConfig": {
        "rank": None, "world_size": None, "tp_size": None, "pp_size": None, "pcp_size": None, "dcp_size": None,
    },
    "vllm.v1.kv_offload.config.OffloadingCacheConfig": {"blocks_per_chunk": None, "tokens_per_hash": None},
    "vllm.v1.kv_offload.config.OffloadingModelConfig": {"name": None, "dtype": None},
    "vllm.v1.metrics.cache_hit_source.CacheHitSource": {"HOST": None, "DISK": None, "EXTERNAL_UNSPECIFIED": None},
    "vllm.v1.kv_cache_interface.KVCacheConfig": {
        "kv_cache_groups": None, "kv_cache_tensors": None, "kv_cache_layout": None, "num_blocks": None,
    },
    "vllm.v1.kv_cache_interface.KVCacheTensor": {"layers": None, "layer_stride": None, "block_stride": None},
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": {"layer_names": None, "kv_cache_spec": None},
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": {"sliding_window": None, "extra_retained_tokens": None},
    "vllm.v1.kv_cache_interface.MambaSpec": {"mamba_cache_mode": None},
    f"{_OFFLOADING}_connector.OffloadingConnector": {
        "scheduler": None, "connector_scheduler": None, "connector_worker": None,
    },
    f"{_OFFLOADING}.scheduler.OffloadingConnectorScheduler": {
        "config": None, "manager": None, "_req_status": None, "_jobs": None,
    },
    f"{_OFFLOADING}.scheduler.SchedulerOffloadConfig": {
        "kv_group_configs": None, "blocks_per_chunk": None, "alignment_tokens": None,
    },
    f"{_OFFLOADING}.scheduler.GroupOffloadConfig": {
        "group_idx": None, "tokens_per_block": None, "tokens_per_chunk": None, "kv_cache_spec": None,
        "requires_cow_source": None, "load_window_size_in_chunks": ["num_tokens"],
    },
    f"{_OFFLOADING}.scheduler.RequestGroupState": {
        "offload_keys": None, "block_ids": None, "next_stored_chunk_idx": None,
    },
    f"{_OFFLOADING}.scheduler.RequestOffloadState": {
        "req_context": None, "group_states": None, "transfer_jobs": None, "num_locally_computed_tokens": None,
        "update_offload_keys": [],
    },
    f"{_OFFLOADING}.scheduler.TransferJobStatus": {"req_id": None},
    f"{_OFFLOADING}.worker.OffloadingConnectorWorker": {"worker": None},
    f"{_OFFLOADING}.metrics.OffloadingConnectorStats": {
        "increase_counter": ["counter_name", "counter_increase_value", "labelvalues"],
        "set_gauge": ["gauge_name", "gauge_value", "labelvalues"], "is_empty": [], "to_dict": [],
    },
    "vllm.v1.kv_offload.base.OffloadingCounterMetadata": {"__init__": ["documentation", "labelnames"]},
    "vllm.v1.kv_offload.base.OffloadingGaugeMetadata": {"__init__": ["documentation", "labelnames"]},
    f"{_OFFLOADING}.common.OffloadingWorkerMetadata": {"__init__": ["completed_jobs", "transfer_stats"]},
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorTransferResults": {
        "finished_recving": None, "failed_recving": None,
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorRole": {"SCHEDULER": None, "WORKER": None},
    "vllm.config.kv_transfer.KVTransferConfig": {
        "kv_connector": None, "kv_connector_extra_config": None, "kv_load_failure_policy": None, "is_kv_producer": None,
        "is_kv_consumer": None, "engine_id": None,
    },
    "vllm.config.cache.CacheConfig": {"prefix_caching_hash_algo": None, "enable_prefix_caching": None},
    "vllm.config.parallel.ParallelConfig": {
        "decode_context_parallel_size": None, "pipeline_parallel_size": None,
    },
    "vllm.config.model.ModelConfig": {
        "model": None, "revision": None, "dtype": None, "quantization": None, "max_model_len": None,
        "hf_text_config": None,
    },
    "vllm.platforms.interface.Platform": {
        "is_cuda": [], "is_cpu": [], "get_device_capability": [], "device_type": None, "device_name": None,
    },
    "vllm.distributed.device_communicators.cuda_wrapper.CudaRTLibrary": {
        "cudaHostRegister": ["ptr", "size", "flags"], "cudaHostUnregister": ["ptr"], "cudaGetLastError": [],
    },
}  # fmt: skip

#: Function -> parameters that kvpool_vllm gives it.
FUNCTIONS: dict[str, list[str]] = {
    "vllm._custom_ops.swap_blocks_batch": ["src_ptrs", "dst_ptrs", "sizes", "is_src_access_order_any"],
    "vllm.v1.kv_offload.base.get_offload_group_idx": ["key"],
    f"{_OFFLOADING}.config.build_offloading_config": ["vllm_config", "kv_cache_config"],
    f"{_OFFLOADING}.config.get_offloading_group_ids": ["kv_cache_config"],
    "vllm.v1.core.kv_cache_utils.resolve_dcp_kv_block_size": ["spec", "dcp_world_size"],
}


class Source(Protocol):
    """Where vLLM's modules are read from."""

    def text(self, path: str) -> str | None:
        """Return the text of a file named as below site-packages; None when there is none."""

    def version(self) -> str:
        """Return vLLM's version."""


class Installed:
    """An installed vLLM; found, not imported."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise FileNotFoundError("vLLM is not installed here")
        self._root = Path(spec.origin).parent.parent

    def text(self, path: str) -> str | None:
        """See :class:`Source`."""
        file = self._root / path
        return file.read_text() if file.is_file() else None

    def version(self) -> str:
        """See :class:`Source`."""
        found = sorted(self._root.glob("vllm*-*.dist-info/METADATA"))
        return _metadata_version(found[0].read_text()) if found else "unknown"


class Wheel:
    """A wheel file."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._names = set(self._zip.namelist())

    def text(self, path: str) -> str | None:
        """See :class:`Source`."""
        return self._zip.read(path).decode() if path in self._names else None

    def version(self) -> str:
        """See :class:`Source`."""
        name = next(name for name in self._names if name.endswith(".dist-info/METADATA"))
        return _metadata_version(self._zip.read(name).decode())


def _metadata_version(text: str) -> str:
    return next(line.removeprefix("Version: ") for line in text.splitlines() if line.startswith("Version: "))


@dataclass
class Report:
    """Result of one check: what was looked at, and what does not fit."""

    vllm: str
    imports: int = 0
    overrides: int = 0
    members: int = 0
    problems: list[str] = field(default_factory=list)


# ------------------------------------------------------------ reading vLLM's source

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A definition and the module it stands in."""

    module: str
    node: Definition


class Modules:
    """vLLM's modules by name, parsed once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.tree = cache(self._parse)

    def _parse(self, module: str) -> ast.Module | None:
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            text = self._source.text(path)
            if text is not None:
                return ast.parse(text)
        return None

    def find(self, module: str, name: str, *, depth: int = 0) -> Found | None:
        """Return the definition of *name* in *module*, following re-exports."""
        tree = self.tree(module)
        if tree is None or depth > 8:
            return None
        for node in _statements(tree.body):
            if _defines(node, name):
                return Found(module, node)  # type: ignore[arg-type]  # _defines has checked it
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = _absolute(module, node, is_package=self._is_package(module))
                        return self.find(origin, alias.name, depth=depth + 1)
        return None

    def exists(self, module: str, name: str) -> bool:
        """Say whether `from module import name` can work: a definition, or a submodule."""
        return self.find(module, name) is not None or self.tree(f"{module}.{name}") is not None

    def _is_package(self, module: str) -> bool:
        return self._source.text(f"{module.replace('.', '/')}/__init__.py") is not None

    def lineage(self, found: Found) -> Iterator[ast.ClassDef]:
        """Yield a class and its bases as far as they are vLLM's."""
        if not isinstance(found.node, ast.ClassDef):
            return
        yield found.node
        for base in found.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name) and (parent := self.find(found.module, name.id)) is not None:
                yield from self.lineage(parent)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, also those below `if` and `try`."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _statements([*node.body, *(stmt for handler in node.handlers for stmt in handler.body)])


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    return isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)


def _absolute(module: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    """Return the full name of the module that a `from … import` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _member(lineage: Iterable[ast.ClassDef], name: str) -> ast.AST | None:
    """Return where a class or one of its bases defines *name*: a method, a field, or `self.name = …` in a method."""
    for kind in lineage:
        for node in kind.body:
            if _defines(node, name):
                return node
        for method in kind.body:
            if isinstance(method, ast.FunctionDef):
                for inner in ast.walk(method):
                    if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and inner.attr == name:
                        return inner
    return None


# ------------------------------------------------------------ signatures


@dataclass(frozen=True)
class Signature:
    """Parameters of a function: by position, by name only, and which may be left out."""

    positional: tuple[str, ...]
    keyword: tuple[str, ...]
    optional: frozenset[str]
    var_positional: bool
    var_keyword: bool

    @classmethod
    def of(cls, node: Function) -> "Signature":
        """Read it, without `self` or `cls`."""
        arguments = node.args
        positional = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
        defaulted = positional[len(positional) - len(arguments.defaults) :]
        by_name = [arg.arg for arg in arguments.kwonlyargs]
        defaulted += [name for name, value in zip(by_name, arguments.kw_defaults, strict=True) if value is not None]
        own = positional[1:] if positional[:1] in (["self"], ["cls"]) else positional
        return cls(
            tuple(own), tuple(by_name), frozenset(defaulted), arguments.vararg is not None, arguments.kwarg is not None
        )

    @classmethod
    def of_fields(cls, lineage: list[ast.ClassDef]) -> "Signature":
        """Read the constructor of a dataclass, bases first."""
        fields = [
            node for kind in reversed(lineage) for node in kind.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]  # fmt: skip
        names = [node.target.id for node in fields if isinstance(node.target, ast.Name)]
        optional = frozenset(
            node.target.id for node in fields if node.value is not None and isinstance(node.target, ast.Name)
        )
        return cls(tuple(names), (), optional, var_positional=False, var_keyword=False)

    def takes(self, given: list[str]) -> str | None:
        """Return what is wrong with a call that gives these parameters by name or in this order; None: nothing."""
        known = {*self.positional, *self.keyword}
        unknown = [name for name in given if name not in known]
        if unknown and not self.var_keyword:
            return f"does not take {', '.join(unknown)}"
        lacking = [
            name for name in (*self.positional, *self.keyword) if name not in self.optional and name not in given
        ]
        return f"also needs {', '.join(lacking)}" if lacking else None

    def replaces(self, theirs: "Signature") -> str | None:
        """Return why a method with this signature cannot stand in for *theirs*; None: it can."""
        missing = [name for name in theirs.positional if name not in self.positional]
        if missing and not (self.var_positional and self.var_keyword):
            return f"does not take {', '.join(missing)}"
        if not missing and self.positional[: len(theirs.positional)] != theirs.positional:
            return f"takes {self.positional}, vLLM gives {theirs.positional}"
        by_name = [name for name in theirs.keyword if name not in (*self.keyword, *self.positional)]
        if by_name and not self.var_keyword:
            return f"does not take {', '.join(by_name)} by name"
        more = [
            name for name in (*self.positional, *self.keyword)
            if name not in (*theirs.positional, *theirs.keyword) and name not in self.optional
        ]  # fmt: skip
        return f"needs {', '.join(more)}, which vLLM does not give" if more else None


# ------------------------------------------------------------ the three checks


def check(source: Source, ours: Path = OURS) -> Report:
    """Check a vLLM against the kvpool_vllm of folder *ours*."""
    report = Report(vllm=source.version())
    modules = Modules(source)
    for path in sorted(ours.glob("*.py")):
        tree = ast.parse(path.read_text())
        imported = _imports(tree)
        _check_imports(path.name, imported, modules, report)
        _check_overrides(path.name, tree, imported, modules, report)
    _check_members(modules, report)
    return report


def _imports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return local name -> (module, name) of everything imported from vllm, wherever in the file."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for alias in node.names
    }


def _check_imports(file: str, imported: dict[str, tuple[str, str]], modules: Modules, report: Report) -> None:
    for module, name in imported.values():
        report.imports += 1
        if not modules.exists(module, name):
            report.problems.append(f"{file}: {module} has no {name}")


def _check_overrides(
    file: str, tree: ast.Module, imported: dict[str, tuple[str, str]], modules: Modules, report: Report
) -> None:
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for base in kind.bases:
            if isinstance(base, ast.Name) and base.id in imported:
                found = modules.find(*imported[base.id])
                if found is not None:
                    _check_class(f"{file}: {kind.name}", kind, list(modules.lineage(found)), report)


def _check_class(where: str, kind: ast.ClassDef, lineage: list[ast.ClassDef], report: Report) -> None:
    own = {node.name: node for node in kind.body if isinstance(node, ast.FunctionDef)}
    for name, method in own.items():
        theirs = _member(lineage, name)
        if name == "__init__" or not isinstance(theirs, ast.FunctionDef) or _is_property(theirs):
            continue
        report.overrides += 1
        problem = Signature.of(method).replaces(Signature.of(theirs))
        if problem:
            report.problems.append(f"{where}.{name} {problem}")
    for name in _abstract(lineage):
        report.overrides += 1
        if name not in own:
            report.problems.append(f"{where} lacks {name}, which is abstract in vLLM")


def _is_property(node: ast.FunctionDef) -> bool:
    return any(
        isinstance(mark, ast.Name) and mark.id in ("property", "cached_property") for mark in node.decorator_list
    )


def _abstract(lineage: list[ast.ClassDef]) -> set[str]:
    """Return the methods that no class of the lineage implements."""
    implemented: set[str] = set()
    abstract: set[str] = set()
    for kind in lineage:
        for node in kind.body:
            if isinstance(node, ast.FunctionDef) and node.name not in implemented | abstract:
                marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
                (abstract if "abstractmethod" in marks else implemented).add(node.name)
    return abstract


def _check_members(modules: Modules, report: Report) -> None:
    for path, members in MEMBERS.items():
        module, _, name = path.rpartition(".")
        found = modules.find(module, name)
        lineage = list(modules.lineage(found)) if found is not None else []
        if not lineage:
            report.problems.append(f"{path} is no class")
            continue
        for member, given in members.items():
            report.members += 1
            problem = _member_problem(lineage, member, given)
            if problem:
                report.problems.append(f"{path}.{member} {problem}")
    for path, given in FUNCTIONS.items():
        report.members += 1
        module, _, name = path.rpartition(".")
        found = modules.find(module, name)
        if found is None or not isinstance(found.node, Function):
            report.problems.append(f"{path} is no function")
        elif problem := Signature.of(found.node).takes(given):
            report.problems.append(f"{path} {problem}")


def _member_problem(lineage: list[ast.ClassDef], member: str, given: list[str] | None) -> str | None:
    node = _member(lineage, member)
    if given is None:
        return None if node is not None else "is not there"
    if isinstance(node, Function):
        return Signature.of(node).takes(given)
    if member == "__init__" and node is None:
        return Signature.of_fields(lineage).takes(given)
    return "is no method"


# ------------------------------------------------------------ the command


def wheel_of(version: str, cache_folder: Path) -> Path:
    """
    Return the wheel of a vLLM version, downloaded when the cache lacks it.

    Raises:
        FileNotFoundError: It is neither there nor reachable.
    """
    cache_folder.mkdir(parents=True, exist_ok=True)
    pattern = f"vllm-{version}-*.whl"
    if not list(cache_folder.glob(pattern)):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            *_PIP_TARGET,
            "-d",
            str(cache_folder),
            f"vllm=={version}",
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise FileNotFoundError(
                f"no wheel of vLLM {version} in {cache_folder}, and none to be had: {result.stderr}"
            )
    return next(iter(cache_folder.glob(pattern)))


def main() -> int:
    """Check, print, and return 0 only when everything fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--wheel", type=Path)
    chosen.add_argument("--version", help="downloaded by pip when the cache lacks it")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="where downloaded wheels are kept (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the result here as well")
    args = parser.parse_args()
    try:
        if args.version:
            source: Source = Wheel(wheel_of(args.version, args.cache))
        else:
            source = Wheel(args.wheel) if args.wheel else Installed()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    report = check(source)
    print(f"vLLM {report.vllm}: {report.imports} imports, {report.overrides} overrides, {report.members} members")
    for problem in report.problems:
        print(f"  {problem}")
    print("everything kvpool_vllm uses is there" if not report.problems else f"{len(report.problems)} problems")
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
