"""
A copy of one namespace's index as bytes: written now and then and at the end, read at the next start.

Theory. The directory is the truth; a walk of a million folders takes a minute, reading this takes a moment. So it is a
hint: what it names may be gone, and what came later is not in it. A load finds out by its open, and the walk behind it
sets the rest right. What it must never do is name keys of something else: it carries the namespace's fingerprint, which
differs from epoch to epoch, and a checksum over all of it. What does not match is not used, and its reader says why.

    header    magic, format version, rank count, fingerprint
    block     bytes of a key, bytes of a mask, entry count; then that many entries: key, mask (little-endian)
    ...
    end       a block without entries, then the number of entries in all and the XXH3 of everything before

A mask's lowest rank_count bits say which ranks' files there were; what is above them is the writer's own.

Does not cover: where it is kept (`io/snapshot_file.py`), when it is written (`procs/worker_snapshots.py`).
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from kvpool.errors import IntegrityError

MAGIC = b"kvpindex"
FORMAT_VERSION = 1
#: Longest key; a longer one in a block means that it is not ours.
KEY_BYTES_MAX = 512
#: A changed index is written again after this long, and after the shorter time once so many, or such a share, changed.
INTERVAL_S_MAX, INTERVAL_S_MIN = 600.0, 60.0
CHANGES_MIN, CHANGES_SHARE = 1024, 1 / 16

_HEADER = struct.Struct("<8sII32s")
_BLOCK = struct.Struct("<HHI")
_END = struct.Struct("<QQ")


class Block(NamedTuple):
    """Entries as they lie: bytes of a key, bytes of a mask, and keys and masks one after the other."""

    key_bytes: int
    mask_bytes: int
    entries: bytes | memoryview


class Writer:
    """
    Makes the bytes of one snapshot, piece by piece.

    Args:
        fingerprint: 64 hex digits.
    """

    def __init__(self, fingerprint: str, rank_count: int) -> None:
        self._digest = xxhash.xxh3_64()
        self._count = 0
        self._first = _HEADER.pack(MAGIC, FORMAT_VERSION, rank_count, bytes.fromhex(fingerprint))

    def block(self, key_bytes: int, mask_bytes: int, entries: bytes) -> bytes:
        """Return the bytes of one block, those of the header before the first; nothing for no entries."""
        count = len(entries) // (key_bytes + mask_bytes)
        if not count:
            return b""
        self._count += count
        return self._piece(_BLOCK.pack(key_bytes, mask_bytes, count) + entries)

    def end(self) -> bytes:
        """Return the last bytes."""
        last = self._piece(_BLOCK.pack(0, 0, 0))
        return last + _END.pack(self._count, self._digest.intdigest())

    def _piece(self, data: bytes) -> bytes:
        piece, self._first = self._first + data, b""
        self._digest.update(piece)
        return piece


def is_whole(raw: bytes | memoryview) -> bool:
    """Tell whether *raw* ends as a snapshot does, and its checksum is right."""
    size = len(raw) - _END.size
    return size >= _HEADER.size and _END.unpack_from(raw, size)[1] == xxhash.xxh3_64_intdigest(memoryview(raw)[:size])


def read(raw: bytes | memoryview, fingerprint: str, rank_count: int) -> Iterator[Block]:
    """
    Yield the blocks of a snapshot. All of it is checked before the first.

    Raises:
        IntegrityError: It is of another format or of something else, or damaged; says what.
    """
    if len(raw) < _HEADER.size + _BLOCK.size + _END.size:
        raise IntegrityError("index snapshot is cut off", snapshot_bytes=len(raw))
    magic, version, ranks, owner = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise IntegrityError("no index snapshot", magic=magic.hex())
    if version != FORMAT_VERSION:
        raise IntegrityError("index snapshot of another format", format_version=version, known=FORMAT_VERSION)
    if owner.hex() != fingerprint:
        raise IntegrityError("index snapshot of another namespace", expected=fingerprint, found=owner.hex())
    if ranks != rank_count:
        raise IntegrityError("index snapshot of another number of ranks", expected=rank_count, found=ranks)
    if not is_whole(raw):
        raise IntegrityError("index snapshot is damaged: its checksum is another one")
    yield from _blocks(raw, rank_count)


def _blocks(raw: bytes | memoryview, rank_count: int) -> Iterator[Block]:
    found, at, stop = [], _HEADER.size, len(raw) - _END.size
    total = 0
    while at + _BLOCK.size <= stop:
        key_bytes, mask_bytes, count = _BLOCK.unpack_from(raw, at)
        at += _BLOCK.size
        if not count:
            break
        end = at + count * (key_bytes + mask_bytes)
        if not 0 < key_bytes <= KEY_BYTES_MAX or 8 * mask_bytes < rank_count:
            raise IntegrityError("index snapshot has a block that cannot be", at=at, key_bytes=key_bytes, count=count)
        found.append((key_bytes, mask_bytes, at, end))
        total += count
        at = end
    if at != stop or total != _END.unpack_from(raw, stop)[0]:
        raise IntegrityError("index snapshot does not end where it should", at=at, keys=total)
    for key_bytes, mask_bytes, start, end in found:
        yield Block(key_bytes, mask_bytes, raw[start:end])


def entries_of(block: Block, rank_count: int) -> tuple[list[bytes], list[int]]:
    """Return a block's keys, and their masks; keys that no rank has are left out."""
    raw = bytes(block.entries)
    step, full = block.key_bytes + block.mask_bytes, (1 << rank_count) - 1
    keys = [raw[start : start + block.key_bytes] for start in range(0, len(raw), step)]
    if block.mask_bytes == 1:
        masks = [mask & full for mask in raw[block.key_bytes :: step]]
    else:
        splits = range(block.key_bytes, len(raw), step)
        masks = [int.from_bytes(raw[split : split + block.mask_bytes], "little") & full for split in splits]
    if all(masks):
        return keys, masks
    return [key for key, mask in zip(keys, masks, strict=True) if mask], [mask for mask in masks if mask]


def is_due(changes: int, keys: int, age_s: float) -> bool:
    """Tell whether an index with that many *changes* since it was last written, *age_s* ago, is to be written now."""
    if not changes or age_s < INTERVAL_S_MIN:
        return False
    return age_s >= INTERVAL_S_MAX or changes >= max(CHANGES_MIN, int(keys * CHANGES_SHARE))
