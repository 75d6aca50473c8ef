"""
What the command line asks of a running pool, or tells it: one connection for each question.

Covers: health, resize, stop, reset, stores on and off, files that were removed. Blocks, up to a deadline.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator

import kvpool
from kvpool.client.launch import connect_pool
from kvpool.errors import KvpoolError, PeerGone, PoolUnavailable
from kvpool.io.channel import Channel
from kvpool.wire import messages as msg

#: Time for a pool to answer. It asks its own processes first and gives each its own, shorter deadline.
ANSWER_S = 5.0
#: Time for a pool to make a reset durable.
RESET_S = 15.0
#: Time for a pool to write what is filled and end.
STOP_S = 60.0
#: Time for a pool to change its staging: to fill pages, or for running jobs to leave the segments that go.
RESIZE_S = 600.0


def health(run_dir: str, *, timeout_s: float = ANSWER_S) -> msg.Health:
    """
    Return the state of the whole pool.

    Raises:
        PoolUnavailable: No pool answers in time.
        KvpoolError: The pool refuses.
    """
    pool: dict[str, str | int | float | bool] = {}
    rows: list[dict[str, str | int | float | bool]] = []
    with _greeted(run_dir) as channel:
        channel.send(msg.HealthWanted())
        for message in _answers(channel, timeout_s):
            if isinstance(message, msg.Health):
                pool.update(message.pool)
                rows.extend(message.rows)
                if not message.more:
                    return msg.Health(pool=pool, rows=rows)
    raise PoolUnavailable("the pool does not answer", run_dir=run_dir, waited_s=timeout_s)


def resize(
    run_dir: str, staging_bytes: int, *, timeout_s: float = RESIZE_S, told: Callable[[msg.ResizeState], None]
) -> msg.ResizeState:
    """
    Let the pool's staging have so many bytes; return the state when it has, or as many as the machine allows now.

    Args:
        told: Called with each state on the way.

    Raises:
        PoolUnavailable: No pool answers, or it does not get done in time; it goes on then.
        KvpoolError: The pool refuses: names the limit and the number.
    """
    with _greeted(run_dir) as channel:
        channel.send(msg.ResizeWanted(staging_bytes=staging_bytes))
        for message in _answers(channel, timeout_s):
            if isinstance(message, msg.ResizeState):
                told(message)
                if message.done:
                    return message
    raise PoolUnavailable("the change goes on, longer than expected", run_dir=run_dir, waited_s=timeout_s)


def stop(run_dir: str, *, timeout_s: float = STOP_S) -> None:
    """
    Let the pool write what is filled and end; return when it has ended.

    Raises:
        PoolUnavailable: No pool is there, or it does not end in time.
        KvpoolError: The pool refuses.
    """
    with _greeted(run_dir) as channel:
        try:
            channel.send(msg.StopWanted())
            for _ in _answers(channel, timeout_s):
                pass
        except PeerGone:
            return
    raise PoolUnavailable("the pool does not end", run_dir=run_dir, waited_s=timeout_s)


def reset(run_dir: str, name: str, *, timeout_s: float = RESET_S) -> msg.ResetDone:
    """
    Start a new epoch of the namespaces that *name* means; return when it is durable.

    Raises:
        PoolUnavailable: No pool is there, or it does not say so in time.
        KvpoolError: The pool refuses: no such namespace, no device could keep it.
    """
    with _greeted(run_dir) as channel:
        channel.send(msg.ResetWanted(name=name))
        for message in _answers(channel, timeout_s):
            if isinstance(message, msg.ResetDone):
                return message
    raise PoolUnavailable("the pool does not answer", run_dir=run_dir, waited_s=timeout_s)


def switch_stores(run_dir: str, *, on: bool, timeout_s: float = STOP_S) -> None:
    """
    Let the pool take new objects, or none until it ends or is told otherwise; return when it knows.

    Raises:
        PoolUnavailable: No pool is there, or it does not say so in time.
        KvpoolError: The pool refuses.
    """
    with _greeted(run_dir) as channel:
        channel.send(msg.StoresWanted(on=on))
        for message in _answers(channel, timeout_s):
            if isinstance(message, msg.StoresWanted):
                return
    raise PoolUnavailable("the pool does not answer", run_dir=run_dir, waited_s=timeout_s)


class RemovalTeller:
    """
    Tells a running pool of files that were removed beside it, so that its index and its usage stay right.

    Where no pool of *run_dir* answers, nobody has to be told. Close it: what is gathered is told then.
    """

    def __init__(self, run_dir: str | None) -> None:
        self._run_dir = run_dir
        self._gathered: dict[tuple[str, str], tuple[list[bytes], int]] = {}

    def removed(self, device_path: str, directory: str, key: bytes, freed_bytes: int) -> None:
        """The files of *key* are gone, of all ranks."""
        keys, freed = self._gathered.get((device_path, directory), ([], 0))
        keys.append(key)
        self._gathered[device_path, directory] = (keys, freed + freed_bytes)
        if len(keys) >= msg.ITEMS_MAX:
            self._tell()

    def close(self) -> None:
        """Tell the rest."""
        self._tell()

    def _tell(self) -> None:
        gathered, self._gathered = self._gathered, {}
        if self._run_dir is None or not gathered:
            return
        with contextlib.suppress(PoolUnavailable), _greeted(self._run_dir) as channel:
            for (device_path, directory), (keys, freed_bytes) in gathered.items():
                channel.send(
                    msg.FilesRemoved(device_path=device_path, directory=directory, keys=keys, freed_bytes=freed_bytes)
                )
            channel.send(msg.HealthWanted())  # its answer comes behind what was said before
            for message in _answers(channel, ANSWER_S):
                if isinstance(message, msg.Health) and not message.more:
                    return


@contextlib.contextmanager
def _greeted(run_dir: str) -> Iterator[Channel]:
    """
    Give a connection to the pool on which it was greeted, for one question.

    Raises:
        PoolUnavailable: No pool is there, or it ends before the question is done.
    """
    channel = Channel(connect_pool(run_dir), msg.CoordinatorToClient)
    hello = msg.Hello(
        protocol=msg.PROTOCOL_VERSION,
        version=kvpool.__version__,
        role="admin",
        engine="",
        rank=-1,
        pid=os.getpid(),
    )
    try:
        channel.send(hello)
        yield channel
    except PeerGone as error:
        raise PoolUnavailable("the pool ended meanwhile", run_dir=run_dir) from error
    finally:
        channel.close()


def _answers(channel: Channel, timeout_s: float) -> Iterator[msg.Message]:
    """Yield what the pool says until *timeout_s* has passed."""
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    while (left_s := deadline - time.monotonic()) > 0:
        poll.register(channel.fileno(), select.POLLIN | (select.POLLOUT if channel.wants_write else 0))
        poll.poll(left_s * 1000)
        channel.flush()
        for message, fds in channel.receive():
            for fd in fds:
                os.close(fd)
            if isinstance(message, msg.Refused):
                raise KvpoolError.from_wire(
                    {"code": message.code, "message": message.message, "context": message.context}
                )
            yield message
