"""
Steps of `tools/gpu_check.py` that need an engine: are the bytes right, and what do they cost.

Covers: digests of KV blocks before the store and after the load, equal outputs with their control, time to first
token beside recompute and vLLM's own tiers, decode steps with and without background stores, a rank that is killed.
Does not cover: copies without an engine (`tools/gpu_copies.py`), storage, time limits, the table (`gpu_check.py`).

With dummy weights outputs say nothing about the bytes: there the digests speak, and times are taken. Outputs are
compared on a small model with random weights, in bfloat16; so that the order of additions is the same with and
without kvpool, both engines compute a prompt in the same two parts, of which the first is loaded or cached.
"""

import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.client import admin
from kvpool.core.trailer import TRAILER_BYTES
from kvpool.errors import PoolUnavailable
from kvpool.health import facts
from tools.engine_process import Answer, Engine, EngineFailed, cpu_environment, engine_settings
from tools.tiny_models import VOCABULARY, tiny_model

CHUNK = 256
GIB = 1 << 30
#: No new segment for so long, and all are there.
SETTLED_S = 1.5

#: Qwen3-8B's shape: 147,456 bytes of KV per token in bfloat16.
EIGHT_B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu",
}  # fmt: skip


@dataclass
class Host:
    """
    Where the steps run and how large they are.

    Attributes:
        work: Folder for models, logs, pools.
        devices: Directories of storage, one a drive.
        rehearse: On a CPU with a tiny model: shows that the steps work, not how fast.
        tp: Tensor parallel size.
        lengths: Prompt lengths of the time to first token.
    """

    work: Path
    devices: list[Path]
    rehearse: bool
    tp: int
    lengths: list[int]
    staging: str
    repeats: int = 2
    engines: int = field(default=0, init=False)

    def environment(self, *, gpu: bool = True) -> dict[str, str]:
        """Return the environment of an engine."""
        if self.rehearse:
            return cpu_environment(tp=self.tp)
        return {
            "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            # NVLink multicast can put a shared host's GPUs out of service.
            "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
        }  # fmt: skip

    def large(self, connector: dict[str, Any] | None, **changes: Any) -> Engine:
        """Start an engine for times and digests: the 8B shape with dummy weights."""
        if self.rehearse:
            settings = engine_settings(tiny_model("llama", self.work / "models"))
        else:
            model = self.work / "models" / "qwen3-8b-shape"
            model.mkdir(parents=True, exist_ok=True)
            (model / "config.json").write_text(json.dumps(EIGHT_B))
            settings = engine_settings(
                model,
                load_format="dummy",
                max_model_len=100_000,
                max_num_batched_tokens=16384,
                gpu_memory_utilization=0.6,
            )
        return self._start(settings | changes, connector)

    def small(self, connector: dict[str, Any] | None, **changes: Any) -> Engine:
        """Start an engine whose outputs depend on its KV: a small model with random weights."""
        model = tiny_model("llama" if self.rehearse else "llama-gpu", self.work / "models")
        settings = engine_settings(model)
        if not self.rehearse:
            settings |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 * GIB}
        return self._start(settings | changes, connector)

    def _start(self, settings: dict[str, Any], connector: dict[str, Any] | None) -> Engine:
        if connector is not None:
            settings["kv_transfer_config"] = connector
        if self.tp > 1:
            settings["tensor_parallel_size"] = self.tp
        settings["worker_extension_cls"] = "tools.kv_probe.KvProbe"
        self.engines += 1
        return Engine(settings, log=self.work / f"engine-{self.engines}.log", environment=self.environment())

    @property
    def vocabulary(self) -> int:
        """Token ids below this are in both models."""
        return VOCABULARY if self.rehearse else 150_000

    @contextmanager
    def pool(self, *, verify: bool = True, devices: list[Path] | None = None) -> Iterator["HostPool"]:
        """Describe a pool of its own on the storage; its files are removed afterwards."""
        folder = Path(tempfile.mkdtemp(prefix="pool-", dir=self.work))
        pool = HostPool(folder, devices or self.devices, self.staging, verify=verify, patient=self.rehearse)
        try:
            yield pool
        finally:
            pool.wait_gone()
            for device in pool.paths:
                shutil.rmtree(device, ignore_errors=True)


