"""
Measure and attack the copies between staging and a GPU, without vLLM's engine: steps of `tools/gpu_check.py`.

Covers: the rate of kvpool's own copier against plain pinned copies of the same bytes, in one process or in one on
each GPU at once; whether the copies of a killed process still write to its slots afterwards.
Does not cover: engines (`tools/gpu_engines.py`).
"""

import argparse
import importlib
import json
import mmap
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kvpool.client.copier import Copy  # noqa: E402 - the path above comes first
from kvpool.errors import invariant  # noqa: E402
from kvpool.io.shm import create_segment, map_segment, prefault  # noqa: E402
from kvpool_vllm.copies_cpu import CpuCopier  # noqa: E402
from kvpool_vllm.places import GroupLayout, Place, TensorRef  # noqa: E402

#: Qwen3-8B: 36 layers; a block of 16 tokens is 64 KiB in each; 16 blocks make a chunk of 256 tokens.
LAYERS, BLOCK_BYTES, BLOCKS_PER_CHUNK = 36, 65536, 16
OBJECT_BYTES = LAYERS * BLOCK_BYTES * BLOCKS_PER_CHUNK
SLOT_BYTES = OBJECT_BYTES + 4096
ROUNDS = 7
GIB = 1 << 30
#: Processes side by side begin their rounds this long after their start, and take this long for each.
START_S, SIDE_BY_SIDE_S = 40.0, 0.5


def measure_copies(*, gpu: int, objects: int, segment_fd: int, start_at: float | None = None) -> dict[str, Any]:
    """
    Return GB/s of kvpool's copies and of plain pinned copies of the same bytes, medians of interleaved rounds.

    Args:
        gpu: The CUDA device; -1 rehearses on the CPU.
        objects: How many objects a round copies.
        segment_fd: Staging of at least objects * SLOT_BYTES.
        start_at: time.time() of the first timed round, for processes that measure side by side.
    """
    torch: Any = importlib.import_module("torch")  # parts of it are not typed
    device = torch.device("cpu") if gpu < 0 else torch.device("cuda", gpu)
    if gpu >= 0:
        torch.cuda.set_device(device)
    copier = _copier(gpu)
    segment_bytes = os.fstat(segment_fd).st_size
    memory = map_segment(segment_fd, segment_bytes)
    started = time.perf_counter()
    copier.attach(0, memory)
    pin_s = time.perf_counter() - started
    blocks = objects * BLOCKS_PER_CHUNK
    cache = torch.zeros((LAYERS, blocks, BLOCK_BYTES), dtype=torch.int8, device=device)
    tensors = tuple(TensorRef(layer.data_ptr(), BLOCK_BYTES, BLOCK_BYTES) for layer in cache)
    layout = GroupLayout(0, BLOCKS_PER_CHUNK, OBJECT_BYTES, tensors)
    plain_host = torch.empty(objects * OBJECT_BYTES, dtype=torch.int8, pin_memory=gpu >= 0)
    plain_device = torch.empty(objects * OBJECT_BYTES, dtype=torch.int8, device=device)

    def copies(order: Any) -> list[Copy]:
        dealt = order.astype(np.int64).reshape(objects, BLOCKS_PER_CHUNK)
        return [Copy(0, index * SLOT_BYTES, Place(layout, dealt[index])) for index in range(objects)]

    def plain(to: Any, source: Any) -> None:
        to.copy_(source, non_blocking=True)
        if gpu >= 0:
            torch.cuda.synchronize()

    in_order, scattered = np.arange(blocks), np.random.default_rng(1).permutation(blocks)
    ways: dict[str, Callable[[], None]] = {
        "load": lambda: copier.wait(copier.load(copies(in_order))),
        "plain_load": lambda: plain(plain_device, plain_host),
        "load_scattered": lambda: copier.wait(copier.load(copies(scattered))),
        "store": lambda: copier.wait(copier.store(copies(in_order), None)),
        "plain_store": lambda: plain(plain_host, plain_device),
        "store_scattered": lambda: copier.wait(copier.store(copies(scattered), None)),
    }
    _verify(memory, cache, copier, copies(scattered), scattered)
    seconds = _timed(ways, start_at)
    copier.close()
    pinned = {"pin_s": round(pin_s, 3), "pin_gib": round(segment_bytes / GIB, 2)}
    return pinned | _figures(seconds, objects * OBJECT_BYTES)


