"""
A helper process that counts what is below a device's directory, and names the keys that were not used for longest.

Theory. `python -m kvpool.procs.room_scanner ROOT WANT_BYTES SINCE_S` walks all namespaces, whoever opened them. It
writes frames to standard output as `scanner` does: `SpaceSeen` for each namespace, `KeysFresh` for keys with a file
modified since SINCE_S (so that whoever wrote them does not count them twice), then `KeysAged` with the least recently
used keys that together hold WANT_BYTES, in order, then `RoomCounted`; an end of file without that is a walk that
failed. It runs at low priority, asks before each folder whether it may go on (`turns.py`), and its
memory holds the keys it will name only.
"""

import contextlib
import os
import sys
from itertools import islice
from typing import BinaryIO

import msgspec

from kvpool.core.eviction import Aged, OldestKeys
from kvpool.io.inventory import Walk, find_spaces
from kvpool.io.process import lower_priority
from kvpool.procs.scanner import NICENESS
from kvpool.procs.turns import Turns

KEYS_MAX = 256
_LENGTH_BYTES = 4


class SpaceSeen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="space", forbid_unknown_fields=True):
    """Namespace number *space* of this walk: its folders, by rank."""

    space: int
    directories: dict[int, str]


class KeysFresh(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="fresh", forbid_unknown_fields=True):
    """Keys of that namespace that were modified lately, and the ranks whose files are counted."""

    space: int
    keys: list[tuple[bytes, list[int]]]


class KeysAged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="aged", forbid_unknown_fields=True):
    """The next keys in the order of their last use: (seconds since 1970, bytes stored, namespace, key)."""

    keys: list[tuple[float, int, int, bytes]]


class RoomCounted(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="counted", forbid_unknown_fields=True
):
    """All was seen: bytes below the root as the filesystem counts, objects and keys among it."""

    total_bytes: int
    objects: int
    keys: int


RoomFrame = SpaceSeen | KeysFresh | KeysAged | RoomCounted


def command(root: str, want_bytes: int, since_s: float) -> list[str]:
    """Return the command line."""
    return [sys.executable, "-m", "kvpool.procs.room_scanner", root, str(want_bytes), repr(since_s)]


def walk(root: str, want_bytes: int, since_s: float, output: BinaryIO) -> None:
    """Walk, and write what was found."""
    encoder = msgspec.msgpack.Encoder()

    def write(frame: RoomFrame) -> None:
        body = encoder.encode(frame)
        output.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        output.flush()

    seen, spaces, oldest = Walk(before_folder=Turns().wait), find_spaces(root), OldestKeys(want_bytes)
    for number, space in enumerate(spaces):
        write(SpaceSeen(space=number, directories=space.directories))
        fresh: list[tuple[bytes, list[int]]] = []
        for found in seen.keys_of(space):
            oldest.offer(Aged(found.used_s, found.stored_bytes, number, found.key))
            if found.used_s >= since_s:
                fresh.append((found.key, list(found.files)))
            if len(fresh) == KEYS_MAX:
                write(KeysFresh(space=number, keys=fresh))
                fresh = []
        write(KeysFresh(space=number, keys=fresh))
    seen.count_rest(root, spaces)
    aged = iter(oldest.in_order())
    while part := list(islice(aged, KEYS_MAX)):
        write(KeysAged(keys=[(key.used_s, key.stored_bytes, key.space, key.key) for key in part]))
    write(RoomCounted(total_bytes=seen.total_bytes, objects=seen.objects, keys=seen.keys))


def main(arguments: list[str]) -> int:
    """Walk the device named in *arguments*."""
    lower_priority(NICENESS)
    with contextlib.suppress(BrokenPipeError):  # the worker is gone, and so is the interest
        walk(arguments[0], int(arguments[1]), float(arguments[2]), sys.stdout.buffer)
    os._exit(0)  # no second flush into a broken pipe


if __name__ == "__main__":
    main(sys.argv[1:])