class HostPool:
    """A pool that its first engine starts."""

    def __init__(self, folder: Path, devices: list[Path], staging: str, *, verify: bool, patient: bool) -> None:
        self.folder = folder
        self.patient = patient  # of two busy processors that rehearse
        self.run_dir = folder / "run"
        self.paths = [device / folder.name for device in devices]
        self.write_config(staging, verify=verify)

    def write_config(self, staging: str, *, verify: bool) -> None:
        """Write the TOML file; the next start reads it."""
        lines = ["[pool]", f'run_dir = "{self.run_dir}"', f'staging = "{staging}"', f"verify = {json.dumps(verify)}"]
        lines += ["store_deadline_s = 30.0", *(["answer_deadline_s = 5.0"] if self.patient else [])]
        for index, path in enumerate(self.paths):
            path.mkdir(parents=True, exist_ok=True)
            lines += ["[[device]]", f'name = "d{index}"', f'path = "{path}"']
        (self.folder / "kvpool.toml").write_text("\n".join(lines) + "\n")

    def connector(self) -> dict[str, Any]:
        """Return vLLM's `kv_transfer_config`."""
        return {
            "kv_connector": "KvPoolConnector",
            "kv_connector_module_path": "kvpool_vllm.connector",
            "kv_role": "kv_both",
            # Every hit is loaded, whether that pays or not: this measures loads.
            "kv_connector_extra_config": {
                "kvpool_config": str(self.folder / "kvpool.toml"),
                "block_size": CHUNK,
                "load_planner": "off",
            },
        }

    def rows(self) -> list[facts.Facts]:
        """Return health's rows; none where no pool answers."""
        try:
            return list(admin.health(str(self.run_dir)).rows)
        except PoolUnavailable:
            return []

    def total(self, name: str) -> int:
        """Return a fact summed over the I/O workers."""
        return sum(int(row.get(name, 0)) for row in self.rows() if row.get(facts.ROLE) == facts.IO_WORKER)

    def wait_ready(self, ranks: int, *, within_s: float = 120.0) -> float:
        """Return, in seconds, how long it took until all ranks had mapped and pinned the staging."""
        started = time.monotonic()
        seen: list[tuple[float, object]] = []

        def settled() -> bool:
            """Segments come one by one; all are there when none has come for a while."""
            now, state = time.monotonic(), self._mapped(ranks)
            if not seen or seen[-1][1] != state:
                seen.append((now, state))
            return bool(state) and now - seen[-1][0] > SETTLED_S

        wait_for(settled, "staging is mapped and pinned", within_s)
        return seen[-1][0] - started

    def _mapped(self, ranks: int) -> list[int]:
        """Return how many segments each rank has mapped; nothing while one of them has none, or some not pinned."""
        rows = [row for row in self.rows() if row.get(facts.ROLE) == facts.RANK_CLIENT]
        mapped = [int(row.get(facts.SEGMENTS_MAPPED, 0)) for row in rows]
        pinned = [int(row.get(facts.SEGMENTS_PINNED, count)) for row, count in zip(rows, mapped, strict=True)]
        return mapped if len(rows) >= ranks and all(mapped) and mapped == pinned else []

    def wait_written(self, *, within_s: float = 120.0) -> None:
        """Return once everything that was filled is on the drives."""
        names = (facts.QUEUE_STORE, facts.IN_FLIGHT_WRITES, facts.SLOTS_FILLING)
        wait_for(lambda: all(self.total(name) == 0 for name in names), "everything is written", within_s)

    def wait_gone(self, *, within_s: float = 60.0) -> None:
        """Return once the pool has ended after its last client."""
        wait_for(lambda: not self.rows(), "the pool ends", within_s)

    def objects(self) -> list[Path]:
        """Return the published objects."""
        return [path for device in self.paths for path in device.rglob("*.bin") if ".kvpool" not in path.parts]

    def forget_objects(self) -> None:
        """Remove the objects, for room; their keys are not asked for again."""
        for path in self.objects():
            path.unlink(missing_ok=True)

    def alter(self) -> None:
        """Replace the payload of every object by noise of bfloat16 near one."""
        chance = np.random.default_rng(3)
        for path in self.objects():
            words = (path.stat().st_size - TRAILER_BYTES) // 2
            noise = chance.integers(0x3F00, 0x4000, words, dtype=np.uint16)
            with path.open("r+b") as file:
                file.write(noise.tobytes())


def wait_for(there: Any, what: str, within_s: float) -> None:
    """Return once *there()* is true; fail after *within_s*."""
    end = time.monotonic() + within_s
    while not there():
        if time.monotonic() > end:
            raise EngineFailed(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.05)


def prompt(seed: int, count: int, vocabulary: int) -> list[int]:
    """Return random tokens."""
    chance = random.Random(seed)
    return [chance.randrange(3, vocabulary) for _ in range(count)]


def flush(engine: Engine) -> None:
    """Take one more step: the last step's stores go out with the next."""
    engine.ask([5, 6, 7, 8, 9], 2)


