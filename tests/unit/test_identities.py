"""Telling namespaces of one model name apart: every difference is named, and nothing else."""

from typing import Any

import pytest

from kvpool.core.identities import VALUE_CHARS_MAX, differences
from kvpool.wire.messages import GroupSpec, NamespaceSpec


def spec(**changes: Any) -> NamespaceSpec:
    told: dict[str, Any] = {
        "fingerprint": "0" * 64, "model_name": "m", "block_size": 128, "blocks_per_file": 2, "tp": 1, "pp": 1, "pcp": 1,
        "dtype": "bfloat16", "rank_count": 1, "groups": [GroupSpec(group=0, object_bytes=4096)],
        "identity": {"weights": "aa", "rope": "x"},
    }  # fmt: skip
    return NamespaceSpec(**{**told, **changes})


def test_equal_namespaces_differ_in_nothing() -> None:
    assert [] == differences(spec(), spec(fingerprint="1" * 64))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype": "fp8"}, "dtype: bfloat16 -> fp8"),
        ({"identity": {"weights": "bb", "rope": "x"}}, "weights: aa -> bb"),
        ({"identity": {"weights": "aa"}}, "rope: x -> (not said)"),
        ({"identity": {"weights": "aa", "rope": "x", "new": "1"}}, "new: (not said) -> 1"),
    ],
)
def test_a_difference_is_named_with_both_values(changes: dict[str, Any], expected: str) -> None:
    assert [expected] == differences(spec(), spec(**changes))


def test_long_values_are_cut() -> None:
    (said,) = differences(spec(), spec(identity={"weights": "b" * 500, "rope": "x"}))
    assert len(said) < 2 * VALUE_CHARS_MAX
