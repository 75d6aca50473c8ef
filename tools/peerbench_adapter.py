"""
kvpool as a peer of peerbench, the side-by-side benchmark of KV-block stores (`tools/compare.py` installs it there).

Theory. The adapter's process is the rank: a real `RankClient` whose copier holds a gate. Before a store, slots for
all blocks are asked for and filled, and their Filled held back; timed is from the opening of that gate until the
pool's index tells the last block as stored. In a load the gate holds the releases: timed is from the first Load until
the last Ready; after it every block is copied out of its slot for the harness to check, then released. So
staging has room for all blocks of a round, and no copy is inside the clock, as for peers without staging of
their own.

A load must come from the drive, not from the staging that the store has left full. So every timed phase has
a new pool, made where the harness asks for the processes of the phase, before its clock starts.

Options: qd=16, verify=1 (0: payload checksums not verified), devices=1 (that many devices, in one directory each).
"""

import mmap
import os
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from pb.adapter import Adapter

from kvpool.cli.bench_pool import OwnPool, Plan
from kvpool.cli.bench_rank import ENGINE, Staged
from kvpool.cli.bench_work import Work
from kvpool.client.copier import Copy
from kvpool.client.launch import ClientConfig
from kvpool.client.rank import LoadObject, RankClient, StoreObject

#: Below the harness's own time limit of an answer.
TIMEOUT_S = 80.0
#: Staging of each device beside that of its blocks: slots that stores never get (queue depth and these), and what
#: segments of whole slots leave over.
SPARE_SLOTS = 8
SPARE_BYTES = 256 << 20
SPARE_SHARE = 0.1


class GateCopier:
    """
    Fills slots at once, and holds the ends of its copies until the gate is open.

    Attributes:
        at: Block -> (segment, offset, time) of its slot.
    """

    def __init__(self, view: memoryview, block_bytes: int) -> None:
        self._blocks = np.frombuffer(view, dtype=np.uint64)
        self._words = block_bytes // 8
        self.staged = Staged()
        self.open = False
        self.at: dict[int, tuple[int, int, float]] = {}
        self.moved = threading.Condition()

    def attach(self, segment: int, memory: mmap.mmap) -> None:
        """Keep a view of the segment."""
        self.staged.add(segment, np.frombuffer(memory, dtype=np.uint64))

    def detach(self, segment: int) -> None:
        """Let go of it."""
        self.staged.remove(segment)

    def load(self, copies: Sequence[Copy]) -> object:
        """Note where the blocks are; `copy_out` copies them later."""
        return self._note(copies)

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        """Copy the blocks into their slots; the pool hears of it when the gate opens."""
        for copy in copies:
            start = _block(copy) * self._words
            slot = self.staged.slot(copy.segment, copy.offset, self._words)
            slot[:] = self._blocks[start : start + self._words]
        return self._note(copies)

    def copy_out(self, block: int) -> None:
        """Copy a block that is Ready from its slot to the harness's memory."""
        segment, offset, _ = self.at[block]
        start = block * self._words
        self._blocks[start : start + self._words] = self.staged.slot(segment, offset, self._words)

    def ended(self, ticket: object) -> bool:
        """Tell whether the gate is open."""
        return self.open

    def wait(self, ticket: object) -> None:
        """The client waits when it closes; then the gate holds nothing back."""

    def close(self) -> None:
        """Nothing to free."""

    def wait_noted(self, count: int) -> None:
        """Wait until that many blocks have their slots."""
        with self.moved:
            if not self.moved.wait_for(lambda: len(self.at) >= count, TIMEOUT_S):
                raise TimeoutError(f"{len(self.at)} of {count} blocks have a slot after {TIMEOUT_S:.0f} s")

    def _note(self, copies: Sequence[Copy]) -> object:
        now = time.perf_counter()
        with self.moved:
            self.at.update({_block(copy): (copy.segment, copy.offset, now) for copy in copies})
            self.moved.notify_all()
        return None


def _block(copy: Copy) -> int:
    if not isinstance(copy.place, int):
        raise TypeError("a place here is a block's number")
    return copy.place


class GatedClient(RankClient):
    """A rank client that does not look at its copies while the gate holds them: that would be the gate's cost."""

    def __init__(self, *args: Any, copier: GateCopier, **more: Any) -> None:
        self._gate = copier
        super().__init__(*args, copier=copier, **more)

    def open_gate(self) -> None:
        """Let all copies be ended from now on."""
        self._gate.open = True
        self._wake()

    def _take_copies(self) -> bool:
        return self._gate.open and super()._take_copies()

    def _arm_timer(self) -> None:
        held = {} if self._gate.open else self._tickets
        if held:
            self._tickets = {}
        super()._arm_timer()
        if held:
            self._tickets = held


