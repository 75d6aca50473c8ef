"""The trailer: what is packed is unpacked, and each mismatch is named."""

import re

import pytest

from kvpool.core import trailer
from kvpool.errors import IntegrityError, InvariantError

EXPECTED = trailer.Expected(key=b"k" * 36, rank=3, fingerprint=b"f" * 32, payload_bytes=12345)


def test_a_trailer_fills_its_4096_bytes_and_says_what_was_packed():
    raw = trailer.pack(EXPECTED, 0xFEDCBA9876543210)
    assert 4096 == len(raw)
    assert trailer.Trailer(*EXPECTED, 0xFEDCBA9876543210) == trailer.unpack(raw)
    assert 0xFEDCBA9876543210 == trailer.check(raw, EXPECTED)


def test_the_format_on_disk_stays_what_it_is():
    raw = trailer.pack(EXPECTED, 7)
    assert (
        b"kvpool\r\n\x01\0\0\0\x03\0\0\0" + (12345).to_bytes(8, "little") + b"f" * 32 + b"\x07" + bytes(7) == raw[:64]
    )
    assert b"\x24\0" + b"k" * 36 + bytes(92) == raw[64:194]
    assert bytes(4088 - 194) == raw[194:4088]
    assert "bb6592bbaeffb1d7" == raw[4088:].hex()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"key": b"K" * 36}, "key is another one"), ({"rank": 4}, "rank is another one"),
     ({"fingerprint": b"F" * 32}, "fingerprint is another one"),
     ({"payload_bytes": 1}, "payload_bytes is another one")],
)  # fmt: skip
def test_the_trailer_of_another_object_is_named_by_what_differs(change, words):
    with pytest.raises(IntegrityError, match=re.escape(words)):
        trailer.check(trailer.pack(EXPECTED._replace(**change), 7), EXPECTED)


@pytest.mark.parametrize(
    ("offset", "words"),
    [(0, "no trailer"), (8, "another format"), (20, "own checksum"), (70, "own checksum"),
     (3000, "own checksum"), (4090, "own checksum")],
)  # fmt: skip
def test_a_changed_byte_is_named(offset, words):
    raw = bytearray(trailer.pack(EXPECTED, 7))
    raw[offset] ^= 1
    with pytest.raises(IntegrityError, match=words):
        trailer.check(bytes(raw), EXPECTED)


def test_a_cut_trailer_is_named():
    with pytest.raises(IntegrityError, match="cut off"):
        trailer.unpack(trailer.pack(EXPECTED, 7)[:-1])


@pytest.mark.parametrize("change", [{"key": b"k" * 129}, {"fingerprint": b"short"}])
def test_fields_that_do_not_fit_are_our_mistake(change):
    with pytest.raises(InvariantError):
        trailer.pack(EXPECTED._replace(**change), 0)


@pytest.mark.parametrize(("payload", "padded"), [(1, 4096), (4096, 4096), (4097, 8192), (4 << 20, 4 << 20)])
def test_a_slot_is_the_padded_payload_and_a_trailer(payload, padded):
    assert padded + 4096 == trailer.slot_bytes(payload)
