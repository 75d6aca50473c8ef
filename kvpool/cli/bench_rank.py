"""
The client process of `kvpool bench`: stores and loads objects as a rank of an engine would.

Theory. It reads commands (one JSON object a line) on standard input and answers on standard output. Jobs of `batch`
objects are submitted to a :class:`~kvpool.client.rank.RankClient` one after the other, so that two are
always under way; what comes back is seen where a real rank would launch its copies, in the copier, which
notes the time and writes or compares the marks of each object. The thread that submits sleeps meanwhile.

    {"do": "store"}  ->  {"done": true, "first_ns": ..., "at_ns": [...], "failed": {...}}
    {"do": "load"}   ->  the same, and "from_ns", "wrong": [...]
    {"do": "check", "indices": [...]}  ->  {"done": true, "wrong": [...]}: loads them again and compares every word
    anything else, or the end of input  ->  ends

Times are CLOCK_REALTIME, so that they can be put beside the times of files.
Does not cover: starting the pool, CPU of the processes, figures.
"""

import json
import mmap
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvpool.cli.bench_work import Content, Words, Work
from kvpool.client.copier import Copy
from kvpool.client.launch import ClientConfig
from kvpool.client.rank import LoadObject, RankClient, StoreObject
from kvpool.errors import Code

ENGINE = "bench"
#: For the pool to be there, and then for its staging.
CONNECT_TIMEOUT_S = 120.0
#: How often the ends of jobs are looked at while no object comes: only failed objects are learned that way.
ENDED_EVERY_S = 0.05
#: Part of a phase after which progress is told.
PROGRESS_SHARE = 0.02


class Staged:
    """The segments of staging that are mapped here."""

    def __init__(self) -> None:
        self._segments: dict[int, Words] = {}
        self._changed = threading.Condition()

    def add(self, segment: int, words: Words) -> None:
        """A segment was mapped."""
        with self._changed:
            self._segments[segment] = words
            self._changed.notify_all()

    def remove(self, segment: int) -> None:
        """A segment is to be unmapped: nothing here refers to it any more."""
        with self._changed:
            self._segments.pop(segment, None)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of all segments."""
        with self._changed:
            return sum(words.nbytes for words in self._segments.values())

    def slot(self, segment: int, offset: int, words: int) -> Words:
        """Return the first *words* words of a slot."""
        return self._segments[segment][offset // 8 : offset // 8 + words]

    def wait_whole(self, staging_bytes: int, devices: int, timeout_s: float) -> bool:
        """Wait until all of staging is here: what misses is less than one segment for each device."""
        with self._changed:
            return self._changed.wait_for(lambda: self._missing(staging_bytes, devices) < 0, timeout_s)

    def _missing(self, staging_bytes: int, devices: int) -> int:
        sizes = [words.nbytes for words in self._segments.values()]
        return staging_bytes - sum(sizes) - devices * max(sizes, default=0)


@dataclass(slots=True)
class Seen:
    """What the copier saw of one phase."""

    at_ns: dict[int, int] = field(default_factory=dict)
    wrong: list[int] = field(default_factory=list)


class BenchCopier:
    """
    Copies nothing but the marks of an object, and notes when.

    Attributes:
        fill: True: new segments are filled with the pattern when they are attached, for storing.
        whole: True: loads compare the whole object instead of its marks.
    """

    def __init__(self, work: Work, *, fill: bool) -> None:
        self._work = work
        self._content = Content(work)
        self.staged = Staged()
        self.fill = fill
        self.whole = False
        self.seen = Seen()
        self.moved = threading.Condition()

    def attach(self, segment: int, memory: mmap.mmap) -> None:
        """Fill every slot of a new segment with the pattern."""
        words = np.frombuffer(memory, dtype=np.uint64)
        if self.fill:
            for start in range(0, words.nbytes - self._work.slot_bytes + 1, self._work.slot_bytes):
                words[start // 8 : start // 8 + self._content.words] = self._content.pattern
        self.staged.add(segment, words)

    def detach(self, segment: int) -> None:
        """Let go of the mapping."""
        self.staged.remove(segment)

    def load(self, copies: Sequence[Copy]) -> object:
        """Note which objects are there, and those that are not what was stored."""
        now = time.time_ns()
        right = self._content.equal if self.whole else self._content.marked
        for copy in copies:
            index = _index(copy)
            self.seen.at_ns[index] = now
            if not right(self._payload(copy), index):
                self.seen.wrong.append(index)
        self._notify()
        return None

    def store(self, copies: Sequence[Copy], after: object | None) -> object:
        """Write the marks of the objects into their slots."""
        for copy in copies:
            self._content.mark(self._payload(copy), _index(copy))
        now = time.time_ns()
        for copy in copies:
            self.seen.at_ns[_index(copy)] = now
        self._notify()
        return None

    def ended(self, ticket: object) -> bool:
        """Always."""
        return True

    def wait(self, ticket: object) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to free."""

    def _payload(self, copy: Copy) -> Words:
        return self.staged.slot(copy.segment, copy.offset, self._content.words)

    def _notify(self) -> None:
        with self.moved:
            self.moved.notify_all()


