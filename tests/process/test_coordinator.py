"""The coordinator as a process, with stand-ins for the I/O workers: what peers see of it."""

import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvpool.errors import Exit, PeerGone, PoolUnavailable
from kvpool.io import channel
from kvpool.wire import messages as m
from tests.process.pool_harness import MIB, ROOT, PoolProcess, Talker, held, namespace, wait_until

Start = Callable[..., PoolProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start coordinators that end with the test."""
    pools: list[PoolProcess] = []

    def begin(**options: Any) -> PoolProcess:
        pools.append(PoolProcess(tmp_path, **options))
        return pools[-1]

    yield begin
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(start: Start) -> PoolProcess:
    return start()


def refused(pool: PoolProcess, hello: m.Message) -> m.Refused:
    talker = pool.connect()
    talker.send(hello)
    refusal, _ = talker.wait(m.Refused)
    talker.wait_hang_up()
    return refusal


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


# ---------------------------------------------------------------- attaching


def test_two_ranks_and_a_scheduler_attach(pool: PoolProcess) -> None:
    ranks = [pool.attach("rank", rank) for rank in (0, 1)]
    scheduler = pool.attach("scheduler")
    assert [["d0", "d1"]] * 2 == [rank.welcome.devices for rank in ranks]
    assert len({rank.welcome.generation for rank in ranks}) == 1
    assert len({talker.welcome.client for talker in [*ranks, scheduler]}) == 3
    for rank in ranks:
        for device in (0, 1):
            worker, _ = pool.worker_of(rank, device)
            wait_until(lambda worker=worker: held(worker))
    scheduler.wait(m.DevicesChanged, lambda told: all(state.healthy for state in told.devices))


def test_every_rank_maps_every_segment_before_its_worker_can_name_it(pool: PoolProcess) -> None:
    rank = pool.attach("rank", 0)
    late = None
    for device in (0, 1):
        worker, _ = pool.worker_of(rank, device)
        wait_until(lambda worker=worker: held(worker))
        late = late or pool.attach("rank", 1)
        for number in held(worker):
            for mapper in (rank, late):
                up, fds = mapper.wait(m.SegmentUp, lambda up, number=number: up.segment == number)
                assert up.segment_bytes == os.fstat(fds[0]).st_size
                os.close(fds[0])


def test_staging_is_used_whole_and_has_no_name(pool: PoolProcess) -> None:
    pool.attach("rank", 0)
    facts = wait_until(lambda: (facts := pool.health()[0])["staging_ready_bytes"] > 15 * MIB and facts)
    assert facts["staging_ready_bytes"] <= facts["staging_bytes"] == 16 * MIB
    assert [] == [name for name in os.listdir("/dev/shm") if name.startswith("kvpool")]


def test_a_second_coordinator_of_the_same_place_ends_at_once(pool: PoolProcess, start: Start) -> None:
    pool.connect()
    second = start()
    assert Exit.ALREADY_RUNNING == second.popen.wait(10)
    assert is_alive(pool.popen.pid)


def test_a_left_over_socket_is_replaced(pool: PoolProcess, start: Start) -> None:
    pool.connect()
    pool.popen.kill()
    pool.popen.wait()
    assert stat.S_ISSOCK(os.stat(f"{pool.run_dir}/pool.sock").st_mode)
    assert start().attach("admin").welcome.generation > 0


def test_its_directory_is_private(pool: PoolProcess) -> None:
    pool.connect()
    assert 0o700 == stat.S_IMODE(os.stat(pool.run_dir).st_mode)


@pytest.mark.parametrize("mode", [0o755, 0o710])
def test_a_directory_open_to_others_is_refused(start: Start, tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    pool = start()
    assert Exit.CONFIG == pool.popen.wait(10)
    assert "chmod 700" in pool.log()


# ---------------------------------------------------------------- refusing


def test_another_protocol_is_refused_with_both_numbers(pool: PoolProcess) -> None:
    context = refused(pool, pool.hello("admin", protocol=99)).context
    assert (m.PROTOCOL_VERSION, 99) == (context["pool_protocol"], context["client_protocol"])


def test_a_rank_beyond_the_world_is_refused(pool: PoolProcess) -> None:
    assert "rank_count" in refused(pool, pool.hello("rank", 2)).message


def test_a_second_owner_of_a_rank_is_refused(pool: PoolProcess) -> None:
    pool.attach("rank", 0)
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.process.pool_harness import PoolProcess, Talker, channel
import types
talker = Talker(channel.connect({pool.run_dir + "/pool.sock"!r}))
talker.send(PoolProcess.hello(None, "rank", 0))
from kvpool.wire import messages as m
print(talker.wait(m.Refused)[0].message)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert "attached already" in told.stdout


def test_ranks_of_one_engine_must_agree_on_the_namespace(pool: PoolProcess) -> None:
    pool.attach("rank", 0)
    assert "another namespace" in refused(pool, pool.hello("rank", 1, namespace=namespace("b"))).message


def test_one_fingerprint_means_one_namespace(pool: PoolProcess) -> None:
    pool.attach("rank", 0)
    other = pool.hello("rank", 0, engine="engine-1", namespace=namespace(object_bytes=(5000,)))
    assert "groups" in refused(pool, other).context["different"]


@pytest.mark.parametrize(
    "spoilt", [{"fingerprint": "A" * 64}, {"model_name": "../up"}, {"dtype": "a/b"}, {"groups": []}, {"rank_count": 0}]
)
def test_an_unsound_namespace_is_refused(pool: PoolProcess, spoilt: dict[str, Any]) -> None:
    spec = m.msgspec.structs.replace(namespace(), **spoilt)
    refused(pool, pool.hello("rank", 0, namespace=spec))
    assert 0 == pool.health()[0]["clients"]


def test_a_namespace_too_large_for_staging_is_refused_with_the_number_needed(pool: PoolProcess) -> None:
    refusal = refused(pool, pool.hello("rank", 0, namespace=namespace(object_bytes=(8 * MIB,))))
    assert 2 * 2 * (8 * MIB + 4096) == refusal.context["needed_bytes"]


def test_a_foreign_user_is_refused(pool: PoolProcess, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    pool.connect()
    code = f"""
import os, socket
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
directory = os.open({pool.run_dir!r}, os.O_PATH | os.O_DIRECTORY)
os.fchdir(os.open({pool.run_dir!r}, os.O_RDONLY))
os.chmod({pool.run_dir!r}, 0o777); os.chmod("pool.sock", 0o777)
os.setuid(65534)
sock.connect("pool.sock")
print(sock.recv(65536))
print(sock.recv(65536))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert "own user" in told.stdout
    assert told.stdout.endswith("b''\n")
    assert "uid=65534" in pool.log()


def test_who_does_not_greet_is_dropped(pool: PoolProcess) -> None:
    talker = pool.connect()
    refusal, _ = talker.wait(m.Refused)
    assert "no Hello" in refusal.message


# ---------------------------------------------------------------- bad frames


@pytest.mark.parametrize("frame", [b"\xc1", b"x" * 70_000, b"\x81\xa4type\xa4Nope", b"\x81\xa4type\xa5Hello"])
def test_a_malformed_frame_closes_that_peer_only(pool: PoolProcess, frame: bytes) -> None:
    other = pool.attach("scheduler")
    for greeted in (False, True):
        peer = pool.attach("rank", 0) if greeted else pool.connect()
        raw = socket.socket(fileno=os.dup(peer.channel.fileno()))
        raw.send(frame)
        raw.close()
        peer.wait_hang_up()
    other.send(m.Announce(request="r", first=0, keys=[b"a"]))
    assert 1 == len(other.wait(m.Status)[0].flags)
    assert wait_until(lambda: pool.health()[0]["peers_refused"] == 2)


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("rank", m.Announce(request="r", first=0, keys=[])),
        ("scheduler", m.CopiesEnded(device=0, worker_generation=1)),
        ("rank", m.StopWanted()),
        ("scheduler", m.Announce(request="r", first=5, keys=[b"a"])),
    ],
)
def test_a_message_out_of_role_or_order_closes_that_peer(pool: PoolProcess, role: str, message: m.Message) -> None:
    peer = pool.attach(role, 0 if role == "rank" else -1)
    peer.send(message)
    peer.wait_hang_up()
    assert is_alive(pool.popen.pid)


