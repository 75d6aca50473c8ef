"""
The gate: which loads and which stores are too short to be worth it, whatever is going on.

Theory. A break-even file names, for each medium, the prompt length from which on a load is never slower than computing.
A load of fewer tokens is declined before it takes GPU blocks. A load from both is priced as what it is: with curves, by
the time of its two parts against the time of computing it; without, by the thresholds in the proportion of its
parts.

A prefix that is shorter than the lower of the two thresholds will never be loaded, so it is not stored either. When a
later request makes the same prefix long enough, all its chunks are stored, from the first on: whether a chunk is
stored follows from the length of the request, never from the chunk's own place, so no holes arise.

Does not cover: waiting, queues, partial loads (`planner.py`).
"""

from dataclasses import dataclass

from kvpool.core.curves import BreakEven, Curves


@dataclass(frozen=True, slots=True)
class Gate:
    """
    Thresholds of one machine, margin included.

    Attributes:
        ssd_tokens, mem_tokens: Loads of fewer tokens are declined; 0: none is.
        curves: For loads from both.
    """

    ssd_tokens: int = 0
    mem_tokens: int = 0
    curves: Curves | None = None

    @classmethod
    def of(cls, found: BreakEven) -> "Gate":
        """Return the gate of a break-even file."""
        ssd, mem = (tokens + found.margin_tokens if tokens else 0 for tokens in (found.ssd_tokens, found.mem_tokens))
        return cls(ssd, mem, found.curves)

    def may_load(self, resident_tokens: int, read_tokens: int, *, local_tokens: int = 0) -> bool:
        """
        Tell whether a load is worth it.

        Args:
            resident_tokens, read_tokens: Of the load, by where they lie.
            local_tokens: On the GPU already, before the load.
        """
        tokens = resident_tokens + read_tokens
        if not read_tokens or not resident_tokens:
            return tokens >= (self.ssd_tokens if read_tokens else self.mem_tokens)
        if self.curves is not None and self.ssd_tokens:
            curves = self.curves
            load_s = max(curves.g_ssd.at(read_tokens), curves.g_mem.at(tokens))
            return load_s <= curves.prefill(local_tokens, local_tokens + tokens)
        return tokens * tokens >= resident_tokens * self.mem_tokens + read_tokens * self.ssd_tokens

    def may_store(self, prompt_tokens: int) -> bool:
        """Tell whether a prefix of that length can ever be worth loading."""
        return prompt_tokens >= min(self.ssd_tokens, self.mem_tokens)
