"""
What a request may say to kvpool in its `kv_transfer_params`.

    kvpool_load: false       load nothing for this request
    kvpool_store: false      store nothing of it
    kvpool_tenant: "name"    share stored and cached KV with requests of the same tenant only

Theory of tenants. vLLM hashes a request's `cache_salt` into its first block, and every later block hash contains the
ones before. A tenant becomes part of that salt before anybody has used the hashes: so keys stay vLLM's own block
hashes, requests of other tenants cannot have them, and vLLM's own prefix cache keeps tenants apart by the same means.

What cannot be understood is taken for the wish to be left alone: neither loaded nor stored, and said once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

PREFIX = "kvpool_"
LOAD, STORE, TENANT = "kvpool_load", "kvpool_store", "kvpool_tenant"
TENANT_CHARS_MAX = 128
#: Complaints remembered so that each is said once.
COMPLAINTS_MAX = 256

_complaints: set[str] = set()


@dataclass(frozen=True, slots=True)
class RequestParams:
    """See the module; *problem* says what was not understood."""

    load: bool = True
    store: bool = True
    tenant: str | None = None
    problem: str = ""


def read_params(params: Mapping[str, Any] | None) -> RequestParams:
    """Return what *params* say; with a problem, neither load nor store."""
    given = {key: value for key, value in (params or {}).items() if str(key).startswith(PREFIX)}
    problem = "; ".join(filter(None, (_problem(key, value) for key, value in sorted(given.items()))))
    if problem:
        return RequestParams(load=False, store=False, problem=problem)
    return RequestParams(load=given.get(LOAD, True), store=given.get(STORE, True), tenant=given.get(TENANT))


def _problem(key: str, value: object) -> str:
    if key in (LOAD, STORE):
        return "" if isinstance(value, bool) else f"{key} must be true or false, not {value!r:.50}"
    if key != TENANT:
        return f"{key!r:.50} is not known: {LOAD}, {STORE} and {TENANT} are"
    if not isinstance(value, str) or not 0 < len(value) <= TENANT_CHARS_MAX:
        return f"{key} must be a string of 1 to {TENANT_CHARS_MAX} characters, not {value!r:.50}"
    return ""


def say_problem(params: RequestParams) -> None:
    """Log what was not understood, each once."""
    if params.problem and params.problem not in _complaints and len(_complaints) < COMPLAINTS_MAX:
        _complaints.add(params.problem)
        logger.warning(
            "kvpool: a request's kv_transfer_params are wrong, it is neither loaded nor stored: %s", params.problem
        )


def separate_tenant(request: "Request") -> None:
    """Give a request that has just arrived the block hashes of its tenant."""
    params = read_params(request.kv_transfer_params)
    if params.tenant is not None:
        request.cache_salt = f"{request.cache_salt or ''}\0{TENANT}\0{params.tenant}"
        request.block_hashes.clear()
        request.update_block_hashes()
