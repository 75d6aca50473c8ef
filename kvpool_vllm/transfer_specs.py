"""
What the scheduler tells the workers about one job: which objects, and on which devices they are.

vLLM carries these beside its own `GPULoadStoreSpec`, which says which GPU blocks take part. Keys
stand in the order of those blocks: by KV group, then by position.
"""

from dataclasses import dataclass

from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(frozen=True)
class KvPoolLoadSpec(LoadStoreSpec):
    """
    Objects to load.

    Attributes:
        request: vLLM's request id.
        fingerprint: The scheduler's namespace; a worker with another one must not load.
        epoch: The scheduler's epoch of it (how often it was reset); a rank in another one must not load.
        keys, devices: The objects, and the device that the index says holds each.
        resident: One byte a key, 1 where it was in staging when it was looked up: for metrics.
    """

    request: str
    fingerprint: str
    epoch: int
    keys: tuple[bytes, ...]
    devices: tuple[int, ...]
    resident: bytes = b""


@dataclass(frozen=True)
class KvPoolStoreSpec(LoadStoreSpec):
    """
    Objects to store.

    Attributes:
        request, fingerprint, epoch: As for a load.
        keys, devices: The objects, and the device that placement chose for each.
        ends: Per key, the token position in the request where its chunk ends: prefix order.
        masks: Per key, one byte a block of the chunk, 1 where the block is present; None: as `block_indices` says
            for a run of blocks without holes.
    """

    request: str
    fingerprint: str
    epoch: int
    keys: tuple[bytes, ...]
    devices: tuple[int, ...]
    ends: tuple[int, ...]
    masks: tuple[bytes | None, ...]