def test_a_scheduler_that_does_not_read_is_dropped_and_harms_nobody(pool: PoolProcess) -> None:
    deaf = pool.attach("scheduler")
    with contextlib.suppress(PeerGone):
        for _ in range(20_000):
            deaf.send(m.Announce(request="r", first=0, keys=[b"a"]))
            while not deaf.channel.flush():
                select.select([], [deaf.channel], [])
    assert wait_until(lambda: pool.health()[0]["clients"] == 0)
    assert 1 == pool.health()[0]["peers_dropped"]


# ---------------------------------------------------------------- the index


def test_stored_keys_are_told_to_who_announced_them(pool: PoolProcess) -> None:
    scheduler, rank = pool.attach("scheduler"), pool.attach("rank", 0)
    worker, _ = pool.worker_of(rank, 1)
    scheduler.send(m.Announce(request="r", first=0, keys=[b"a", b"b"]))
    assert b"\0\0" == scheduler.wait(m.Status)[0].flags
    worker.send(m.Store(job=1, store=1, first=0, keys=[b"a"]))
    assert [m.KeyState(b"a", m.STORED, 1)] == scheduler.wait(m.KeysChanged)[0].entries
    assert [b"a"] == scheduler.wait(m.StoresEnded)[0].kept


def test_a_scan_that_has_not_ended_is_helped_by_a_probe(start: Start) -> None:
    pool = start(environment={"FAKE_SCAN": "never"})
    scheduler = pool.attach("scheduler")
    scheduler.wait(m.DevicesChanged, lambda told: all(state.healthy for state in told.devices))
    scheduler.send(m.Announce(request="r", first=0, keys=[b"disk", b"none"]))
    assert not scheduler.wait(m.Status)[0].complete
    assert bytes([m.STORED, 0]) == scheduler.wait(m.Status, lambda status: status.complete)[0].flags


