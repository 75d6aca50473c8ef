"""The memory of a rank's round trip: it goes through the copies that KV goes through."""

import mmap

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvpool.client.copier import Copy  # noqa: E402 - found out above whether it can be had
from kvpool_vllm.copies_cpu import CpuCopier  # noqa: E402 - the same
from kvpool_vllm.places import GroupLayout, TensorRef  # noqa: E402 - the same
from kvpool_vllm.round_trip import DeviceTrial, pattern  # noqa: E402 - the same

LAYOUT = GroupLayout(0, 4, 5000, (TensorRef(0, 1 << 20, 1000), TensorRef(0, 1 << 20, 200)))


def test_a_pattern_goes_to_a_slot_and_back_and_one_altered_byte_is_found() -> None:
    trial, copier, memory = DeviceTrial(LAYOUT, torch.device("cpu")), CpuCopier(), mmap.mmap(-1, 16384)
    copier.attach(1, memory)
    place = trial.fill(b"seed")
    assert trial.holds(b"seed") and not trial.holds(b"other")
    copier.store([Copy(1, 4096, place)], None)
    trial.clear()
    assert not trial.holds(b"seed")
    copier.load([Copy(1, 4096, place)])
    assert trial.holds(b"seed")
    memory[4096 + 4700] ^= 1
    copier.load([Copy(1, 4096, place)])
    assert not trial.holds(b"seed")
    copier.detach(1)


def test_a_pattern_has_no_two_equal_words() -> None:
    words = pattern(b"seed", 80_000).view(np.uint64)
    assert len(words) == len(np.unique(words))
    assert 13 == len(pattern(b"seed", 13))
