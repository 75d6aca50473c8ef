"""
Sockets that carry messages and file descriptors between kvpool's processes.

Theory. Every queue is one AF_UNIX SOCK_SEQPACKET socket: the kernel keeps message boundaries, tells the
peer's user, passes descriptors, and reports the peer's end. A :class:`Channel` never blocks: it sends at once
what the socket takes and queues the rest, up to a bound; a peer that lets the queue overflow is dropped. The
owner waits in its epoll for reading, and for writing while `wants_write`; then calls `receive` or `flush`.

A bad frame ends the peer, but not what it said before: `receive` first returns the good messages, and the next
call raises. So that this call comes, the channel shuts its reading side, which epoll reports as readable.
Descriptors: those sent are duplicated while they wait; those received belong to the caller; those that came
with a frame that is refused are closed here.

Does not cover: the content of messages (`wire/`), who may connect, what to do about a lost peer.
"""

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from types import UnionType
from typing import NamedTuple

from kvpool.errors import HostError, PeerGone, PoolUnavailable, ProtocolError, invariant
from kvpool.wire.codec import FRAME_BYTES_MAX, Decoder, encode
from kvpool.wire.messages import Message

__all__ = ["Channel", "PeerGone", "accept", "adopt", "connect", "listen", "pair", "peer_pid", "peer_uid"]

#: Most frames, and bytes of frames, that wait for a peer before it counts as dead.
QUEUE_MESSAGES_MAX = 4096
QUEUE_BYTES_MAX = 64 * 1024 * 1024
#: Most frames one `receive` returns, so that one busy peer cannot starve the others.
RECEIVE_FRAMES_MAX = 64
#: Most descriptors beside one frame.
FDS_MAX = 8
#: Unix socket paths are at most this long (sun_path is 108 bytes with the closing NUL).
PATH_BYTES_MAX = 107

_LISTEN_BACKLOG = 128
_SEND_BUFFER_BYTES = 1 << 20
_UCRED = struct.Struct("3i")

#: errno of a send or receive: the peer, or the socket to it, is gone.
_ERRNOS_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ECONNREFUSED, errno.ESHUTDOWN})
#: errno of a send: the kernel has no room for this peer's frame or descriptors; the peer is given up.
_ERRNOS_NO_ROOM = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS})
#: errno of a connect: nobody listens there, or too many are waiting already.
_ERRNOS_NOBODY = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ECONNREFUSED, errno.EAGAIN, errno.ECONNRESET})


class _Queued(NamedTuple):
    """A frame that waits, and the descriptors (ours) that go with it."""

    frame: bytes
    fds: tuple[int, ...]