# ---------------------------------------------------------------- a worker dies


def kill_worker(pool: PoolProcess, device: int) -> int:
    pid = int(pool.worker_rows()[device]["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_killed_worker_is_mourned_and_started_again(pool: PoolProcess) -> None:
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    worker, generation = pool.worker_of(rank, 0)
    scheduler.send(m.Announce(request="r", first=0, keys=[b"a"]))
    worker.send(m.Store(job=1, store=1, first=0, keys=[b"a"]))
    scheduler.wait(m.KeysChanged)
    kill_worker(pool, 0)
    down, _ = rank.wait(m.WorkerDown)
    assert (0, generation) == (down.device, down.worker_generation)
    assert [m.KeyState(b"a", 0, 255)] == scheduler.wait(m.KeysChanged)[0].entries
    scheduler.wait(m.DevicesChanged, lambda told: not told.devices[0].healthy)
    _, successor = pool.worker_of(rank, 0)
    assert successor > generation
    assert 1 == pool.worker_rows()[0]["restarts"]


def test_a_dead_workers_segments_wait_for_every_rank(pool: PoolProcess) -> None:
    ranks = [pool.attach("rank", rank) for rank in (0, 1)]
    worker, generation = pool.worker_of(ranks[0], 0)
    pool.worker_of(ranks[1], 0)
    before = wait_until(lambda: len(found := held(worker)) == 9 and found)
    kill_worker(pool, 0)
    successor, _ = pool.worker_of(ranks[0], 0)
    assert {} == held(successor)
    ranks[0].send(m.CopiesEnded(device=0, worker_generation=generation))
    time.sleep(0.2)
    assert {} == held(successor)
    assert len(before) == pool.health()[0]["segments_quarantined"]
    ranks[1].send(m.CopiesEnded(device=0, worker_generation=generation))
    assert before == wait_until(lambda: held(successor))


def test_a_dead_workers_segments_wait_for_its_ring(start: Start) -> None:
    pool = start(devices=("d0",), environment={"FAKE_RING": "held"})
    rank = pool.attach("rank", 0)
    worker, generation = pool.worker_of(rank, 0)
    before = wait_until(lambda: len(found := held(worker)) == 9 and found)
    holders = [int(row["ring_holder"]) for row in pool.worker_rows()]
    try:
        kill_worker(pool, 0)
        successor, _ = pool.worker_of(rank, 0)
        rank.send(m.CopiesEnded(device=0, worker_generation=generation))
        time.sleep(0.3)
        assert {} == held(successor)
        os.kill(holders[0], signal.SIGKILL)
        assert before == wait_until(lambda: held(successor))
    finally:
        rows = pool.worker_rows()
        for pid in {*holders, *(int(row["ring_holder"]) for row in rows)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_rank_that_died_is_proof_enough(pool: PoolProcess) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.process.pool_harness import PoolProcess, Talker, channel
from kvpool.wire import messages as m
talker = Talker(channel.connect({pool.run_dir + "/pool.sock"!r}))
talker.send(PoolProcess.hello(None, "rank", 1))
talker.wait(m.WorkerUp, lambda up: up.device == 0)
print("attached", flush=True)
time.sleep(60)
"""
    rank = pool.attach("rank", 0)
    worker, generation = pool.worker_of(rank, 0)
    before = wait_until(lambda: len(found := held(worker)) == 9 and found)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert b"attached\n" == other.stdout.readline()
        kill_worker(pool, 0)
        successor, _ = pool.worker_of(rank, 0)
        rank.send(m.CopiesEnded(device=0, worker_generation=generation))
        time.sleep(0.2)
        assert {} == held(successor)
        other.kill()
    assert before == wait_until(lambda: held(successor))


def test_workers_hear_when_a_departed_rank_is_proven(pool: PoolProcess) -> None:
    rank = pool.attach("rank", 0)
    for device in (0, 1):
        pool.worker_of(rank, device)
    rank.close()
    wait_until(lambda: pool.health()[0]["clients"] == 0)
    assert [0, 0] == [row.get("clients_proven", 0) for row in pool.worker_rows()], "its process lives"
    pool.attach("rank", 0)
    assert [1, 1] == [row["clients_proven"] for row in pool.worker_rows()], "it greets anew: its copies have ended"


def test_a_device_that_cannot_start_leaves_the_others_working(start: Start) -> None:
    pool = start(devices=("d0", "bad"), environment={"FAKE_BOOT": str(int(Exit.HOST))})
    rank = pool.attach("rank", 0)
    pool.worker_of(rank, 0)
    wait_until(lambda: "cannot start (HOST)" in pool.log())
    assert ["running", "down"] == [row["state"] for row in pool.worker_rows()]
    assert 0 == pool.worker_rows()[1]["restarts"]


def test_a_pool_without_any_device_ends_with_their_reason(start: Start) -> None:
    pool = start(devices=("bad",), environment={"FAKE_BOOT": str(int(Exit.HOST))})
    assert Exit.HOST == pool.popen.wait(10)


def test_a_worker_that_crashes_while_it_starts_is_tried_again(start: Start) -> None:
    pool = start(devices=("d0", "bad"), environment={"FAKE_BOOT": "1"})
    wait_until(lambda: pool.worker_rows()[1]["restarts"] >= 2)


# ---------------------------------------------------------------- several namespaces


def forget_recalled(*ranks: Talker) -> dict[int, int]:
    """Answer as ranks do; return the segments that they were shown, and their bytes."""
    shown: dict[int, int] = {}
    for rank in ranks:
        rank.is_silent(0.05, m.SegmentDown)
        for message, fds in rank.inbox:
            for fd in fds:
                os.close(fd)
            if isinstance(message, m.SegmentUp):
                shown[message.segment] = message.segment_bytes
            elif isinstance(message, m.SegmentDown):
                rank.send(m.SegmentForgotten(segment=message.segment))
        rank.inbox.clear()
    return shown


def test_a_further_slot_size_gets_staging_from_the_first(pool: PoolProcess) -> None:
    first = pool.attach("rank", 0)
    worker, _ = pool.worker_of(first, 0)
    wait_until(lambda: len(held(worker)) == 9)
    second = pool.attach("rank", 0, engine="engine-1", namespace=namespace("b", object_bytes=(200_000,)))
    mapped: set[int] = set()

    def forget() -> bool:
        mapped.update(forget_recalled(first, second))
        return {104, 200} == set(held(worker).values())

    wait_until(forget)
    holds = set(held(worker))
    forget()  # what was granted meanwhile was told the ranks before
    assert holds <= mapped
    facts = pool.health()[0]
    assert facts["staging_ready_bytes"] <= 16 * MIB


@pytest.mark.parametrize(("weight", "share"), [(1, 0.5), (3, 0.75)])
def test_models_share_staging_by_the_weights_of_their_engines(pool: PoolProcess, weight: int, share: float) -> None:
    first = pool.attach("rank", 0, weight=weight)
    worker, _ = pool.worker_of(first, 0)
    second = pool.attach("rank", 0, engine="engine-1", namespace=namespace("b", object_bytes=(200_000,)))

    shown: dict[int, int] = {}

    def shared() -> bool:
        shown.update(forget_recalled(first, second))
        parts = {104: 0, 200: 0}
        for segment, kib in held(worker).items():
            parts[kib] += shown.get(segment, 0)
        return parts[200] > 0 and abs(parts[104] / sum(parts.values()) - share) < 0.1

    wait_until(shared)


def test_a_weight_out_of_range_is_refused(pool: PoolProcess) -> None:
    assert "weight" in refused(pool, pool.hello("rank", 0, weight=0)).message


def test_a_model_that_left_gives_its_staging_to_the_next(pool: PoolProcess) -> None:
    pool.attach("rank", 0, namespace=namespace(object_bytes=(1_500_000,))).close()
    wait_until(lambda: pool.health()[0]["clients"] == 0)
    pool.attach("rank", 0, namespace=namespace("b", object_bytes=(3_000_000,)))
    other = pool.hello("rank", 0, engine="engine-1", namespace=namespace(object_bytes=(1_500_000,)))
    assert "staging" in refused(pool, other).message


# ---------------------------------------------------------------- the end


def worker_pids(pool: PoolProcess) -> list[int]:
    """Wait until every worker is ready; return their process ids."""
    wait_until(lambda: all(row["state"] == "running" for row in pool.worker_rows()))
    return [int(row["pid"]) for row in pool.worker_rows()]


def test_it_ends_when_asked_and_its_workers_too(pool: PoolProcess) -> None:
    pids = worker_pids(pool)
    admin = pool.attach("admin")
    admin.send(m.StopWanted())
    admin.wait_hang_up()
    assert 0 == pool.popen.wait(10)
    assert [] == [pid for pid in pids if is_alive(pid)]
    assert not os.path.exists(f"{pool.run_dir}/pool.sock")


def test_ctrl_c_lets_the_workers_write_first(pool: PoolProcess) -> None:
    worker_pids(pool)
    os.killpg(pool.popen.pid, signal.SIGINT)
    assert 0 == pool.popen.wait(10)
    assert 2 == pool.log().count("has written everything and ended")


def test_a_killed_coordinator_takes_its_workers_along(pool: PoolProcess) -> None:
    pids = worker_pids(pool)
    rank = pool.attach("rank", 0)
    pool.popen.kill()
    rank.wait_hang_up()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_second_signal_ends_it_at_once(pool: PoolProcess) -> None:
    pids = worker_pids(pool)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    pool.popen.send_signal(signal.SIGTERM)
    wait_until(lambda: pool.health()[1][0]["state"] == "draining")
    hello = pool.hello("rank", 0)
    assert PoolUnavailable.code == refused(pool, hello).code
    pool.popen.send_signal(signal.SIGTERM)
    pool.popen.wait(5)
    assert [] == [pid for pid in pids if is_alive(pid)]


def test_a_detached_pool_ends_after_its_last_client(start: Start) -> None:
    pool = start(detached=True)
    rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
    pool.worker_of(rank, 0)
    rank.close()
    time.sleep(0.6)
    assert pool.popen.poll() is None
    scheduler.close()
    assert 0 == pool.popen.wait(10)
    assert "no client is left" in Path(pool.run_dir, "coordinator.log").read_text()


def test_an_attached_pool_stays_without_clients(start: Start) -> None:
    pool = start(idle_exit_s=0.1)
    pool.attach("rank", 0).close()
    time.sleep(0.5)
    assert pool.popen.poll() is None


def test_a_detached_pool_survives_the_end_of_its_starters_process_group(start: Start, tmp_path: Path) -> None:
    pool = start(devices=("d0",))
    pool.end()
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from kvpool.io import process
process.spawn([sys.executable, "-m", "kvpool.procs.coordinator", "--config-json", {str(tmp_path / "pool.json")!r},
    "--detached", "--worker-module", "tests.process.fake_worker"], detached=True)
print("started", flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True, env=environment
    ) as starter:
        assert starter.stdout is not None
        assert b"started\n" == starter.stdout.readline()
        socket_path = f"{pool.run_dir}/pool.sock"
        wait_until(lambda: os.path.exists(socket_path))
        talker = Talker(channel.connect(socket_path))
        talker.send(pool.hello("rank", 0))
        talker.wait(m.Welcome)
        with socket.socket(fileno=os.dup(talker.channel.fileno())) as copy:
            pid = channel.peer_pid(copy)
        os.killpg(starter.pid, signal.SIGKILL)
    assert talker.is_silent(0.3, m.WorkerDown)
    assert is_alive(pid)
    talker.close()
    wait_until(lambda: not is_alive(pid))


def test_killing_every_process_at_once_leaves_nothing_in_shared_memory(pool: PoolProcess) -> None:
    before = os.statvfs("/dev/shm").f_bfree
    rank = pool.attach("rank", 0)
    wait_until(lambda: pool.health()[0]["staging_ready_bytes"] > 15 * MIB)
    pids = [pool.popen.pid, *(int(row["pid"]) for row in pool.worker_rows())]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    pool.popen.wait()
    rank.wait_hang_up()
    rank.close()
    assert [] == [name for name in os.listdir("/dev/shm") if name.startswith("kvpool")]
    wait_until(lambda: before - os.statvfs("/dev/shm").f_bfree < 8 * MIB // 4096)


def test_clients_and_workers_that_come_and_go_leave_no_descriptor(pool: PoolProcess) -> None:
    def come_and_go() -> None:
        rank, scheduler = pool.attach("rank", 0), pool.attach("scheduler")
        _, generation = pool.worker_of(rank, 0)
        kill_worker(pool, 0)
        rank.wait(m.WorkerDown)
        rank.send(m.CopiesEnded(device=0, worker_generation=generation))
        pool.worker_of(rank, 0)
        rank.close()
        scheduler.close()
        wait_until(lambda: pool.health()[0]["segments_quarantined"] == 0)
        wait_until(lambda: pool.health()[0]["staging_ready_bytes"] > 15 * MIB)

    process = psutil.Process(pool.popen.pid)
    come_and_go()
    first = process.num_fds()
    for _ in range(3):
        come_and_go()
    wait_until(lambda: process.num_fds() <= first)


def test_it_sleeps_when_nothing_happens(pool: PoolProcess) -> None:
    pool.attach("rank", 0)
    wait_until(lambda: pool.health()[0]["staging_ready_bytes"] > 15 * MIB)
    process = psutil.Process(pool.popen.pid)
    time.sleep(0.2)
    before = process.num_ctx_switches().voluntary
    time.sleep(1)
    assert process.num_ctx_switches().voluntary - before <= 2
