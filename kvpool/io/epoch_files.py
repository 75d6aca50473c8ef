"""
The epoch of each namespace that was ever reset, kept on a device; and the bin for what a reset left behind.

Below the device's `.kvpool`: `epochs/<fingerprint>.json`, written beside, made durable, and put in place whole; and
`trash/`, into which old folders are moved in one step, to be removed by a helper when there is time (`procs/sweeper`).

Does not cover: what an epoch means (`core/epochs.py`), which folders are old (`procs/worker_epochs.py`).
"""

import contextlib
import os
import re
import time

import msgspec

from kvpool.io.files import LEFTOVER_AGE_S, WRITER

EPOCHS_NAME = "epochs"
TRASH_NAME = "trash"
#: Epoch files read; each is a namespace that was reset at least once.
EPOCHS_MAX = 4096

_NAME = re.compile(r"([0-9a-f]{64})\.json")


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Content of an epoch file."""

    epoch: int


def read_epochs(private: str) -> dict[str, int]:
    """
    Return fingerprint -> epoch as kept below *private*.

    Raises:
        OSError: They cannot be read, so that nobody knows what may be served.
        msgspec.MsgspecError: One is broken, with the same consequence.
    """
    folder = f"{private}/{EPOCHS_NAME}"
    epochs: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is not None and len(epochs) < EPOCHS_MAX:
                with open(entry.path, "rb") as file:
                    epochs[match[1]] = msgspec.json.decode(file.read(), type=Kept).epoch
    return epochs


def keep_epoch(private: str, fingerprint: str, epoch: int) -> None:
    """
    Keep *epoch*, durably when this returns; a higher one that is there stays.

    Raises:
        OSError: It is not kept.
    """
    if read_epochs(private).get(fingerprint, 0) >= epoch:
        return
    folder = f"{private}/{EPOCHS_NAME}"
    os.makedirs(folder, 0o700, exist_ok=True)
    temporary = f"{folder}/.{fingerprint}-{WRITER}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(msgspec.json.encode(Kept(epoch=epoch)))
        file.flush()
        os.fsync(fd)
    os.rename(temporary, f"{folder}/{fingerprint}.json")
    for made in (folder, private):
        _sync_directory(made)


def remove_leftovers(private: str) -> None:
    """Remove what was written beside and never put in place, by a process that was killed; errors are for the next."""
    with contextlib.suppress(OSError), os.scandir(f"{private}/{EPOCHS_NAME}") as entries:
        for entry in entries:
            if entry.name.startswith(".") and time.time() - entry.stat().st_mtime > LEFTOVER_AGE_S:
                os.unlink(entry.path)


def discard(private: str, directory: str, name: str) -> bool:
    """Move *directory* to the trash under a name that begins with *name*; tell whether it was there."""
    trash = trash_of(private)
    os.makedirs(trash, 0o700, exist_ok=True)
    for number in range(EPOCHS_MAX):
        target = f"{trash}/{name}-{os.getpid()}-{number}"
        if not os.path.lexists(target):
            with contextlib.suppress(FileNotFoundError):
                os.rename(directory, target)
                return True
            return False
    return False


def trash_of(private: str) -> str:
    """Return the trash's path."""
    return f"{private}/{TRASH_NAME}"


def has_trash(private: str) -> bool:
    """Tell whether there is anything to remove."""
    with contextlib.suppress(FileNotFoundError), os.scandir(trash_of(private)) as entries:
        return next(entries, None) is not None
    return False


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
