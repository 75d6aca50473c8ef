"""
The files of index snapshots: one for each namespace, below the device's `.kvpool/index`, put in place whole.

A snapshot arrives at its writer as a stream, and gets its name only once its end has come and its checksum is right: a
writer or a sender that was killed leaves the old one. It is not made durable: what a power cut leaves of it is seen by
the checksum, and then the directory is walked as if there were none.

Does not cover: what is in it (`core/snapshot.py`).
"""

import contextlib
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from kvpool.core import snapshot
from kvpool.errors import IntegrityError
from kvpool.io.files import DIRECTORY_MODE, FILE_MODE, LEFTOVER_AGE_S, WRITER

FOLDER_NAME = "index"
SUFFIX = ".snapshot"
#: A snapshot that was not written again for so long is of a namespace that nobody uses.
FORGOTTEN_AGE_S = 90 * 86400.0


def path_of(private: str, fingerprint: str) -> str:
    """Return where the snapshot of the namespace *fingerprint* is, below a device's `.kvpool`."""
    return f"{private}/{FOLDER_NAME}/{fingerprint}{SUFFIX}"


def write(path: str, pieces: Iterable[bytes]) -> None:
    """
    Put what *pieces* bring at *path*.

    Raises:
        IntegrityError: It is not a whole snapshot; the old one stays.
        OSError: It cannot be written; the old one stays.
    """
    folder, name = os.path.split(path)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, DIRECTORY_MODE)
    temporary = f"{folder}/.{name}-{WRITER}"
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        with open(fd, "w+b") as file:
            file.writelines(pieces)
            file.flush()
            if not file.tell() or not _is_whole(file):
                raise IntegrityError("index snapshot did not arrive whole", snapshot_bytes=file.tell())
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _is_whole(file: BinaryIO) -> bool:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
        return snapshot.is_whole(raw)  # type: ignore[arg-type]  # reads like bytes


def read(path: str, fingerprint: str, rank_count: int) -> Iterator[tuple[list[bytes], list[int]]]:
    """
    Yield keys and masks of the snapshot at *path*, a part at a time; nothing where there is none.

    Raises:
        IntegrityError: It cannot be used; nothing was yielded.
        OSError: It cannot be read; nothing was yielded.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise IntegrityError("index snapshot is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            for block in snapshot.read(raw, fingerprint, rank_count):  # type: ignore[arg-type]  # reads like bytes
                yield snapshot.entries_of(block, rank_count)


def remove(private: str, fingerprint: str) -> None:
    """Remove the snapshot of a namespace, if there is one."""
    with contextlib.suppress(OSError):
        os.unlink(path_of(private, fingerprint))


def tidy(private: str) -> None:
    """Remove what killed writers left behind, and snapshots of what nobody serves any more; errors are for the next."""
    with contextlib.suppress(OSError), os.scandir(f"{private}/{FOLDER_NAME}") as entries:
        for entry in entries:
            age_s = time.time() - entry.stat().st_mtime
            if age_s > (LEFTOVER_AGE_S if entry.name.startswith(".") else FORGOTTEN_AGE_S):
                os.unlink(entry.path)
