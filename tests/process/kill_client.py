"""
One client of a pool as a process of its own, so that it can be killed: a rank, or a scheduler, without an engine.

    python -m tests.process.kill_client ROLE ENGINE CONFIG_JSON

Reads one command a line from standard input and writes one event a line to standard output, both JSON. It ends with its
standard input. What object *number* holds depends on the version of the weights, so that old bytes are told from new.
"""

import json
import os
import select
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from kvpool import config
from kvpool.client.copier import Copy, MemoryCopier
from kvpool.client.launch import ClientConfig
from kvpool.client.rank import LoadObject, RankClient, StoreObject
from kvpool.client.scheduler import SchedulerClient
from tests.process.kill_objects import OBJECT_BYTES, SPEC, key_of, payload_of

_PIECES = 8
_LOOK_S = 0.003


class SlowCopier(MemoryCopier):
    """Copies piece by piece, with pauses in between, on a thread of its own: a copy that is under way for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.pause_s = 0.0
        self.running: set[threading.Thread] = set()

    def load(self, copies: Sequence[Copy]) -> object:
        return self._slowly(copies, super().load) if self.pause_s else super().load(copies)

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        return self._slowly(copies, lambda part: super(SlowCopier, self).store(part, None))

    def ended(self, ticket: object) -> bool:
        if isinstance(ticket, threading.Thread) and ticket.is_alive():
            return False
        self.running.discard(ticket)  # type: ignore[arg-type]
        return True

    def wait(self, ticket: object) -> None:
        if isinstance(ticket, threading.Thread):
            ticket.join()

    def _slowly(self, copies: Sequence[Copy], move: Any) -> object:
        if not self.pause_s:
            return move(copies)
        thread = threading.Thread(target=self._run, args=(copies, move, self.pause_s), daemon=True)
        self.running.add(thread)
        thread.start()
        return thread

    def _run(self, copies: Sequence[Copy], move: Any, pause_s: float) -> None:
        step = -(-OBJECT_BYTES // _PIECES)
        for first in range(0, OBJECT_BYTES, step):
            move([Copy(copy.segment, copy.offset + first, copy.place[first : first + step]) for copy in copies])  # type: ignore[index]
            time.sleep(pause_s / _PIECES)


def say(**event: Any) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class Rank:
    """Commands: store, load, pause, state. Events: the end of a job, with what was wrong."""

    def __init__(self, settings: ClientConfig, engine: str) -> None:
        self.copier = SlowCopier()
        self.client = RankClient(settings, SPEC, engine=engine, rank=0, copier=self.copier)
        self._loads: dict[int, tuple[list[int], int, list[bytearray]]] = {}

    def do(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "store":
                objects = [
                    StoreObject(
                        key_of(number), number % 2, memoryview(bytearray(payload_of(number, command["version"])))
                    )
                    for number in command["numbers"]
                ]
                self.client.submit_store(command["job"], f"s{command['job']}", objects, None, epoch=command["epoch"])
            case "load":
                places = [bytearray(OBJECT_BYTES) for _ in command["numbers"]]
                self._loads[command["job"]] = (command["numbers"], command["version"], places)
                objects = [
                    LoadObject(key_of(number), number % 2, memoryview(place))
                    for number, place in zip(command["numbers"], places, strict=True)
                ]
                self.client.submit_load(command["job"], objects, epoch=command["epoch"])
            case "pause":
                self.copier.pause_s = command["seconds"]

    def look(self) -> None:
        for ended in self.client.take_ended():
            numbers, version, places = self._loads.pop(ended.job, ([], 0, []))
            failed = {index: code.name for index, code in ended.failed}
            wrong = [
                number
                for index, (number, place) in enumerate(zip(numbers, places, strict=True))
                if index not in failed and bytes(place) != payload_of(number, version)
            ]
            say(job=ended.job, failed=failed, wrong=wrong, objects=ended.objects)

    def state(self) -> dict[str, Any]:
        return {"up": self.client.wait_connected(0), "copying": len(self.copier.running)}

    def close(self) -> None:
        self.client.close()


class Scheduler:
    """Commands: announce, withdraw, reset, state."""

    def __init__(self, settings: ClientConfig, engine: str) -> None:
        self.client = SchedulerClient(settings, SPEC, engine=engine)

    def do(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "announce":
                self.client.announce(command["request"], [key_of(number) for number in command["numbers"]])
            case "withdraw":
                self.client.withdraw(command["request"])
            case "reset":
                self.client.reset()

    def look(self) -> None:
        self.client.pump()

    def state(self) -> dict[str, Any]:
        return {"up": self.client.connected, "epoch": self.client.epoch}

    def close(self) -> None:
        self.client.close()


def main(role: str, engine: str, config_json: str) -> None:
    """Serve until standard input ends; tell every change of the client's state."""
    settings = config.from_json(config_json)
    there = ClientConfig(run_dir=settings.pool.run_dir, settings=settings, autostart=True)
    client = Rank(there, engine) if role == "rank" else Scheduler(there, engine)
    told: dict[str, Any] = {}
    buffer = b""
    while True:
        if select.select([0], [], [], _LOOK_S)[0]:
            data = os.read(0, 1 << 20)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                client.do(json.loads(line))
        client.look()
        state = client.state()
        if state != told:
            told = state
            say(state=state)
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
