"""Peers and descriptors of the coordinator, where numbers of descriptors are used again."""

import os
import select
import socket
from collections.abc import Iterator

import pytest

from kvpool.errors import PeerGone
from kvpool.io.channel import Channel, pair
from kvpool.procs.coordinator_loop import Loop
from kvpool.procs.coordinator_peer import Peer
from kvpool.wire import messages as m


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def peer_on(loop: Loop, sock: socket.socket, heard: list[m.Message]) -> Peer:
    return Peer(
        loop, sock, m.ClientToCoordinator, on_message=lambda message, _: heard.append(message), on_gone=lambda _: None
    )


def turn(loop: Loop) -> None:
    """Let the loop turn once."""
    loop.soon(lambda: loop.stop(0))
    loop.run()


def test_a_peer_closed_twice_leaves_the_next_one_of_its_number_alone(loop: Loop) -> None:
    heard: list[m.Message] = []
    first, theirs = pair()
    number = first.fileno()
    gone = peer_on(loop, first, heard)
    gone.hang_up(PeerGone("it hung up"))
    other, ours = pair()
    assert number in (other.fileno(), ours.fileno())  # the lowest free number is given out
    served, speaking = (other, ours) if other.fileno() == number else (ours, other)
    peer = peer_on(loop, served, heard)
    gone.close()
    Channel(speaking, m.CoordinatorToClient).send(m.HealthWanted())
    turn(loop)
    assert [m.HealthWanted()] == heard
    peer.close()
    theirs.close()
    speaking.close()


def test_what_was_reported_of_a_descriptor_is_not_told_to_the_next_one_of_its_number(loop: Loop) -> None:
    called: list[int] = []
    readers, writers = zip(*(os.pipe() for _ in range(2)), strict=True)
    replaced: list[int] = []

    def replace(mine: int, other: int) -> None:
        """Close the other descriptor, which is reported too, and watch a quiet one of the same number."""
        if not replaced:
            loop.forget(other)
            os.close(other)
            quiet, writer = os.pipe()
            assert quiet == other  # the lowest free number is given out
            loop.watch(quiet, called.append)
            replaced.extend((other, writer))
        os.read(mine, 1)

    for mine, other in (readers, readers[::-1]):
        loop.watch(mine, lambda _, mine=mine, other=other: replace(mine, other))
    for writer in writers:
        os.write(writer, b"x")
    assert 2 == len(select.select(readers, [], [], 1)[0])
    turn(loop)
    assert [] == called
    for fd in {*readers, *writers, *replaced}:
        os.close(fd)