class PeerAdapter(Adapter):  # type: ignore[misc] # peerbench comes without types
    """See the module."""

    def setup(self) -> None:
        """Lay out the work; pools are made phase by phase."""
        context = self.ctx
        self._devices = self.opt("devices", 1)
        self._depth = self.opt("qd", 16)
        self._work = Work(
            seed=0,
            object_bytes=context.block_bytes,
            object_count=context.nblocks,
            devices=self._devices,
            batch=self._depth * self._devices,
        )
        self._keys = [context.key(block) + (0).to_bytes(4, "big") for block in range(context.nblocks)]
        self._pool: OwnPool | None = None
        self._client: GatedClient | None = None
        #: The pool is as the next phase needs it.
        self._is_fresh = False
        self._jobs = 0

    def reset(self) -> None:
        """End the pool, delete everything."""
        self._end_pool()
        super().reset()

    def pids(self) -> list[int]:
        """Return the pool's processes; a pool that has served a phase is replaced first, outside the clock."""
        return self._fresh_pool().pids

    def prepare_store(self, keys: list[int]) -> None:
        """Get a slot for every block and fill it; the pool is not told yet."""
        pool = self._fresh_pool()
        pool.watch.announce([self._keys[block] for block in keys])
        client, copier = self._connected()
        for batch in self._batches(keys):
            objects = [StoreObject(self._keys[block], self._device(block), block) for block in batch]
            job = self._next_job()
            client.submit_store(job, f"request-{job}", objects, None)
        copier.wait_noted(len(keys))

    def store(self, keys: list[int]) -> dict[str, Any]:
        """Tell the pool that all slots are filled, and wait until the index has all blocks as stored."""
        pool, (client, _) = self._fresh_pool(), self._connected()
        self._is_fresh = False
        begin_ns = time.time_ns()
        client.open_gate()
        wanted = {self._keys[block] for block in keys}
        while not wanted <= pool.watch.stored_ns.keys():
            if not select.select([pool.watch], [], [], TIMEOUT_S)[0]:
                raise TimeoutError(f"{len(pool.watch.stored_ns)} of {len(keys)} blocks stored; {pool.log_tail()}")
            pool.watch.pump()
        return {"lat_s": [(pool.watch.stored_ns[key] - begin_ns) / 1e9 for key in wanted], "note": self._note()}

    def load(self, keys: list[int]) -> dict[str, Any]:
        """Ask for all blocks, two batches under way at a time, and wait until the last is Ready."""
        self._is_fresh = False
        client, copier = self._connected()
        asked: dict[int, float] = {}
        for batch in self._batches(keys):
            copier.wait_noted(len(asked) - self._work.batch)
            asked.update(dict.fromkeys(batch, time.perf_counter()))
            objects = [LoadObject(self._keys[block], self._device(block), block) for block in batch]
            client.submit_load(self._next_job(), objects)
        copier.wait_noted(len(keys))
        return {"lat_s": [copier.at[block][2] - asked[block] for block in keys], "note": self._note()}

    def finish_load(self, keys: list[int]) -> None:
        """Copy every block out of its slot."""
        _, copier = self._connected()
        for block in keys:
            copier.copy_out(block)

    def teardown(self) -> None:
        """End the pool."""
        self._end_pool()

    # ------------------------------------------------------------ inside

    def _note(self) -> str:
        return f"verify={self.opt('verify', True)} devices={self._devices} depth={self._depth}"

    def _device(self, block: int) -> int:
        return self._work.device(block)

    def _batches(self, keys: list[int]) -> list[list[int]]:
        size = self._work.batch
        return [keys[first : first + size] for first in range(0, len(keys), size)]

    def _next_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def _connected(self) -> tuple[GatedClient, GateCopier]:
        if self._client is None:
            raise RuntimeError("no pool is attached")
        return self._client, self._client._gate  # noqa: SLF001 - ours

    def _fresh_pool(self) -> OwnPool:
        if self._pool is not None and self._is_fresh:
            return self._pool
        self._end_pool()
        paths = [os.path.join(self.ctx.data_dir, f"device{index}") for index in range(self._devices)]
        for path in paths:
            os.makedirs(path, exist_ok=True)
        slots = -(-self._work.object_count // self._devices) + self._depth + SPARE_SLOTS
        plan = Plan(
            paths=paths,
            queue_depth=self._depth,
            staging_bytes=self._devices * (int(slots * self._work.slot_bytes * (1 + SPARE_SHARE)) + SPARE_BYTES),
            verify=self.opt("verify", True),
        )
        self._pool = OwnPool(plan, self._work)
        copier = GateCopier(self.ctx.view, self.ctx.block_bytes)
        config = ClientConfig(run_dir=self._pool.run_dir)
        self._client = GatedClient(config, self._work.namespace(), engine=ENGINE, rank=0, copier=copier)
        ready = self._client.wait_connected(TIMEOUT_S)
        if not (ready and copier.staged.wait_whole(plan.staging_bytes, self._devices, TIMEOUT_S)):
            raise TimeoutError(f"the pool cannot be used: {self._pool.log_tail()}")
        self._pool.wait_staged(copier.staged.mapped_bytes)
        self._is_fresh = True
        return self._pool

    def _end_pool(self) -> None:
        if self._client is not None:
            self._client.open_gate()
            self._client.close()
            self._client = None
        if self._pool is not None:
            self._pool.__exit__()
            self._pool = None
        self._is_fresh = False
