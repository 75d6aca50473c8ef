"""Huge pages for shared memory: what is in it stays, and failing is no failure."""

import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.io import huge_pages, shm

MIB = 1 << 20


def kernel_collapses() -> bool:
    """Tell whether this kernel has MADV_COLLAPSE for shared memory and may use it."""
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return (major, minor) >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


needs_collapse = pytest.mark.skipif(not kernel_collapses(), reason="no MADV_COLLAPSE here")


@pytest.fixture
def segment() -> Iterator[int]:
    fd = shm.create_segment(8 * MIB + 4096)
    yield fd
    os.close(fd)


@needs_collapse
def test_every_whole_huge_page_of_the_range_is_gathered(segment: int) -> None:
    assert 6 * MIB == huge_pages.gather(segment, 2 * MIB, 6 * MIB + 4096)


def test_what_the_memory_holds_stays(segment: int) -> None:
    content = os.urandom(8 * MIB + 4096)
    os.pwrite(segment, content, 0)
    huge_pages.gather(segment, 0, 8 * MIB)
    assert content == os.pread(segment, len(content), 0)


@needs_collapse
def test_a_range_without_pages_reads_as_zeros_afterwards(segment: int) -> None:
    assert 8 * MIB == huge_pages.gather(segment, 0, 8 * MIB)
    assert bytes(8 * MIB) == os.pread(segment, 8 * MIB, 0)
    assert 8 * MIB == 512 * os.fstat(segment).st_blocks


@needs_collapse
def test_a_segment_is_filled_with_huge_pages(segment: int) -> None:
    shm.prefault(segment, 8 * MIB + 4096)
    assert 8 * MIB + 4096 == 512 * os.fstat(segment).st_blocks
    assert 8 * MIB == huge_pages.gather(segment, 0, 8 * MIB)


def test_memory_that_cannot_be_gathered_is_left_as_it_is() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"k" * 4 * MIB)
        file.flush()
        assert huge_pages.gather(file.fileno(), 0, 4 * MIB) in range(0, 4 * MIB + 1, 2 * MIB)
        assert b"k" * 4 * MIB == os.pread(file.fileno(), 4 * MIB, 0)


def test_a_bad_descriptor_or_a_short_range_is_no_failure(segment: int) -> None:
    assert 0 == huge_pages.gather(-1, 0, 4 * MIB)
    assert 0 == huge_pages.gather(segment, 0, 2 * MIB - 1)
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "kvpool" in line]
