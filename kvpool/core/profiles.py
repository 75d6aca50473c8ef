"""
Where the stored prefix of one waiting request lies, and what loading any part of it takes.

Theory. A :class:`Profile` counts, chunk by chunk, what a load up to there would read from each device; it changes only
with residency. :class:`Priced` holds the same in seconds, at the prices of now. Both are arrays over i, the number of
chunks that a load brings beyond those that the GPU has: the planner looks at every i at once.

Does not cover: the choice (`planner.py`).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpool.core.chunk_places import RESIDENT_PLACE as RESIDENT
from kvpool.core.chunk_places import STORING_PLACE as STORING
from kvpool.core.curves import Floats
from kvpool.core.prices import Prices

__all__ = ["RESIDENT", "STORING", "Counts", "Priced", "Profile"]

Counts = NDArray[np.int64]


class Profile:
    """
    Where a request's stored prefix lies, counted up chunk by chunk.

    Args:
        tokens: Of the whole prompt.
        local_tokens: Of them already on the GPU.
        places: Per chunk from the prompt's start to the first one that is not stored: a device, RESIDENT or STORING.
        chunk_tokens: Tokens of a chunk.
        cuts: The numbers of chunks that may be loaded; None: every one. For hybrid models.

    Attributes:
        first: Chunks that are wholly on the GPU: a load starts behind them.
        chunks: Chunks of the stored prefix.
        devices: Those that have any of it.
        counts: (devices, i): chunks to read from each for a load of i chunks, i from 0 on.
        storing_from: The least i that takes a chunk which is still being stored.
        forbidden: Where i is not to be chosen; None: nowhere.
    """

    __slots__ = (
        "_priced", "_version", "chunks", "counts", "devices", "first", "forbidden", "local_tokens", "storing_from",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokens: int,
        local_tokens: int,
        places: Sequence[int] | NDArray[np.int16],
        *,
        chunk_tokens: int,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.tokens, self.local_tokens = tokens, local_tokens
        self.chunks = len(places)
        self.first = min(local_tokens // chunk_tokens, self.chunks)
        found = np.asarray(places, dtype=np.int16)[self.first :]
        self.devices: list[int] = np.flatnonzero(np.bincount(found + 2)[2:]).tolist() if len(found) else []
        self.counts: Counts = np.zeros((len(self.devices), len(found) + 1), dtype=np.int64)
        if self.devices:
            lies_there = found == np.array(self.devices, dtype=np.int16)[:, None]
            np.cumsum(lies_there, axis=1, out=self.counts[:, 1:])
        storing = int((found == STORING).argmax()) if len(found) else 0
        stores = len(found) > 0 and bool(found[storing] == STORING)
        self.storing_from = storing + 1 if stores else len(found) + 1
        self.forbidden: NDArray[np.bool_] | None = None
        if cuts is not None:
            self.forbidden = np.ones(len(found) + 1, dtype=np.bool_)
            self.forbidden[0] = False
            self.forbidden[[k - self.first for k in cuts if self.first <= k <= self.chunks]] = False
        self._version = -1
        self._priced: Priced | None = None

    @property
    def empty(self) -> bool:
        """Nothing is stored beyond what the GPU has."""
        return self.chunks <= self.first

    def priced(self, prices: Prices) -> "Priced":
        """Return its seconds at *prices*, made anew only when these have changed."""
        if self._priced is None:
            self._priced = Priced(self, prices)
        elif self._version != prices.version:
            self._priced.scale(self, prices)
        self._version = prices.version
        return self._priced


class Priced:
    """
    Seconds of loads of i chunks, i from 0 on.

    Attributes:
        rest: GPU seconds that are left to compute; of no load everything that is not on the GPU.
        copy: Bringing the chunks to the GPU.
        reads: (devices, i): seconds of reading; -inf where nothing is read, so that its backlog does not count.
        drains: Seconds of reading of all devices together.
    """

    __slots__ = ("_prices", "_tables", "_unread", "copy", "drains", "reads", "rest")

    def __init__(self, profile: Profile, prices: Prices) -> None:
        self._look_up(profile, prices)
        self.scale(profile, prices)

    def _look_up(self, profile: Profile, prices: Prices) -> None:
        count = profile.chunks - profile.first + 1
        striped = profile.counts * prices.device_count
        most = int(striped.max()) if striped.size else 0
        f, g_mem, g_ssd = prices.tables(max(profile.chunks, most))
        self._prices = prices
        self._tables = f[profile.first : profile.chunks + 1], g_mem[:count], g_ssd[striped]
        self._unread = profile.counts == 0

    def scale(self, profile: Profile, prices: Prices) -> None:
        """Price anew with the scales of now."""
        if prices is not self._prices:
            self._look_up(profile, prices)
        f, g_mem, g_ssd = self._tables
        scales = prices.scales
        whole = prices.prefill(0, profile.tokens) + prices.floor
        self.rest: Floats = whole - f * scales.prefill
        self.rest[0] = prices.prefill(profile.local_tokens, profile.tokens)
        self.copy: Floats = g_mem * scales.copy
        self.reads: Floats = g_ssd * np.array([scales.drives[device] for device in profile.devices])[:, None]
        self.drains: Floats = self.reads.sum(axis=0) if profile.devices else np.zeros(len(f))
        self.reads[self._unread] = -np.inf
