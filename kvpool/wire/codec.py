"""
Frames: one message as MessagePack, and back against a closed set of message types.

Covers the bytes of a frame and the splitting of long lists. Does not cover sockets or descriptors
(`io/channel.py`), nor who may say what when. Whatever the bytes are, decoding ends with a message of
the set or with :class:`ProtocolError` that says why; nothing else is ever raised.
"""

from collections.abc import Iterator, Sequence
from types import UnionType
from typing import Any, TypeVar

import msgspec

from kvpool.errors import ProtocolError
from kvpool.wire.messages import FRAME_BYTES_MAX, ITEMS_MAX, Message

__all__ = ["FRAME_BYTES_MAX", "LIST_BYTES_MAX", "Decoder", "encode", "split"]

#: Most encoded bytes of one list in a message: leaves room for the other fields of any message.
LIST_BYTES_MAX = 48 * 1024
#: MessagePack puts at most this many bytes before the content of a byte string.
_BYTES_HEADER_MAX = 5

_Item = TypeVar("_Item")

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """
    Return the frame of *message*.

    Raises:
        ProtocolError: It does not fit a frame or holds what MessagePack cannot say; nothing was sent then.
    """
    try:
        frame = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError("message cannot be encoded", type=type(message).__name__, reason=str(error)) from error
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(
            "message too long", type=type(message).__name__, bytes=len(frame), bytes_max=FRAME_BYTES_MAX
        )
    return frame


class Decoder:
    """
    Decodes frames of one closed set of messages.

    Args:
        messages: A message class, or a union of them (the unions at the end of `wire/messages.py`).
    """

    def __init__(self, messages: type[Message] | UnionType) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages)

    def decode(self, frame: bytes | bytearray | memoryview) -> Message:
        """
        Return the message in *frame*.

        Raises:
            ProtocolError: Too long, not MessagePack, unknown type or field, wrong type; `reason` says which.
        """
        if len(frame) > FRAME_BYTES_MAX:
            raise ProtocolError("frame too long", bytes=len(frame), bytes_max=FRAME_BYTES_MAX)
        try:
            message = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError, MemoryError) as error:
            raise ProtocolError("frame is not a message", bytes=len(frame), reason=str(error)) from error
        if not isinstance(message, Message):
            raise ProtocolError("frame is not a message", bytes=len(frame), reason=f"a {type(message).__name__}")
        return message


def split(
    items: Sequence[_Item], *, items_max: int = ITEMS_MAX, bytes_max: int = LIST_BYTES_MAX
) -> Iterator[tuple[int, list[_Item]]]:
    """
    Cut a list into parts that each fit one message.

    Yields:
        (first, part): part is items[first : first + len(part)], never empty, at most *items_max* items and
        *bytes_max* encoded bytes. An item that alone is longer is a part of its own. Nothing for an empty list.
    """
    first, part_bytes = 0, 0
    for index, item in enumerate(items):
        item_bytes = len(item) + _BYTES_HEADER_MAX if isinstance(item, bytes) else len(_encoder.encode(item))
        if index > first and (index - first == items_max or part_bytes + item_bytes > bytes_max):
            yield first, list(items[first:index])
            first, part_bytes = index, 0
        part_bytes += item_bytes
    if first < len(items):
        yield first, list(items[first:])
