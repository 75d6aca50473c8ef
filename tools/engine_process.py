"""
Start a real vLLM engine in a process of its own and talk to it.

Covers: the parent's side of `tools/engine_child.py`: start, requests and their results, commands, a
clean end, a violent end of the whole process tree. Every wait has a time limit.
Does not cover: pools, files, faults (`tests/e2e/`).
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).resolve().parent.parent
CHILD = Path(__file__).resolve().parent / "engine_child.py"
#: Its `sitecustomize` keeps ranks from yielding.
NO_YIELD = Path(__file__).resolve().parent / "no_yield"

#: Longest silence of an engine before the parent calls it hung, seconds.
ANSWER_S = 120.0


class EngineFailed(Exception):  # noqa: N818 - a fact about the engine
    """The engine ended, refused a command, or did not answer in time; the message ends with its log."""


@dataclass(frozen=True, slots=True)
class Answer:
    """
    One finished request.

    Attributes:
        tokens: The generated token ids.
        cached: Prompt tokens that were not computed: from the engine's own cache or from the connector.
        first_s, total_s: Time to first token and to the end, seconds.
        steps_s: Time between one output and the next, seconds.
        finish: vLLM's finish reason; None after an abort or an error.
        error: What the engine said instead of an answer.
    """

    tokens: list[int]
    cached: int
    first_s: float | None = None
    total_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None


def cpu_environment(*, tp: int = 1) -> dict[str, str]:
    """Return the environment of a CPU engine on a small machine; *tp* ranks get one core each."""
    binding = "|".join(str(core) for core in range(tp)) if tp > 1 else "auto"
    return {
        "PYTHONPATH": str(NO_YIELD),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        # With a connector vLLM would keep another core free, and compute with fewer threads than without.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }


def engine_settings(model: Path, **changes: Any) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for a model without tokenizer, changed by *changes*."""
    settings: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "seed": 0,
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
    }
    return settings | changes


