"""Who is let in under which epoch: the table of the module, row by row."""

from typing import Any

import msgspec
import pytest

from kvpool.errors import HostError, KvpoolError, PoolUnavailable
from kvpool.procs.coordinator_epochs import Epochs
from kvpool.wire.messages import EpochEntry, EpochKept, EpochsTold, EpochWanted, Hello, Message
from tests.unit.test_identities import spec

F = spec().fingerprint


class Pool:
    """A loop without time, and workers that keep every number unless told otherwise."""

    def __init__(self, *, settled: bool = True) -> None:
        self.ready = [0, 1]
        self.sent: list[tuple[int, Message]] = []
        self.moved: list[str] = []
        self.failed: list[str] = []
        self.looked_again = 0
        self.epochs = Epochs(self, self, 2)  # type: ignore[arg-type]
        if settled:
            for device in self.ready:
                self.epochs.worker_ready(device)

    def set_timer(self, *_: Any) -> None: ...

    def cancel_timer(self, *_: Any) -> None: ...

    def soon(self, callback: Any) -> None:
        callback()

    def epoch_moved(self, fingerprint: str) -> None:
        self.moved.append(fingerprint)

    def greetings_may_go_on(self) -> None:
        self.looked_again += 1

    def reset_failed(self, fingerprint: str, error: KvpoolError) -> None:
        self.failed.append(fingerprint)

    def tell_worker(self, device: int, message: Message) -> None:
        self.sent.append((device, message))

    def devices_ready(self) -> list[int]:
        return self.ready

    def answer(self, error: str = "") -> None:
        """Let every worker answer what it was told."""
        sent, self.sent = self.sent, []
        for device, wanted in sent:
            assert isinstance(wanted, EpochWanted)
            kept = EpochKept(fingerprint=wanted.fingerprint, epoch=wanted.epoch, error=error)
            self.epochs.kept(device, kept)

    def raised(self, epoch: int) -> "Pool":
        self.epochs.raise_to(F, epoch)
        self.answer()
        return self


def hello(role: str = "scheduler", **changes: Any) -> Hello:
    told = Hello(protocol=1, version="", role=role, engine="e", rank=0, pid=1, namespace=spec())
    return msgspec.structs.replace(told, **changes)


def test_nobody_is_let_in_before_every_device_has_said_what_it_keeps() -> None:
    pool = Pool(settled=False)
    assert hello() == pool.epochs.admit(hello())
    pool.epochs.told(0, EpochsTold(entries=[EpochEntry(F, 3)]))
    pool.epochs.worker_ready(0)
    assert hello("rank") == pool.epochs.admit(hello("rank"))
    pool.epochs.worker_ready(1)
    assert [3, 3] == [pool.epochs.admit(hello()), pool.epochs.admit(hello("rank"))]
    assert [(1, EpochWanted(fingerprint=F, epoch=3))] == pool.sent


@pytest.mark.parametrize("epoch", [-1, 2])
def test_a_reset_waits_for_the_next_number_and_is_let_in_to_that(epoch: int) -> None:
    pool = Pool().raised(2)
    waiting = pool.epochs.admit(hello(epoch=epoch, reset=True))
    assert isinstance(waiting, Hello)
    assert [0, 1] == [device for device, _ in pool.sent]
    assert hello("rank") == pool.epochs.admit(hello("rank"))
    pool.answer()
    assert [F, F] == pool.moved
    assert 3 == pool.epochs.admit(waiting)
    assert [] == pool.sent


def test_a_reset_from_an_older_epoch_joins_what_others_began() -> None:
    pool = Pool().raised(2)
    assert 2 == pool.epochs.admit(hello(epoch=1, reset=True))
    assert [] == pool.sent


def test_a_scheduler_of_an_older_epoch_is_refused_until_it_resets() -> None:
    pool = Pool().raised(2)
    with pytest.raises(PoolUnavailable, match="reset"):
        pool.epochs.admit(hello(epoch=1))
    assert [2, 2] == [pool.epochs.admit(hello("rank")), pool.epochs.admit(hello(epoch=2))]


def test_an_epoch_that_the_devices_forgot_is_raised_to_again() -> None:
    pool = Pool()
    waiting = pool.epochs.admit(hello(epoch=5))
    assert isinstance(waiting, Hello)
    pool.answer()
    assert 5 == pool.epochs.admit(waiting)


def test_a_reset_that_no_device_keeps_moves_nobody_and_is_said() -> None:
    pool = Pool()
    pool.epochs.admit(hello(reset=True))
    pool.answer(error="no space")
    assert ([], [F], 0) == (pool.moved, pool.failed, pool.epochs.book.current(F))
    pool.ready = []
    with pytest.raises(HostError):
        pool.epochs.admit(hello(reset=True))


def test_a_device_that_was_ready_first_is_told_of_a_reset_that_only_a_later_one_knows() -> None:
    pool = Pool(settled=False)
    pool.epochs.worker_ready(0)
    assert [] == pool.sent
    pool.epochs.told(1, EpochsTold(entries=[EpochEntry(F, 3)]))
    pool.epochs.worker_ready(1)
    assert [(0, EpochWanted(fingerprint=F, epoch=3))] == pool.sent