def _figures(seconds: dict[str, float], size: int) -> dict[str, Any]:
    """Return GB/s of each way for *size* bytes, and the ratios of kvpool's ways to the plain one of their direction."""
    rates = {f"{name}_gbps": round(size / taken / 1e9, 2) for name, taken in seconds.items()}
    ratios = {
        f"{name}_ratio": round(seconds[f"plain_{name.split('_')[0]}"] / taken, 3)
        for name, taken in seconds.items()
        if not name.startswith("plain")
    }
    return {"bytes": size, **rates, **ratios}


def _copier(gpu: int) -> Any:
    if gpu < 0:
        return CpuCopier()
    from kvpool_vllm.copies_cuda import CudaCopier

    return CudaCopier()


def _timed(ways: dict[str, Callable[[], None]], start_at: float | None) -> dict[str, float]:
    """Return the median seconds of each way, over rounds in which all take their turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for turn in range(ROUNDS):
        for place, (name, way) in enumerate(ways.items()):
            if start_at is not None:
                time.sleep(max(0.0, start_at + (turn * len(ways) + place) * SIDE_BY_SIDE_S - time.time()))
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _verify(memory: mmap.mmap, cache: Any, copier: Any, copies: list[Copy], order: Any) -> None:
    """Check once that a load puts every block where it belongs."""
    view = np.frombuffer(memory, dtype=np.int8)
    for index in range(len(copies)):
        start = index * SLOT_BYTES
        view[start : start + OBJECT_BYTES] = index % 100 + 1
    copier.wait(copier.load(copies))
    found = cache[:, :, 0].cpu().numpy()
    expected = np.empty(len(order), dtype=np.int8)
    expected[order] = np.arange(len(order)) // BLOCKS_PER_CHUNK % 100 + 1
    invariant(bool((found == expected[None, :]).all()), "every block landed in its place")


def measure_alone(*, gpu: int, objects: int) -> dict[str, Any]:
    """Measure in this process, on staging of its own."""
    fd = create_segment(objects * SLOT_BYTES)
    prefault(fd, objects * SLOT_BYTES)
    try:
        return measure_copies(gpu=gpu, objects=objects, segment_fd=fd)
    finally:
        os.close(fd)


def measure_side_by_side(*, gpus: int, objects: int) -> dict[str, Any]:
    """Measure in one process for each GPU at once, all on the same staging; the combined rates against plain ones."""
    fd = create_segment(objects * SLOT_BYTES)
    prefault(fd, objects * SLOT_BYTES)
    start_at = time.time() + START_S
    children = [
        subprocess.Popen(
            [
                sys.executable, __file__, "measure", "--gpu", str(gpu), "--objects", str(objects),
                "--segment-fd", str(fd), "--start-at", str(start_at),
            ],
            stdout=subprocess.PIPE, pass_fds=[fd],
        )
        for gpu in range(gpus)
    ]  # fmt: skip
    found = [json.loads(child.communicate(timeout=180)[0].splitlines()[-1]) for child in children]
    os.close(fd)
    names = [name for name in found[0] if name.endswith("_gbps")]
    combined = {name: round(sum(one[name] for one in found), 2) for name in names}
    return {
        "ranks": found,
        "combined": combined,
        "load_ratio": round(combined["load_gbps"] / combined["plain_load_gbps"], 3),
        "store_ratio": round(combined["store_gbps"] / combined["plain_store_gbps"], 3),
    }


# ------------------------------------------------------------ a rank that is killed during its copies

PIECE_BYTES = 64 << 20
#: What the victim copies, and what is written over it.
THEIRS, PATTERN = 0x5A, 0xA5


def copy_without_end(*, gpu: int, segment_fd: int, say_fd: int) -> None:
    """Copy from the GPU into all of the staging over and over, far ahead of what has been done; never returns."""
    torch: Any = importlib.import_module("torch")  # parts of it are not typed
    torch.cuda.set_device(gpu)
    size = os.fstat(segment_fd).st_size
    memory = map_segment(segment_fd, size)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    result = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), size, 0))
    invariant(result == 0, "staging can be pinned", result=result)
    source = torch.full((PIECE_BYTES,), THEIRS, dtype=torch.uint8, device="cuda")
    pieces = host.split(PIECE_BYTES)
    events: list[Any] = []
    told = False
    while True:
        for piece in pieces:
            piece.copy_(source[: len(piece)], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        events.append(event)
        if len(events) > 4:
            events.pop(0).synchronize()
            if not told:
                told = True
                os.write(say_fd, b"!")


def attack_killed_copies(*, gpu: int, gib: float, rounds: int, watch_s: float = 2.0) -> dict[str, Any]:
    """
    Kill a process in the middle of its copies; write a pattern over its slots at once; count pieces that change.

    Two moments are tried in turn: the hang-up of its socket (a pipe here), and its pidfd becoming readable. In the
    control the pattern is written while the process still lives: then pieces must change, or nothing is seen here.
    """
    control = _one_kill(gpu=gpu, size=int(gib * GIB), moment="alive", watch_s=1.0)
    results = []
    for turn in range(rounds):
        moment = ("hang_up", "pidfd")[turn % 2]
        results.append({"after": moment, **_one_kill(gpu=gpu, size=int(gib * GIB), moment=moment, watch_s=watch_s)})
    changed = {
        moment: sum(result["pieces_changed"] for result in results if result["after"] == moment)
        for moment in ("hang_up", "pidfd")
    }
    return {
        "control": control,
        "rounds": results,
        "pieces_changed_after": changed,
        "death_proves": changed["pidfd"] == 0 < control["pieces_changed"],
    }


def _one_kill(*, gpu: int, size: int, moment: str, watch_s: float) -> dict[str, Any]:
    fd = create_segment(size)
    prefault(fd, size)
    memory = map_segment(fd, size)
    slots = np.frombuffer(memory, dtype=np.uint8)
    hears, says = os.pipe()
    child = subprocess.Popen(
        [
            sys.executable, __file__, "copy-without-end", "--gpu", str(gpu), "--segment-fd", str(fd),
            "--say-fd", str(says),
        ],
        pass_fds=[fd, says],
    )  # fmt: skip
    os.close(says)
    invariant(os.read(hears, 1) == b"!", "the victim copies")
    pidfd = os.pidfd_open(child.pid)
    if moment != "alive":
        os.kill(child.pid, signal.SIGKILL)
    killed = time.perf_counter()
    if moment != "alive":
        select.select([pidfd if moment == "pidfd" else hears], [], [], 60)
    noticed_ms = (time.perf_counter() - killed) * 1e3
    slots[:] = PATTERN
    written_ms = (time.perf_counter() - killed) * 1e3
    changed: set[int] = set()
    last_ms = 0.0
    while time.perf_counter() - killed < watch_s:
        seen = np.flatnonzero(slots[:: PIECE_BYTES // 16] != PATTERN)
        new = set((seen // 16).tolist()) - changed
        if new:
            last_ms = (time.perf_counter() - killed) * 1e3
            changed |= new
    changed |= set((np.flatnonzero(slots != PATTERN)[:1_000_000] // PIECE_BYTES).tolist())
    child.kill()
    child.wait()
    for descriptor in (hears, pidfd, fd):
        os.close(descriptor)
    del slots
    memory.close()
    return {
        "noticed_ms": round(noticed_ms, 1),
        "pattern_written_ms": round(written_ms, 1),
        "pieces": size // PIECE_BYTES,
        "pieces_changed": len(changed),
        "last_change_ms": round(last_ms, 1),
    }


def main() -> None:
    """Run as one of several processes side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "copy-without-end"])
    parser.add_argument("--gpu", type=int, required=True)
    parser.add_argument("--segment-fd", type=int, required=True)
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--start-at", type=float)
    parser.add_argument("--say-fd", type=int, default=-1)
    args = parser.parse_args()
    if args.what == "copy-without-end":
        copy_without_end(gpu=args.gpu, segment_fd=args.segment_fd, say_fd=args.say_fd)
    found = measure_copies(gpu=args.gpu, objects=args.objects, segment_fd=args.segment_fd, start_at=args.start_at)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
