"""
A real vLLM engine that takes JSON commands on standard input and answers on a descriptor of its own.

Theory. Starting an engine costs tens of seconds, so one engine serves many scenarios: its parent
(`tools/engine_process.py`) submits requests, aborts them, resets the prefix cache and reads counters
while others run. One JSON object a line each way. Every command is answered once, by `{"id": …,
"value": …}` or `{"id": …, "error": …}`; requests report themselves by `{"request": …, "event": …}`
with event `first` (first token) and `done`. Closing standard input ends the engine.

Does not cover: what the commands mean for a test; the tiny models.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import time
from typing import Any, cast

Command = dict[str, Any]


class Child:
    """The engine, its running requests, and the way back to the parent."""

    def __init__(self, engine: Any, reply_fd: int) -> None:
        self._engine = engine
        self._reply = os.fdopen(reply_fd, "w", buffering=1)
        self._requests: dict[str, asyncio.Task[None]] = {}

    def say(self, **message: Any) -> None:
        """Send one message to the parent."""
        self._reply.write(json.dumps(message) + "\n")

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Carry out commands until standard input closes or `quit` comes."""
        while line := await reader.readline():
            command = json.loads(line)
            if command["do"] == "quit":
                self.say(id=command["id"], value=None)
                return
            try:
                value = await self._carry_out(command)
            except Exception as error:  # noqa: BLE001 - process border: the parent decides what an error means
                self.say(id=command["id"], error=f"{type(error).__name__}: {error}")
            else:
                self.say(id=command["id"], value=value)

    async def _carry_out(self, command: Command) -> Any:
        match command["do"]:
            case "submit":
                for request in command["requests"]:
                    self._requests[request["name"]] = asyncio.create_task(self._run(**request))
                return None
            case "abort":
                return await self._engine.abort(command["name"])
            case "reset":
                return await self._engine.reset_prefix_cache(
                    command.get("running", False), command.get("connector", False)
                )
            case "counters":
                return _counters()
            case "metrics":
                return _metrics()
            case "rpc":
                return await self._engine.collective_rpc(command["method"], args=tuple(command.get("args", ())))
            case other:
                raise ValueError(f"no such command: {other}")

    async def _run(
        self, name: str, prompt: list[int], max_tokens: int, extra: dict[str, Any] | None = None, priority: int = 0
    ) -> None:
        """Run one request to its end and report it; *extra* goes to SamplingParams."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            **(extra or {}),
        )
        started, first, stamps, output = time.monotonic(), None, [], None
        try:
            async for output in self._engine.generate({"prompt_token_ids": prompt}, params, name, priority=priority):
                stamps.append(time.monotonic())
                if first is None and output.outputs[0].token_ids:
                    first = stamps[-1] - started
                    self.say(request=name, event="first", first_s=first)
        except Exception as error:  # noqa: BLE001 - process border: an engine that died or refused is a result too
            self.say(request=name, event="done", error=f"{type(error).__name__}: {error}", tokens=[], cached=0)
            return
        tokens = [] if output is None else list(output.outputs[0].token_ids)
        self.say(
            request=name,
            event="done",
            tokens=tokens,
            cached=0 if output is None else output.num_cached_tokens or 0,
            finish=None if output is None else output.outputs[0].finish_reason,
            first_s=first,
            total_s=time.monotonic() - started,
            steps_s=[after - before for before, after in itertools.pairwise(stamps)],
        )


def _counters() -> dict[str, float]:
    """Return the engine's counters and gauges by name, summed over their labels (with `name{source}` beside)."""
    from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

    found: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if isinstance(metric, Counter | Gauge):
            found[metric.name] = found.get(metric.name, 0) + metric.value
            for label in ("source", "transfer_type", "reason"):
                if label in metric.labels:
                    key = f"{metric.name}{{{metric.labels[label]}}}"
                    found[key] = found.get(key, 0) + metric.value
    return found


def _metrics() -> str:
    """Return what vLLM's `/metrics` would answer."""
    from prometheus_client import generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return generate_latest(get_prometheus_registry()).decode()


async def _main(settings: dict[str, Any], reply_fd: int) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = settings.pop("kv_transfer_config", None)
    arguments = AsyncEngineArgs(**settings, kv_transfer_config=KVTransferConfig(**transfer) if transfer else None)
    engine = AsyncLLM.from_engine_args(arguments)
    child = Child(engine, reply_fd)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    child.say(id=0, value="up")
    try:
        await child.serve(reader)
    finally:
        engine.shutdown()


def main() -> None:
    """Run the child; its parent wrote the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", required=True, help="JSON: arguments of vLLM's AsyncEngineArgs")
    parser.add_argument("--reply-fd", type=int, required=True)
    args = parser.parse_args()
    os.set_inheritable(args.reply_fd, False)
    # Terminated, it still ends the engine's own processes; by default it would leave them behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    asyncio.run(_main(cast(dict[str, Any], json.loads(args.settings)), args.reply_fd))


if __name__ == "__main__":
    main()
