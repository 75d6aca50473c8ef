"""Row 14: another adapter's, tenant's or image's KV was served."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvpool.core import layout
from kvpool_vllm.request_params import separate_tenant

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
HASH = get_hash_fn_by_name("sha256")


def hashes(*, tenant: str | None = None, adapter: str | None = None, salt: str | None = None) -> list[bytes]:
    """Return the block hashes that a request with that prompt stores and loads under."""
    init_none_hash(HASH)
    lora = LoRARequest(adapter, 1, f"/adapters/{adapter}") if adapter else None
    request = Request(
        "r", list(range(64)), SamplingParams(max_tokens=1), None, lora_request=lora, cache_salt=salt,
        block_hasher=get_request_block_hasher(16, HASH),
    )  # fmt: skip
    request.kv_transfer_params = {"kvpool_tenant": tenant} if tenant else None
    separate_tenant(request)
    return [bytes(block) for block in request.block_hashes]


def test_row_14_tenants_adapters_and_salts_share_no_block_and_each_finds_its_own_again() -> None:
    asked = [{}, {"tenant": "a"}, {"tenant": "b"}, {"adapter": "x"}, {"adapter": "y"}, {"salt": "a"},
             {"tenant": "a", "adapter": "x"}, {"tenant": "a", "salt": "a"}]  # fmt: skip
    found = [hashes(**one) for one in asked]
    assert [4] * len(asked) == [len(one) for one in found]
    assert 4 * len(asked) == len({block for one in found for block in one})
    assert found == [hashes(**one) for one in asked]


def test_row_14_the_file_of_a_block_is_named_by_vllms_own_hash() -> None:
    (block, *_) = hashes(tenant="a")
    assert f"{block.hex()}.bin" == layout.object_name(block + bytes(4))
