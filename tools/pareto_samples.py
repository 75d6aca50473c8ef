"""
Raw samples of what computing and loading take, and what may be said of them.

Theory. A file of JSON lines: first what was measured on, then one line for each sample. Medians stand for a length;
how sure they are is told by order statistics: of m samples, the interval between the r-th smallest and the r-th
largest holds the median with a probability that depends on m and r alone, whatever the distribution. A length is
measured enough when the half-width of that interval is a small part of the median.

A longer prompt never takes less time, so medians that fall are noise: neighbours are pooled (isotonic regression).

Does not cover: taking samples (`pareto_measure.py`), the break-even file (`emit_break_even.py`).
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Media, in the order of the curves.
MEDIA = ("recompute", "disk", "staging")
CONFIDENCE = 0.95
#: Fewer samples say nothing about the median with that confidence.
SAMPLES_MIN = 6


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: where its prompt came from, how many tokens of it, time to first token."""

    medium: str
    tokens: int
    seconds: float


@dataclass(slots=True)
class Samples:
    """
    A file of samples, and what they were measured on.

    Attributes:
        about: Model, GPU, drive, versions, settings; a file is gone on with only when they are the same.
    """

    path: Path
    about: dict[str, Any]
    found: list[Sample] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, about: dict[str, Any]) -> "Samples":
        """
        Go on with a file, or begin it.

        Raises:
            ValueError: It was measured on something else; names what differs.
        """
        if path.exists():
            samples = cls.read(path)
            different = [key for key in {*about, *samples.about} if about.get(key) != samples.about.get(key)]
            if different:
                raise ValueError(f"{path} was measured with other settings ({', '.join(sorted(different))})")
            return samples
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"about": about}) + "\n", encoding="utf-8")
        return cls(path, about)

    @classmethod
    def read(cls, path: Path) -> "Samples":
        """Read a file; a last line that was cut off is passed over."""
        lines = path.read_text(encoding="utf-8").split("\n")
        about = json.loads(lines[0])["about"]
        return cls(path, about, [Sample(**json.loads(line)) for line in lines[1:-1] if line])

    def add(self, sample: Sample) -> None:
        """Keep one sample, on disk first."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(sample)) + "\n")
        self.found.append(sample)

    def seconds(self, medium: str, tokens: int) -> list[float]:
        """Return the samples of one length."""
        return [sample.seconds for sample in self.found if (sample.medium, sample.tokens) == (medium, tokens)]

    def lengths(self, medium: str) -> list[int]:
        """Return the lengths that have samples, ascending."""
        return sorted({sample.tokens for sample in self.found if sample.medium == medium})


def spread(seconds: Sequence[float]) -> float:
    """Return the half-width of the median's confidence interval over the median; infinite for too few samples."""
    count = len(seconds)
    if count < SAMPLES_MIN:
        return math.inf
    ordered, rank = sorted(seconds), 0
    below = 0.0
    while rank < count // 2:
        below += math.comb(count, rank) / 2**count
        if 1 - 2 * below < CONFIDENCE:
            break
        rank += 1
    low, high = ordered[max(0, rank - 1)], ordered[count - max(1, rank)]
    return (high - low) / 2 / statistics.median(ordered)


def pooled(medians: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the closest curve that never falls: neighbours that fall get their mean."""
    blocks: list[tuple[float, list[int]]] = []
    for tokens, seconds in sorted(medians):
        mean, members = seconds, [tokens]
        while blocks and blocks[-1][0] > mean:
            before, others = blocks.pop()
            mean = (mean * len(members) + before * len(others)) / (len(members) + len(others))
            members = others + members
        blocks.append((mean, members))
    return [(tokens, mean) for mean, members in blocks for tokens in members]
