"""
The cache policies against plain models of what was published, and against known hit ratios.

The models are written for being obviously right, not for speed: LRU as one list, ARC as the text of figure 4
of Megiddo and Modha (FAST 2003), case by case.
"""

import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.arc import Arc
from kvpool.core.cache import CachePolicy, Past
from kvpool.core.lru import Lru


class Requests:
    """A policy used as a plain cache: each request is over at once."""

    def __init__(self, policy: CachePolicy[Any]) -> None:
        self.policy = policy
        self.hits = 0

    def request(self, key: Hashable) -> bool:
        policy = self.policy
        if key in policy:
            policy.take(key)
            policy.add(key, often=True)
            self.hits += 1
            return True
        past = policy.recall(key)
        if len(policy) == policy.capacity:
            policy.drop(policy.victim(past))
        policy.add(key, often=past is not Past.UNKNOWN)
        return False


class PlainLru:
    def __init__(self, c: int) -> None:
        self.c = c
        self.keys: list[int] = []

    def request(self, x: int) -> bool:
        hit = x in self.keys
        self.keys = [*(key for key in self.keys if key != x), x][-self.c :]
        return hit


class PlainArc:
    """Figure 4 of the paper. Lists run from LRU to MRU."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def request(self, x: int) -> bool:
        c, t1, t2, b1, b2 = self.c, self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:
            (t1 if x in t1 else t2).remove(x)
            t2.append(x)
            return True
        if x in b1:
            self.p = min(self.p + (1 if len(b1) >= len(b2) else len(b2) / len(b1)), c)
            self.replace(x)
            b1.remove(x)
            t2.append(x)
        elif x in b2:
            self.p = max(self.p - (1 if len(b2) >= len(b1) else len(b1) / len(b2)), 0)
            self.replace(x)
            b2.remove(x)
            t2.append(x)
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.pop(0)
                    self.replace(x)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.pop(0)
                self.replace(x)
            t1.append(x)
        return False


small_traces = st.lists(st.integers(min_value=0, max_value=14), max_size=150)
capacities = st.integers(min_value=1, max_value=6)


@given(capacity=capacities, trace=small_traces)
@settings(max_examples=150, deadline=None)
def test_lru_is_the_plain_one(capacity: int, trace: list[int]) -> None:
    ours, plain = Requests(Lru(capacity)), PlainLru(capacity)
    for key in trace:
        assert plain.request(key) == ours.request(key)
        ours.policy.validate()
        assert plain.keys == list(ours.policy._idle)


@given(capacity=capacities, trace=small_traces)
@settings(max_examples=300, deadline=None)
def test_arc_is_the_published_one_list_for_list(capacity: int, trace: list[int]) -> None:
    arc: Arc[int] = Arc(capacity)
    ours, plain = Requests(arc), PlainArc(capacity)
    for key in trace:
        assert plain.request(key) == ours.request(key)
        arc.validate()
        assert {"t1": plain.t1, "t2": plain.t2, "b1": plain.b1, "b2": plain.b2} == arc.lists()
        assert plain.p == arc.target


@given(
    policy=st.sampled_from([Lru, Arc]),
    steps=st.lists(
        st.tuples(st.integers(min_value=0, max_value=9), st.integers(min_value=0, max_value=3)), max_size=120
    ),
)
@settings(max_examples=150, deadline=None)
def test_objects_in_use_are_never_victims_and_the_bounds_hold(
    policy: Callable[[int], CachePolicy[int]], steps: list[tuple[int, int]]
) -> None:
    """Objects come, stay in use, become idle and go in any order, while the capacity changes."""
    cache = policy(4)
    in_use: set[int] = set()
    for key, step in steps:
        if step == 0:
            cache.resize(1 + key % 6)
            while len(cache) > cache.capacity:
                cache.drop(cache.victim())
        elif key in in_use and step == 1:
            in_use.remove(key)
            while len(cache) >= cache.capacity:
                victim = cache.victim()
                assert victim not in in_use
                cache.drop(victim)
            cache.add(key, often=key % 2 == 0)
        elif key in cache:
            cache.take(key)
            in_use.add(key)
        elif key not in in_use:
            cache.recall(key)
            in_use.add(key)
        assert not any(key in cache for key in in_use)
        cache.validate()


@pytest.mark.parametrize("policy", [Lru, Arc])
def test_nobody_is_a_victim_of_an_empty_cache(policy: Callable[[int], CachePolicy[int]]) -> None:
    with pytest.raises(KeyError):
        policy(3).victim()


# ---------------------------------------------------------------- hit ratios of generated traces


def hit_ratio(policy: CachePolicy[Any], trace: list[int]) -> float:
    cache = Requests(policy)
    for key in trace:
        cache.request(key)
    return round(cache.hits / len(trace), 3)


def zipf(seed: int, *, objects: int = 1000, length: int = 20_000, exponent: float = 0.9) -> list[int]:
    rng = random.Random(seed)
    weights = [1 / rank**exponent for rank in range(1, objects + 1)]
    return rng.choices(range(objects), weights, k=length)


def loop(*, objects: int, length: int = 20_000) -> list[int]:
    return [number % objects for number in range(length)]


def scans_and_reuse(seed: int, *, reused: int = 80, scan: int = 300, rounds: int = 30) -> list[int]:
    """A working set that fits is used all the time; now and then a scan passes that never comes back."""
    rng = random.Random(seed)
    trace, fresh = [], 10**6
    for _ in range(rounds):
        trace += [rng.randrange(reused) for _ in range(400)]
        trace += range(fresh, fresh + scan)
        fresh += scan
    return trace


def best_zipf(objects: int, cached: int, exponent: float = 0.9) -> float:
    """The hit ratio of a cache that always holds the most popular objects: no policy without foresight beats it."""
    weights = [1 / rank**exponent for rank in range(1, objects + 1)]
    return sum(weights[:cached]) / sum(weights)


@pytest.mark.parametrize(("seed", "lru", "arc"), [(1, 0.470, 0.550), (2, 0.477, 0.548)])
def test_popular_objects_of_a_zipf_trace_are_hit(seed: int, lru: float, arc: float) -> None:
    trace = zipf(seed)
    assert lru == hit_ratio(Lru(100), trace)
    assert arc == hit_ratio(Arc(100), trace)
    assert lru < arc < best_zipf(1000, 100)


@pytest.mark.parametrize("policy", [Lru, Arc])
def test_a_loop_is_hit_if_it_fits_and_by_neither_policy_if_not(policy: Callable[[int], CachePolicy[int]]) -> None:
    assert 0.995 == hit_ratio(policy(100), loop(objects=100))
    assert 0.0 == hit_ratio(policy(100), loop(objects=101))


def test_arc_keeps_what_is_reused_through_scans_and_lru_does_not() -> None:
    trace = scans_and_reuse(1)
    best = round((30 * 400 - 80) / len(trace), 3)
    assert 0.458 == hit_ratio(Lru(100), trace)
    assert best == hit_ratio(Arc(100), trace)
