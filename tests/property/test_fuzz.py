"""
Ten thousand of each of the things that others write, each altered a little: an error that says so, or what it was.

What is altered is whole and right before, so that most of what comes out is nearly right. Seeds are fixed.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from kvpool import config_example
from kvpool.config import Settings, parse_settings
from kvpool.core import layout, trailer
from kvpool.errors import ConfigError, IntegrityError, ProtocolError
from kvpool.io.files import DeviceFiles
from kvpool.wire.codec import encode
from tests.process.pool_harness import namespace
from tests.property.test_codec import ALL, DECODERS, _sample

COUNT = 10_000


def altered(whole: bytes, chance: random.Random) -> bytes:
    """Return *whole* with one to three changes: bits, bytes, a piece removed, doubled, moved, or of zeros."""
    raw = bytearray(whole)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(raw) + 1)
        end = min(len(raw), at + chance.choice([1, 2, 8, 64]))
        match chance.randrange(7):
            case 0 if at < len(raw):
                raw[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(raw):
                raw[at] = chance.randrange(256)
            case 2:
                del raw[at:end]
            case 3:
                raw[at:at] = raw[at:end]
            case 4:
                raw[at:at] = chance.randbytes(chance.choice([1, 4, 32]))
            case 5:
                raw[at:end] = bytes(end - at)
            case _:
                del raw[at:]
    return bytes(raw)


def all_altered(wholes: list[bytes], seed: int) -> Iterator[tuple[int, bytes]]:
    """Yield COUNT times (number of the whole one, what became of it)."""
    chance = random.Random(seed)
    for number in range(COUNT):
        yield number % len(wholes), altered(wholes[number % len(wholes)], chance)


def test_ten_thousand_altered_frames_are_messages_of_their_set_or_protocol_errors() -> None:
    refused = 0
    for number, raw in all_altered([encode(_sample(kind)) for _, kind in ALL], seed=1):
        decoder = DECODERS[ALL[number][0]]
        try:
            found = decoder.decode(raw)
        except ProtocolError as error:
            assert error.message
            refused += 1
        else:
            assert found == decoder.decode(encode(found))
    assert COUNT / 2 < refused < COUNT


def test_ten_thousand_altered_trailers_are_refused_or_whole() -> None:
    expected = [
        trailer.Expected(bytes([number]) * (number + 4), number, bytes([number]) * 32, 1000 * number + 1)
        for number in range(1, 20)
    ]
    wholes = [trailer.pack(each, 2**60 + each.rank) for each in expected]
    refused = 0
    for number, raw in all_altered(wholes, seed=2):
        try:
            found = trailer.check(raw, expected[number])
        except IntegrityError as error:
            assert error.message
            refused += 1
        else:
            # The payload's checksum is no part of what is expected; one that was altered is caught by the payload.
            assert raw == trailer.pack(expected[number], found) == wholes[number]
    assert refused > 0.9 * COUNT


def test_ten_thousand_altered_manifests_are_replaced_or_say_whose_folder_it_is(tmp_path: Path) -> None:
    device = DeviceFiles(str(tmp_path))
    spec = namespace()
    path = Path(device.open_namespace(spec)[0], layout.MANIFEST_NAME)
    whole = path.read_bytes()
    elsewhere = 0
    for _, raw in all_altered([whole], seed=3):
        path.write_bytes(raw)
        found = device._maybe_manifest(str(path))
        elsewhere += found is None
        assert found is None or found.spec.fingerprint
    assert COUNT / 2 < elsewhere < COUNT
    path.unlink(missing_ok=True)
    assert Path(device.open_namespace(spec)[0]) == path.parent


def test_ten_thousand_altered_configurations_are_settings_or_errors_that_say_where() -> None:
    whole = config_example.example().encode()
    lines = b"".join(line for line in whole.splitlines(keepends=True) if not line.startswith(b"#"))
    refused = 0
    for _, raw in all_altered([lines], seed=4):
        try:
            assert isinstance(parse_settings(raw.decode(errors="replace"), file="pool.toml"), Settings)
        except ConfigError as error:
            assert "pool.toml" == error.context["file"]
            refused += 1
    assert COUNT / 2 < refused < COUNT
