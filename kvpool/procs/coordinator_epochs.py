"""
Who is let in under which epoch, and how a reset goes.

Theory. An engine resets by greeting anew: its scheduler hangs up, and says Hello with `reset` and the epoch it was in.
That greeting waits while every device that runs keeps the next number; then everybody who is attached under the old one
is hung up on, and the greeting is answered under the new one. So an answer means that the reset is durable, and a
greeting that was never answered is said again: to the same pool or to the next one, where it joins what was begun.

    scheduler says         and                          it is let in
    reset                  its epoch counts             after a raise by one, to that
    reset                  a higher epoch counts        to that: it joins the others
    no reset               its epoch counts, or none    to that
    no reset               a higher epoch counts        not at all: its KV may be from before
    any                    its epoch is above all       after a raise to its epoch: the devices forgot it

Ranks are always let in, to what counts: jobs name the epoch that their scheduler is in, and a rank does no other.
Everybody waits until each device has said what it keeps, or SETTLE_S is over.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from kvpool.core.epochs import EpochBook, Raised
from kvpool.errors import HostError, KvpoolError, PoolUnavailable
from kvpool.procs.coordinator_loop import Loop
from kvpool.wire.messages import EpochEntry, EpochKept, EpochsTold, EpochWanted, Hello, Message

#: After that, a device that has not said what it keeps is served without; it follows, or leads, when it comes.
SETTLE_S = 8.0
#: A device that has not kept a number by then is not waited for.
RAISE_S = 5.0

log = logging.getLogger("kvpool.coordinator")


class EpochEvents(Protocol):
    """What the coordinator is told of epochs."""

    def epoch_moved(self, fingerprint: str) -> None:
        """Another epoch of that namespace counts now: whoever is attached under the old one must go."""

    def greetings_may_go_on(self) -> None:
        """Greetings that had to wait may be looked at again."""

    def reset_failed(self, fingerprint: str, error: KvpoolError) -> None:
        """No device could keep a number: greetings that wait for it are in vain."""

    def tell_worker(self, device: int, message: Message) -> None:
        """Send to a device's worker, if it is ready."""

    def devices_ready(self) -> list[int]:
        """Return the devices whose workers are ready."""


class Epochs:
    """See the module."""

    def __init__(self, loop: Loop, events: EpochEvents, device_count: int) -> None:
        self._loop = loop
        self._events = events
        self.book = EpochBook(device_count)
        self._then: dict[str, list[Callable[[Raised], None]]] = {}
        loop.set_timer("epochs", time.monotonic_ns() + int(SETTLE_S * 1e9), self._settle_rest)

    # ---------------------------------------------------------------- clients

    def admit(self, hello: Hello) -> int | Hello:
        """
        Return the epoch that a peer is let in to; a greeting: it has to wait, and that is what it will have said.

        Raises:
            KvpoolError: It is not let in; says why.
        """
        if hello.namespace is None:
            return 0
        fingerprint = hello.namespace.fingerprint
        if not self.book.settled or self.book.rising(fingerprint):
            return hello
        current = self.book.current(fingerprint)
        if hello.role != "scheduler":
            return current
        if hello.epoch > current:
            self.raise_to(fingerprint, hello.epoch)
            return hello
        if hello.reset and hello.epoch in (-1, current):
            self.raise_to(fingerprint, current + 1)
            return msgspec.structs.replace(hello, epoch=current)
        if not hello.reset and 0 <= hello.epoch < current:
            raise PoolUnavailable(
                "another engine reset this model's cache: this one neither loads nor stores until it resets, too",
                epoch=current, engine_epoch=hello.epoch,
            )  # fmt: skip
        return current

    def raise_to(self, fingerprint: str, epoch: int, then: Callable[[Raised], None] | None = None) -> None:
        """
        Begin a reset; *then* is called at its end.

        Raises:
            HostError: No device is there to keep it.
        """
        devices = self._events.devices_ready()
        if not devices:
            raise HostError("no device runs that could keep a reset: try again")
        self.book.raise_to(fingerprint, epoch, devices)
        if then is not None:
            self._then.setdefault(fingerprint, []).append(then)
        for device in devices:
            self._events.tell_worker(device, EpochWanted(fingerprint=fingerprint, epoch=epoch))
        until_ns = time.monotonic_ns() + int(RAISE_S * 1e9)
        self._loop.set_timer(f"epoch-{fingerprint}", until_ns, lambda: self._give_up(fingerprint, epoch))

    def _give_up(self, fingerprint: str, epoch: int) -> None:
        self._ended(self.book.give_up(fingerprint, epoch))

    def _ended(self, raised: Raised | None) -> None:
        if raised is None:
            return
        self._loop.cancel_timer(f"epoch-{raised.fingerprint}")
        if raised.kept:
            log.info("namespace %s was reset: epoch %d", raised.fingerprint[:8], raised.epoch)
            self._move(raised.fingerprint)
        else:
            self._events.reset_failed(raised.fingerprint, HostError("no device could keep the reset durably"))
        for then in self._then.pop(raised.fingerprint, []):
            then(raised)
        self._events.greetings_may_go_on()

    def _move(self, fingerprint: str) -> None:
        self._events.epoch_moved(fingerprint)
        for device in self._events.devices_ready():
            self._catch_up(device)

    def _catch_up(self, device: int) -> None:
        for fingerprint, epoch in self.book.behind(device):
            self._events.tell_worker(device, EpochWanted(fingerprint=fingerprint, epoch=epoch))

    # ---------------------------------------------------------------- workers

    def told(self, device: int, message: EpochsTold) -> None:
        """A worker that starts says what its device keeps."""
        for entry in message.entries:
            self._told(device, entry)

    def _told(self, device: int, entry: EpochEntry) -> None:
        if self.book.told(device, entry.fingerprint, entry.epoch) and self.book.settled:
            log.warning("device %d knows of a reset of %s that the others do not", device, entry.fingerprint[:8])
            self._move(entry.fingerprint)

    def kept(self, device: int, message: EpochKept) -> None:
        """A worker keeps a number, or cannot."""
        if message.error:
            log.error("device %d cannot keep a reset: %s", device, message.error)
        self._ended(self.book.answered(device, message.fingerprint, message.epoch, kept=not message.error))

    def worker_ready(self, device: int) -> None:
        """A worker has said all that its device keeps; let it keep what the others do, before it serves anybody."""
        self._catch_up(device)
        self._settle([device])

    def worker_gone(self, device: int) -> None:
        """A worker ended, or never was ready."""
        for raised in self.book.gone(device):
            self._ended(raised)
        self._settle([device])

    def _settle_rest(self) -> None:
        if not self.book.settled:
            log.warning("devices %s do not say what was reset: serving without them", self.book.unsettled)
            self._settle(self.book.unsettled)

    def _settle(self, devices: list[int]) -> None:
        if self.book.settle(devices):
            self._loop.cancel_timer("epochs")
            for device in self._events.devices_ready():  # those that were ready before others told of a reset
                if device not in devices:
                    self._catch_up(device)
            self._loop.soon(self._events.greetings_may_go_on)