# ------------------------------------------------------------ are the bytes right


def digests(host: Host) -> dict[str, Any]:
    """Compare every rank's KV blocks before their store with the same blocks after their load in a new engine."""
    length = 3000 if host.rehearse else 16384 + 100
    tokens = prompt(1, length, host.vocabulary)
    loadable = (length - 1) // CHUNK * CHUNK
    with host.pool() as pool:
        stored, _ = _watched(host, pool, tokens)
        objects = len(pool.objects())
        pool.wait_gone()
        loaded, answer = _watched(host, pool, tokens)
    ranks = []
    for before, after in zip(stored, loaded, strict=True):
        blocks = after["loaded"]
        ranks.append(
            {
                "blocks_stored": len(before["stored"]),
                "blocks_loaded": len(blocks),
                "distinct": len(set(blocks.values())),
                "equal": sum(before["stored"].get(name) == digest for name, digest in blocks.items()),
            }
        )
    good = all(0 < rank["blocks_loaded"] == rank["distinct"] == rank["equal"] for rank in ranks)
    return {
        "ok": good and answer.cached == loadable,
        "tokens_loaded": answer.cached,
        "tokens_expected": loadable,
        "objects": objects,
        "ranks": ranks,
    }


def _watched(host: Host, pool: HostPool, tokens: list[int]) -> tuple[list[dict[str, dict[str, str]]], Answer]:
    """Start an engine, watch its transfers, ask one prompt, end it; return digests a rank, and the answer."""
    with host.large(pool.connector()) as engine:
        engine.wait_up(within_s=400)
        pool.wait_ready(host.tp)
        engine.rpc("kvprobe_watch")
        answer = engine.ask(tokens, 1)
        flush(engine)
        pool.wait_written()
        return engine.rpc("kvprobe_take", within_s=300), answer


