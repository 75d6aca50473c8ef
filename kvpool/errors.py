"""
Every error that kvpool raises on purpose, the codes that cross processes, and the exit codes.

Covers: the exception tree, :class:`Code` (why one object's transfer failed), :class:`Exit`.
Does not cover: errno tables (`kvpool/io`), what a caller does about an error.
Numbers are append-only: a removed one is never given again.
"""

import enum
from typing import Any, ClassVar, NoReturn


class InvariantError(Exception):
    """A bug in kvpool itself. Outside the KvpoolError tree, so that no handler of expected errors hides it."""


def invariant(ok: bool, what: str, **facts: object) -> None:
    """Assert that survives ``python -O``. One property per call."""
    if not ok:
        raise InvariantError(" ".join([what, *(f"{name}={value!r}" for name, value in facts.items())]))


def unreachable(what: str, **facts: object) -> NoReturn:
    """Report a branch that only a bug in kvpool can reach."""
    raise InvariantError(" ".join([what, *(f"{name}={value!r}" for name, value in facts.items())]))


class Code(enum.IntEnum):
    """Why one object could not be loaded or stored. Crosses processes; append only."""

    MISSING = 1  # no such file
    READ_ERROR = 2  # the device said no
    CORRUPT = 3  # the bytes are not those that were published
    DEADLINE = 4  # took longer than the configuration allows
    WORKER_LOST = 5  # the device's I/O worker ended
    NO_SLOT = 6  # no staging slot in time
    CANCELLED = 7  # the client, or the engine, took it back
    NAMESPACE_UNKNOWN = 8  # the worker has not heard of that namespace
    WRITE_ERROR = 9  # the device said no
    DEVICE_FULL = 10  # no space, quota or inodes
    REFUSED = 11  # the pool does not take it now (draining, read-only, injected by a test)
    COPY_ERROR = 12  # the copy between slot and GPU failed
    EPOCH = 13  # the namespace was reset meanwhile


class Exit(enum.IntEnum):
    """Exit codes of kvpool's processes. 0 to 2 have their usual meaning; append only."""

    OK = 0
    DEGRADED = 1  # `health`: something is not as it should be
    NOT_THERE = 2  # `health`: no pool answers
    CONFIG = 10
    HOST = 11  # kernel, limits, file system: starting again will not help
    ALREADY_RUNNING = 12  # another coordinator holds the run directory
    COORDINATOR_GONE = 13  # an I/O worker lost its coordinator
    INVARIANT = 20  # a bug


class KvpoolError(Exception):
    """Base of what kvpool raises on purpose. Never raised itself; crosses processes as data."""

    code: ClassVar[int] = 0

    def __init__(self, message: str, **context: str | int | float) -> None:
        super().__init__(message)
        self.message = message
        self.context = context

    def __str__(self) -> str:
        return " ".join([self.message, *(f"{name}={value}" for name, value in self.context.items())])

    def to_wire(self) -> dict[str, Any]:
        """Return the error as plain data: code, message, context."""
        return {"code": self.code, "message": self.message, "context": self.context}

    @classmethod
    def from_wire(cls, data: dict[str, Any]) -> "KvpoolError":
        """Return the error that :meth:`to_wire` described; an unknown code becomes the base class."""
        kind = next((c for c in _concrete(KvpoolError) if c.code == data["code"]), KvpoolError)
        return kind(data["message"], **data["context"])


def _concrete(kind: type[KvpoolError]) -> list[type[KvpoolError]]:
    return [found for sub in kind.__subclasses__() for found in (sub, *_concrete(sub))]


class ConfigError(KvpoolError):
    """A setting is wrong: names file, key, value, and what is allowed."""

    code = 10


class HostError(KvpoolError):
    """The machine does not allow it: names the limit, its value, and the value needed."""

    code = 11


class ProtocolError(KvpoolError):
    """A frame or a message is not one of ours. Closes that peer only."""

    code = 12


class PoolUnavailable(KvpoolError):  # noqa: N818 - a state of the pool, named so in the design
    """No pool answers. Raised in clients only, where it becomes a miss."""

    code = 13


class DeviceError(KvpoolError):
    """A storage device failed: names device, operation, errno."""

    code = 14


class IntegrityError(KvpoolError):
    """Stored bytes are not those that were published: names the object and what did not match."""

    code = 15


class PeerGone(KvpoolError):  # noqa: N818 - a fact about a socket, caught by its owner
    """The process at the other end of a socket hung up, or does not read what is sent to it."""

    code = 16
