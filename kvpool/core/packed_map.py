"""
A map from keys to small numbers that needs a third of a dict's memory.

Theory. A dict of a million 36-byte keys holds a million `bytes` objects, 130 bytes an entry; here an entry is the key's
bytes, its number, and a place in a table: 45 to 55 bytes. Entries lie one after the other in one `bytearray`, in no
order that means anything; a table of 32-bit indices into it, open addressing with linear probing, finds them. Removing
moves the last entry into the gap and the table's next entries back, so nothing is left behind by what is gone.

There are SHARDS such tables, each for its part of the hashes, so that the longest step, the growth of one, stays a few
milliseconds with millions of keys. Keys of each length have their own; a namespace has one length, tests have more.

The hash is CRC-32: in C, the same in every process, and good enough for keys that are hashes themselves.
"""

from array import array
from collections.abc import Iterator
from itertools import islice
from zlib import crc32

from kvpool.errors import invariant

SHARD_BITS = 6
SHARDS = 1 << SHARD_BITS
_SHARD_MASK = SHARDS - 1
_TABLE_SIZE_MIN = 8
#: Twice as much would enter every entry twice over a table's life; a table is the smaller part.
_GROWTH = 4
_EMPTY = 0


class _Shard:
    """
    Entries of one length of keys and one part of the hashes.

    Attributes:
        table: Entry number + 1 at the place that the hash names or the next free one; _EMPTY elsewhere.
        entries: key_bytes of key and value_bytes of number (little-endian) for each entry.
        count: Entries.
    """

    __slots__ = ("count", "entries", "entry_bytes", "key_bytes", "mask", "table")

    def __init__(self, key_bytes: int, value_bytes: int) -> None:
        self.key_bytes = key_bytes
        self.entry_bytes = key_bytes + value_bytes
        self.count = 0
        self.entries = bytearray()
        self.mask = _TABLE_SIZE_MIN - 1
        self.table = array("I", bytes(4 * _TABLE_SIZE_MIN))

    def find(self, key: bytes, place: int) -> int:
        """Return where *key*'s entry starts, -1 if there is none; *place* is its hash's place."""
        table, mask, entries, size, length = self.table, self.mask, self.entries, self.entry_bytes, self.key_bytes
        place &= mask
        while number := table[place]:
            start = (number - 1) * size
            if entries[start : start + length] == key:
                return start
            place = (place + 1) & mask
        return -1

    def add(self, key: bytes, place: int, value: int) -> int:
        """Add an entry where *key* has none, and return -1; otherwise return where it starts."""
        table, mask, entries, size, length = self.table, self.mask, self.entries, self.entry_bytes, self.key_bytes
        place &= mask
        while number := table[place]:
            start = (number - 1) * size
            if entries[start : start + length] == key:
                return start
            place = (place + 1) & mask
        entries += key + value.to_bytes(size - length, "little")
        self.count += 1
        table[place] = self.count
        if 3 * self.count >= 2 * mask:
            self._grow()
        return -1

    def remove(self, start: int, place: int) -> None:
        """Remove the entry at *start*, whose hash's place is *place*."""
        number = start // self.entry_bytes + 1
        self._close_gap(self._place_of(place, number))
        last = len(self.entries) - self.entry_bytes
        if start != last:
            key = bytes(self.entries[last : last + self.key_bytes])
            self.table[self._place_of(crc32(key) >> SHARD_BITS, self.count)] = number
            self.entries[start : start + self.entry_bytes] = self.entries[last:]
        del self.entries[last:]
        self.count -= 1

    def _enter(self, place: int, number: int) -> None:
        table, mask = self.table, self.mask
        place &= mask
        while table[place]:
            place = (place + 1) & mask
        table[place] = number

    def _place_of(self, place: int, number: int) -> int:
        """Return where in the table *number* stands."""
        place &= self.mask
        while self.table[place] != number:
            invariant(self.table[place] != _EMPTY, "an entry is not in its table")
            place = (place + 1) & self.mask
        return place

    def _close_gap(self, gap: int) -> None:
        """Empty a place, and move back those after it that would not be found any more."""
        table, mask = self.table, self.mask
        place = gap
        while number := table[place := (place + 1) & mask]:
            start = (number - 1) * self.entry_bytes
            home = crc32(self.entries[start : start + self.key_bytes]) >> SHARD_BITS & mask
            if (place - home) & mask >= (place - gap) & mask:
                table[gap] = number
                gap = place
        table[gap] = _EMPTY

    def _grow(self) -> None:
        size = _GROWTH * (self.mask + 1)
        self.mask = size - 1
        self.table = array("I", bytes(4 * size))
        entries, step, length = self.entries, self.entry_bytes, self.key_bytes
        for number, start in enumerate(range(0, len(entries), step), start=1):
            self._enter(crc32(entries[start : start + length]) >> SHARD_BITS, number)


