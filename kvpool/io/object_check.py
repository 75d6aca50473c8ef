"""
Reads one object's file as a whole and says what is wrong with it.

Past the page cache where the filesystem can, so that a check does not push out what others use. What is found is data,
never an exception: a file that vanishes meanwhile was removed, which is nobody's fault.

Does not cover: which files to check, and what to do about them (`cli/fsck_cmd.py`).
"""

import contextlib
import errno
import mmap
import os
import stat
import threading
from typing import NamedTuple

from kvpool.core import trailer
from kvpool.core.trailer import ALIGNMENT_BYTES, TRAILER_BYTES
from kvpool.errors import IntegrityError
from kvpool.io.checksum import payload_checksum
from kvpool.io.files import FILE_MODE

#: A file larger than this is none of ours, and is not read.
FILE_BYTES_MAX = 1 << 30


class Wanted(NamedTuple):
    """What a file must hold: *fingerprint* and *payload_bytes* None where nothing says what they should be."""

    path: str
    key: bytes
    rank: int
    fingerprint: bytes | None
    payload_bytes: int | None


class Verdict(NamedTuple):
    """
    What was found.

    Attributes:
        bytes: Read.
        wrong: Why the bytes are not those that were published; empty if they are.
        mode: The permission bits, where they let others read; 0 if they do not.
        unreadable: The errno's name where the device or the permissions did not let us look.
        gone: The file is not there any more.
    """

    bytes: int = 0
    wrong: str = ""
    mode: int = 0
    unreadable: str = ""
    gone: bool = False


_local = threading.local()


def check_object(wanted: Wanted) -> Verdict:
    """Read and check one file. May be called from several threads."""
    try:
        fd = _open(wanted.path)
    except OSError as error:
        return _failed(error)
    try:
        facts = os.fstat(fd)
        mode = stat.S_IMODE(facts.st_mode)
        loose = mode if mode & ~FILE_MODE else 0
        if facts.st_size > FILE_BYTES_MAX:
            return Verdict(wrong=f"file has {facts.st_size} bytes", mode=loose)
        data = _read(fd, facts.st_size)
        return Verdict(bytes=len(data), wrong=_what_is_wrong(data, wanted), mode=loose)
    except OSError as error:
        return _failed(error)
    finally:
        os.close(fd)


def _failed(error: OSError) -> Verdict:
    if error.errno == errno.ENOENT:
        return Verdict(gone=True)
    return Verdict(unreadable=errno.errorcode.get(error.errno or 0, str(error.errno)))


def _open(path: str) -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        return os.open(path, flags | os.O_DIRECT)
    return os.open(path, flags)


def _read(fd: int, size: int) -> memoryview:
    """Return the file's bytes, in memory of this thread that the next read uses again."""
    needed = max(ALIGNMENT_BYTES, trailer.padded_bytes(size))
    held: mmap.mmap | None = getattr(_local, "page", None)
    if held is None or len(held) < needed:
        held = _local.page = mmap.mmap(-1, needed)
    view, done = memoryview(held), 0
    while done < size:
        got = os.preadv(fd, [view[done:needed]], done)
        done += got
        if not got or done % ALIGNMENT_BYTES:
            break
    return view[:done]


def _what_is_wrong(data: memoryview, wanted: Wanted) -> str:
    try:
        if len(data) < TRAILER_BYTES:
            raise IntegrityError("file is too short", file_bytes=len(data))
        found = trailer.unpack(bytes(data[-TRAILER_BYTES:]))
        expected = trailer.Expected(
            wanted.key,
            wanted.rank,
            found.fingerprint if wanted.fingerprint is None else wanted.fingerprint,
            found.payload_bytes if wanted.payload_bytes is None else wanted.payload_bytes,
        )
        trailer.check(bytes(data[-TRAILER_BYTES:]), expected)
        if len(data) != trailer.slot_bytes(expected.payload_bytes):
            raise IntegrityError("file has another size", file_bytes=len(data))
        if found.checksum == trailer.NO_CHECKSUM:
            return ""  # nothing to check it by; a pool that verifies does not serve it
        if payload_checksum(data[: expected.payload_bytes]) != found.checksum:
            raise IntegrityError("payload's checksum")
    except IntegrityError as error:
        return str(error)
    return ""
