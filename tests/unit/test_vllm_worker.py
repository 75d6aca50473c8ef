"""One rank's transfers: jobs of vLLM dealt out to objects, and failures told beside successful ends."""

# ruff: noqa: E402 - vLLM is imported, or the module skipped, before what needs it

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.unit.vllm_there import import_vllm

import_vllm()

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    make_offload_key,
)

from kvpool.client.copier import Copy
from kvpool.client.rank import JobEnded, JobObject
from kvpool.errors import Code, ConfigError
from kvpool.wire.messages import GroupSpec, NamespaceSpec
from kvpool_vllm.copies_cpu import CpuCopier
from kvpool_vllm.places import ABSENT
from kvpool_vllm.transfer_specs import KvPoolLoadSpec, KvPoolStoreSpec
from kvpool_vllm.worker import KvPoolWorker, LoadFailure, layouts_of

PER_CHUNK = 2
PAGES = (96, 32)
BLOCKS = 16
SLOT = 4096


class FakeClient:
    """Keeps what is submitted; a test ends the jobs. Slots of one segment are given in order of keys."""

    def __init__(self, copier: CpuCopier) -> None:
        self.copier = copier
        self.slots: dict[bytes, int] = {}
        self.stores: dict[int, tuple[str, Sequence[JobObject]]] = {}
        self.loads: dict[int, Sequence[JobObject]] = {}
        self.ended: list[JobEnded] = []
        self.flushed: list[set[int]] = []
        self.closed = False

    def submit_store(
        self, job: int, request: str, objects: Sequence[JobObject], after: object, *, epoch: int | None = None
    ) -> None:
        self.stores[job] = (request, objects)

    def submit_load(self, job: int, objects: Sequence[JobObject], *, epoch: int | None = None) -> None:
        self.loads[job] = objects

    def copies(self, objects: Sequence[JobObject]) -> list[Copy]:
        return [Copy(0, self.slots.setdefault(o.key, len(self.slots)) * SLOT, o.place) for o in objects]

    def end_store(self, job: int) -> None:
        self.copier.store(self.copies(self.stores[job][1]), None)
        self.ended.append(JobEnded(job, "store", (), 1, 0.5))

    def end_load(self, job: int, failed: tuple[int, ...] = ()) -> None:
        kept = [o for index, o in enumerate(self.loads[job]) if index not in failed]
        self.copier.load(self.copies(kept))
        self.ended.append(JobEnded(job, "load", tuple((index, Code.CORRUPT) for index in failed), 1, 0.5))

    def take_ended(self) -> list[JobEnded]:
        ended, self.ended = self.ended, []
        return ended

    def flush(self, jobs: set[int]) -> None:
        self.flushed.append(jobs)

    def close(self) -> None:
        self.closed = True


