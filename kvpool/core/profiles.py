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

Counts = NDArray[np.intp]


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
        most: Chunks that the device with most of them has.
        forbidden: Where i is not to be chosen; None: nowhere.
    """

    __slots__ = (
        "_priced", "_version", "chunks", "counts", "devices", "first", "forbidden", "local_tokens", "most",
        "storing_from", "tokens",
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
        # Chunks by place, from STORING on: nothing is done for places that no chunk is at.
        held = np.bincount(found + 2).tolist() if len(found) else []
        self.devices: list[int] = [place for place, count in enumerate(held[2:]) if count]
        self.counts: Counts = np.zeros((len(self.devices), len(found) + 1), dtype=np.intp)
        self.most: int = max(held[2:], default=0)
        if self.devices:
            counts = self.counts[:, 1:]
            np.equal(found, np.array(self.devices, dtype=np.int16)[:, None], out=counts, casting="unsafe")
            np.add.accumulate(counts, axis=1, out=counts)
        stores = bool(held and held[0])
        self.storing_from = int((found == STORING).argmax()) + 1 if stores else len(found) + 1
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
        brings: (devices + 1, i): seconds of reading from each device, -inf where nothing is read, so that its backlog
            does not count; in the last row, of bringing the chunks to the GPU.
        shared: Seconds of the GPU and of all devices together: what others wait for meanwhile.
    """

    __slots__ = ("_behind", "_charges", "_prices", "_tables", "_unread", "brings", "rest", "shared")

    def __init__(self, profile: Profile, prices: Prices) -> None:
        self._look_up(profile, prices)
        self.scale(profile, prices)

    def _look_up(self, profile: Profile, prices: Prices) -> None:
        count = profile.chunks - profile.first + 1
        striped = prices.device_count
        f, g_mem, g_ssd = prices.tables(max(profile.chunks, profile.most * striped))
        self._prices = prices
        self._tables = f[profile.first : profile.chunks + 1], g_mem[:count], g_ssd[::striped].take(profile.counts)
        self._unread = profile.counts == 0

    def scale(self, profile: Profile, prices: Prices) -> None:
        """Price anew with the scales of now."""
        if prices is not self._prices:
            self._look_up(profile, prices)
        f, g_mem, g_ssd = self._tables
        scales = prices.scales
        self.rest: Floats = f * -scales.prefill
        self.rest += prices.prefill(0, profile.tokens) + prices.floor
        self.rest[0] = prices.prefill(profile.local_tokens, profile.tokens)
        self.brings: Floats = np.empty((len(profile.devices) + 1, len(f)))
        np.multiply(g_mem, scales.copy, out=self.brings[-1])
        self.shared: Floats = self.rest
        if profile.devices:
            reads = self.brings[:-1]
            np.multiply(g_ssd, np.array([scales.drives[device] for device in profile.devices])[:, None], out=reads)
            self.shared = np.add.reduce(reads)
            self.shared += self.rest
            np.putmask(reads, self._unread, -np.inf)
        self._behind, self._charges = 0, self.rest

    def charges(self, behind: int) -> Floats:
        """Return the seconds from the bytes' arrival on, with those of *behind* others; kept until these change."""
        if behind != self._behind:
            self._behind, self._charges = behind, self.shared * behind
            self._charges += self.rest
        return self._charges
