"""Row 22: Python threads that do I/O starved on the interpreter lock beside the model."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.requests import AnnouncedRequests, Later
from kvpool.wire.messages import DeviceState
from tests.field.conftest import MakeWorld
from tests.process.real_pool import RealPool
from tests.unit.vllm_there import import_vllm

import_vllm()

from kvpool_vllm import scheduling
from tests.unit.vllm_world import CHUNK, FakePool

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
#: The threads of a client: jobs and copies; mapping and pinning; starting a pool. None of them does I/O.
THREADS = {"kvpool-rank", "kvpool-segments", "kvpool-start"}


def calls_of(what: Callable[[], object]) -> int:
    """Return how many functions *what* calls, of Python and of C."""
    count = 0

    def note(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        what()
    finally:
        sys.setprofile(None)
    return count


def opens_below(directory: Path) -> list[str]:
    """Return a list that gets each path below *directory* that this process opens from now on."""
    opened: list[str] = []

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).startswith(str(directory)):
            opened.append(str(args[0]))

    sys.addaudithook(note)  # it stays; nobody opens anything there after the test
    return opened


@pytest.mark.parametrize("why", ["unanswered", "deferred"])
def test_row_22_a_poll_of_a_waiting_request_costs_the_scheduler_nothing_per_block(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(FakePool, "answered", lambda _, request: why == "deferred")
    monkeypatch.setattr(scheduling, "RETRY_EVERY_S", 600.0)
    monkeypatch.setattr(scheduling, "WAIT_S_MAX", 0.0)
    world = make_world()
    world.pool.states = {0: DeviceState(device=0, healthy=True, read_bytes_per_s=1.0, backlog_bytes=0)}
    if why == "deferred":
        world.add("first", 2 * CHUNK + 10)
        world.hit("first")
        assert world.step().loads
    else:
        world.pool.default = Later(0, "unanswered")
    for name, chunks in (("short", 2), ("long", 30)):
        world.add(name, chunks * CHUNK + 10)
        if why == "deferred":
            world.hit(name)
    world.step()
    polls = []
    for name in ("short", "long"):
        request = world.scheduler.requests[name]
        assert (None, False) == world.connector.get_num_new_matched_tokens(request, 0)
        polls.append(calls_of(lambda r=request: world.connector.get_num_new_matched_tokens(r, 0)))  # type: ignore[misc]
    assert polls[0] == polls[1]
    assert polls[0] < 100


def test_row_22_asking_whether_the_pool_has_answered_costs_nothing_per_key() -> None:
    table = AnnouncedRequests()
    table.pool_joined(0, now_ns=0)
    for request, count in (("short", 2), ("long", 2000)):
        table.announce(request, [b"%d" % number for number in range(count)], 0, now_ns=0)
    costs = [calls_of(lambda r=request: table.answered(r, now_ns=1)) for request in ("short", "long")]  # type: ignore[misc]
    assert costs[0] == costs[1]


def test_row_22_the_engines_processes_open_no_object_and_have_no_thread_that_would(
    tmp_path: Path,
) -> None:
    pool = RealPool(tmp_path, devices=("d0",))
    try:
        rank = pool.start_rank()
        pool.stored(rank, range(8))
        opened = opens_below(tmp_path)
        for first in (0, 4):
            assert () == pool.end_of(rank, pool.load(rank, range(first, first + 4))).failed
        pool.stored(rank, range(8, 12))
        assert [] == [path for path in opened if path.endswith(".bin")]
        assert os.getpid() not in {int(row["pid"]) for row in pool.worker_rows()}
        running = {thread.name for thread in threading.enumerate() if thread.name.startswith("kvpool")}
        assert THREADS >= running
    finally:
        pool.close()
