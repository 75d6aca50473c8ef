"""What a request says to kvpool: taken as said, or, where it cannot be understood, left alone."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

from typing import Any

import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

from vllm.v1.kv_offload.base import LookupResult, ReqContext

from kvpool.client.scheduler import Hit
from kvpool_vllm import request_params
from kvpool_vllm.manager import KvPoolManager
from kvpool_vllm.request_params import RequestParams, read_params
from tests.unit.test_vllm_manager import CHUNK, FakePool, context_of, key_of, metrics, stored_keys

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, RequestParams()),
        ({"max_load_tokens": 5, "do_remote_decode": True}, RequestParams()),
        ({"kvpool_load": False}, RequestParams(load=False)),
        ({"kvpool_store": False, "kvpool_load": True}, RequestParams(store=False)),
        ({"kvpool_tenant": "acme"}, RequestParams(tenant="acme")),
    ],
)
def test_what_is_said_is_taken(given: dict[str, Any] | None, expected: RequestParams) -> None:
    assert expected == read_params(given)


@pytest.mark.parametrize(
    "given",
    [
        {"kvpool_load": "false"},
        {"kvpool_store": 0},
        {"kvpool_tenant": ""},
        {"kvpool_tenant": "x" * 129},
        {"kvpool_tenant": 7},
        {"kvpool_tennant": "acme"},
    ],
)
def test_what_is_not_understood_means_neither_load_nor_store_and_is_said_once(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(request_params, "_complaints", set())
    monkeypatch.setattr(request_params.logger, "warning", lambda text, *args: said.append(text % args))
    for _ in range(2):
        params = read_params(given)
        request_params.say_problem(params)
        assert (False, False, None) == (params.load, params.store, params.tenant)
    assert 1 == len(said)
    assert next(iter(given)) in said[0]


@pytest.mark.parametrize(
    ("given", "loads", "stores"),
    [({"kvpool_load": False}, False, True), ({"kvpool_store": False}, True, False), ({"kvpool_load": 1}, False, False)],
)
def test_a_request_is_loaded_and_stored_as_it_says(given: dict[str, Any], loads: bool, stores: bool) -> None:
    pool = FakePool()
    manager = KvPoolManager(pool, fingerprint="f", chunk_tokens={0: CHUNK}, metrics=metrics())  # type: ignore[arg-type]
    context = context_of()
    manager.on_new_request(ReqContext(req_id="r", kv_transfer_params=given))
    pool.known = {key_of(0): Hit(0, True)}
    assert loads == (manager.lookup(key_of(0), context) is LookupResult.HIT)
    assert stores == bool(stored_keys(manager, context, 1))
