"""
What computing and loading whole chunks cost now: the measured curves, scaled by what is true, as tables.

Theory. The planner compares every whole number of chunks of every waiting request, many times a second. So the curves
are evaluated once per chunk count and kept as arrays; a change of the scales makes new arrays, and a version number
that says so. Scales are how many times longer something takes now than the curves say.

A load of a prefix is striped over the devices. The disk curve was measured over the whole pool, so `device_count` times
the chunks that lie on one device is what the curve is asked for; a device alone gets its own scale.
"""

from dataclasses import dataclass

import numpy as np

from kvpool.core.curves import Curves, Floats

#: Tables grow in steps of so many chunks.
_CHUNKS_STEP = 512
#: Prompt lengths whose prefill is remembered.
_LENGTHS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Scales:
    """How many times longer than the curves say: computing, copying, reading from each device."""

    prefill: float
    copy: float
    drives: tuple[float, ...]


class Prices:
    """
    Tables of one machine and one chunk size.

    Args:
        curves: As measured.
        chunk_tokens: Tokens of a whole chunk.
        device_count: Devices that the disk curve was measured over, and that are there.
        scales: What is true now; None: the curves.

    Attributes:
        version: Moves with every change of scales.
        floor: Seconds that every prefill pays once.
    """

    def __init__(
        self, curves: Curves, chunk_tokens: int, *, device_count: int = 1, scales: Scales | None = None
    ) -> None:
        self._curves = curves
        self.chunk_tokens = chunk_tokens
        self.device_count = device_count
        self.version = 0
        self._chunks = 0
        self._tables: tuple[Floats, Floats, Floats]
        self._prefills: dict[int, float] = {0: curves.f.floor}
        self.set_scales(scales or Scales(1.0, 1.0, (1.0,) * device_count))

    def set_scales(self, scales: Scales) -> None:
        """Price with *scales* from now on."""
        self.scales = scales
        self.floor = self._curves.f.floor * scales.prefill
        self.version += 1

    def tables(self, chunks: int) -> tuple[Floats, Floats, Floats]:
        """
        Return unscaled seconds of prefill from 0 on, copy, and disk transfer, for 0 to at least *chunks* chunks.

        The first begins with the floor, the others with 0.
        """
        if chunks >= self._chunks:
            self._chunks = (chunks // _CHUNKS_STEP + 1) * _CHUNKS_STEP
            tokens = np.arange(self._chunks + 1, dtype=np.float64) * self.chunk_tokens
            f, g_ssd, g_mem = self._curves.f, self._curves.g_ssd, self._curves.g_mem
            self._tables = (
                f.many(tokens),
                g_mem.many(tokens) - min(f.floor, g_mem.floor),
                g_ssd.many(tokens) - min(f.floor, g_ssd.floor),
            )
            self._tables[1][0] = self._tables[2][0] = 0.0
        return self._tables

    def prefill(self, computed: int, tokens: int) -> float:
        """Return the seconds to compute tokens *computed* to *tokens*, one floor included."""
        return self.floor + (self._f(tokens) - self._f(computed)) * self.scales.prefill

    def rest(self, computed: int, tokens: int) -> float:
        """Return the same, as cheaply as it is asked for in every step: *computed* counts in whole chunks."""
        chunks = computed // self.chunk_tokens
        return self.floor + (self._f(tokens) - float(self.tables(chunks)[0][chunks])) * self.scales.prefill

    def _f(self, tokens: int) -> float:
        found = self._prefills.get(tokens)
        if found is None:
            if len(self._prefills) >= _LENGTHS_MAX:
                self._prefills = {0: self._curves.f.floor}
            found = self._prefills[tokens] = self._curves.f.at(tokens)
        return found

    def read(self, device: int, chunks: int) -> float:
        """Return the seconds to read *chunks* chunks from one device."""
        striped = chunks * self.device_count
        return float(self.tables(striped)[2][striped]) * self.scales.drives[device]

    def copy(self, chunks: int) -> float:
        """Return the seconds to bring *chunks* resident chunks to the GPU."""
        return float(self.tables(chunks)[1][chunks]) * self.scales.copy


def worst_change(old: Scales, new: Scales) -> float:
    """Return by what factor (at least 1) the scale that changed most has changed."""
    pairs = [(old.prefill, new.prefill), (old.copy, new.copy), *zip(old.drives, new.drives, strict=True)]
    return max(max(before / after, after / before) for before, after in pairs)
