"""Row 8: pinning more than 512 GiB in one call fails, and the error shows up in another kernel."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import mmap
from collections.abc import Iterator

import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

from tests.field.fake_cuda import FakeCuda

GIB = 1 << 30
#: Linux's; this version of Python does not name it.
MAP_NORESERVE = 0x4000


@pytest.fixture
def staging() -> Iterator[mmap.mmap]:
    """130 GiB of addresses; no page of it is touched."""
    memory = mmap.mmap(-1, 130 * GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    yield memory
    memory.close()


def test_row_08_staging_is_pinned_in_pieces_of_at_most_64_gib(
    staging: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    copier = cuda.copier()
    copier.attach(0, staging)
    assert [64 * GIB, 64 * GIB, 2 * GIB] == cuda.registrations
    first, second, third = sorted(cuda.registered)
    assert (64 * GIB, 64 * GIB) == (second - first, third - second)
    copier.detach(0)
    assert {} == cuda.registered
    copier.close()


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_row_08_a_piece_that_cannot_be_pinned_leaves_no_piece_pinned_and_no_error_behind(
    staging: mmap.mmap, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.register_fails_at = fails_at
    copier = cuda.copier()
    copier.attach(0, staging)
    assert ({}, 0) == (cuda.registered, cuda.error)
    copier.detach(0)
    copier.close()
