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

from kvpool.core.curves import Floats
from kvpool.core.prices import Prices

#: Places of a chunk beside the devices' numbers.
RESIDENT = -1
STORING = -2

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
        counts: Per device that has any: chunks to read for a load of i chunks, i from 0 on.
        storing_from: The least i that takes a chunk which is still being stored.
        forbidden: Where i is not to be chosen; None: nowhere.
    """

    __slots__ = (
        "_priced", "_version", "chunks", "counts", "first", "forbidden", "local_tokens", "storing_from", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokens: int,
        local_tokens: int,
        places: Sequence[int],
        *,
        chunk_tokens: int,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.tokens, self.local_tokens = tokens, local_tokens
        self.chunks = len(places)
        self.first = min(local_tokens // chunk_tokens, self.chunks)
        found = np.asarray(places[self.first :], dtype=np.int16)
        self.counts: dict[int, Counts] = {}
        for device in sorted(set(found.tolist())):
            if device >= 0:
                counted = self.counts[device] = np.zeros(len(found) + 1, dtype=np.int64)
                np.cumsum(found == device, out=counted[1:])
        storing = np.flatnonzero(found == STORING)
        self.storing_from = int(storing[0]) + 1 if len(storing) else len(found) + 1
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
        """Return its tables at *prices*, made anew only when these have changed."""
        if self._priced is None or self._version != prices.version:
            self._version, self._priced = prices.version, Priced(self, prices)
        return self._priced


class Priced:
    """
    Seconds of loads of i chunks, i from 0 on.

    Attributes:
        rest: GPU seconds that are left to compute; of no load everything that is not on the GPU.
        copy: Bringing the chunks to the GPU.
        reads: Per device that has any: (device, seconds of reading; -inf where nothing is read, so that its backlog
            does not count).
        drains: Seconds of reading of all devices together.
    """

    __slots__ = ("copy", "drains", "reads", "rest")

    def __init__(self, profile: Profile, prices: Prices) -> None:
        count = profile.chunks - profile.first + 1
        most = max((int(counted[-1]) for counted in profile.counts.values()), default=0) * prices.device_count
        f, g_mem, g_ssd = prices.tables(max(profile.chunks, most))
        scales = prices.scales
        whole = prices.prefill(0, profile.tokens) + prices.floor
        self.rest: Floats = whole - f[profile.first : profile.chunks + 1] * scales.prefill
        self.rest[0] = prices.prefill(profile.local_tokens, profile.tokens)
        self.copy: Floats = g_mem[:count] * scales.copy
        self.drains: Floats = np.zeros(count)
        self.reads: list[tuple[int, Floats]] = []
        for device, counted in profile.counts.items():
            seconds = g_ssd[counted * prices.device_count] * scales.drives[device]
            self.drains += seconds
            seconds[counted == 0] = -np.inf
            self.reads.append((device, seconds))
