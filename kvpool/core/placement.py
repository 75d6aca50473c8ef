"""
Which device a chunk of a prefix is stored on: weighted striping over the healthy devices.

Theory. The devices form one cyclic sequence, the smooth weighted round robin of their weights: in
every window of it each device has its share, to within one. A prefix starts somewhere in the
sequence, chosen by its first key, and chunk number p of it goes p steps further; so n chunks of one
prefix use all drives evenly however small n is, and different prefixes start at different drives.

A device that is not healthy keeps its places in the sequence, and what falls on them is dealt out
to the healthy ones by the same rule. So a lost drive costs its share of bytes, and every other
chunk stays where it was. The rule decides where a *new* object goes; the index says where one is.

Source:
    Smooth weighted round robin: as in nginx's upstream module (2012, "smooth weighted balancing").
"""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from zlib import crc32

from kvpool.errors import invariant


@lru_cache(maxsize=64)
def smooth_sequence(weights: tuple[int, ...]) -> tuple[int, ...]:
    """
    Return one period of the smooth weighted round robin of *weights*.

    Args:
        weights: Per device, >= 0; 0 means never.

    Returns:
        Device indices; device d appears weights[d] / gcd times. Empty when all weights are 0.
    """
    common = gcd(*weights) or 1
    steps = [weight // common for weight in weights]
    total = sum(steps)
    current = [0] * len(steps)
    sequence = []
    for _ in range(total):
        current = [value + step for value, step in zip(current, steps, strict=True)]
        chosen = max((device for device in range(len(steps)) if steps[device]), key=lambda device: current[device])
        current[chosen] -= total
        sequence.append(chosen)
    return tuple(sequence)


def device_of(weights: Sequence[int], healthy: Sequence[bool], first_key: bytes, position: int) -> int | None:
    """
    Return the device for chunk number *position* of the prefix whose first key is *first_key*.

    Args:
        weights: Per device, >= 1.
        healthy: Per device.
        first_key: Key of the prefix's first chunk.
        position: Index of the chunk in its prefix, >= 0.

    Returns:
        A healthy device's index, None if there is none.
    """
    invariant(len(weights) == len(healthy), "one weight and one health per device", weights=weights, healthy=healthy)
    return _device_of(tuple(weights), tuple(healthy), crc32(first_key) + position)


@lru_cache(maxsize=4096)
def _substitutes(weights: tuple[int, ...], healthy: tuple[bool, ...]) -> tuple[int, ...]:
    return smooth_sequence(tuple(w if ok else 0 for w, ok in zip(weights, healthy, strict=True)))


def _device_of(weights: tuple[int, ...], healthy: tuple[bool, ...], step: int) -> int | None:
    sequence = smooth_sequence(weights)
    device = sequence[step % len(sequence)]
    if healthy[device]:
        return device
    others = _substitutes(weights, healthy)
    if not others:
        return None
    period, place = divmod(step, len(sequence))
    lost = _lost_before(weights, healthy)
    return others[(period * lost[-1] + lost[place]) % len(others)]


@lru_cache(maxsize=4096)
def _lost_before(weights: tuple[int, ...], healthy: tuple[bool, ...]) -> tuple[int, ...]:
    """Return, per place of the sequence and for its end, how many places before it belong to lost devices."""
    counts = [0]
    for device in smooth_sequence(weights):
        counts.append(counts[-1] + (not healthy[device]))
    return tuple(counts)
