"""
One peer of the coordinator: a channel in the loop.

Theory. A peer is served until the first of: it hangs up, it says something that is not one of its
messages, a handler refuses what it said, it does not read what it is sent, or the coordinator
closes it. From then on sends to it do nothing, and `on_gone` is called exactly once with the
reason, never from inside a `send`; so whoever sends needs no care.
"""

import os
import select
import socket
from collections.abc import Callable, Iterable, Sequence
from types import UnionType

from kvpool.errors import KvpoolError, PeerGone, ProtocolError
from kvpool.io.channel import Channel
from kvpool.procs.coordinator_loop import Loop
from kvpool.wire.messages import Message

#: Frames taken from one peer before the others have their turn: a scan's news must not delay an announcement.
FRAMES_PER_TURN = 8


class Peer:
    """
    See the module.

    Args:
        decoder: The messages it may send.
        on_message: Called with each message and its descriptors, which are the callee's; may raise KvpoolError.
        on_gone: Called once with the reason; the channel is closed then.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        decoder: type[Message] | UnionType,
        *,
        on_message: Callable[[Message, list[int]], None],
        on_gone: Callable[[KvpoolError], None],
    ) -> None:
        self._loop = loop
        self._channel = Channel(sock, decoder)
        self._fd = self._channel.fileno()
        self._on_message = on_message
        self._on_gone = on_gone
        self._writing = False
        self.gone = False
        loop.watch(self._fd, self._ready)

    @property
    def queued(self) -> int:
        """Frames that wait for the peer to read."""
        return self._channel.queue_length

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send, now or when the peer reads; nothing if it is gone. *fds* stay the caller's."""
        if self.gone:
            return
        try:
            self._channel.send(message, fds)
        except KvpoolError as error:  # gone, or not to be told this; the sender has others to serve
            self._end(error)
        else:
            self._watch_writing()

    def hang_up(self, reason: KvpoolError) -> None:
        """Serve this peer no more; `on_gone` follows."""
        self._end(reason)

    def read_last_words(self) -> None:
        """Take what a peer said before its process ended."""
        try:
            while not self.gone and self._receive():
                pass
        except (PeerGone, ProtocolError) as error:
            self._end(error)

    def close(self) -> None:
        """Close without `on_gone`. Once: afterwards the descriptor's number may be another peer's."""
        if self.gone:
            return
        self.gone = True
        self._loop.forget(self._fd)
        self._channel.close()

    def _ready(self, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._channel.flush()
                self._watch_writing()
            if events & ~select.EPOLLOUT:
                self._receive()
        except (PeerGone, ProtocolError) as error:
            self._end(error)

    def _receive(self) -> bool:
        """Handle what can be read now. Returns whether that was anything."""
        received = self._channel.receive(FRAMES_PER_TURN)
        for position, (message, fds) in enumerate(received):
            if self.gone:
                _close_all(fd for _, later in received[position:] for fd in later)
                break
            try:
                self._on_message(message, fds)
            except KvpoolError as error:
                self._end(error)
        return bool(received)

    def _watch_writing(self) -> None:
        wanted = self._channel.wants_write
        if wanted != self._writing:
            self._writing = wanted
            self._loop.change(self._fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

    def _end(self, reason: KvpoolError) -> None:
        if self.gone:
            return
        self.close()
        self._loop.soon(lambda: self._on_gone(reason))


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
