"""The scheduler client against a pool of real sockets, and what its calls cost."""

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.client.launch import ClientConfig
from kvpool.client.scheduler import Hit, Later, Miss, SchedulerClient
from kvpool.errors import InvariantError
from kvpool.wire.messages import Announce, DevicesChanged, DeviceState, GroupSpec, NamespaceSpec, Withdraw
from tests.process.fake_pool import FakePool

WAIT_S = 10.0
NAMESPACE = NamespaceSpec(
    fingerprint="0" * 64,
    model_name="tiny",
    block_size=16,
    blocks_per_file=16,
    tp=1,
    pp=1,
    pcp=1,
    dtype="bfloat16",
    rank_count=1,
    groups=[GroupSpec(group=0, object_bytes=5000)],
    identity={},
)


def keys(count: int, first: int = 0) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() + bytes(4) for number in range(first, first + count)]


def pump_until(client: SchedulerClient, what: Callable[[], object]) -> None:
    """Let the scheduler step until *what* holds."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline, "did not come"
        time.sleep(0.002)
        client.pump()


@pytest.fixture
def pool(tmp_path: Path, open_descriptors: None) -> Iterator[FakePool]:
    pool = FakePool(str(tmp_path), devices=2)
    yield pool
    pool.close()


@pytest.fixture
def client(pool: FakePool) -> Iterator[SchedulerClient]:
    client = SchedulerClient(ClientConfig(run_dir=pool.run_dir), NAMESPACE, engine="engine")
    pump_until(client, lambda: client.connected)
    yield client
    client._table.validate()
    client.close()


def test_an_announced_key_is_later_then_what_the_pool_says(pool: FakePool, client: SchedulerClient) -> None:
    stored, absent = keys(2)
    pool.objects[stored, 0] = (1, 0)
    client.announce("r", [stored, absent])
    assert isinstance(client.lookup("r", stored), Later | Hit)
    pump_until(client, lambda: client.lookup("r", stored) == Hit(device=1, resident=True))
    assert Miss("absent") == client.lookup("r", absent)


def test_an_unanswered_announcement_becomes_a_miss_in_time(pool: FakePool, client: SchedulerClient) -> None:
    pool.hold_statuses = True
    begin = time.monotonic()
    client.announce("r", keys(1))
    assert isinstance(client.lookup("r", keys(1)[0]), Later)
    pump_until(client, lambda: client.lookup("r", keys(1)[0]) == Miss("unanswered"))
    assert time.monotonic() - begin < 1.0


def test_a_silent_pool_is_a_miss_at_once_until_it_speaks(pool: FakePool, client: SchedulerClient) -> None:
    pool.hold_statuses = True
    for number in range(3):
        client.announce(f"r{number}", keys(1))
        pump_until(client, lambda n=number: client.lookup(f"r{n}", keys(1)[0]) != Later)  # type: ignore[misc]
        pump_until(client, lambda n=number: isinstance(client.lookup(f"r{n}", keys(1)[0]), Miss))  # type: ignore[misc]
    assert not client.connected
    client.announce("r3", keys(1))
    assert Miss("silent") == client.lookup("r3", keys(1)[0])
    pool.hold_statuses = False
    client.announce("r4", keys(1))
    pump_until(client, lambda: client.connected)
    assert Miss("absent") == client.lookup("r4", keys(1)[0])


def test_a_lost_pool_is_a_miss_at_once_and_requests_are_announced_again(
    pool: FakePool, client: SchedulerClient
) -> None:
    pool.objects[keys(1)[0], 0] = (0, 0)
    client.announce("r", keys(1500))
    pump_until(client, lambda: isinstance(client.lookup("r", keys(1)[0]), Hit))
    pool.vanish()
    pump_until(client, lambda: client.lookup("r", keys(1)[0]) == Miss("unconnected"))
    pool.start()
    pool.objects[keys(1)[0], 0] = (1, 0)
    pump_until(client, lambda: client.lookup("r", keys(1)[0]) == Hit(device=1, resident=True))
    pump_until(client, lambda: client.lookup("r", keys(1, first=1499)[0]) == Miss("absent"))


def test_without_a_pool_everything_is_a_miss_and_costs_nothing(tmp_path: Path, open_descriptors: None) -> None:
    client = SchedulerClient(ClientConfig(run_dir=str(tmp_path)), NAMESPACE, engine="engine")
    client.announce("r", keys(10))
    client.store_offered("r", keys(10))
    assert Miss("unconnected") == client.lookup("r", keys(1)[0])
    assert 0 == client.place_store("r", keys(1)[0], 0, keys(1)[0])
    assert not client.request_cut("r")
    client.withdraw("r")
    client.close()
    assert Miss("disabled") == client.lookup("r", keys(1)[0])


def test_withdrawals_reach_the_pool(pool: FakePool, client: SchedulerClient) -> None:
    client.announce("r", keys(1))
    client.withdraw("r")
    client.withdraw("unknown")
    pump_until(client, lambda: "Withdraw" in pool.kinds_heard("scheduler"))
    assert Miss("unannounced") == client.lookup("r", keys(1)[0])


def test_the_pool_hears_which_requests_started_and_which_wait_again(pool: FakePool, client: SchedulerClient) -> None:
    client.announce("r", keys(2), priority=-1)
    client.started("r")
    client.started("r")
    client.waits_again("r")
    client.waits_again("r")
    client.pump()
    wanted = [Announce(request="r", first=0, keys=keys(2), priority=-1), Withdraw(requests=["r"], started=True),
              Announce(request="r", first=2, keys=[], priority=-1)]  # fmt: skip
    kinds = (Announce, Withdraw)
    pump_until(client, lambda: wanted == [one for _, one in list(pool.heard) if isinstance(one, kinds)])


def test_stores_are_placed_in_stripes_on_healthy_devices_and_where_the_index_has_them(
    pool: FakePool, client: SchedulerClient
) -> None:
    chunks = keys(8)
    placed = [client.place_store("r", key, position, chunks[0]) for position, key in enumerate(chunks)]
    assert [placed[0], 1 - placed[0]] * 4 == placed
    sick = DeviceState(device=0, healthy=False, read_bytes_per_s=0.0, backlog_bytes=7)
    pool.call(lambda: pool._schedulers()[0].channel.send(DevicesChanged(devices=[sick])))
    pump_until(client, client.device_states)
    assert {0: sick} == client.device_states()
    assert [1] * 8 == [client.place_store("r", key, position, chunks[0]) for position, key in enumerate(chunks)]
    pool.objects[chunks[3], 0] = (0, 0)
    client.announce("r", chunks)
    pump_until(client, lambda: isinstance(client.lookup("r", chunks[3]), Hit))
    assert 0 == client.place_store("r", chunks[3], 3, chunks[0])


def test_a_refused_scheduler_goes_on_without_a_pool(pool: FakePool, caplog: pytest.LogCaptureFixture) -> None:
    pool.refuse_hello = "another protocol"
    client = SchedulerClient(ClientConfig(run_dir=pool.run_dir), NAMESPACE, engine="engine")
    pump_until(client, lambda: any("another protocol" in record.message for record in caplog.records))
    assert Miss("unconnected") == client.lookup("r", keys(1)[0])
    client.close()


def test_a_bug_disables_the_client_and_is_said_once(
    client: SchedulerClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise InvariantError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(client._table, "announce", broken)
        client.announce("r", keys(1))
        client.announce("r", keys(1))
    client.pump()
    assert Miss("disabled") == client.lookup("r", keys(1)[0])
    assert client.request_cut("r")
    assert 1 == sum("is disabled" in record.message for record in caplog.records)


def median_us(what: Callable[[int], object], count: int) -> float:
    """Return the median cost of *what*, microseconds."""
    times = []
    for number in range(count):
        begin = time.perf_counter()
        what(number)
        times.append(time.perf_counter() - begin)
    return sorted(times)[count // 2] * 1e6


def test_calls_are_cheap_enough_for_the_scheduler(pool: FakePool, client: SchedulerClient) -> None:
    """Bounds are wide, since other things run beside the tests; the design asks for a tenth of them."""
    chunks = [keys(512, first=512 * number) for number in range(20)]
    announce_us = median_us(lambda number: client.announce(f"r{number}", chunks[number]), 20)
    pump_until(client, lambda: client.lookup("r19", chunks[19][511]) == Miss("absent"))
    pump_us = median_us(lambda _: client.pump(), 200)
    lookup_us = median_us(lambda number: client.lookup("r0", chunks[0][number]), 200)
    print(f"announce of 512 keys {announce_us:.0f} us, pump {pump_us:.1f} us, lookup {lookup_us:.2f} us")
    assert announce_us < 2000
    assert pump_us < 200
    assert lookup_us < 50
