"""Properties of names and trailers: whatever comes in, only what we wrote is believed."""

import contextlib

from hypothesis import example, given
from hypothesis import strategies as st

from kvpool.core import layout, trailer
from kvpool.errors import IntegrityError

keys = st.builds(
    lambda hash_, group: hash_ + group.to_bytes(4, "big"),
    st.binary(min_size=1, max_size=layout.HASH_BYTES_MAX),
    st.integers(0, 2**32 - 1) | st.just(0),
)
expected = st.builds(
    trailer.Expected,
    key=st.binary(max_size=trailer.KEY_BYTES_MAX),
    rank=st.integers(0, 2**32 - 1),
    fingerprint=st.binary(min_size=32, max_size=32),
    payload_bytes=st.integers(0, 2**64 - 1),
)
checksums = st.integers(0, 2**64 - 1)


@given(keys)
def test_a_key_comes_back_from_its_file_name(key):
    assert key == layout.maybe_key(layout.object_name(key))


@given(st.text() | st.from_regex(r"[0-9a-f]{0,8}(_g[0-9]{0,11})?\.bin", fullmatch=True))
def test_a_name_is_the_one_of_its_key_or_of_none(name):
    key = layout.maybe_key(name)
    assert key is None or name == layout.object_name(key)


@given(st.text())
@example("..")
@example("/")
@example("\ud800" * 200)
def test_any_text_becomes_one_safe_component(text):
    component = layout.safe_component(text)
    assert 1 <= len(component.encode("ascii")) <= layout.COMPONENT_CHARS_MAX
    assert not set(component) & set("/\0+ \n")
    assert not component.startswith(".")
    assert component == layout.safe_component(component)


@given(expected, checksums)
def test_what_is_packed_is_unpacked(what, checksum):
    raw = trailer.pack(what, checksum)
    assert (*what, checksum) == tuple(trailer.unpack(raw))
    assert checksum == trailer.check(raw, what)


@given(st.binary(max_size=64) | st.binary(min_size=4096, max_size=4096))
def test_bytes_that_are_no_trailer_are_refused(raw):
    with contextlib.suppress(IntegrityError):
        assert raw == trailer.pack(trailer.Expected(*trailer.unpack(raw)[:4]), trailer.unpack(raw).checksum)


@given(expected, checksums, st.integers(0, 4095), st.integers(1, 255))
def test_no_changed_byte_is_believed(what, checksum, offset, change):
    raw = bytearray(trailer.pack(what, checksum))
    raw[offset] ^= change
    try:
        trailer.check(bytes(raw), what)
    except IntegrityError:
        return
    raise AssertionError(f"byte {offset} may be anything")


@given(expected, expected, checksums)
def test_the_trailer_of_another_object_is_refused(what, other, checksum):
    try:
        trailer.check(trailer.pack(other, checksum), what)
    except IntegrityError:
        assert what != other
    else:
        assert what == other
