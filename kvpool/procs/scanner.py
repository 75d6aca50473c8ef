"""
A helper process that walks namespace directories and tells which objects are there.

Theory. `python -m kvpool.procs.scanner SNAPSHOT FINGERPRINT DIR ...`, one directory a rank, in rank order. It writes
frames to standard output, each four bytes of length (little-endian) and one MessagePack message: `Remembered` for what
the snapshot names, if there is one, and `SnapshotRead` at its end; then it walks, and writes `Found` many times,
`ScanEnded` once at the end; an end of file without it is a scan that failed. The reader cuts frames with
:class:`FrameReader`. The walk runs at low priority, asks before each folder whether it may go on (`turns.py`), holds a
folder at a time, and needs no `stat` for an object: what a file really holds is seen at its load.

Names that no object has, and objects in a folder that is not theirs, are counted and left alone. Temporary files that
were last written before this process started belong to a worker that is gone, and are removed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO, Generic, TypeVar

import msgspec

from kvpool.core import layout
from kvpool.errors import IntegrityError
from kvpool.io import snapshot_file
from kvpool.io.process import lower_priority
from kvpool.procs.turns import Turns
from kvpool.wire.messages import TRIAL_KEY

KEYS_MAX = 256
NICENESS = 15
#: File times are taken from a clock that is up to a tick behind.
CLOCK_LAG_S = 0.02
_LENGTH_BYTES = 4


class Found(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="found", forbid_unknown_fields=True):
    """Objects of *rank* that are there."""

    rank: int
    keys: list[bytes]


class Remembered(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="remembered", forbid_unknown_fields=True
):
    """Keys that the snapshot names, and the ranks (bits) that had them."""

    keys: list[bytes]
    masks: list[int]


class SnapshotRead(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="snapshot", forbid_unknown_fields=True
):
    """All that the snapshot names was told; *reason*: why none of it could be."""

    keys: int
    reason: str


class ScanEnded(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="ended", forbid_unknown_fields=True):
    """All was seen: objects told, names that no object has, temporary files removed, folders that could not be read."""

    objects: int
    ignored: int
    removed: int
    unreadable: int


FrameT = TypeVar("FrameT")


class Frames(Generic[FrameT]):
    """Cuts a helper's output into messages, however it arrives."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        self._rest = b""
        self._decoder = decoder

    def feed(self, data: bytes) -> list[FrameT]:
        """
        Return the messages that *data* completes.

        Raises:
            msgspec.MsgspecError: A frame is not one of ours.
        """
        self._rest += data
        messages: list[FrameT] = []
        start = 0
        while (body := start + _LENGTH_BYTES) <= len(self._rest):
            stop = body + int.from_bytes(self._rest[start:body], "little")
            if stop > len(self._rest):
                break
            messages.append(self._decoder.decode(self._rest[body:stop]))
            start = stop
        self._rest = self._rest[start:]
        return messages


Frame = Found | Remembered | SnapshotRead | ScanEnded


class FrameReader(Frames[Frame]):
    """Cuts the scanner's output into messages."""

    def __init__(self) -> None:
        super().__init__(msgspec.msgpack.Decoder(Frame))


def command(
    directories: list[str], snapshot: str = "", fingerprint: str = "", *, leftover_age_s: float = CLOCK_LAG_S
) -> list[str]:
    """
    Return the command line that reads *snapshot*, if one is named, and scans *directories*, one a rank.

    Args:
        leftover_age_s: A temporary file that old when the scan starts is one that a killed writer left.
    """
    return [sys.executable, "-m", "kvpool.procs.scanner", snapshot, fingerprint, str(leftover_age_s), *directories]


class Scan:
    """One walk over all ranks' directories."""

    def __init__(self, directories: list[str], output: BinaryIO, *, leftover_before_s: float) -> None:
        self._directories = directories
        self._output = output
        self._turns = Turns()
        self._leftover_before_s = leftover_before_s
        self._encoder = msgspec.msgpack.Encoder()
        self._objects = self._ignored = self._removed = self._unreadable = 0

    def remember(self, snapshot: str, fingerprint: str) -> None:
        """Write what the snapshot names."""
        count, reason = 0, ""
        try:
            for named, had in snapshot_file.read(snapshot, fingerprint, len(self._directories)):
                there = [at for at, key in enumerate(named) if not key.startswith(TRIAL_KEY)]
                keys, masks = [named[at] for at in there], [had[at] for at in there]
                for first in range(0, len(keys), KEYS_MAX):
                    part = slice(first, first + KEYS_MAX)
                    self._write(Remembered(keys=keys[part], masks=masks[part]))
                count += len(keys)
        except BrokenPipeError:
            raise
        except (IntegrityError, OSError) as error:
            reason = str(error)
        self._write(SnapshotRead(keys=count, reason=reason))

    def run(self) -> None:
        """Walk, and write what is found; at last ScanEnded."""
        for rank, directory in enumerate(self._directories):
            batch: list[bytes] = []
            for key in self._keys(directory):
                batch.append(key)
                if len(batch) == KEYS_MAX:
                    self._tell(rank, batch)
                    batch = []
            if batch:
                self._tell(rank, batch)
        self._write(
            ScanEnded(objects=self._objects, ignored=self._ignored, removed=self._removed, unreadable=self._unreadable)
        )

    def _tell(self, rank: int, keys: list[bytes]) -> None:
        self._objects += len(keys)
        self._write(Found(rank=rank, keys=keys))

    def _write(self, message: Frame) -> None:
        body = self._encoder.encode(message)
        self._output.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        self._output.flush()

    def _keys(self, directory: str) -> Iterator[bytes]:
        for upper in self._entries(directory):
            if not self._is_folder(upper, layout.MANIFEST_NAME):
                continue
            for lower in self._entries(upper.path):
                if not self._is_folder(lower):
                    continue
                for entry in self._entries(lower.path):
                    key = layout.maybe_key(entry.name)
                    if key is not None and layout.object_directory(key) == f"{upper.name}/{lower.name}":
                        yield key
                    else:
                        self._leave(entry)

    def _is_folder(self, entry: os.DirEntry[str], known_file: str = "") -> bool:
        if entry.is_dir(follow_symlinks=False):
            return True
        if entry.name != known_file:
            self._leave(entry)
        return False

    def _entries(self, directory: str) -> list[os.DirEntry[str]]:
        self._turns.wait()
        try:
            with os.scandir(directory) as entries:
                return list(entries)
        except FileNotFoundError:
            return []
        except OSError:
            self._unreadable += 1
            return []

    def _leave(self, entry: os.DirEntry[str]) -> None:
        """Count what is no object; remove it if it is what a dead worker left."""
        self._ignored += 1
        if layout.is_temporary(entry.name):
            with contextlib.suppress(OSError):  # somebody else was faster, or the next scan will be
                if entry.stat(follow_symlinks=False).st_mtime < self._leftover_before_s:
                    os.unlink(entry.path)
                    self._removed += 1


def main(arguments: list[str]) -> int:
    """Read the snapshot and scan the directories named in *arguments*."""
    snapshot, fingerprint, leftover_age_s, *directories = arguments
    scan = Scan(directories, sys.stdout.buffer, leftover_before_s=time.time() - float(leftover_age_s))
    with contextlib.suppress(BrokenPipeError):  # the worker is gone, and so is the interest
        if snapshot:
            scan.remember(snapshot, fingerprint)
        lower_priority(NICENESS)
        scan.run()
    os._exit(0)  # no second flush into a broken pipe


if __name__ == "__main__":
    main(sys.argv[1:])
