"""Channels on real socket pairs: order, descriptors, bounds, deaths, hostile peers."""

import contextlib
import os
import resource
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from kvpool.errors import HostError, InvariantError, PoolUnavailable, ProtocolError
from kvpool.io import channel as channel_module
from kvpool.io.channel import Channel, PeerGone, accept, adopt, connect, listen, pair, peer_pid, peer_uid
from kvpool.wire.codec import FRAME_BYTES_MAX, encode
from kvpool.wire.messages import (
    CoordinatorToClient,
    Message,
    RankToWorker,
    Ready,
    Refused,
    Release,
    SegmentDown,
    SegmentUp,
    SlotGrant,
    WorkerToRank,
)


@pytest.fixture(autouse=True)
def _no_descriptor_is_left(open_descriptors: object) -> None:
    """Every test here ends with the descriptors it began with."""


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    left, right = pair()
    coordinator, client = Channel(left, RankToWorker), Channel(right, CoordinatorToClient)
    yield coordinator, client
    coordinator.close()
    client.close()


@pytest.fixture
def raw() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel and the bare socket of a peer that may send anything."""
    left, right = pair()
    ours = Channel(left, CoordinatorToClient)
    yield ours, right
    ours.close()
    right.close()


@pytest.fixture
def a_file() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def _readable(channel: Channel) -> bool:
    return bool(select.select([channel], [], [], 0)[0])


def test_messages_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    coordinator, client = ends
    sent: list[Message] = [SegmentDown(segment=number) for number in range(50)]
    for message in sent:
        coordinator.send(message)
    assert [(message, []) for message in sent] == client.receive()
    assert [] == client.receive()


def test_a_descriptor_arrives_as_the_same_file_closed_on_exec(ends: tuple[Channel, Channel], a_file: int) -> None:
    coordinator, client = ends
    coordinator.send(SegmentUp(segment=1, segment_bytes=4096), [a_file])
    [(message, [fd])] = client.receive()
    try:
        assert SegmentUp(segment=1, segment_bytes=4096) == message
        assert os.fstat(a_file).st_ino == os.fstat(fd).st_ino
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_a_queued_descriptor_outlives_its_sender_closing_it(ends: tuple[Channel, Channel]) -> None:
    coordinator, client = ends
    while not coordinator.wants_write:
        coordinator.send(SegmentDown(segment=0))
    fd = os.memfd_create("test")
    inode = os.fstat(fd).st_ino
    coordinator.send(SegmentUp(segment=1, segment_bytes=4096), [fd])
    os.close(fd)
    last: tuple[Message, list[int]] | None = None
    while coordinator.wants_write or _readable(client):
        last = client.receive()[-1]
        coordinator.flush()
    assert last is not None
    try:
        assert inode == os.fstat(last[1][0]).st_ino
    finally:
        os.close(last[1][0])


def test_sending_never_blocks_and_everything_arrives_once(ends: tuple[Channel, Channel]) -> None:
    coordinator, client = ends
    count = 3000
    for number in range(count):
        coordinator.send(SegmentDown(segment=number))
    assert coordinator.wants_write
    assert 0 < coordinator.queue_length < count
    arrived: list[Message] = []
    while len(arrived) < count:
        arrived += [message for message, _ in client.receive()]
        coordinator.flush()
    assert [SegmentDown(segment=number) for number in range(count)] == arrived
    assert not coordinator.wants_write


def test_epoll_does_not_spin_on_a_full_socket(ends: tuple[Channel, Channel]) -> None:
    coordinator, _ = ends
    while not coordinator.wants_write:
        coordinator.send(SegmentDown(segment=0))
    assert not select.select([], [coordinator], [], 0)[1], "a socket that takes nothing is not writable"


def test_one_receive_is_bounded(ends: tuple[Channel, Channel]) -> None:
    coordinator, client = ends
    for number in range(channel_module.RECEIVE_FRAMES_MAX + 1):
        coordinator.send(SegmentDown(segment=number))
    assert channel_module.RECEIVE_FRAMES_MAX == len(client.receive())
    assert _readable(client)
    assert 1 == len(client.receive())


def test_a_peer_that_does_not_read_is_dropped_and_hears_of_it(
    ends: tuple[Channel, Channel], a_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "QUEUE_MESSAGES_MAX", 10)
    coordinator, client = ends
    sent = 0
    with pytest.raises(PeerGone, match="does not read"):
        while True:
            coordinator.send(SegmentUp(segment=sent, segment_bytes=1), [a_file])
            sent += 1
    assert not coordinator.wants_write
    with pytest.raises(PeerGone):
        coordinator.send(SegmentDown(segment=0))
    assert _readable(coordinator), "the owner learns of it in its epoll"
    with pytest.raises(PeerGone, match="does not read"):
        coordinator.receive()
    arrived = 0
    with pytest.raises(PeerGone):
        while True:
            for _, fds in client.receive():
                arrived += 1
                os.close(fds[0])
    assert sent - 10 == arrived


def test_the_queue_is_bounded_in_bytes_too(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "QUEUE_BYTES_MAX", 200_000)
    worker, _ = ends
    answer = Ready(job=1, slots=[SlotGrant(index=0, segment=2**30, offset=2**40)] * 2000)
    with pytest.raises(PeerGone, match="does not read"):
        for _ in range(100):
            worker.send(answer)


def test_hang_up_is_told_after_the_last_message(ends: tuple[Channel, Channel]) -> None:
    coordinator, client = ends
    for number in range(3):
        coordinator.send(SegmentDown(segment=number))
    coordinator.close()
    assert 3 == len(client.receive())
    assert _readable(client)
    with pytest.raises(PeerGone, match="hung up"):
        client.receive()
    with pytest.raises(PeerGone):
        client.send(Release(job=1, indices=[]))


def test_reset_is_told_after_the_last_message(ends: tuple[Channel, Channel]) -> None:
    """Linux reports ECONNRESET, once, when the peer closed with frames unread, ahead of what the peer sent."""
    coordinator, client = ends
    client.send(Release(job=1, indices=[]))
    coordinator.send(SegmentDown(segment=1))
    coordinator.close()
    assert [(SegmentDown(segment=1), [])] == client.receive()
    with pytest.raises(PeerGone):
        client.receive()


def test_death_of_the_peer_process_is_a_hang_up() -> None:
    left, right = pair()
    pid = os.posix_spawn(
        "/bin/sh", ["sh", "-c", "kill -9 $$"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, right.fileno(), 9)]
    )
    right.close()
    ours = Channel(left, CoordinatorToClient)
    os.waitpid(pid, 0)
    with pytest.raises(PeerGone):
        ours.receive()
    ours.close()


def test_sending_to_a_peer_that_is_gone_raises_and_never_signals(ends: tuple[Channel, Channel]) -> None:
    coordinator, client = ends
    client.close()
    with pytest.raises(PeerGone):
        coordinator.send(SegmentDown(segment=1))


BAD_FRAMES = {
    "no messagepack": b"\xc1",
    "too long": b"\x00" * (FRAME_BYTES_MAX + 1),
    "much too long": b"\x00" * (3 * FRAME_BYTES_MAX),
    "unknown type": msgpack.packb({"type": "Nothing"}),
    "of another set": msgpack.packb({"type": "LoadCancel", "job": 1}),
    "unknown field": msgpack.packb({"type": "SegmentDown", "segment": 1, "x": 1}),
    "wrong type": msgpack.packb({"type": "SegmentDown", "segment": "1"}),
    "missing field": msgpack.packb({"type": "SegmentDown"}),
    "missing descriptor": msgpack.packb({"type": "SegmentUp", "segment": 1, "segment_bytes": 1}),
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_a_bad_frame_ends_that_peer_after_what_it_said_before(
    raw: tuple[Channel, socket.socket], frame: bytes, a_file: int
) -> None:
    ours, peer = raw
    peer.send(encode(SegmentDown(segment=1)))
    peer.send(frame)
    assert [(SegmentDown(segment=1), [])] == ours.receive()
    assert _readable(ours), "the owner is called again although no more bytes came"
    for _ in range(2):
        with pytest.raises(ProtocolError):
            ours.receive()


@pytest.mark.parametrize(
    "frame", [*BAD_FRAMES.values(), encode(SegmentDown(segment=1)), b""], ids=[*BAD_FRAMES, "none expected", "empty"]
)
@pytest.mark.parametrize("count", [2, 3, channel_module.FDS_MAX, channel_module.FDS_MAX + 1, 100])
def test_descriptors_of_a_refused_frame_are_closed(
    raw: tuple[Channel, socket.socket], frame: bytes, count: int, a_file: int
) -> None:
    ours, peer = raw
    socket.send_fds(peer, [frame], [a_file] * count)
    with pytest.raises((ProtocolError, PeerGone)):
        ours.receive()  # the fixture counts descriptors


def test_descriptors_that_found_no_room_here_are_said_to_be_lost(ends: tuple[Channel, Channel], a_file: int) -> None:
    coordinator, client = ends
    coordinator.send(SegmentUp(segment=1, segment_bytes=1), [a_file])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(ProtocolError, match="lost"):
            client.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptors_that_nobody_received_are_closed(ends: tuple[Channel, Channel], a_file: int) -> None:
    coordinator, _ = ends
    for number in range(5):
        coordinator.send(SegmentUp(segment=number, segment_bytes=1), [a_file])


def test_a_peer_with_a_bad_frame_can_still_be_told_why(raw: tuple[Channel, socket.socket]) -> None:
    ours, peer = raw
    peer.send(b"\xc1")
    with pytest.raises(ProtocolError):
        ours.receive()
    ours.send(SegmentDown(segment=7))
    assert encode(SegmentDown(segment=7)) == peer.recv(100)
    with pytest.raises(BrokenPipeError):
        peer.send(b"more")


def test_the_number_of_descriptors_must_match_the_message(ends: tuple[Channel, Channel], a_file: int) -> None:
    coordinator, client = ends
    with pytest.raises(InvariantError):
        coordinator.send(SegmentUp(segment=1, segment_bytes=1))
    with pytest.raises(InvariantError):
        coordinator.send(SegmentDown(segment=1), [a_file])
    assert [] == client.receive()


def test_a_message_too_long_leaves_the_channel_as_it_was(ends: tuple[Channel, Channel]) -> None:
    _, rank = ends
    with pytest.raises(ProtocolError, match="too long"):
        rank.send(Release(job=1, indices=[2**40] * 10_000))
    rank.send(Release(job=1, indices=[1]))
    assert [(Release(job=1, indices=[1]), [])] == ends[0].receive()


def test_a_frame_of_the_greatest_length_passes(ends: tuple[Channel, Channel]) -> None:
    worker, rank = ends
    text = "x" * (FRAME_BYTES_MAX - len(encode(_refused(""))) - 2)
    worker.send(_refused(text))
    [(message, _)] = rank.receive()
    assert _refused(text) == message


def _refused(text: str) -> Message:
    return Refused(code=1, message=text)


def test_listen_connect_accept_and_credentials(tmp_path: Path) -> None:
    path = str(tmp_path / "pool.sock")
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(path))
        assert accept(listener) is None
        ours = stack.enter_context(connect(path))
        theirs = accept(listener)
        assert theirs is not None
        stack.enter_context(theirs)
        assert (os.getuid(), os.getpid()) == (peer_uid(theirs), peer_pid(theirs))
        assert not ours.getblocking() and not theirs.getblocking()


def test_listen_replaces_the_name_a_dead_listener_left(tmp_path: Path) -> None:
    path = str(tmp_path / "pool.sock")
    listen(path).close()
    with pytest.raises(PoolUnavailable):
        connect(path)
    with listen(path), connect(path):
        pass


def test_connect_where_nobody_listens_is_pool_unavailable(tmp_path: Path) -> None:
    with pytest.raises(PoolUnavailable):
        connect(str(tmp_path / "pool.sock"))
    with pytest.raises(PoolUnavailable):
        connect(str(tmp_path / "no" / "pool.sock"))


def test_a_path_too_long_for_a_socket_is_a_host_error(tmp_path: Path) -> None:
    path = "/" + "x" * channel_module.PATH_BYTES_MAX
    for call in (listen, connect):
        with pytest.raises(HostError, match="107"):
            call(path)


def test_connect_does_not_wait_for_a_listener_that_accepts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "_LISTEN_BACKLOG", 1)
    path = str(tmp_path / "pool.sock")
    with contextlib.ExitStack() as stack:
        stack.enter_context(listen(path))
        with pytest.raises(PoolUnavailable):
            for _ in range(10):
                stack.enter_context(connect(path))


def test_adopt_takes_a_seqpacket_socket_and_nothing_else(a_file: int) -> None:
    left, right = pair()
    with left, adopt(os.dup(right.fileno())) as adopted:
        right.close()
        left.send(b"x")
        assert b"x" == adopted.recv(10)
        assert not adopted.getblocking()
    stream, other = socket.socketpair()
    with stream, other, pytest.raises(ProtocolError):
        adopt(os.dup(stream.fileno()))
    with pytest.raises(ProtocolError):
        adopt(os.dup(a_file))


def test_closing_twice_is_harmless_and_a_closed_channel_is_gone(ends: tuple[Channel, Channel]) -> None:
    coordinator, _ = ends
    coordinator.close()
    coordinator.close()
    assert -1 == coordinator.fileno()
    with pytest.raises(PeerGone):
        coordinator.send(SegmentDown(segment=1))
    with pytest.raises(PeerGone):
        coordinator.receive()


def test_two_threads_of_traffic_lose_nothing() -> None:
    left, right = pair()
    worker, rank = Channel(left, RankToWorker), Channel(right, WorkerToRank)
    count = 2000

    def answer() -> None:
        seen = 0
        while seen < count:
            select.select([worker], [worker] if worker.wants_write else [], [])
            worker.flush()
            for message, _ in worker.receive():
                assert isinstance(message, Release)
                worker.send(Ready(job=message.job, slots=[]))
                seen += 1
        while not worker.flush():
            select.select([], [worker], [])

    thread = threading.Thread(target=answer)
    thread.start()
    jobs: list[int] = []
    for job in range(count):
        rank.send(Release(job=job, indices=[]))
    while len(jobs) < count:
        select.select([rank], [rank] if rank.wants_write else [], [])
        rank.flush()
        jobs += [message.job for message, _ in rank.receive() if isinstance(message, Ready)]
    thread.join()
    worker.close()
    rank.close()
    assert list(range(count)) == jobs
