"""
One engine's clients, without the engine: a scheduler and its only rank, on a pool of real processes.

Every version of the weights has bytes of its own under the same keys, so that old bytes are told from new ones.
"""

import hashlib
from pathlib import Path

from kvpool.client.copier import MemoryCopier
from kvpool.client.launch import ClientConfig
from kvpool.client.rank import JobEnded, LoadObject, RankClient, StoreObject
from kvpool.client.scheduler import Hit, Miss, SchedulerClient
from kvpool.core.epochs import spec_of
from tests.process.pool_harness import namespace, wait_until

OBJECT_BYTES = 50_000
SPEC = namespace(rank_count=1, object_bytes=(OBJECT_BYTES,))
KEYS = [hashlib.sha256(b"%d" % number).digest() + bytes(4) for number in range(6)]
WAIT_S = 15.0


def content(version: int, index: int) -> bytes:
    """Return what object *index* holds when it is computed with weights of that version."""
    return hashlib.sha256(b"%d %d" % (version, index)).digest() * (OBJECT_BYTES // 32 + 1)


class Engine:
    """One engine's scheduler and only rank, on the pool of *directory*."""

    def __init__(self, directory: Path, name: str = "engine-a") -> None:
        config = ClientConfig(run_dir=str(directory / "run"), settings=None, autostart=False)
        self.scheduler = SchedulerClient(config, SPEC, engine=name)
        self.rank = RankClient(config, SPEC, engine=name, rank=0, copier=MemoryCopier())
        self._job = 0
        self._request = 0

    def wait_connected(self) -> "Engine":
        """Wait until both roles are in the pool, in the same epoch."""

        def there() -> bool:
            self.scheduler.pump()
            return self.scheduler.connected and self.rank.connected and self._rank_epoch() == self.scheduler.epoch

        wait_until(there, WAIT_S)
        assert self.rank.wait_connected(WAIT_S)
        wait_until(lambda: int(self.rank.facts()["segments_mapped"]) > 0, WAIT_S)
        return self

    def _rank_epoch(self) -> int | None:
        return self.rank._link.epoch

    def store(self, version: int, *, epoch: int | None = None) -> JobEnded:
        """Offer all keys; wait until the pool says that they can be loaded."""
        self._job += 1
        objects = [
            StoreObject(key, index % 2, memoryview(bytearray(content(version, index)[:OBJECT_BYTES])))
            for index, key in enumerate(KEYS)
        ]
        self.rank.submit_store(
            self._job, f"s{self._job}", objects, None, epoch=self.scheduler.epoch if epoch is None else epoch
        )
        return self._end()

    def load(self, *, epoch: int | None = None) -> tuple[JobEnded, list[bytes]]:
        """Load all keys, whatever lookups say."""
        self._job += 1
        places = [bytearray(OBJECT_BYTES) for _ in KEYS]
        objects = [LoadObject(key, index % 2, memoryview(places[index])) for index, key in enumerate(KEYS)]
        self.rank.submit_load(self._job, objects, epoch=self.scheduler.epoch if epoch is None else epoch)
        return self._end(), [bytes(place) for place in places]

    def _end(self) -> JobEnded:
        ended = wait_until(self.rank.take_ended, WAIT_S)
        assert [self._job] == [end.job for end in ended]
        return ended[0]

    def lookups(self) -> list[type]:
        """Announce a request, and return what is said of its keys."""
        self._request += 1
        name = f"r{self._request}"
        self.scheduler.announce(name, KEYS)

        def answered() -> bool:
            self.scheduler.pump()
            return all(isinstance(self.scheduler.lookup(name, key), Hit | Miss) for key in KEYS)

        wait_until(answered, WAIT_S)
        found = [type(self.scheduler.lookup(name, key)) for key in KEYS]
        self.scheduler.withdraw(name)
        return found

    def wait_hits(self) -> None:
        """Wait until all keys are hits."""
        wait_until(lambda: set(self.lookups()) == {Hit}, WAIT_S)

    def reset(self) -> None:
        """Reset, and wait until the pool has answered."""
        self.scheduler.reset()
        assert -1 == self.scheduler.epoch
        self.wait_connected()

    def close(self) -> None:
        self.scheduler.close()
        self.rank.close()


def served(engine: Engine, version: int) -> bool:
    """Tell whether all keys load, with the bytes of that version; no bytes of another one may come."""
    ended, found = engine.load()
    failed = {index for index, _ in ended.failed}
    good = [content(version, index)[:OBJECT_BYTES] for index in range(len(KEYS))]
    assert all(index in failed or found[index] == good[index] for index in range(len(KEYS))), "bytes of another version"
    return not failed


def files_of(tmp_path: Path, epoch: int) -> list[Path]:
    """Return the objects on disk of that epoch."""
    folder = "tiny" if epoch == 0 else f"tiny+{spec_of(SPEC, epoch).fingerprint[:8]}"
    return [path for device in ("d0", "d1") for path in (tmp_path / device / folder).rglob("*.bin")]
