"""The copiers without a GPU."""

import mmap

import pytest

from kvpool.client.copier import Copy, MemoryCopier, NullCopier


def test_bytes_go_to_the_slot_and_back_and_nowhere_else() -> None:
    copier, memory = MemoryCopier(), mmap.mmap(-1, 8192)
    copier.attach(3, memory)
    copier.store([Copy(3, 4096, memoryview(bytearray(b"abc")))], None)
    assert bytes(4096) + b"abc" + bytes(4093) == memory[:]
    place = bytearray(3)
    copier.load([Copy(3, 4096, memoryview(place))])
    assert b"abc" == place
    copier.detach(3)
    memory.close()


def test_after_detach_nothing_refers_to_the_mapping() -> None:
    copier, memory = MemoryCopier(), mmap.mmap(-1, 4096)
    copier.attach(0, memory)
    with pytest.raises(BufferError):
        memory.close()
    copier.detach(0)
    memory.close()


def test_the_null_copier_touches_nothing() -> None:
    copier, memory = NullCopier(), mmap.mmap(-1, 4096)
    copier.attach(0, memory)
    ticket = copier.store([Copy(0, 0, memoryview(bytearray(b"abc")))], None)
    assert copier.ended(ticket)
    copier.wait(ticket)
    assert bytes(4096) == memory[:]
    copier.detach(0)
    copier.close()
    memory.close()
