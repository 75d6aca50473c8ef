"""
The connector's scheduler role beyond vLLM's own: announcing, waiting requests, admission, failed loads, holes.

Theory. vLLM asks about a waiting request in every scheduling pass, about once per millisecond when nothing runs,
and each time its connector looks up every key. So the last answer is remembered with all it depended on (what
the pool has told, ended jobs, the lengths), and a poll that finds these unchanged compares a few integers. vLLM's
connector keeps state of a request's last lookup, which an admitted load needs: so a hit is admitted either
right after its lookup or while nothing has changed since.

With a planner (:mod:`kvpool_vllm.planning`) its verdict comes before the lookup: a deferred request is not looked up, a
declined or partial one is looked up for no more tokens than are worth loading. Where it has no say the gate declines
hits that are too short.

A hit that is not resident goes through :mod:`kvpool_vllm.defer`; this module tells it the bytes, the blocks
vLLM will ask for, and the blocks that are free, by the computation of vLLM's own admission.

Not covered: what is stored (:mod:`kvpool_vllm.manager`), the order in which vLLM asks.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from kvpool.core.planner import COMPUTE, LOAD_ALL, LOAD_PART, STAGING, STORE_UNDER_WAY, Kind, Load
from kvpool.wire.messages import NamespaceSpec
from kvpool_vllm.defer import Deferral, Verdict, Wish
from kvpool_vllm.holes import ChunkNeed, need_all, need_of_state, need_of_window
from kvpool_vllm.manager import KvPoolManager
from kvpool_vllm.metrics import COSTS_LESS, LOAD_FAILED, REST_COSTS_LESS, TOO_SHORT
from kvpool_vllm.planning import BLOCKS_SCARCE, Planning

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        GroupOffloadConfig,
        OffloadingConnectorScheduler,
        RequestGroupState,
        RequestOffloadState,
        TransferJobStatus,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

#: A lookup that says "later" is repeated after this long even if nothing was heard: its end may be a deadline. That of
#: a deferred hit is repeated no more often than this, however much is heard.
RETRY_EVERY_S = 0.005
#: Time that one scheduling pass may spend waiting for the pool's answers, in all.
WAIT_S_MAX = 0.001

#: Verdicts as metrics name them.
DECLINES = {COMPUTE: COSTS_LESS, LOAD_PART: REST_COSTS_LESS}
DEFERS = {
    STAGING: "staging",
    STORE_UNDER_WAY: "store_under_way",
    Verdict.DEFER_BACKLOG.value: "drive_backlog",
    Verdict.DEFER_BLOCKS.value: "blocks",
}

Answer = tuple[int | None, bool]
LATER: Answer = (None, False)
#: No bound on what a lookup may find.
NO_LIMIT = -1


@dataclass(frozen=True, slots=True)
class Seen:
    """What an answer depended on: lengths, the planner, vLLM's own reasons for "later", what the pool has told."""

    computed: int
    tokens: int
    limit: int
    engine: int
    pool: int


@dataclass(frozen=True, slots=True)
class Remembered:
    """
    The last answer to a waiting request.

    Attributes:
        seen: What it depended on.
        answer: What vLLM's lookup said.
        wish: The hit in it, when it was deferred.
        again_at: When the lookup is worth repeating: for "later", which may end with time, for a deferred hit, if
            anything has changed.
    """

    seen: Seen
    answer: Answer
    wish: Wish | None
    again_at: float


