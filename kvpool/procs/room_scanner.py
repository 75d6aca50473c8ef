"""
A helper process that counts what is below a device's directory, and names the keys that were not used for longest.

Theory. `python -m kvpool.procs.room_scanner ROOT WANT_BYTES` walks all namespaces, whoever opened them. It writes
frames to standard output as `scanner` does: `SpaceSeen` for each namespace, then `KeysAged` with the least recently
used keys that together hold WANT_BYTES, in order, then `RoomCounted`; an end of file without that is a walk that
failed. It runs at low priority, and its memory holds the keys it will name only.
"""

import contextlib
import os
import sys
from itertools import islice
from typing import BinaryIO

import msgspec

from kvpool.core.eviction import Aged, OldestKeys
from kvpool.io.inventory import Walk, find_spaces
from kvpool.procs.scanner import NICENESS

KEYS_MAX = 256
_LENGTH_BYTES = 4


class SpaceSeen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="space", forbid_unknown_fields=True):
    """Namespace number *space* of this walk: its folders, by rank."""

    space: int
    directories: dict[int, str]


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


RoomFrame = SpaceSeen | KeysAged | RoomCounted


def command(root: str, want_bytes: int) -> list[str]:
    """Return the command line."""
    return [sys.executable, "-m", "kvpool.procs.room_scanner", root, str(want_bytes)]


def walk(root: str, want_bytes: int, output: BinaryIO) -> None:
    """Walk, and write what was found."""
    encoder = msgspec.msgpack.Encoder()

    def write(frame: RoomFrame) -> None:
        body = encoder.encode(frame)
        output.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        output.flush()

    seen, spaces, oldest = Walk(), find_spaces(root), OldestKeys(want_bytes)
    for number, space in enumerate(spaces):
        write(SpaceSeen(space=number, directories=space.directories))
        oldest.offer_all(Aged(found.used_s, found.stored_bytes, number, found.key) for found in seen.keys_of(space))
    seen.count_rest(root, spaces)
    aged = iter(oldest.in_order())
    while part := list(islice(aged, KEYS_MAX)):
        write(KeysAged(keys=[(key.used_s, key.stored_bytes, key.space, key.key) for key in part]))
    write(RoomCounted(total_bytes=seen.total_bytes, objects=seen.objects, keys=seen.keys))


def main(arguments: list[str]) -> int:
    """Walk the device named in *arguments*."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with contextlib.suppress(BrokenPipeError):  # the worker is gone, and so is the interest
        walk(arguments[0], int(arguments[1]), sys.stdout.buffer)
    os._exit(0)  # no second flush into a broken pipe


if __name__ == "__main__":
    main(sys.argv[1:])