class World:
    """A worker of two KV groups over two tensors that both groups share, as vLLM overlays them."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros((BLOCKS, page), dtype=torch.int8) for page in PAGES]
        refs = [CanonicalKVCacheRef(0, PAGES[0]), CanonicalKVCacheRef(1, PAGES[1])]
        self.caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(self.tensors, PAGES, strict=True)],
            [refs, refs],
        )
        self.staging = mmap.mmap(-1, 64 * SLOT)
        self.copier = CpuCopier()
        self.copier.attach(0, self.staging)
        self.client = FakeClient(self.copier)
        layouts = layouts_of(self.caches, namespace(), blocks_per_chunk=PER_CHUNK, layers=[2, 2])
        self.worker = KvPoolWorker(layouts, fingerprint="f", copier=self.copier, client=self.client)  # type: ignore[arg-type]

    def fill(self) -> None:
        noise = np.random.default_rng(0)
        for tensor in self.tensors:
            tensor.copy_(torch.from_numpy(noise.integers(-128, 127, tuple(tensor.shape), np.int8)))

    def blocks(self, *ids: int) -> list[bytes]:
        return [b"".join(tensor[block].numpy().tobytes() for tensor in self.tensors) for block in ids]

    def ends(self) -> list[int]:
        results = self.worker.get_finished()
        assert all(result.success for result in results)
        return [result.job_id for result in results]


def namespace(object_bytes: int = PER_CHUNK * sum(PAGES)) -> NamespaceSpec:
    return NamespaceSpec(
        fingerprint="f", model_name="m", block_size=128, blocks_per_file=PER_CHUNK, tp=1, pp=1, pcp=1, dtype="d",
        rank_count=1, groups=[GroupSpec(group=g, object_bytes=object_bytes) for g in (0, 1)], identity={},
    )  # fmt: skip


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.copier.detach(0)
    made.staging.close()


def keys_of(group: int, *chunks: int) -> tuple[bytes, ...]:
    return tuple(bytes(make_offload_key(bytes([chunk]) * 32, group)) for chunk in chunks)


def store_spec(keys: tuple[bytes, ...], ends: tuple[int, ...], masks: Any = None, name: str = "f") -> KvPoolStoreSpec:
    return KvPoolStoreSpec("r", name, 0, keys, (0,) * len(keys), ends, masks or (None,) * len(keys))


def load_spec(keys: tuple[bytes, ...], name: str = "f") -> KvPoolLoadSpec:
    return KvPoolLoadSpec("r", name, 0, keys, (0,) * len(keys))


def gpu(blocks: list[int], sizes: list[int], indices: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=indices)


def test_what_is_stored_from_some_blocks_is_loaded_into_others(world: World) -> None:
    world.fill()
    keys = (*keys_of(0, 1, 2), *keys_of(1, 2))
    before = world.blocks(1, 2, 3, 4, 5, 6)
    assert world.worker.submit_store(1, gpu([1, 2, 3, 4, 5, 6], [4, 2], [0, 2]), store_spec(keys, (256, 512, 512)))
    world.client.end_store(1)
    assert [1] == world.ends()
    assert world.worker.submit_load(2, load_spec(keys), gpu([9, 10, 11, 12, 13, 14], [4, 2], [0, 2]))
    world.client.end_load(2)
    assert [2] == world.ends()
    assert before == world.blocks(9, 10, 11, 12, 13, 14)
    assert [] == world.worker.take_failures()


def test_a_store_is_offered_in_prefix_order_over_all_groups(world: World) -> None:
    keys = (*keys_of(0, 1, 2), *keys_of(1, 1, 2))
    world.worker.submit_store(1, gpu(list(range(1, 9)), [4, 4], [0, 0]), store_spec(keys, (256, 512, 256, 512), None))
    request, objects = world.client.stores[1]
    assert "r" == request
    assert [keys[0], keys[2], keys[1], keys[3]] == [o.key for o in objects]


def test_blocks_already_on_the_gpu_and_past_the_end_are_neither_read_nor_written(world: World) -> None:
    world.fill()
    keys = keys_of(0, 1, 2)
    stored = world.blocks(1, 2, 3, 4)
    world.worker.submit_store(1, gpu([1, 2, 3, 4], [4, 0], [0, 0]), store_spec(keys, (256, 512)))
    world.client.end_store(1)
    untouched = [block for block in range(BLOCKS) if block not in (9, 10)]
    before = world.blocks(*untouched)
    world.worker.submit_load(2, load_spec(keys), gpu([9, 10], [2, 0], [1, 0]))
    world.client.end_load(2)
    assert stored[1:3] == world.blocks(9, 10)
    assert before == world.blocks(*untouched)


def test_the_gap_of_a_store_that_starts_inside_a_chunk_is_zeroed_in_the_slot(world: World) -> None:
    world.fill()
    world.staging[:] = b"\xaa" * len(world.staging)
    world.worker.submit_store(1, gpu([7], [0, 1], [0, 1]), store_spec(keys_of(1, 1), (256,), (b"\0\1",)))
    world.client.end_store(1)
    pages = [world.tensors[index][7].numpy().tobytes() for index in (0, 1)]
    expected = bytes(PAGES[0]) + pages[0] + bytes(PAGES[1]) + pages[1]
    assert expected.ljust(SLOT, b"\0") == world.staging[:SLOT]


def test_a_failed_object_is_reported_as_its_key_and_blocks(world: World) -> None:
    keys = keys_of(0, 1, 2, 3)
    world.worker.submit_load(5, load_spec(keys), gpu([4, 5, 6, 7, 8], [5, 0], [1, 0]))
    world.client.end_load(5, failed=(1, 2))
    assert [5] == world.ends()
    assert [LoadFailure(5, "r", set(keys[1:]), {5, 6, 7, 8})] == world.worker.take_failures()
    assert [] == world.worker.take_failures()


def test_a_load_that_vllm_waits_for_is_stale_whatever_landed(world: World) -> None:
    keys = keys_of(0, 1)
    world.worker.submit_load(5, load_spec(keys), gpu([4, 5], [2, 0], [0, 0]))
    world.worker.wait({5, 99})
    world.client.end_load(5)
    assert [5] == world.ends()
    assert [{5, 99}] == world.client.flushed
    assert [LoadFailure(5, "r", set(keys), {4, 5})] == world.worker.take_failures()


@pytest.mark.parametrize(
    "spec", [load_spec(keys_of(0, 1), "other"), load_spec(keys_of(0, 1, 2, 3)), load_spec(()), LoadStoreSpec()]
)
def test_a_load_that_cannot_be_asked_for_ends_at_once_with_all_its_blocks_failed(
    world: World, spec: KvPoolLoadSpec
) -> None:
    assert world.worker.submit_load(5, spec, gpu([4, 5], [2, 0], [0, 0]))
    assert {} == world.client.loads
    assert [5] == world.ends()
    assert [{4, 5}] == [failure.blocks for failure in world.worker.take_failures()]


@pytest.mark.parametrize(
    "spec",
    [
        store_spec(keys_of(0, 1), (256,), None, "other"),
        store_spec(keys_of(0, 1, 2, 3), (256, 512, 768)),
        store_spec(keys_of(0, 1), (256,), (b"\0\1",)),
        store_spec((), ()),
        LoadStoreSpec(),
    ],
)
def test_a_store_that_cannot_be_offered_ends_at_once(world: World, spec: KvPoolStoreSpec) -> None:
    assert world.worker.submit_store(5, gpu([4, 5], [2, 0], [0, 0]), spec)
    assert {} == world.client.stores
    assert [5] == world.ends()


def test_a_broken_client_ends_every_job_and_fails_every_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.worker.submit_load(5, load_spec(keys_of(0, 1)), gpu([4, 5], [2, 0], [0, 0]))
    world.worker.submit_store(6, gpu([6, 7], [2, 0], [0, 0]), store_spec(keys_of(0, 2), (256,)))

    def broken() -> list[JobEnded]:
        raise RuntimeError("broken")

    monkeypatch.setattr(world.client, "take_ended", broken)
    assert [5, 6] == world.ends()
    assert [{4, 5}] == [failure.blocks for failure in world.worker.take_failures()]
    assert world.worker.submit_load(7, load_spec(keys_of(0, 1)), gpu([8, 9], [2, 0], [0, 0]))
    assert [7] == world.ends()
    assert [{8, 9}] == [failure.blocks for failure in world.worker.take_failures()]
    assert [] == world.ends()


def test_null_blocks_of_a_load_are_never_written(world: World) -> None:
    world.worker.submit_load(5, load_spec(keys_of(0, 1)), gpu([0, 5], [2, 0], [0, 0]))
    assert [ABSENT, 5] == world.client.loads[5][0].place.blocks.tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("object_bytes", "layers"), [(100, 2), (PER_CHUNK * sum(PAGES), 3)])
def test_tensors_that_the_scheduler_cannot_know_or_that_leave_layers_out_are_refused(
    world: World, object_bytes: int, layers: int
) -> None:
    with pytest.raises(ConfigError):
        layouts_of(world.caches, namespace(object_bytes), blocks_per_chunk=PER_CHUNK, layers=[layers, layers])


def test_one_tensor_of_whole_blocks_stands_for_all_layers(world: World) -> None:
    packed = torch.zeros((BLOCKS, sum(PAGES)), dtype=torch.int8)
    refs = [CanonicalKVCacheRef(0, sum(PAGES))]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(packed, sum(PAGES))], [refs, refs])
    layouts = layouts_of(caches, namespace(), blocks_per_chunk=PER_CHUNK, layers=[2, 2])
    assert [sum(PAGES)] * 2 == [layout.tensors[0].stride for layout in layouts]


def test_shutdown_leaves_the_pool(world: World) -> None:
    world.worker.shutdown()
    assert world.client.closed
