"""Traces, and the simulated machine that the planner is tuned on."""

import json
import math
import sys
from pathlib import Path

import pytest

from kvpool.core.planner import Planner
from tools import trace_sim
from tools.trace_world import POLICIES, Outcome, World
from tools.traces import CHUNK_TOKENS, Request, at_rate, convert_block_hashes, read_trace, synthetic, write_trace


def run(trace: list[Request], policy: str, *, gpu: str = "h200", drive: float = 6.0, seed: int = 1) -> Outcome:
    return World(trace_sim.machine_of(gpu, drive), trace, policy, seed, Planner()).run()


def test_a_seed_gives_the_same_trace_and_another_one_another() -> None:
    assert synthetic(50, 1) == synthetic(50, 1)
    assert synthetic(50, 1) != synthetic(50, 2)


def test_requests_share_the_chunks_of_what_they_continue_only() -> None:
    requests = synthetic(400, 3)
    seen: set[int] = set()
    hits = 0
    for request in requests:
        assert request.tokens // CHUNK_TOKENS == len(request.chunks)
        assert len(set(request.chunks)) == len(request.chunks)
        known = [chunk in seen for chunk in request.chunks]
        assert known == sorted(known, reverse=True), "a hit is a prefix"
        hits += sum(known)
        seen.update(request.chunks)
    assert 0.3 < hits / sum(len(request.chunks) for request in requests) < 0.95


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = at_rate(synthetic(20, 1), 2.0)
    write_trace(tmp_path / "t.jsonl", trace)
    found = read_trace(tmp_path / "t.jsonl")
    assert [(r.tokens, r.chunks, r.output_tokens) for r in trace] == [
        (r.tokens, r.chunks, r.output_tokens) for r in found
    ]
    assert [r.arrival_s for r in trace] == pytest.approx([r.arrival_s for r in found], abs=1e-5)


def test_block_hashes_become_chunks_that_are_equal_where_prefixes_are() -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 1300, "output_length": 5, "hash_ids": [1, 2, 9]},
        {"timestamp": 1600, "input_length": 1300, "output_length": 5, "hash_ids": [7, 2, 9]},
    ]
    first, second, third = convert_block_hashes(map(json.dumps, rows), block_tokens=512)
    assert (4, 5, 1.5) == (len(first.chunks), len(second.chunks), second.arrival_s)
    assert first.chunks == second.chunks[:4]
    assert not set(second.chunks) & set(third.chunks)


def test_a_request_alone_is_computed_in_its_prefill_time() -> None:
    found = run([Request(0.0, 16_384, tuple(range(64)), 1)], "planner")
    assert math.isclose(0.536, found.first_s[0], rel_tol=0.1)


def test_a_request_alone_that_comes_again_takes_the_cheaper_way() -> None:
    trace = [Request(at_s, 16_384, tuple(range(63)), 1) for at_s in (0.0, 100.0)]
    load, compute = run(trace, "off").first_s[1], run(trace, "never").first_s[1]
    assert load < compute
    assert math.isclose(load, run(trace, "planner").first_s[1], rel_tol=0.25)
    slow = {policy: run(trace, policy, drive=0.5).first_s[1] for policy in ("off", "never", "planner")}
    assert slow["never"] < slow["off"]
    assert math.isclose(slow["never"], slow["planner"], rel_tol=0.25)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_and_nothing_is_held_at_the_end(policy: str) -> None:
    trace = at_rate(synthetic(60, 2), 3.0)
    world = World(trace_sim.machine_of("h200", 6.0), trace, policy, 2, Planner())
    found = world.run()
    assert len(trace) == len(found.first_s)
    assert all(first_s > 0 for first_s in found.first_s)
    assert not world.queue and not world.running
    assert world.staging_free == pytest.approx(world.machine.staging_bytes)


def test_the_planner_is_no_worse_than_the_better_fixed_policy_in_a_short_run_of_a_cell() -> None:
    machine = trace_sim.machine_of("h200", 6.0)
    trace, better = trace_sim.busy_trace(machine, 150, 4)
    means = {policy: trace_sim.mean(trace_sim.run(machine, trace, policy, 4)) for policy in ("off", "never", "planner")}
    assert better in ("off", "never")
    assert means["planner"] <= 1.02 * min(means["off"], means["never"])


def test_the_command_writes_a_trace_and_replays_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(tmp_path / "t.jsonl")
    monkeypatch.setattr(sys, "argv", ["trace_sim.py", "generate", trace, "--requests", "30", "--rate", "2"])
    trace_sim.main()
    monkeypatch.setattr(sys, "argv", ["trace_sim.py", "replay", trace, "--drive", "12"])
    trace_sim.main()
    printed = capsys.readouterr().out
    assert "| h200 | 12.0 |" in printed
    assert "planner: read " in printed
