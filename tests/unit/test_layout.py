"""Names of files and folders: what they are, and that they lead back to their key."""

import pytest

from kvpool.core import layout
from kvpool.errors import InvariantError
from kvpool.wire.messages import GroupSpec, NamespaceSpec

HASH = bytes.fromhex("0123456789abcdef" * 4)


def spec(**changes: object) -> NamespaceSpec:
    values = {
        "fingerprint": "ab" * 32,
        "model_name": "org/model",
        "block_size": 16,
        "blocks_per_file": 16,
        "tp": 2,
        "pp": 1,
        "pcp": 1,
        "dtype": "bfloat16",
        "rank_count": 2,
        "groups": [GroupSpec(group=0, object_bytes=100)],
        "identity": {},
    }
    return NamespaceSpec(**(values | changes))


def test_path_of_group_zero_has_no_suffix():
    digits = HASH.hex()
    assert f"/ns/012/34/{digits}.bin" == layout.object_path("/ns", HASH + bytes(4))


def test_path_of_another_group_names_it():
    assert f"/ns/012/34/{HASH.hex()}_g258.bin" == layout.object_path("/ns", HASH + bytes([0, 0, 1, 2]))


@pytest.mark.parametrize("hash_bytes", [1, 2, 3, 16, 64, layout.HASH_BYTES_MAX])
def test_names_of_hashes_of_any_length_fit_and_lead_back(hash_bytes):
    key = b"\xf7" * hash_bytes + b"\xff\xff\xff\xff"
    name = layout.object_name(key)
    assert len(name) <= 255
    assert key == layout.maybe_key(name)
    assert [3, 2] == [len(part) for part in layout.object_directory(key).split("/")]


@pytest.mark.parametrize("key", [b"", bytes(4), bytes(layout.HASH_BYTES_MAX + 5)])
def test_a_key_without_a_usable_hash_is_our_mistake(key):
    with pytest.raises(InvariantError):
        layout.object_name(key)


@pytest.mark.parametrize(
    "name",
    ["", "manifest.json", "00.BIN", "0.bin", "AB.bin", "ab_g0.bin", "ab_g01.bin", "ab_g4294967296.bin", "ab_g.bin",
     "ab.bin ", "ab.bin\n", "../ab.bin", "ab_g1_g2.bin", "ab_g\u0661.bin", ".kvpool-1-2.tmp", "00" * 113 + ".bin"],
)  # fmt: skip
def test_names_that_no_key_has_give_no_key(name):
    assert layout.maybe_key(name) is None


def test_temporaries_are_told_from_everything_else():
    assert layout.is_temporary(layout.temporary_name("12ab", 34))
    assert not layout.is_temporary("kvpool-12-34.tmp")
    assert not layout.is_temporary(layout.object_name(HASH + bytes(4)))


@pytest.mark.parametrize(
    ("text", "component"),
    [("org/model", "org_model"), ("/etc/passwd", "_etc_passwd"), ("..", "_.."), (".hidden", "_.hidden"), ("", "_"),
     ("a+b", "a_b"), ("Qwen3-4B.v1", "Qwen3-4B.v1"), ("模型", "__"), ("a\0b\nc", "a_b_c")],
)  # fmt: skip
def test_model_names_become_one_safe_component(text, component):
    assert component == layout.safe_component(text)


def test_long_model_names_are_cut_and_stay_different():
    one, other = layout.safe_component("m" * 500 + "1"), layout.safe_component("m" * 500 + "2")
    assert layout.COMPONENT_CHARS_MAX == len(one) == len(other)
    assert one != other


def test_namespace_directory_spells_the_parallel_shape():
    expected = "org_model/block_size_16_blocks_per_file_16/tp_2_pp_size_1_pcp_size_1/rank_1/bfloat16"
    assert expected == layout.rank_directory(spec(), "org_model", 1)


def test_a_namespace_may_have_the_plain_folder_or_its_own():
    assert ("org_model", "org_model+abababab") == layout.model_directories(spec())


def test_no_model_name_can_be_the_own_folder_of_another():
    assert "+" not in layout.model_directories(spec(model_name="org_model+abababab"))[0]
    assert layout.PRIVATE_NAME != layout.model_directories(spec(model_name=layout.PRIVATE_NAME))[0]
