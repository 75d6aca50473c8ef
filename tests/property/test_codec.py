"""Whatever the bytes of a frame are, decoding ends with a message of the set or with ProtocolError."""

import random
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ProtocolError
from kvpool.wire import messages
from kvpool.wire.codec import FRAME_BYTES_MAX, LIST_BYTES_MAX, Decoder, encode, split
from kvpool.wire.messages import ITEMS_MAX, Message

UNIONS = {
    name: getattr(messages, name)
    for name in (
        "ClientToCoordinator",
        "CoordinatorToClient",
        "RankToWorker",
        "WorkerToRank",
        "CoordinatorToWorker",
        "WorkerToCoordinator",
    )
}
DECODERS = {name: Decoder(union) for name, union in UNIONS.items()}

_ints = st.integers(-(2**63), 2**64 - 1)
_scalars = st.one_of(st.none(), st.booleans(), _ints, st.floats(), st.text(max_size=20), st.binary(max_size=40))
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def _sample(kind: Any) -> Any:
    """A value of a field's type: lists get two items, so that every nested struct is seen."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(
            *[_sample(field.type) for field in msgspec.structs.fields(kind)]
            if kind.__struct_config__.array_like
            else [],
            **({} if kind.__struct_config__.array_like else _sample_fields(kind)),
        )
    origin = getattr(kind, "__origin__", None)
    if origin is list:
        return [_sample(kind.__args__[0])] * 2
    if origin is dict:
        return {"name": _sample(kind.__args__[1])}
    if getattr(kind, "__args__", None):
        return _sample(kind.__args__[0])
    return {int: 7, str: "seven", bytes: b"\x07" * 36, float: 0.5, bool: True}[kind]


def _sample_fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: _sample(field.type) for field in msgspec.structs.fields(kind)}


ALL = [(name, kind) for name, union in UNIONS.items() for kind in union.__args__]
ALL_IDS = [f"{name}-{kind.__name__}" for name, kind in ALL]


@pytest.mark.parametrize(("union", "kind"), ALL, ids=ALL_IDS)
def test_every_message_comes_back_as_it_was(union: str, kind: type[Message]) -> None:
    message = _sample(kind)
    assert message == DECODERS[union].decode(encode(message))


@pytest.mark.parametrize(("union", "kind"), ALL, ids=ALL_IDS)
def test_another_implementation_of_messagepack_reads_and_writes_the_same(union: str, kind: type[Message]) -> None:
    message = _sample(kind)
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    assert plain == msgpack.unpackb(encode(message))
    assert message == DECODERS[union].decode(msgpack.packb(plain))


@pytest.mark.parametrize(("union", "kind"), ALL, ids=ALL_IDS)
def test_unknown_fields_are_refused(union: str, kind: type[Message]) -> None:
    plain = {**msgspec.to_builtins(_sample(kind), builtin_types=(bytes,)), "surprise": 1}
    with pytest.raises(ProtocolError, match="surprise"):
        DECODERS[union].decode(msgpack.packb(plain))


@pytest.mark.parametrize("union", UNIONS)
def test_messages_of_another_set_are_refused(union: str) -> None:
    for kind in {kind for _, kind in ALL} - set(UNIONS[union].__args__):
        with pytest.raises(ProtocolError, match="reason="):
            DECODERS[union].decode(encode(_sample(kind)))


@settings(max_examples=2000, deadline=None)
@given(union=st.sampled_from(sorted(UNIONS)), frame=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(union: str, frame: bytes) -> None:
    _decode(union, frame)


@settings(max_examples=300, deadline=None)
@given(union=st.sampled_from(sorted(UNIONS)), value=_values)
def test_any_messagepack_value_is_a_message_or_a_protocol_error(union: str, value: Any) -> None:
    _decode(union, msgpack.packb(value))


@settings(max_examples=300, deadline=None)
@given(which=st.sampled_from(ALL), data=st.data())
def test_any_value_in_any_field_is_a_message_or_a_protocol_error(
    which: tuple[str, type[Message]], data: st.DataObject
) -> None:
    union, kind = which
    plain = msgspec.to_builtins(_sample(kind), builtin_types=(bytes,))
    plain[data.draw(st.sampled_from(sorted(plain)))] = data.draw(_values)
    _decode(union, msgpack.packb(plain))


def test_ten_thousand_damaged_frames_are_messages_or_protocol_errors() -> None:
    chance = random.Random(20261130)
    frames = [(union, encode(_sample(kind))) for union, kind in ALL]
    refused = 0
    for _ in range(10_000):
        union, frame = chance.choice(frames)
        refused += not _decode(union, _damaged(frame, chance))
    assert 5_000 < refused < 10_000, "the damage is neither harmless nor total"


def _damaged(frame: bytes, chance: random.Random) -> bytes:
    damaged = bytearray(frame)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(damaged))
        match chance.randrange(4):
            case 0:
                damaged[place] = chance.randrange(256)
            case 1:
                damaged[place] ^= 1 << chance.randrange(8)
            case 2:
                del damaged[place + 1 :]
            case _:
                damaged[place:place] = chance.randbytes(chance.randint(1, 9))
    return bytes(damaged)


def _decode(union: str, frame: bytes) -> bool:
    """Decode; True for a message, False for ProtocolError, anything else fails the test."""
    try:
        message = DECODERS[union].decode(frame)
    except ProtocolError as error:
        assert error.context["reason"], "a refusal says why"
        return False
    assert isinstance(message, UNIONS[union])
    return True


@pytest.mark.parametrize(
    "frame",
    [
        b"\x91" * 60_000,  # arrays in arrays
        b"\x81\xa1a" * 20_000,  # maps in maps
        b"\xdd\xff\xff\xff\xff",  # an array said to hold 4 billion items
        b"\xdf\xff\xff\xff\xff",  # a map said to
        b"\xc6\xff\xff\xff\xff",  # bytes said to
        msgpack.packb({"type": "Withdraw", "requests": []})[:-1] + b"\xdd\xff\xff\xff\xff",
        msgpack.packb({"type": "Withdraw"})[:-8] + b"\xff" * 8,
        msgpack.packb({"type": "Withdraw", "requests": []}) + b"\x00",
        msgpack.packb([{"type": "Withdraw", "requests": []}]),
        msgpack.packb({"type": "Withdraw", "requests": ["x", 5]}),
        msgpack.packb({"type": "Withdraw", "requests": [b"x"]}),
        msgpack.packb({b"type": "Withdraw", "requests": []}),
        msgpack.packb({"requests": []}),
        msgpack.packb({"type": 5, "requests": []}),
        b"",
    ],
)
def test_hostile_frames_are_refused_with_a_reason(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="reason="):
        DECODERS["ClientToCoordinator"].decode(frame)


def test_a_frame_above_the_limit_is_refused_on_both_sides() -> None:
    fits = messages.Withdraw(requests=["x" * (FRAME_BYTES_MAX - 40)])
    assert fits == DECODERS["ClientToCoordinator"].decode(encode(fits))
    too_long = messages.Withdraw(requests=["x" * FRAME_BYTES_MAX])
    with pytest.raises(ProtocolError, match="too long"):
        encode(too_long)
    with pytest.raises(ProtocolError, match="too long"):
        DECODERS["ClientToCoordinator"].decode(msgspec.msgpack.encode(too_long))


def test_what_messagepack_cannot_say_is_refused_before_it_is_sent() -> None:
    for message in (messages.Withdraw(requests=["\ud800"]), messages.SegmentForgotten(segment=2**70)):
        with pytest.raises(ProtocolError, match="cannot be encoded"):
            encode(message)


@given(
    items=st.lists(st.binary(max_size=40) | st.text(max_size=40), max_size=60),
    items_max=st.integers(1, 20),
    bytes_max=st.integers(1, 300),
)
def test_split_keeps_every_item_once_in_order_and_within_the_bounds(
    items: list[bytes | str], items_max: int, bytes_max: int
) -> None:
    parts = list(split(items, items_max=items_max, bytes_max=bytes_max))
    assert items == [item for _, part in parts for item in part]
    assert [first for first, _ in parts] == [sum(len(part) for _, part in parts[:at]) for at in range(len(parts))]
    for _, part in parts:
        assert 1 <= len(part) <= items_max
        assert len(part) == 1 or sum(len(msgspec.msgpack.encode(item)) for item in part) <= bytes_max


def test_the_longest_lists_of_keys_fit_a_frame() -> None:
    keys = [bytes(36)] * (3 * ITEMS_MAX + 1)
    parts = list(split(keys))
    assert [ITEMS_MAX] * 3 + [1] == [len(part) for _, part in parts]
    for first, part in parts:
        encode(messages.Announce(request="r" * 1000, first=first, keys=part, more=True))
    for _, part in split(["r" * 1000] * 200):
        assert len(encode(messages.Withdraw(requests=part))) <= LIST_BYTES_MAX + 100