def outputs(host: Host) -> dict[str, Any]:
    """Compare greedy outputs from loaded KV with those of an engine without kvpool; and from altered bytes."""
    block = 128 if host.rehearse else 16
    prompts = [prompt(100 + index, 1500 + 37 * index, VOCABULARY) for index in range(4 if host.rehearse else 12)]
    heads = [tokens[: (len(tokens) - 1) // CHUNK * CHUNK] for tokens in prompts]
    with host.pool() as pool, ExitStack() as stack:
        plain = stack.enter_context(host.small(None))
        with host.small(pool.connector()) as engine:
            engine.wait_up(within_s=400)
            pool.wait_ready(host.tp)
            for head in heads:
                engine.ask(head, 1)
            flush(engine)
            pool.wait_written()
        plain.wait_up(within_s=400)
        expected = []
        for head, tokens in zip(heads, prompts, strict=True):
            plain.ask(head, 1)
            expected.append(plain.ask(tokens, 16))
        assert all(answer.cached >= len(head) - block for answer, head in zip(expected, heads, strict=True))
        pool.wait_gone()
        loaded = _answers(host, pool, prompts)
        pool.wait_gone()
        pool.alter()
        pool.write_config(host.staging, verify=False)
        control = _answers(host, pool, prompts)
    right = [answer.tokens == want.tokens for answer, want in zip(loaded, expected, strict=True)]
    differs = [answer.tokens != want.tokens for answer, want in zip(control, expected, strict=True)]
    counted = [answer.cached == len(head) for answer, head in zip(loaded, heads, strict=True)]
    return {
        "ok": all(right) and all(differs) and all(counted),
        "prompts": len(prompts),
        "equal": sum(right),
        "control_differs": sum(differs),
        "tokens_loaded": sum(answer.cached for answer in loaded),
        "tokens_expected": sum(map(len, heads)),
    }


def _answers(host: Host, pool: HostPool, prompts: list[list[int]]) -> list[Answer]:
    with host.small(pool.connector()) as engine:
        engine.wait_up(within_s=400)
        pool.wait_ready(host.tp)
        return [engine.ask(tokens, 16) for tokens in prompts]


def missing_rank(host: Host) -> dict[str, Any]:
    """Remove one rank's objects of a prefix: it must be a miss for all ranks."""
    tokens = prompt(7, 1500, VOCABULARY)
    with host.pool() as pool:
        with host.small(pool.connector()) as engine:
            engine.wait_up(within_s=400)
            pool.wait_ready(host.tp)
            engine.ask(tokens, 1)
            flush(engine)
            pool.wait_written()
        pool.wait_gone()
        victims = [path for path in pool.objects() if f"rank_{host.tp - 1}" in path.parts]
        for path in victims:
            path.unlink()
        answer = _answers(host, pool, [tokens])[0]
    return {"ok": bool(victims) and answer.cached == 0, "objects_removed": len(victims), "tokens_loaded": answer.cached}


def killed_rank(host: Host) -> dict[str, Any]:
    """Kill one rank during a load: the pool lives, its slots return, a new engine loads what was published."""
    length = 3000 if host.rehearse else 60_000
    tokens = prompt(8, length, host.vocabulary)
    loadable = (length - 1) // CHUNK * CHUNK
    with ExitStack() as stack:
        pool = stack.enter_context(host.pool())
        engine = stack.enter_context(host.large(pool.connector()))
        engine.wait_up(within_s=400)
        pool.wait_ready(host.tp)
        victim = int(engine.rpc("kvprobe_pid")[-1])
        engine.ask(tokens, 1)
        flush(engine)
        pool.wait_written()
        engine.reset()
        coordinator = _pids(pool, facts.COORDINATOR)
        # Another engine keeps the pool alive.
        stack.enter_context(host.small(pool.connector())).wait_up(within_s=400)
        engine.submit("load", tokens, 1)
        wait_for(lambda: pool.total(facts.IN_FLIGHT_READS) > 0, "the load reads", 30)
        os.kill(victim, signal.SIGKILL)
        error = engine.wait("load", within_s=120).error
        engine.kill_tree()
        busy = (facts.SLOTS_PINNED, facts.SLOTS_FILLING, facts.SLOTS_QUARANTINED)
        wait_for(lambda: all(pool.total(name) == 0 for name in busy), "slots return", 60)
        same_pool = coordinator == _pids(pool, facts.COORDINATOR)
        successor = stack.enter_context(host.large(pool.connector()))
        successor.wait_up(within_s=400)
        pool.wait_ready(2 * host.tp)
        answer = successor.ask(tokens, 1)
    return {"ok": same_pool and answer.cached == loadable, "error_told": error, "tokens_loaded": answer.cached}


def _pids(pool: HostPool, role: str) -> list[int]:
    return [int(row[facts.PID]) for row in pool.rows() if row.get(facts.ROLE) == role]


# ------------------------------------------------------------ what they cost


def first_token(host: Host) -> dict[str, Any]:
    """Measure time to first token: computed, from the engine's own cache, from the drives by kvpool."""
    rows = []
    with host.pool() as pool, host.large(pool.connector()) as engine:
        engine.wait_up(within_s=400)
        ready_s = pool.wait_ready(host.tp, within_s=300)
        _warm(host, engine)
        for length in host.lengths:
            samples: dict[str, list[float]] = {"recompute": [], "gpu": [], "kvpool": [], "kvpool_again": []}
            expected = (length - 1) // CHUNK * CHUNK
            dropped, resident, loaded = 0, 0, []
            for repeat in range(host.repeats):
                tokens = prompt(length * 10 + repeat, length, host.vocabulary)
                before = pool.total(facts.STORES_DROPPED)
                samples["recompute"].append(_first(engine, tokens))
                flush(engine)
                samples["gpu"].append(_first(engine, tokens))
                pool.wait_written()
                dropped += pool.total(facts.STORES_DROPPED) - before
                for name in ("kvpool", "kvpool_again"):
                    engine.reset()
                    had = pool.total(facts.LOADS_RESIDENT)
                    answer = engine.ask(tokens, 1)
                    samples[name].append(answer.first_s or 0.0)
                    loaded.append(answer.cached)
                    resident += pool.total(facts.LOADS_RESIDENT) - had
                pool.forget_objects()
            rows.append(
                {
                    "tokens": length,
                    **{name: round(statistics.median(times), 4) for name, times in samples.items()},
                    "loaded_as_expected": all(count == expected for count in loaded),
                    "objects_dropped": dropped,
                    "loads_resident": resident,
                    "samples": {name: [round(time_s, 4) for time_s in times] for name, times in samples.items()},
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return {"ok": all(row["loaded_as_expected"] for row in rows), "staging_ready_s": round(ready_s, 1), "rows": rows}


def native_tiers(host: Host) -> dict[str, Any]:
    """Measure time to first token of vLLM's own tiers, as `first_token` does: its CPU tier, its filesystem tier."""
    if host.rehearse:
        return {"ok": True, "skipped": "vLLM's own tiers need a GPU"}
    root = host.devices[0] / "native"
    tiers = {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 24 * GIB, "block_size": CHUNK,
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
    }  # fmt: skip
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": tiers}
    rows = []
    with host.large(connector) as engine:
        engine.wait_up(within_s=400)
        _warm(host, engine)
        for length in host.lengths:
            samples: dict[str, list[float]] = {"recompute": [], "gpu": [], "cpu": [], "disk": []}
            for repeat in range(host.repeats):
                tokens = prompt(length * 10 + repeat, length, host.vocabulary)
                samples["recompute"].append(_first(engine, tokens))
                time.sleep(1 + length / 20_000)  # its background stores; it does not say when they have ended
                flush(engine)
                samples["gpu"].append(_first(engine, tokens))
                engine.reset()
                samples["cpu"].append(_first(engine, tokens))
                engine.reset(connector=True)
                samples["disk"].append(_first(engine, tokens))
                engine.reset(connector=True)
                shutil.rmtree(root, ignore_errors=True)
                root.mkdir(parents=True, exist_ok=True)
            rows.append(
                {"tokens": length, **{name: round(statistics.median(times), 4) for name, times in samples.items()}}
            )
            print(json.dumps(rows[-1]), flush=True)
    shutil.rmtree(root, ignore_errors=True)
    return {"ok": True, "rows": rows}


def _warm(host: Host, engine: Engine) -> None:
    for index, length in enumerate((500, 1000) if host.rehearse else (2_000, 16_000)):
        engine.ask(prompt(900 + index, length, host.vocabulary), 1)


def _first(engine: Engine, tokens: list[int]) -> float:
    return engine.ask(tokens, 1).first_s or 0.0


def decode_steps(host: Host) -> dict[str, Any]:
    """Compare decode steps of 16 running requests with and without their prompts' stores behind them."""
    requests, length, steps = (4, 600, 40) if host.rehearse else (16, 4096, 256)
    rounds: list[dict[str, Any]] = []
    with host.pool() as pool, host.large(pool.connector()) as engine:
        engine.wait_up(within_s=400)
        pool.wait_ready(host.tp, within_s=300)
        _warm(host, engine)
        for turn in range(host.repeats + 1):
            for name, transfer in (("without", {"max_offload_tokens": 0}), ("with", None)):
                prompts = {
                    f"{name}-{turn}-{index}": prompt(
                        5000 + turn * 100 + index + 50 * (name == "with"), length, host.vocabulary
                    )
                    for index in range(requests)
                }
                before = pool.total(facts.BYTES_STORED)
                began = time.monotonic()
                engine.submit_all(prompts, steps, transfer=transfer)
                answers = [engine.wait(one) for one in prompts]
                took = time.monotonic() - began
                pool.wait_written()
                written_s = time.monotonic() - began
                times = _steps_together(answers)
                rounds.append(
                    {
                        "stores": name, "p50_ms": _percentile(times, 50), "p99_ms": _percentile(times, 99),
                        "steps": len(times), "stored_gb": round((pool.total(facts.BYTES_STORED) - before) / 1e9, 3),
                        "took_s": round(took, 2), "written_after_s": round(written_s, 2),
                    }
                )  # fmt: skip
                print(json.dumps(rounds[-1]), flush=True)
            pool.forget_objects()
    rounds = rounds[2:]  # the first turn warms up
    figures = {
        f"{name}_{which}": round(statistics.median(one[which] for one in rounds if one["stores"] == name), 3)
        for name in ("without", "with")
        for which in ("p50_ms", "p99_ms")
    }
    stored = [one["stored_gb"] for one in rounds if one["stores"] == "with"]
    none = [one["stored_gb"] for one in rounds if one["stores"] == "without"]
    return {
        "ok": min(stored) > 0 and max(none) == 0,
        **figures,
        "p50_ratio": round(figures["with_p50_ms"] / figures["without_p50_ms"], 3),
        "p99_ratio": round(figures["with_p99_ms"] / figures["without_p99_ms"], 3),
        "rounds": rounds,
    }


def _steps_together(answers: list[Answer]) -> list[float]:
    """Return the times between outputs, of all requests, from when the last of them had begun."""
    count = min(len(answer.steps_s) for answer in answers)
    last_start = max(answer.first_s or 0.0 for answer in answers)
    first_start = min(answer.first_s or 0.0 for answer in answers)
    # Requests that began early have steps that still shared the engine with prefills; leave those out.
    found = []
    for answer in answers:
        spare = last_start - (answer.first_s or first_start)
        passed, index = 0.0, 0
        while index < count and passed < spare:
            passed += answer.steps_s[index]
            index += 1
        found += answer.steps_s[index + 1 :]
    return found


def _percentile(times: list[float], which: int) -> float:
    return round(float(np.percentile(np.array(times), which)) * 1e3, 3) if times else 0.0
