"""
Stores: which offered keys get slots, and what becomes of them until they are filled.

Theory. An offer is decided key by key in prefix order. A key gets slots for all ranks at once, or
waits for them with its whole offer behind it, or is dropped; the first drop cuts the offer, because
a prefix with a hole is worth nothing behind the hole. An engine's offers are decided in the order in
which they came, whatever their slot sizes, since its ranks copy a request's offers in that order: so
no offer waits for slots that a later one holds. Engines take turns. Ranks fill early keys while later
ones wait, so an offer larger than staging streams through.

Loads go first: stores hold at most the slots beyond a reserve for loads, and take no slot that an
opened read waits for. Only while stores hold less than one key's slots may they take those before
loads, and loads then leave slots until one key's are together (`SlotPool.saved`), so that stores go
on, slowly, under any load.

A dropped key frees the slots nobody can be writing to; the others stay filling until their ranks
say Filled or Cancel, or leave and are proven gone.
"""

from collections.abc import Iterable

from kvpool.core.clients import Client, StoreJob, Waiter
from kvpool.core.deadlines import Deadlines
from kvpool.core.fair_queue import FairQueue
from kvpool.core.key_index import KeyIndex
from kvpool.core.loads import Loads
from kvpool.core.object_events import (
    Action,
    Dropped,
    ObjectId,
    SendDropped,
    SendExists,
    SendGranted,
    StoreWanted,
    TellStoreEnded,
)
from kvpool.core.residency import Residency
from kvpool.core.slots import SlotPool, SlotStep
from kvpool.core.store_offers import Ask, Decision, Offer, OfferId, StoreKey
from kvpool.core.writes import Writes
from kvpool.errors import ProtocolError, invariant