class Engine:
    """A running engine. Use it as a context manager, or end it with :meth:`close` or :meth:`kill_tree`."""

    def __init__(self, settings: dict[str, Any], *, log: Path, environment: dict[str, str] | None = None) -> None:
        """Start it in the background; :meth:`wait_up` says when it takes requests."""
        self.log = log
        self._answers: dict[str, Answer] = {}
        self._first: dict[str, float] = {}
        self._values: dict[int, dict[str, Any]] = {}
        self._commands = 0
        self._unread = b""
        environment = environment or {}
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")])]
        full = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
        self._reply, theirs = os.pipe()
        try:
            with log.open("ab") as stream:
                self.process = subprocess.Popen(
                    [sys.executable, str(CHILD), "--settings", json.dumps(settings), "--reply-fd", str(theirs)],
                    stdin=subprocess.PIPE, stdout=stream, stderr=stream, pass_fds=[theirs], env=full,
                    start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ life

    def wait_up(self, *, within_s: float = 400.0) -> "Engine":
        """Return once the engine takes requests."""
        self._wait(lambda: 0 in self._values, "start", within_s)
        return self

    def close(self, *, within_s: float = 60.0) -> None:
        """End the engine as a user would; kill its tree when that takes too long."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill_tree()
        self._forget_pipe()

    def tree(self) -> list[int]:
        """Return the pids of the engine and of everything that it has started and that still belongs to it."""
        try:
            mother = psutil.Process(self.process.pid)
            return [mother.pid, *(child.pid for child in mother.children(recursive=True))]
        except psutil.NoSuchProcess:
            return []

    def kill_tree(self) -> list[int]:
        """SIGKILL the engine's whole process tree at once; return the pids."""
        pids = self.tree()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._forget_pipe()
        return pids

    def _forget_pipe(self) -> None:
        if self._reply >= 0:
            os.close(self._reply)
            self._reply = -1

    # ------------------------------------------------------------ requests

    def submit(
        self, name: str, prompt: Sequence[int], max_tokens: int = 8, *, transfer: dict[str, Any] | None = None
    ) -> None:
        """Start a request; *transfer* is vLLM's `kv_transfer_params`."""
        self.submit_all({name: prompt}, max_tokens, transfer=transfer)

    def submit_all(
        self,
        prompts: Mapping[str, Sequence[int]],
        max_tokens: int = 8,
        *,
        transfer: dict[str, Any] | None = None,
        priorities: Mapping[str, int] | None = None,
    ) -> None:
        """Start several requests with one command, in order; *priorities* where the engine schedules by them."""
        extra = {"extra_args": {"kv_transfer_params": transfer}} if transfer else None
        requests = [
            {
                "name": name,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "extra": extra,
                "priority": (priorities or {}).get(name, 0),
            }
            for name, prompt in prompts.items()
        ]
        for name in prompts:
            self._answers.pop(name, None)
            self._first.pop(name, None)
        self._ask("submit", requests=requests)

    def wait(self, name: str, *, within_s: float = ANSWER_S) -> Answer:
        """Return the answer of a request that was submitted."""
        self._wait(lambda: name in self._answers, f"answer to request {name}", within_s)
        return self._answers[name]

    def answered(self, name: str) -> bool:
        """Say whether that request has ended, as far as is known now."""
        self._read(0)
        return name in self._answers

    def wait_first(self, name: str, *, within_s: float = ANSWER_S) -> float:
        """Return the time to first token of a submitted request as soon as it is there, seconds."""
        self._wait(lambda: name in self._first or name in self._answers, f"first token of {name}", within_s)
        return self._first.get(name, -1.0)

    def generate(self, prompts: Mapping[str, Sequence[int]], max_tokens: int = 8) -> dict[str, Answer]:
        """Run requests together and return their answers by name."""
        self.submit_all(prompts, max_tokens)
        return {name: self.wait(name) for name in prompts}

    def ask(self, prompt: Sequence[int], max_tokens: int = 8) -> Answer:
        """Run one request alone."""
        name = f"ask-{self._commands}"
        return self.generate({name: prompt}, max_tokens)[name]

    def abort(self, name: str) -> None:
        """Abort a running request."""
        self._ask("abort", name=name)

    def reset(self, *, connector: bool = False, running: bool = False) -> bool:
        """Empty the engine's own prefix cache; with *connector* tell the connector too."""
        return bool(self._ask("reset", connector=connector, running=running))

    def counters(self) -> dict[str, float]:
        """Return the engine's Prometheus counters and gauges by name."""
        return dict(self._ask("counters"))

    def metrics(self) -> str:
        """Return what the engine's `/metrics` would answer, in Prometheus' text format."""
        return str(self._ask("metrics"))

    def external_tokens(self) -> int:
        """Return how many prompt tokens the connector has supplied since the start."""
        return int(self.counters().get("vllm:external_prefix_cache_hits", 0))

    def rpc(self, method: str, *args: Any, within_s: float = ANSWER_S) -> list[Any]:
        """Call a method of every worker (see vLLM's `worker_extension_cls`); one value a rank."""
        return list(self._ask("rpc", method=method, args=list(args), within_s=within_s))

    # ------------------------------------------------------------ the pipe

    def _ask(self, what: str, *, within_s: float = ANSWER_S, **arguments: Any) -> Any:
        self._commands += 1
        number = self._commands
        line = json.dumps({"id": number, "do": what, **arguments}) + "\n"
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._failed(f"{what}: the engine has ended") from None
        self._wait(lambda: number in self._values, f"answer to {what}", within_s)
        message = self._values.pop(number)
        if "error" in message:
            raise self._failed(f"{what}: {message['error']}")
        return message["value"]

    def _wait(self, there: Any, what: str, within_s: float) -> None:
        end = time.monotonic() + within_s
        while not there():
            left = end - time.monotonic()
            if left <= 0:
                raise self._failed(f"no {what} within {within_s:.0f} s")
            if not self._read(min(left, 5.0)) and self.process.poll() is not None:
                raise self._failed(f"waiting for {what}: the engine ended with {self.process.returncode}")

    def _read(self, within_s: float) -> bool:
        """Take in what the child says within that time; False when it says nothing more at all."""
        readable, _, _ = select.select([self._reply], [], [], within_s)
        if not readable:
            return self.process.poll() is None
        data = os.read(self._reply, 1 << 20)
        self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return bool(data)

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._values[message["id"]] = message
        elif message["event"] == "first":
            self._first[message["request"]] = message["first_s"]
        else:
            name = message.pop("request")
            del message["event"]
            self._answers[name] = Answer(**message)

    def _failed(self, what: str) -> EngineFailed:
        tail = self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""
        return EngineFailed(f"{what}\n--- end of {self.log}\n{tail}")