def _index(copy: Copy) -> int:
    if not isinstance(copy.place, int):
        raise TypeError("a place of the bench is an object's number")
    return copy.place


class Driver:
    """Submits the jobs of one phase and waits for them."""

    def __init__(self, client: RankClient, copier: BenchCopier, work: Work, tell: Callable[[dict[str, object]], None]):
        self._client = client
        self._copier = copier
        self._work = work
        self._tell = tell
        self._jobs = 0
        #: Objects of the phase that ended as failed: index -> code.
        self._failed: dict[int, int] = {}

    def store(self) -> dict[str, object]:
        """Offer every object, in order; the answer's times are those at which the slots were filled."""
        self._run(list(self._work.batches()), self._submit_store)
        at_ns = self._copier.seen.at_ns
        return self._answer(first_ns=min(at_ns.values(), default=0))

    def load(self, batches: Sequence[Sequence[int]]) -> dict[str, object]:
        """Ask for the objects; the answer has for each the time it was asked for and the time it was Ready."""
        asked_ns: dict[int, int] = {}

        def submit(job: int, batch: Sequence[int]) -> None:
            now = time.time_ns()
            asked_ns.update(dict.fromkeys(batch, now))
            work = self._work
            self._client.submit_load(job, [LoadObject(work.key(i), work.device(i), i) for i in batch])

        self._run(batches, submit)
        asked = [asked_ns[index] for index in sorted(asked_ns)]
        return self._answer(first_ns=min(asked, default=0), from_ns=asked)

    def _submit_store(self, job: int, batch: Sequence[int]) -> None:
        work = self._work
        objects = [StoreObject(work.key(i), work.device(i), i) for i in batch]
        self._client.submit_store(job, f"request-{job}", objects, None)

    def _answer(self, **more: object) -> dict[str, object]:
        seen = self._copier.seen
        at_ns = [seen.at_ns[index] for index in sorted(seen.at_ns)]
        names = {index: Code(code).name for index, code in self._failed.items()}
        return {"done": True, "at_ns": at_ns, "wrong": seen.wrong, "failed": names, **more}

    def _run(self, batches: Sequence[Sequence[int]], submit: Callable[[int, Sequence[int]], None]) -> None:
        """Submit every batch as a job, two under way at a time, until all jobs ended."""
        self._copier.seen, self._failed = Seen(), {}
        waiting = list(reversed(batches))
        under_way: dict[int, Sequence[int]] = {}
        submitted, told = 0, 0
        total = sum(map(len, batches))
        while waiting or under_way:
            while waiting and submitted - self._settled() <= self._work.batch:
                self._jobs += 1
                under_way[self._jobs] = waiting.pop()
                submitted += len(under_way[self._jobs])
                submit(self._jobs, under_way[self._jobs])
            settled = self._settled()
            if settled - told >= PROGRESS_SHARE * total:
                told = settled
                self._tell({"done": False, "objects": settled})
            self._sleep_until(max(settled + 1, submitted - self._work.batch if waiting else submitted))
            self._take_ended(under_way)

    def _settled(self) -> int:
        return len(self._copier.seen.at_ns) + len(self._failed)

    def _sleep_until(self, settled: int) -> None:
        """Sleep until that many objects have come; for long enough to see ended jobs 20 times a second otherwise."""
        with self._copier.moved:
            self._copier.moved.wait_for(lambda: self._settled() >= settled, timeout=ENDED_EVERY_S)

    def _take_ended(self, under_way: dict[int, Sequence[int]]) -> None:
        for ended in self._client.take_ended():
            batch = under_way.pop(ended.job)
            for position, code in ended.failed:
                if batch[position] not in self._copier.seen.at_ns:
                    self._failed[batch[position]] = int(code)


def main() -> int:
    """Attach to the pool that argv names, then serve commands until the input ends."""
    run_dir, work_json, staging_bytes, fill = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "fill"
    work = msgspec.json.decode(work_json.encode(), type=Work)

    def tell(answer: dict[str, object]) -> None:
        print(json.dumps(answer), flush=True)

    copier = BenchCopier(work, fill=fill)
    config = ClientConfig(run_dir=run_dir, settings=None, autostart=False)
    client = RankClient(config, work.namespace(), engine=ENGINE, rank=0, copier=copier)
    try:
        connected = client.wait_connected(CONNECT_TIMEOUT_S)
        whole = connected and copier.staged.wait_whole(staging_bytes, work.devices, CONNECT_TIMEOUT_S)
        tell({"done": True, "connected": whole, "mapped_bytes": copier.staged.mapped_bytes})
        driver = Driver(client, copier, work, tell)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "store":
                tell(driver.store())
            elif command["do"] == "load":
                tell(driver.load(list(work.batches())))
            elif command["do"] == "check":
                copier.whole = True
                tell(driver.load([[index] for index in command["indices"]]))
    finally:
        client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