class Stores:
    """
    All stores of one device.

    Attributes:
        offers: By identity, until decided, asked by all ranks and not cut, or past their deadline.
        filling: The FILLING decision of a key; at most one.
        queue: Offers with undecided keys, by engine.
        saving: Some pool saves slots for a store.
        refusing: Why no key is taken now; None while they are.
    """

    def __init__(
        self, *, store_deadline_ns: int, fill_deadline_ns: int, index: KeyIndex, residency: Residency, loads: Loads,
        writes: Writes, actions: list[Action], counts: dict[str, int],
    ) -> None:  # fmt: skip
        self.index = index
        self.residency = residency
        self.loads = loads
        self.writes = writes
        self.actions = actions
        self.counts = counts
        self.offers: dict[OfferId, Offer] = {}
        self.filling: dict[tuple[int, bytes], StoreKey] = {}
        self.queue: FairQueue[Offer] = FairQueue()
        self.pools: list[SlotPool] = []
        self.saving = False
        self.decide_deadlines: Deadlines[StoreKey] = Deadlines(store_deadline_ns, _key_waits)
        self.fill_deadlines: Deadlines[StoreKey] = Deadlines(fill_deadline_ns, _key_waits)
        self.offer_deadlines: Deadlines[Offer] = Deadlines(
            store_deadline_ns + fill_deadline_ns, lambda offer, due_ns: offer.due_ns == due_ns
        )
        self.refusing: Dropped | None = None

    def add_pool(self, pool: SlotPool) -> None:
        """Serve that slot size too."""
        self.pools.append(pool)

    # ------------------------------------------------------------ ranks ask

    def want(self, client: Client, event: StoreWanted, pools: dict[int, SlotPool], now_ns: int) -> None:
        """A rank offers keys; raises ProtocolError before anything changes."""
        job_number, first, keys = event.job, event.first, event.keys
        offer_id = OfferId(client.engine, client.space.namespace, event.store)
        sizes = self._check_ask(client, event, offer_id)
        if not keys:
            return
        job = client.stores.get(job_number)
        if job is None:
            job = client.stores[job_number] = StoreJob(client, job_number)
        job.end = first + len(keys)
        offer = self.offers.get(offer_id)
        if offer is None:
            offer = self.offers[offer_id] = Offer(offer_id, client.space)
            offer.due_ns = self.offer_deadlines.start(offer, now_ns)
        self.counts["stores_wanted"] += len(keys)
        for offset, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            self._ask(offer, Ask(job, first + offset), key, pools[size], now_ns)
        if offer.undecided:
            self.queue.push(client.engine, offer)
        job.maybe_forget()

    def _check_ask(self, client: Client, event: StoreWanted, offer_id: OfferId) -> list[int]:
        job_number, first, keys = event.job, event.first, event.keys
        sizes = [client.space.size_of(key) for key in keys]
        job = client.stores.get(job_number)
        if job is not None and first < job.end:
            raise ProtocolError("index of a store job asked for twice", job=job_number, index=first)
        if len(set(keys)) != len(keys):
            raise ProtocolError("the same key twice in a store", job=job_number)
        offer = self.offers.get(offer_id)
        for key in keys if offer is not None else ():
            known = offer.keys.get(key) if offer is not None else None
            ask = known.asks.get(client.rank) if known is not None else None
            if ask is not None and ask.job.client is client:
                raise ProtocolError("key of a store asked for twice", job=job_number, key=key.hex())
        return sizes

    def _ask(self, offer: Offer, ask: Ask, key: bytes, pool: SlotPool, now_ns: int) -> None:
        rank = ask.job.client.rank
        store_key = offer.keys.get(key)
        if store_key is None:
            store_key = offer.keys[key] = StoreKey(offer, key, pool)
            store_key.engines[offer.id.engine] = None
            store_key.due_ns = self.decide_deadlines.start(store_key, now_ns)
            offer.undecided.append(store_key)
        elif store_key.decision is Decision.WAITING and rank in store_key.asks:
            # Two live clients say that they are the same rank: the first keeps its ask.
            client = ask.job.client.client
            self.actions.append(SendDropped(client=client, job=ask.job.job, index=ask.index))
            return
        store_key.asks[rank] = ask
        if store_key.decision is Decision.WAITING:
            ask.job.waiting[ask.index] = store_key
        else:
            self._answer(store_key, rank, ask)
            self._maybe_forget(store_key)

    def _answer(self, store_key: StoreKey, rank: int, ask: Ask) -> None:
        """Answer a rank's ask for a decided key."""
        client = ask.job.client
        number, job, index = client.client, ask.job.job, ask.index
        ask.job.waiting.pop(index, None)
        if store_key.decision is Decision.DROPPED:
            self.actions.append(SendDropped(client=number, job=job, index=index))
        elif store_key.decision is Decision.FILLING and not store_key.told >> rank & 1:
            store_key.told |= 1 << rank
            ask.job.granted[index] = store_key
            client.begin_use(store_key.pool)
            slot = store_key.slots[rank]
            self.actions.append(SendGranted(client=number, job=job, index=index, slot=slot.ref))
        else:
            self.actions.append(SendExists(client=number, job=job, index=index))

    def _answer_all(self, store_key: StoreKey) -> None:
        for rank, ask in store_key.asks.items():
            self._answer(store_key, rank, ask)
            ask.job.maybe_forget()
        self._maybe_forget(store_key)

    def _maybe_forget(self, store_key: StoreKey) -> None:
        """Forget a decision that every rank has heard and that needs no fill."""
        offer = store_key.offer
        if store_key.decision in (Decision.WAITING, Decision.FILLING):
            return
        if len(store_key.asks) == offer.space.rank_count:
            offer.keys.pop(store_key.key, None)
            self._maybe_forget_offer(offer)

    def _maybe_forget_offer(self, offer: Offer) -> None:
        if not offer.keys and not offer.undecided and not offer.cut:
            self._forget_offer(offer)

    def _forget_offer(self, offer: Offer) -> None:
        offer.due_ns = 0
        if self.offers.get(offer.id) is offer:
            del self.offers[offer.id]

    # ------------------------------------------------------------ decisions

    def pump(self, now_ns: int) -> None:
        """Decide what can be decided now."""
        if not self.queue and not self.saving:
            return
        refusing = self.refusing or (Dropped.ROOM if now_ns < self.writes.full_until_ns else None)
        self.saving = False
        for pool in self.pools:
            pool.saved = 0
        moved = True
        while moved:
            moved = False
            for engine, offer in self.queue.heads():
                if self._decide_next(offer, refusing, now_ns):
                    moved = True
                    self.queue.yield_turn(engine)
                    if not offer.undecided:
                        self.queue.discard(engine, offer)
                        self._maybe_forget_offer(offer)

    def _decide_next(self, offer: Offer, refusing: Dropped | None, now_ns: int) -> bool:
        """Decide the offer's first undecided key; return False if it has to wait."""
        store_key = offer.undecided[0]
        if store_key.decision is not Decision.WAITING:
            offer.undecided.popleft()
            offer.cut = offer.cut or Dropped.PREFIX
            return True
        verdict = self._verdict(store_key, refusing)
        if verdict is Decision.WAITING:
            return False
        offer.undecided.popleft()
        if verdict is Decision.FILLING:
            self._grant(store_key, now_ns)
        elif verdict is Decision.EXISTS:
            self._exists(store_key)
        else:
            self._drop(store_key, refusing or offer.cut or Dropped.STAGING)
        return True

    def _verdict(self, store_key: StoreKey, refusing: Dropped | None) -> Decision:
        """Say what becomes of a key now; WAITING if slots may come."""
        space = store_key.space
        if space.flags(store_key.key) or (space.namespace, store_key.key) in self.filling:
            return Decision.EXISTS
        if store_key.offer.cut or refusing:
            return Decision.DROPPED
        if store_key.key in space.removing:
            return Decision.WAITING
        return self._slots_verdict(store_key)

    def _slots_verdict(self, store_key: StoreKey) -> Decision:
        space, pool = store_key.space, store_key.pool
        ranks = space.rank_count
        capacity = pool.store_capacity(ranks)
        if capacity < ranks:
            return Decision.DROPPED
        if pool.store_held + ranks > capacity:
            return Decision.WAITING
        if any(ask.job.client.capped(pool) for ask in store_key.asks.values()):
            return Decision.WAITING
        if pool.store_held >= ranks:
            return Decision.FILLING if pool.spare() - pool.wanted >= ranks else Decision.WAITING
        if pool.spare() >= ranks:
            return Decision.FILLING
        if pool.total > ranks:
            pool.saved = ranks
            self.saving = True
        return Decision.WAITING

    def _grant(self, store_key: StoreKey, now_ns: int) -> None:
        space, pool, offer = store_key.space, store_key.pool, store_key.offer
        pool.saved = 0
        objects = [store_key.object_of(rank) for rank in range(space.rank_count)]
        store_key.slots = [self.residency.take(pool, object_id, by_store=True) for object_id in objects]
        store_key.decision = Decision.FILLING
        store_key.due_ns = self.fill_deadlines.start(store_key, now_ns)
        offer.filling += 1
        self.filling[space.namespace, store_key.key] = store_key
        self.counts["keys_granted"] += 1
        space.young[store_key.key] = 1
        self._answer_all(store_key)

    def _exists(self, store_key: StoreKey) -> None:
        store_key.decision = Decision.EXISTS
        store_key.due_ns = 0
        self.counts["keys_existing"] += 1
        other = self.filling.get((store_key.space.namespace, store_key.key))
        if other is not None:
            other.engines.update(store_key.engines)
        else:
            self._tell_ended(store_key)
        self._answer_all(store_key)

    def _tell_ended(self, store_key: StoreKey) -> None:
        kept = store_key.space.flags(store_key.key) != 0
        self.actions.extend(TellStoreEnded(engine=engine, key=store_key.key, kept=kept) for engine in store_key.engines)

    def _drop(self, store_key: StoreKey, why: Dropped) -> None:
        """The key is not stored for any rank, and nothing after it in its offer that is not decided."""
        was_filling = store_key.decision is Decision.FILLING
        store_key.decision = Decision.DROPPED
        store_key.due_ns = 0
        store_key.offer.cut = Dropped.PREFIX
        self._count_dropped(why)
        self._tell_ended(store_key)
        if was_filling:
            self._drop_slots(store_key)
            self._maybe_forget(store_key)
        else:
            self._answer_all(store_key)

    def _count_dropped(self, why: Dropped) -> None:
        self.counts["keys_dropped"] += 1
        self.counts[f"keys_dropped_{why}"] += 1

    def _drop_slots(self, store_key: StoreKey) -> None:
        self._end_filling(store_key)
        self.loads.preloads.store_dropped(store_key)
        for rank, slot in enumerate(store_key.slots):
            written_to = store_key.told & ~store_key.filled
            if not written_to >> rank & 1:
                slot.step(SlotStep.SPOIL)
        waiters = list(store_key.waiters)
        store_key.waiters.clear()
        for waiter in waiters:
            waiter.place = None
            self.loads.place(waiter)

    def _end_filling(self, store_key: StoreKey) -> None:
        del self.filling[store_key.space.namespace, store_key.key]
        store_key.offer.filling -= 1

    # ------------------------------------------------------------ ranks fill

    def fill(self, client: Client, job_number: int, indices: list[int]) -> None:
        """Copies into these slots have ended; raises ProtocolError before anything changes."""
        job = client.stores.get(job_number)
        if job is None or len(set(indices)) != len(indices) or not all(index in job.granted for index in indices):
            raise ProtocolError("filled a slot that it was not granted", client=client.client, job=job_number)
        for index in indices:
            store_key = job.granted.pop(index)
            self.loads.end_use(client, store_key.pool)
            if store_key.decision is Decision.DROPPED:
                store_key.slots[client.rank].step(SlotStep.SPOIL)
                continue
            store_key.filled |= 1 << client.rank
            if store_key.filled == store_key.space.full:
                self._complete(store_key)
        job.maybe_forget()

    def _complete(self, store_key: StoreKey) -> None:
        """Every rank has filled: the key is resident, loadable, and to be written."""
        self._end_filling(store_key)
        store_key.decision = Decision.WRITING
        store_key.due_ns = 0
        self.counts["keys_filled"] += 1
        for slot in store_key.slots:
            self.residency.fill(slot, held=True)
        self._tell_ended(store_key)
        waiters = list(store_key.waiters)
        store_key.waiters.clear()
        for waiter in waiters:
            waiter.place = None
            self.loads.place(waiter)
        for slot in store_key.slots:
            self.loads.object_stored(slot)
        self.writes.add(store_key)
        self._maybe_forget(store_key)

    def cancel(self, client: Client, job_number: int, indices: Iterable[int]) -> None:
        """The rank will not fill these; those it was not answered get no answer."""
        job = client.stores.get(job_number)
        if job is None:
            return
        for index in indices:
            self._cancel_one(job, index)
        job.maybe_forget()

    def _cancel_one(self, job: StoreJob, index: int) -> None:
        waiting = job.waiting.pop(index, None)
        if waiting is not None:
            self._withdraw(waiting, job.client.rank)
            return
        granted = job.granted.pop(index, None)
        if granted is not None:
            client = job.client
            if granted.decision is Decision.FILLING:
                self._drop(granted, Dropped.CANCELLED)
            self.loads.end_use(client, granted.pool)
            granted.slots[client.rank].step(SlotStep.SPOIL)

    def _withdraw(self, store_key: StoreKey, rank: int) -> None:
        """An undecided key loses a rank: it is dropped for the others; its place in the offer stays until its turn."""
        store_key.decision = Decision.DROPPED
        store_key.due_ns = 0
        self._count_dropped(Dropped.CANCELLED)
        self._tell_ended(store_key)
        for other, ask in store_key.asks.items():
            if other != rank:
                self._answer(store_key, other, ask)
                ask.job.maybe_forget()
        self._maybe_forget(store_key)

    def brings(self, object_id: ObjectId) -> bool:
        """Return whether that object is being filled."""
        return (object_id.namespace, object_id.key) in self.filling

    def join(self, waiter: Waiter) -> bool:
        """Let a load wait for the fill of its object, if there is one and no file."""
        object_id: ObjectId = waiter.object
        store_key = self.filling.get((object_id.namespace, object_id.key))
        if store_key is None or self.index.has(object_id):
            return False
        if self.loads.count(waiter):
            waiter.place = store_key
            store_key.waiters[waiter] = None
        return True

    # ------------------------------------------------------------ ranks leave, time passes

    def leave(self, client: Client) -> None:
        """*client* departed: what it was to fill is dropped; its slots wait for proof."""
        for job in list(client.stores.values()):
            for index in list(job.waiting):
                self._cancel_one(job, index)
            for store_key in list(job.granted.values()):
                if store_key.decision is Decision.FILLING:
                    self._drop(store_key, Dropped.CANCELLED)
                self.residency.haunt(client, store_key.slots[client.rank])
            job.granted.clear()
        client.stores.clear()
        self._drop_unasked(client)

    def _drop_unasked(self, client: Client) -> None:
        """Drop what the departed rank of that engine was still to ask for: nobody would fill it."""
        for offer in list(self.offers.values()):
            if offer.id.engine != client.engine or offer.id.namespace != client.space.namespace:
                continue
            for store_key in list(offer.keys.values()):
                if store_key.decision is Decision.FILLING and client.rank not in store_key.asks:
                    self._drop(store_key, Dropped.CANCELLED)
                elif store_key.decision is Decision.WAITING:
                    offer.cut = offer.cut or Dropped.CANCELLED

    def expire(self, now_ns: int) -> None:
        """Drop what was not decided or not filled in time; forget old offers."""
        for store_key in self.decide_deadlines.expired(now_ns):
            store_key.offer.cut = store_key.offer.cut or Dropped.LATE
        for store_key in self.fill_deadlines.expired(now_ns):
            if store_key.decision is Decision.FILLING:
                self.counts["fills_late"] += 1
                self._drop(store_key, Dropped.LATE)
        for offer in self.offer_deadlines.expired(now_ns):
            if offer.undecided or offer.filling:
                offer.due_ns = self.offer_deadlines.start(offer, now_ns)
            else:
                self._forget_offer(offer)

    # ------------------------------------------------------------ looks

    def validate(self) -> None:
        """Check that offers, queues and decisions agree, and that every dropped key has its reason."""
        reasons = sum(self.counts[f"keys_dropped_{why}"] for why in Dropped)
        invariant(reasons == self.counts["keys_dropped"], "keys were dropped without a reason", reasons=reasons)
        for offer_id, offer in self.offers.items():
            invariant(offer.id == offer_id, "offer under another identity", offer=offer_id)
            offer.validate()
        for offer in self.queue:
            invariant(bool(offer.undecided), "a decided offer is queued", offer=offer.id)
            invariant(self.offers.get(offer.id) is offer, "a forgotten offer is queued", offer=offer.id)
        queued = set(self.queue)
        for offer in self.offers.values():
            invariant(offer in queued or not offer.undecided, "an undecided offer is not queued", offer=offer.id)
        for (namespace, key), store_key in self.filling.items():
            invariant(store_key.key == key, "filling another key", key=key.hex())
            invariant(store_key.space.namespace == namespace, "filling in another namespace", key=key.hex())
            invariant(store_key.decision is Decision.FILLING, "filling by another decision", key=key.hex())
            for waiter in store_key.waiters:
                invariant(waiter.place is store_key, "waiter waits elsewhere", key=key.hex())


def _key_waits(store_key: StoreKey, due_ns: int) -> bool:
    return store_key.due_ns == due_ns
