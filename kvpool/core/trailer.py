"""
The last 4096 bytes of an object file: what the bytes before it are.

Theory. An object file is payload, zeros up to a multiple of 4096, trailer; one direct read brings all of it. The
trailer says for which key, rank and namespace the payload was published, how long it is and its checksum, and
ends with a checksum of itself. A file that is truncated, swapped with another, from another model or bit-rotten
therefore differs from what the reader expects, and the first difference is named. Bytes that are not used are zero,
so that equal objects are equal files.

    offset  bytes  field (little-endian)
         0      8  magic
         8      4  format version
        12      4  rank
        16      8  payload bytes
        24     32  namespace fingerprint
        56      8  payload checksum (xxh3_64); 0: none (one that is 0 by chance counts as none, and is stored again)
        64      2  length of the key
        66    128  key, zero-padded
       194   3894  zero
      4088      8  xxh3_64 of the 4088 bytes before

Numbers and offsets are append-only within a format version.
"""

import struct
from typing import NamedTuple

import xxhash

from kvpool.errors import IntegrityError, invariant

TRAILER_BYTES = 4096
ALIGNMENT_BYTES = 4096
FORMAT_VERSION = 1
MAGIC = b"kvpool\r\n"
KEY_BYTES_MAX = 128

#: In the place of a payload checksum: the object was published without one, by a pool that does not verify.
NO_CHECKSUM = 0

_FIELDS = struct.Struct(f"<8sIIQ32sQH{KEY_BYTES_MAX}s")
_CHECKED_BYTES = TRAILER_BYTES - 8
_ZEROS = bytes(_CHECKED_BYTES - _FIELDS.size)
_CHECKSUM_OFFSET = 56


class Expected(NamedTuple):
    """What a reader expects of an object, and what a writer says of it: *fingerprint* is 32 bytes."""

    key: bytes
    rank: int
    fingerprint: bytes
    payload_bytes: int


class Trailer(NamedTuple):
    """What a trailer says."""

    key: bytes
    rank: int
    fingerprint: bytes
    payload_bytes: int
    checksum: int


def padded_bytes(payload_bytes: int) -> int:
    """Return *payload_bytes* rounded up to the alignment of direct I/O."""
    return -(-payload_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def slot_bytes(payload_bytes: int) -> int:
    """Return the size of the slot, and of the file, of an object of *payload_bytes*."""
    return padded_bytes(payload_bytes) + TRAILER_BYTES


def pack(expected: Expected, checksum: int) -> bytes:
    """Return the 4096 bytes that end the file of an object whose payload has that checksum."""
    key, rank, fingerprint, payload_bytes = expected
    invariant(len(key) <= KEY_BYTES_MAX, "length of a key", key=key)
    invariant(len(fingerprint) == 32, "length of a fingerprint", fingerprint=fingerprint)
    checked = _FIELDS.pack(MAGIC, FORMAT_VERSION, rank, payload_bytes, fingerprint, checksum, len(key), key) + _ZEROS
    return checked + xxhash.xxh3_64_intdigest(checked).to_bytes(8, "little")


def unpack(raw: bytes) -> Trailer:
    """
    Return what the trailer *raw* says.

    Raises:
        IntegrityError: It is not one that :func:`pack` returns; names the first thing that is wrong.
    """
    if len(raw) != TRAILER_BYTES:
        raise IntegrityError("trailer is cut off", trailer_bytes=len(raw))
    magic, version, rank, payload_bytes, fingerprint, checksum, key_bytes, key = _FIELDS.unpack_from(raw)
    if magic != MAGIC:
        raise IntegrityError("no trailer", magic=magic.hex())
    if version != FORMAT_VERSION:
        raise IntegrityError("another format", format_version=version, known=FORMAT_VERSION)
    if xxhash.xxh3_64_intdigest(raw[:_CHECKED_BYTES]) != int.from_bytes(raw[_CHECKED_BYTES:], "little"):
        raise IntegrityError("trailer's own checksum")
    trailer = Trailer(key[:key_bytes], rank, fingerprint, payload_bytes, checksum)
    if key_bytes > KEY_BYTES_MAX or pack(Expected(*trailer[:4]), checksum) != raw:
        raise IntegrityError("trailer has something where zeros belong")
    return trailer


def check(raw: bytes, expected: Expected) -> int:
    """
    Return the payload checksum that the trailer *raw* names.

    Raises:
        IntegrityError: The trailer is not that of the object *expected*; names the first mismatch.
    """
    checksum = int.from_bytes(raw[_CHECKSUM_OFFSET : _CHECKSUM_OFFSET + 8], "little")
    if pack(expected, checksum) == raw:
        return checksum
    found = unpack(raw)
    for name, want, have in zip(Expected._fields, expected, found[:4], strict=True):
        if want != have:
            raise IntegrityError(f"{name} is another one", expected=_text(want), found=_text(have))
    raise IntegrityError("trailer is not as written")


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