class SchedulerSide:
    """
    State of the scheduler role.

    Args:
        scheduler: vLLM's offloading bookkeeping; its request states are read, and their store progress is set back.
        manager: What is stored.
        namespace: Sizes of the objects.
        backlog_s_max: See :class:`Deferral`.
        by_priority: Whether vLLM schedules by priority: what is read ahead follows it.
        planning: Decides by cost; None: whatever is stored is loaded.
    """

    def __init__(
        self,
        scheduler: "OffloadingConnectorScheduler",
        manager: KvPoolManager,
        namespace: NamespaceSpec,
        *,
        backlog_s_max: float,
        by_priority: bool = False,
        planning: Planning | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._object_bytes = {group.group: group.object_bytes * namespace.rank_count for group in namespace.groups}
        self._configs = {config.group_idx: config for config in scheduler.config.kv_group_configs}
        self._needs = {
            group: need_of(config, scheduler.config.blocks_per_chunk, scheduler.config.alignment_tokens)
            for group, config in self._configs.items()
        }
        self._deferral = Deferral(backlog_s_max=backlog_s_max)
        self._by_priority = by_priority
        self._planning = planning
        self._main_group = main_group(scheduler.config.kv_group_configs)
        self._kv_bytes_per_token = kv_bytes_per_token(scheduler.config.kv_group_configs, namespace)
        #: Users' own bounds on loads, of requests that were given another one.
        self._own_limits: dict[str, int | None] = {}
        #: Bytes of loads of which everything was resident.
        self._copied: dict[str, int] = {}
        self._remembered: dict[str, Remembered] = {}
        self._announced: dict[str, int] = {}
        #: Requests that hold GPU blocks: they run or load.
        self._holding: dict[str, Request] = {}
        #: Moves whenever vLLM's own reasons to say "later" may have changed.
        self._changes = 0
        self._pumped = False
        self._wait_left_s = WAIT_S_MAX
        self._promised: int | None = None
        self._blocks: KVCacheManager | None = None
        #: What fails here switches the manager off too: everything is a miss then.
        self.guard = manager.guard
        self._metrics = manager.metrics
        self._metrics.main_group = scheduler.config.kv_group_configs[self._main_group].group_idx
        #: Why what is stored of a waiting request would not be loaded, and what it has waited for, so far.
        self._declined: dict[str, str] = {}
        self._waited: dict[str, set[str]] = {}
        manager.mask_of = self._mask_of
        manager.blocks_unused = self._blocks_unused
        manager.may_store = self._may_store
        if planning is not None:
            manager.client.more_facts = planning.facts

    @property
    def _states(self) -> dict[str, "RequestOffloadState"]:
        return self._scheduler._req_status  # noqa: SLF001 - vLLM's bookkeeping has no public door

    @property
    def _jobs(self) -> dict[int, "TransferJobStatus"]:
        return self._scheduler._jobs  # noqa: SLF001 - the same

    @property
    def stopped(self) -> bool:
        """A reset found blocks in use: nothing is loaded or stored until one does not."""
        return self._manager.stopped

    def bind(self, kv_cache_manager: "KVCacheManager") -> None:
        """Get to know vLLM's blocks."""
        self._blocks = kv_cache_manager

    # ------------------------------------------------------------ arrival and end

    def announce(self, request: "Request") -> None:
        """Announce the keys of *request* that the pool has not heard of, of all groups together, in prefix order."""
        status = self._states.get(request.request_id)
        if status is None:
            return
        status.update_offload_keys()
        plans = self._planning is not None and self._manager.may_load(request.request_id)
        if plans and request.request_id not in self._holding:
            self._plan_for(request, status)
        keys = [key for state in status.group_states for key in state.offload_keys]
        known = self._announced.get(request.request_id, 0)
        if len(keys) == known:
            return
        position = status.req_context.get_offload_key_position
        keys.sort(key=lambda key: position(key) or 0)  # stable: a longer request only appends
        self._announced[request.request_id] = len(keys)
        priority = request.priority if self._by_priority else 0
        self._manager.announce(request.request_id, keys[known:], priority=priority)

    def _plan_for(self, request: "Request", status: "RequestOffloadState") -> None:
        if self._planning is not None:
            state = status.group_states[self._main_group]
            self._planning.arrived(request, lambda: state.offload_keys, by_priority=self._by_priority)

    def finished(self, request: str) -> None:
        """Forget a request that waits or holds no longer. Its load may still be in flight."""
        if self._planning is not None:
            self._planning.ended(request)
        self._own_limits.pop(request, None)
        self._copied.pop(request, None)
        self._declined.pop(request, None)
        self._waited.pop(request, None)
        self._remembered.pop(request, None)
        self._announced.pop(request, None)
        self._holding.pop(request, None)
        self._deferral.forget(request)
        self._changes += 1

    # ------------------------------------------------------------ lookup

    def answer(self, request: "Request", computed: int, ask: Callable[[], Answer]) -> Answer:
        """
        Say how many tokens after *computed* can be loaded now; (None, False): ask later.

        Args:
            ask: vLLM's own lookup.
        """
        self._pump()
        name = request.request_id
        limit, decided = self._planned(request, computed)
        if limit is None:
            return LATER
        last = self._remembered.get(name)
        if last is None or not self._holds(name, last, self._seen(request, computed, limit)):
            self.announce(request)
            last = self._looked_up(request, computed, limit, ask, gated=not decided)
            self._remembered[name] = last
        return LATER if last.wish is not None and self._deferred(name, last.wish) else last.answer

    def _looked_up(
        self, request: "Request", computed: int, limit: int, ask: Callable[[], Answer], *, gated: bool
    ) -> Remembered:
        """Ask vLLM's connector for at most *limit* tokens; with *gated* a hit may be too short."""
        found = self._ask(lambda: self._ask_for(request.request_id, limit, ask))
        wish = self._wish(request, computed, found[0]) if found[0] else None
        if wish is not None and gated and not self._may_load(wish, found[0] or 0, computed):
            found, wish = self._ask_for(request.request_id, 0, ask), None
            self._declined[request.request_id] = TOO_SHORT
        return Remembered(self._seen(request, computed, limit), found, wish, time.monotonic() + RETRY_EVERY_S)

    def _planned(self, request: "Request", computed: int) -> tuple[int | None, bool]:
        """Return how many tokens to load now (None: later, NO_LIMIT: all), and whether the planner says so."""
        name = request.request_id
        if self._planning is None:
            return NO_LIMIT, False
        verdict = self._manager.guard.run(None, self._planning.maybe_verdict, name, computed)
        if verdict is None:
            return NO_LIMIT, False
        self._declined[name] = DECLINES.get(verdict.why, "")
        if verdict.kind is Kind.DEFER:
            self._waited.setdefault(name, set()).add(DEFERS[verdict.why])
            return None, True
        if verdict.kind is Kind.DECLINE:
            return 0, True
        chunk_tokens = self._scheduler.config.kv_group_configs[self._main_group].tokens_per_chunk
        return NO_LIMIT if verdict.why == LOAD_ALL else max(0, verdict.chunks * chunk_tokens - computed), True

    def _ask_for(self, request: str, limit: int, ask: Callable[[], Answer]) -> Answer:
        """Have vLLM look up at most *limit* tokens: the bound goes into the lookup, which knows what a hit needs."""
        status = self._states.get(request)
        if status is not None:
            own = self._own_limits.setdefault(request, status.max_load_tokens)
            status.max_load_tokens = own if limit == NO_LIMIT else limit if own is None else min(limit, own)
        return ask()

    def _may_load(self, wish: Wish, tokens: int, computed: int) -> bool:
        if self._planning is None:
            return True
        read = min(tokens, round(sum(wish.missing_bytes.values()) / self._kv_bytes_per_token))
        return self._planning.gate.may_load(tokens - read, read, local_tokens=computed)

    def _may_store(self, request: str) -> bool:
        holding = self._holding.get(request)
        return self._planning is None or holding is None or self._planning.gate.may_store(holding.num_prompt_tokens)

    def _ahead(self) -> Load:
        """Return what is ahead of the first waiting request."""
        if self._planning is None:
            return Load(0.0, [])
        backlog = {
            device: max(state.backlog_bytes, self._deferral.backlog_s(device, {device: 1.0}))
            for device, state in self._manager.client.device_states().items()
        }
        scarce = self._blocks is not None and (
            self._blocks_free() < BLOCKS_SCARCE * self._blocks.block_pool.num_gpu_blocks
        )
        return Load(
            self._planning.prefill_seconds(self._holding.values()),
            self._planning.backlog_seconds(backlog),
            blocks_scarce=scarce,
        )

    def _holds(self, request: str, last: Remembered, seen: Seen) -> bool:
        """Say whether the lookup need not be repeated. What stays deferred may be a little out of date."""
        if last.answer[0] is None:
            return last.seen == seen and time.monotonic() < last.again_at
        same_lengths = (last.seen.computed, last.seen.tokens, last.seen.limit) == (
            seen.computed,
            seen.tokens,
            seen.limit,
        )
        if last.seen == seen or not same_lengths or last.wish is None or time.monotonic() >= last.again_at:
            return last.seen == seen
        return self._deferred(request, last.wish)

    def _ask(self, ask: Callable[[], Answer]) -> Answer:
        """Ask vLLM's connector; wait a moment where the pool's answer is all that is missing, and ask again."""
        client, before = self._manager.client, self._manager.unanswered
        answer = ask()
        while answer[0] is None and self._manager.unanswered > before and self._wait_left_s > 0:
            start, changes = time.monotonic(), client.changes
            client.await_news(self._wait_left_s)
            self._wait_left_s -= time.monotonic() - start
            if client.changes != changes:
                before = self._manager.unanswered
                answer = ask()
        return answer

    def _pump(self) -> None:
        """Hear what the pool has said, once in a scheduling pass."""
        if not self._pumped:
            self._pumped = True
            client, guard = self._manager.client, self._manager.guard
            guard.run(None, client.pump)
            if self._planning is not None:
                guard.run(None, self._planning.pool_told, client.device_states(), client.changes, self._ahead)

    def _seen(self, request: "Request", computed: int, limit: int) -> Seen:
        return Seen(computed, request.num_tokens, limit, self._changes, self._manager.client.changes)

    def _deferred(self, request: str, wish: Wish) -> bool:
        free = self._blocks_free()
        now_wish = wish if free == wish.blocks_free else replace(wish, blocks_free=free)
        states = self._manager.client.device_states()
        speeds = {device: state.queued_bytes_per_s or state.read_bytes_per_s for device, state in states.items()}
        found = self._deferral.verdict(request, now_wish, speeds, now=time.monotonic())
        if found.deferred:
            self._waited.setdefault(request, set()).add(DEFERS[found.value])
        return found.deferred

    def _wish(self, request: "Request", computed: int, tokens: int) -> Wish:
        missing = self._missing_bytes(request, computed, tokens)
        others = bool(self._holding.keys() - {request.request_id})
        blocks = self._blocks_wanted(request, computed, tokens) if missing and others else 0
        return Wish(missing_bytes=missing, blocks=blocks, blocks_free=self._blocks_free(), others_free_blocks=others)

    def _missing_bytes(self, request: "Request", computed: int, tokens: int) -> dict[int, int]:
        """Return, by device, the bytes of all ranks that a load of *tokens* would read from the drive."""
        keys = self._keys_to_load(request, computed, tokens)
        missing = self._manager.missing_keys(request.request_id, list(keys))
        return {
            device: sum(self._object_bytes[get_offload_group_idx(OffloadKey(key))] for key in of_device)
            for device, of_device in missing.items()
        }

    def _keys_to_load(self, request: "Request", computed: int, tokens: int) -> Iterator[bytes]:
        for config, state in self._groups_of(request.request_id):
            first = computed // config.tokens_per_chunk
            last = -(-(computed + tokens) // config.tokens_per_chunk)
            window = config.load_window_size_in_chunks(computed + tokens)
            yield from state.offload_keys[max(first, last - window) if window is not None else first : last]

    def _groups_of(self, request: str) -> Iterable[tuple["GroupOffloadConfig", "RequestGroupState"]]:
        status = self._states.get(request)
        return zip(self._scheduler.config.kv_group_configs, status.group_states, strict=True) if status else ()

    # ------------------------------------------------------------ blocks

    def _blocks_free(self) -> int:
        """Return the free GPU blocks that admitted requests will not need to finish their prompts."""
        if self._blocks is None:
            return 0
        if self._promised is None:
            self._promised = self._manager.guard.run(0, self._blocks_promised)
        return self._blocks.block_pool.get_num_free_blocks() - self._promised

    def _blocks_promised(self) -> int:
        prefilling = (r for r in self._holding.values() if r.num_computed_tokens + 1 < r.num_tokens)
        return sum(self._blocks_of(request, request.num_computed_tokens, 0) for request in prefilling)

    def _blocks_wanted(self, request: "Request", computed: int, tokens: int) -> int:
        return self._manager.guard.run(0, self._blocks_of, request, computed, tokens)

    def _blocks_of(self, request: "Request", computed: int, tokens: int) -> int:
        """Return the blocks that *request* still has to get for its whole prompt, as vLLM's admission counts them."""
        manager = self._blocks
        if manager is None:
            return 0
        local = manager.empty_kv_cache_blocks.blocks
        if computed and request.request_id not in self._holding:
            local, *_ = manager.coordinator.find_longest_cache_hit(request.block_hashes, computed)
        total = min(request.num_tokens, manager.max_model_len)
        return manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=total,
            new_computed_blocks=local,
            num_encoder_tokens=0,
            total_computed_tokens=computed + tokens,
            num_local_computed_tokens=computed,
            num_tokens_main_model=total,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )

    # ------------------------------------------------------------ what vLLM did

    def allocated(self, request: "Request", tokens: int) -> None:
        """VLLM gave *request* its blocks; with *tokens* > 0 they are for a load."""
        name = request.request_id
        self._holding[name] = request
        self._remembered.pop(name, None)
        self._promised = None
        self._changes += 1
        self._count(name, tokens)
        if tokens > 0:
            status = self._states[name]
            missing = self._missing_bytes(request, status.num_locally_computed_tokens, tokens)
            self._deferral.admitted(name, missing)
            if not missing:
                self._copied[name] = round(tokens * self._kv_bytes_per_token)
        else:
            self._manager.started(name)
        if self._planning is not None:
            if tokens > 0:
                self._planning.load_admitted(name)
            self._planning.left(name)

    def _count(self, name: str, tokens: int) -> None:
        """Tell for metrics what became of a request that waited, and why."""
        for reason in self._waited.pop(name, ()):
            self._metrics.deferred(reason)
        declined = LOAD_FAILED if self._manager.has_failed(name) else self._declined.get(name, "")
        self._declined.pop(name, None)
        if declined and (not tokens or declined == REST_COSTS_LESS):
            self._metrics.declined(declined)

    def before_stores(self) -> None:
        """Know what exists: vLLM is about to choose what to store in this pass."""
        self._pump()

    def step_built(self, scheduler_output: "SchedulerOutput") -> None:
        """A scheduling pass is over."""
        self._pumped = False
        self._wait_left_s = WAIT_S_MAX
        self._promised = None
        if self._planning is not None:
            scheduled = scheduler_output.num_scheduled_tokens
            self._manager.guard.run(None, self._planning.step_built, scheduled, self._holding)
        for name in scheduler_output.preempted_req_ids or ():
            request, status = self._holding.pop(name, None), self._states.get(name)
            if request is not None and status is not None:
                self._plan_for(request, status)
            self._manager.waits_again(name)
            self._changes += 1

    def failed_keys(self, failed_loads: dict[int, set[bytes]]) -> None:
        """
        Loads did not bring these keys (job -> keys); call it before vLLM forgets the jobs.

        Those requests get no second load, and their chunks from the first failed one on are offered for storing again.
        """
        for job, keys in failed_loads.items():
            status = self._jobs.get(job)
            if status is None:
                continue  # forgotten by a reset
            self._manager.load_failed(status.req_id, keys)
            for _, state in self._groups_of(status.req_id):
                chunks = [index for index, key in enumerate(state.offload_keys) if key in keys]
                state.next_stored_chunk_idx = min([state.next_stored_chunk_idx, *chunks])

    def jobs_ended(self) -> None:
        """VLLM has taken note of ended jobs."""
        self._changes += 1
        for name in self._deferral.loading:
            status = self._states.get(name)
            if status is None or not status.transfer_jobs:
                self._deferral.landed(name)
                self._manager.started(name)
                copied = self._copied.pop(name, 0)
                if self._planning is not None:
                    self._planning.load_landed(name, copied_bytes=copied, alone=len(self._holding) <= 1)

    def _blocks_unused(self) -> bool:
        """Tell whether no request holds a GPU block: only then vLLM's own cache could be emptied."""
        pool = self._blocks.block_pool if self._blocks is not None else None
        return pool is not None and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one is no block

    def reset(self) -> None:
        """VLLM forgot its jobs."""
        self._remembered.clear()
        self._deferral.clear()
        self._changes += 1

    # ------------------------------------------------------------ holes

    def _mask_of(self, request: str, key: bytes) -> tuple[bool, bytes | None]:
        """
        Look at the blocks of a chunk that vLLM wants to store.

        Returns:
            Whether it may be stored, and which of its blocks are present; None for all, or where vLLM names the block.
        """
        group = get_offload_group_idx(OffloadKey(key))
        config, need = self._configs[group], self._needs[group]
        status = self._states.get(request)
        if status is None or config.requires_cow_source:
            return status is not None, None
        end = status.req_context.get_offload_key_position(OffloadKey(key))
        state = next(state for known, state in self._groups_of(request) if known is config)
        last = (end or 0) // config.tokens_per_block
        blocks = state.block_ids[last - need.blocks_per_chunk : last]
        mask = need.mask_of(blocks)
        return mask is not None, mask if mask is not None and not all(mask) else None


def keeps_all(config: "GroupOffloadConfig") -> bool:
    """Say whether a load needs a group's chunks from the prompt's start on: it has full attention."""
    return isinstance(config.kv_cache_spec, FullAttentionSpec) and config.load_window_size_in_chunks(1 << 20) is None


def main_group(configs: "Sequence[GroupOffloadConfig]") -> int:
    """Return the place of the group that has a chunk for every position: the first with full attention."""
    return next((place for place, config in enumerate(configs) if keeps_all(config)), 0)


def kv_bytes_per_token(configs: "Sequence[GroupOffloadConfig]", namespace: NamespaceSpec) -> float:
    """Return the bytes that each token more of a long prompt adds to a load, on all ranks together."""
    object_bytes = {group.group: group.object_bytes for group in namespace.groups}
    main = configs[main_group(configs)]
    counted = [config for config in configs if keeps_all(config)] or [main]
    return namespace.rank_count * sum(object_bytes[config.group_idx] / config.tokens_per_chunk for config in counted)


def need_of(config: "GroupOffloadConfig", blocks_per_chunk: int, alignment_tokens: int | None) -> ChunkNeed:
    """Return which blocks of a chunk of this group a load can want."""
    spec = config.kv_cache_spec
    if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
        return need_of_state(blocks_per_chunk=blocks_per_chunk)
    aligned = alignment_tokens is not None and alignment_tokens % config.tokens_per_chunk == 0
    if isinstance(spec, SlidingWindowSpec) and not isinstance(spec, FullAttentionSpec) and aligned:
        return need_of_window(
            window_tokens=spec.sliding_window + spec.extra_retained_tokens,
            block_tokens=config.tokens_per_block,
            blocks_per_chunk=blocks_per_chunk,
        )
    return need_all(blocks_per_chunk=blocks_per_chunk)
