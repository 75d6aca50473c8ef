"""
What an errno means, per operation on object files.

RETRY: ask again at once (bounded). MISSING: no such file or folder. EXISTS: the name is taken. FULL: no place for it:
space, quota, inodes, or all is read-only. DEVICE: the device or the filesystem failed. An errno that is not in an
operation's table is our mistake.
"""

import enum
import errno
import os

from kvpool.errors import unreachable


class Meaning(enum.Enum):
    """What is to be made of a failed operation."""

    RETRY = "retry"
    MISSING = "missing"
    EXISTS = "exists"
    FULL = "full"
    DEVICE = "device"


_ALWAYS = {
    errno.EINTR: Meaning.RETRY,
    errno.EAGAIN: Meaning.RETRY,
    errno.EBUSY: Meaning.DEVICE,
    errno.EIO: Meaning.DEVICE,
    errno.ENOMEM: Meaning.DEVICE,
    errno.ENOBUFS: Meaning.DEVICE,
    errno.ENODEV: Meaning.DEVICE,
    errno.ENXIO: Meaning.DEVICE,
    errno.EUCLEAN: Meaning.DEVICE,  # ext4 and xfs: structure needs cleaning
    errno.EBADMSG: Meaning.DEVICE,  # xfs, ext4: bad checksum of metadata
    errno.EILSEQ: Meaning.DEVICE,  # block layer: protection information
    errno.ENODATA: Meaning.DEVICE,  # block layer: medium error
    errno.ENOLINK: Meaning.DEVICE,  # block layer: transport
    errno.EREMOTEIO: Meaning.DEVICE,
    errno.ETIMEDOUT: Meaning.DEVICE,
    errno.ESTALE: Meaning.DEVICE,
    errno.ECANCELED: Meaning.DEVICE,  # the ring gives up
    errno.ECONNREFUSED: Meaning.DEVICE,
    errno.ECONNRESET: Meaning.DEVICE,
    errno.EHOSTDOWN: Meaning.DEVICE,
    errno.ENOTCONN: Meaning.DEVICE,
    errno.ESHUTDOWN: Meaning.DEVICE,
    errno.EOPNOTSUPP: Meaning.DEVICE,
}
_BY_PATH = _ALWAYS | {
    errno.EACCES: Meaning.DEVICE,
    errno.EPERM: Meaning.DEVICE,
    errno.ELOOP: Meaning.DEVICE,
    errno.ENOTDIR: Meaning.DEVICE,
    errno.EMFILE: Meaning.DEVICE,
    errno.ENFILE: Meaning.DEVICE,
    errno.ENOENT: Meaning.MISSING,
}
_GROWING = {
    errno.ENOSPC: Meaning.FULL,
    errno.EDQUOT: Meaning.FULL,
    errno.EFBIG: Meaning.FULL,
    errno.EMLINK: Meaning.FULL,
    errno.EROFS: Meaning.FULL,  # what is there can still be read
}

#: operation -> errno -> meaning
TABLES: dict[str, dict[int, Meaning]] = {
    "open": _BY_PATH | {errno.ENOTDIR: Meaning.MISSING, errno.EINVAL: Meaning.DEVICE, errno.EISDIR: Meaning.DEVICE},
    "stat": _BY_PATH | {errno.ENOTDIR: Meaning.MISSING},
    "read": _ALWAYS | {errno.EINVAL: Meaning.DEVICE, errno.EISDIR: Meaning.DEVICE},
    "create": _BY_PATH | _GROWING | {errno.EEXIST: Meaning.EXISTS, errno.EINVAL: Meaning.DEVICE},
    "write": _ALWAYS | _GROWING | {errno.EINVAL: Meaning.DEVICE},
    "fsync": _ALWAYS | _GROWING,
    "link": _BY_PATH | _GROWING | {errno.EEXIST: Meaning.EXISTS, errno.EXDEV: Meaning.DEVICE},
    "rename": _BY_PATH | _GROWING | {errno.EEXIST: Meaning.EXISTS, errno.EXDEV: Meaning.DEVICE},
    "mkdir": _BY_PATH | _GROWING | {errno.EEXIST: Meaning.EXISTS},
}


def meaning(operation: str, number: int) -> Meaning:
    """
    Return what errno *number* means for *operation*.

    Raises:
        InvariantError: The operation's table has no such errno.
    """
    known = TABLES[operation].get(number)
    if known is None:
        unreachable("errno", operation=operation, errno=errno.errorcode.get(number, number))
    return known


def text(operation: str, number: int) -> str:
    """Return the failure in words: `read: Input/output error (EIO)`."""
    return f"{operation}: {os.strerror(number)} ({errno.errorcode.get(number, number)})"