class PackedMap:
    """
    See the module. Reads like a dict of int; keys are 1 byte or longer.

    Args:
        value_bytes: Bytes of a number: 0 <= number < 256 ** value_bytes.
    """

    def __init__(self, value_bytes: int) -> None:
        self.value_bytes = value_bytes
        self._by_length: dict[int, list[_Shard]] = {}

    def get(self, key: bytes, default: int = 0) -> int:
        """Return *key*'s number."""
        shards = self._by_length.get(len(key))
        if shards is None:
            return default
        spread = crc32(key)
        shard = shards[spread & _SHARD_MASK]
        start = shard.find(key, spread >> SHARD_BITS)
        if start < 0:
            return default
        if self.value_bytes == 1:
            return shard.entries[start + shard.key_bytes]
        return int.from_bytes(shard.entries[start + shard.key_bytes : start + shard.entry_bytes], "little")

    def __contains__(self, key: bytes) -> bool:
        return self.get(key, -1) >= 0

    def __setitem__(self, key: bytes, value: int) -> None:
        if self.add(key, value) >= 0:
            spread = crc32(key)
            shard = self._by_length[len(key)][spread & _SHARD_MASK]
            start = shard.find(key, spread >> SHARD_BITS) + shard.key_bytes
            shard.entries[start : start + self.value_bytes] = value.to_bytes(self.value_bytes, "little")

    def add(self, key: bytes, value: int) -> int:
        """Put *key* if it is not there; return the number that it has already, or -1."""
        shards = self._by_length.get(len(key))
        if shards is None:
            shards = self._by_length[len(key)] = [_Shard(len(key), self.value_bytes) for _ in range(SHARDS)]
        spread = crc32(key)
        shard = shards[spread & _SHARD_MASK]
        start = shard.add(key, spread >> SHARD_BITS, value)
        if start < 0:
            return -1
        return int.from_bytes(shard.entries[start + shard.key_bytes : start + shard.entry_bytes], "little")

    def pop(self, key: bytes, default: int = 0) -> int:
        """Remove *key*, if it is there, and return its number."""
        value = self.get(key, -1)
        if value < 0:
            return default
        spread = crc32(key)
        shard = self._by_length[len(key)][spread & _SHARD_MASK]
        shard.remove(shard.find(key, spread >> SHARD_BITS), spread >> SHARD_BITS)
        return value

    def clear(self) -> None:
        """Remove everything, and give its memory back."""
        self._by_length.clear()

    def __len__(self) -> int:
        return sum(shard.count for shards in self._by_length.values() for shard in shards)

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, _ in self.items())

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Yield every key with its number; a part that was begun is told as it was then."""
        for part in range(self.part_count):
            length, packed = self.packed_part(part)
            for start in range(0, len(packed), length + self.value_bytes):
                stop = start + length
                yield packed[start:stop], int.from_bytes(packed[stop : stop + self.value_bytes], "little")

    # ------------------------------------------------------------ parts: for who goes through all of it, in steps

    @property
    def part_count(self) -> int:
        """How many parts there are; parts keep their numbers, and more may come."""
        return SHARDS * len(self._by_length)

    def packed_part(self, part: int) -> tuple[int, bytes]:
        """Return one part as it lies: bytes of a key; keys and numbers (little-endian), one after the other."""
        shard = self._part(part)
        return shard.key_bytes, bytes(shard.entries)

    def above(self, part: int, bound: int, count_max: int) -> list[bytes]:
        """Return at most *count_max* keys of one part whose numbers are greater than *bound*."""
        shard = self._part(part)
        entries, length, step = shard.entries, shard.key_bytes, shard.entry_bytes
        if self.value_bytes == 1:
            starts = (number * step for number, value in enumerate(entries[length::step]) if value > bound)
        else:
            starts = (
                start
                for start in range(0, len(entries), step)
                if int.from_bytes(entries[start + length : start + step], "little") > bound
            )
        return [bytes(entries[start : start + length]) for start in islice(starts, count_max)]

    def _part(self, part: int) -> _Shard:
        return list(self._by_length.values())[part // SHARDS][part % SHARDS]

    def validate(self) -> None:
        """Check that every entry is found where it is, and the tables hold nothing else."""
        for length, shards in self._by_length.items():
            for index, shard in enumerate(shards):
                invariant(len(shard.entries) == shard.count * shard.entry_bytes, "entries are counted")
                invariant(sorted(filter(None, shard.table)) == [*range(1, shard.count + 1)], "a table has its entries")
                for number in range(shard.count):
                    start = number * shard.entry_bytes
                    key = bytes(shard.entries[start : start + length])
                    invariant(crc32(key) & _SHARD_MASK == index, "an entry is in its shard", key=key.hex())
                    invariant(shard.find(key, crc32(key) >> SHARD_BITS) == start, "an entry is found", key=key.hex())