class Channel:
    """
    One peer: messages out, messages in, never blocking.

    Args:
        sock: A SEQPACKET socket; the channel owns it from now on.
        decoder: The messages that may arrive: a class or a union of `wire/messages.py`.
    """

    def __init__(self, sock: socket.socket, decoder: type[Message] | UnionType) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = Decoder(decoder)
        self._queue: deque[_Queued] = deque()
        self._queue_bytes = 0
        #: Why the peer is no longer read. After a bad frame it may still be told so; a peer that is gone may not.
        self._ended: PeerGone | ProtocolError | None = None

    def fileno(self) -> int:
        """Return the socket's descriptor, for epoll; -1 when closed."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Frames wait for the socket to take more: wait for EPOLLOUT, then `flush`."""
        return bool(self._queue)

    @property
    def queue_length(self) -> int:
        """Frames that wait. A sender of many frames goes on when this is low."""
        return len(self._queue)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """
        Send *message*, now or as soon as the peer reads; never blocks.

        Args:
            fds: Descriptors that go with it, `message.fd_count` of them; the caller's, who may close them at once.

        Raises:
            PeerGone: Hung up, or its queue overflowed; nothing more will be sent.
            ProtocolError: The message does not fit a frame. The channel stays as it was.
            HostError: No descriptor is free to keep those that must wait, or the socket is too small for a frame.
        """
        invariant(len(fds) == message.fd_count, "descriptors do not match the message", type=type(message).__name__)
        frame = encode(message)
        self._raise_if_gone()
        if not self._queue and self._send_now(frame, fds):
            return
        if len(self._queue) >= QUEUE_MESSAGES_MAX or self._queue_bytes + len(frame) > QUEUE_BYTES_MAX:
            raise self._end(PeerGone("peer does not read", frames=len(self._queue), bytes=self._queue_bytes))
        self._queue.append(_Queued(frame, _duplicate(fds)))
        self._queue_bytes += len(frame)

    def flush(self) -> bool:
        """
        Send what waits as far as the socket takes it; True when nothing waits any more.

        Raises:
            PeerGone: The peer hung up.
        """
        while self._queue:
            self._raise_if_gone()
            head = self._queue[0]
            if not self._send_now(head.frame, head.fds):
                return False
            self._queue.popleft()
            self._queue_bytes -= len(head.frame)
            _close_all(head.fds)
        return True

    def receive(self, frames_max: int = RECEIVE_FRAMES_MAX) -> list[tuple[Message, list[int]]]:
        """
        Return the messages that can be read now, at most *frames_max*, with their descriptors (the caller's).

        An empty list means: nothing yet. Bytes that are left keep the socket readable.

        Raises:
            PeerGone: Hang-up or reset, once everything read before it was returned.
            ProtocolError: A bad frame, once everything before it was returned.
        """
        received: list[tuple[Message, list[int]]] = []
        while len(received) < frames_max:
            try:
                one = None if self._ended else self._receive_one()
            except (PeerGone, ProtocolError) as error:
                self._end(error, keep_sending=isinstance(error, ProtocolError))
            else:
                if one is not None:
                    received.append(one)
                    continue
            break
        if not received and self._ended is not None:
            raise self._ended
        return received

    def close(self) -> None:
        """Close the socket and the descriptors that waited. Twice is as good as once."""
        self._drop_queue()
        self._sock.close()
        self._ended = self._ended or PeerGone("channel is closed")

    # ------------------------------------------------------------ inside

    def _raise_if_gone(self) -> None:
        if isinstance(self._ended, PeerGone):
            raise self._ended

    def _end(self, error: PeerGone | ProtocolError, *, keep_sending: bool = False) -> PeerGone | ProtocolError:
        """Serve the peer no more; leave the socket readable for epoll, so that the owner learns of it."""
        if self._ended is None or isinstance(error, PeerGone):
            self._ended = error
        if not keep_sending:
            self._drop_queue()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD if keep_sending else socket.SHUT_RDWR)
        return error

    def _drop_queue(self) -> None:
        for queued in self._queue:
            _close_all(queued.fds)
        self._queue.clear()
        self._queue_bytes = 0

    def _send_now(self, frame: bytes, fds: Sequence[int]) -> bool:
        """Hand one frame to the kernel; False when it takes none now."""
        try:
            socket.send_fds(self._sock, [frame], list(fds)) if fds else self._sock.send(frame)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _ERRNOS_GONE or error.errno in _ERRNOS_NO_ROOM:
                raise self._end(PeerGone("peer is gone", errno=errno.errorcode[error.errno])) from error
            if error.errno == errno.EMSGSIZE:
                raise HostError(
                    "socket takes no frame of this size", limit="net.core.wmem_max", needed=4 * FRAME_BYTES_MAX
                ) from error
            raise
        return True

    def _receive_one(self) -> tuple[Message, list[int]] | None:
        """Read one frame; None when there is none now."""
        try:
            frame, ancillary, flags, _ = self._recvmsg()
        except BlockingIOError:
            return None
        fds = _descriptors(ancillary)
        try:
            return self._accept_frame(frame, fds, flags), fds
        except (PeerGone, ProtocolError):
            _close_all(fds)
            raise

    def _recvmsg(self) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
        """One recvmsg. Linux reports a reset before the frames that arrived ahead of it, once: so read again."""
        for _ in range(2):
            try:
                return self._sock.recvmsg(FRAME_BYTES_MAX + 1, socket.CMSG_SPACE(4 * FDS_MAX), socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                raise
            except OSError as error:
                if error.errno not in _ERRNOS_GONE:
                    raise
                reason = errno.errorcode[error.errno]
        raise PeerGone("peer is gone", errno=reason)

    def _accept_frame(self, frame: bytes, fds: list[int], flags: int) -> Message:
        if not frame:
            raise PeerGone("peer hung up")
        if flags & socket.MSG_TRUNC:
            raise ProtocolError("frame too long", bytes_max=FRAME_BYTES_MAX)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("descriptors were lost (too many, or no descriptor free here)", fds_max=FDS_MAX)
        message = self._decoder.decode(frame)
        if len(fds) != message.fd_count:
            raise ProtocolError(
                "descriptors do not match the message",
                type=type(message).__name__,
                fds=len(fds),
                fds_needed=message.fd_count,
            )
        return message


def listen(path: str) -> socket.socket:
    """
    Return a listening, non-blocking socket bound to *path*.

    The caller holds the lock of the directory, so whatever has that name is a leftover and is removed.

    Raises:
        HostError: The path is too long, or the directory does not take it.
    """
    _check_path(path)
    sock = _new_socket()
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        sock.bind(path)
        sock.listen(_LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        raise HostError("cannot listen", path=path, reason=str(error)) from error
    return sock


def accept(listener: socket.socket) -> socket.socket | None:
    """
    Return one new peer's socket, non-blocking; None when nobody waits.

    Raises:
        HostError: No descriptor is free (the peer keeps waiting).
    """
    try:
        sock, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise HostError("no descriptor is free", limit="RLIMIT_NOFILE", reason=str(error)) from error
        raise
    return _prepare(sock)


def connect(path: str) -> socket.socket:
    """
    Return a socket connected to the listener at *path*, non-blocking; never waits.

    Raises:
        PoolUnavailable: Nobody listens there, or too many are waiting already.
        HostError: The path is too long, or access is denied.
    """
    _check_path(path)
    sock = _new_socket()
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        if error.errno in _ERRNOS_NOBODY:
            raise PoolUnavailable("nobody listens", path=path, reason=str(error)) from error
        raise HostError("cannot connect", path=path, reason=str(error)) from error
    return sock


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new connection, both non-blocking."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return _prepare(left), _prepare(right)


def adopt(fd: int) -> socket.socket:
    """
    Return the socket behind a descriptor that was inherited or received; it owns *fd* from now on.

    Raises:
        ProtocolError: It is not an AF_UNIX SEQPACKET socket (*fd* is closed then).
    """
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise ProtocolError("descriptor is not a socket", reason=str(error)) from error
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        sock.close()
        raise ProtocolError("descriptor is not a SEQPACKET socket")
    sock.set_inheritable(False)
    return _prepare(sock)


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process that connected (or made the pair)."""
    return _peer_credentials(sock)[1]


def peer_pid(sock: socket.socket) -> int:
    """Return the process id of the process that connected (or made the pair); 0 from another pid namespace."""
    return _peer_credentials(sock)[0]


def _peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def _new_socket() -> socket.socket:
    return _prepare(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))


def _prepare(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    return sock


def _check_path(path: str) -> None:
    path_bytes = len(os.fsencode(path))
    if path_bytes > PATH_BYTES_MAX:
        raise HostError("socket path too long", path=path, bytes=path_bytes, bytes_max=PATH_BYTES_MAX)


def _duplicate(fds: Sequence[int]) -> tuple[int, ...]:
    duplicates: list[int] = []
    try:
        duplicates.extend(os.dup(fd) for fd in fds)
    except OSError as error:
        _close_all(duplicates)
        raise HostError("no descriptor is free", limit="RLIMIT_NOFILE", reason=str(error)) from error
    return tuple(duplicates)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(data) // 4
            fds.extend(struct.unpack(f"{count}i", data[: 4 * count]))
    return fds


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
