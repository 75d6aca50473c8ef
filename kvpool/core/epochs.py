"""
Epochs of namespaces: which one is served, and who knows of it for good.

Theory. A reset does not delete, it moves on: from then on the namespace is served under another fingerprint, derived
from the client's own and the epoch's number, in folders of its own. No object from before can verify there, whatever
happens to its file. Epoch 0 is the client's fingerprint itself.

The number is kept on every device, before anybody is served under it. A device that was not there follows when it
comes; so the highest number over all devices counts, and nobody is served before every device has said its own, or
is given up (`settled`). Numbers only rise.

    told            a device says what it keeps; a higher number than ours is ours from then on
    raise_to        the next number is sent to every device that runs
    kept, gone      each answers, or ends; when none is left, the number counts if at least one has kept it

Does not cover: who wants a reset, who is let in meanwhile (`procs/coordinator_epochs.py`).
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from kvpool.errors import invariant
from kvpool.wire.messages import NamespaceSpec

#: In the identity of a namespace that was reset: its number, and the fingerprint that its clients say.
EPOCH = "epoch"
EPOCH_OF = "epoch_of"


def spec_of(base: NamespaceSpec, epoch: int) -> NamespaceSpec:
    """Return the namespace that *base* is in that epoch."""
    invariant(EPOCH_OF not in base.identity, "an epoch of an epoch", fingerprint=base.fingerprint)
    if epoch == 0:
        return base
    return msgspec.structs.replace(
        base,
        fingerprint=hashlib.sha256(f"{base.fingerprint}:{epoch}".encode()).hexdigest(),
        identity={**base.identity, EPOCH: str(epoch), EPOCH_OF: base.fingerprint},
    )


def base_of(spec: NamespaceSpec) -> str:
    """Return the fingerprint that the clients of *spec* say."""
    return spec.identity.get(EPOCH_OF, spec.fingerprint)


def epoch_of(spec: NamespaceSpec) -> int:
    """Return the epoch that *spec* is of; one that is not a number is none, and as old as can be."""
    number = spec.identity.get(EPOCH, "0")
    return int(number) if number.isdecimal() else 0


@dataclass(slots=True)
class _Raise:
    """A number on its way: devices that have not answered, and those that keep it."""

    epoch: int
    waiting: set[int]
    kept: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Raised:
    """The end of a raise; *kept*: the number counts. Else no device could keep it, and nothing has changed."""

    fingerprint: str
    epoch: int
    kept: bool


class EpochBook:
    """See the module. *device_count* devices, none heard of at first."""

    def __init__(self, device_count: int) -> None:
        self._unsettled = set(range(device_count))
        #: What counts, by the clients' fingerprint; 0 is not noted.
        self._epochs: dict[str, int] = {}
        #: What each device keeps.
        self._kept: list[dict[str, int]] = [{} for _ in range(device_count)]
        self._raises: dict[str, _Raise] = {}

    @property
    def settled(self) -> bool:
        """Every device has said what it keeps, or is given up."""
        return not self._unsettled

    def settle(self, devices: Iterable[int]) -> bool:
        """Those devices have said all, or will not soon; tell whether that was what `settled` waited for."""
        before = self.settled
        self._unsettled.difference_update(devices)
        return self.settled and not before

    @property
    def unsettled(self) -> list[int]:
        """Devices that `settled` waits for."""
        return sorted(self._unsettled)

    def current(self, fingerprint: str) -> int:
        """Return the epoch that counts."""
        return self._epochs.get(fingerprint, 0)

    def rising(self, fingerprint: str) -> bool:
        """Tell whether a raise of it is under way."""
        return fingerprint in self._raises

    def told(self, device: int, fingerprint: str, epoch: int) -> bool:
        """A device keeps that epoch; tell whether it is higher than what counted until now."""
        kept = self._kept[device]
        kept[fingerprint] = max(epoch, kept.get(fingerprint, 0))
        if epoch <= self.current(fingerprint):
            return False
        self._epochs[fingerprint] = epoch
        return True

    def behind(self, device: int) -> list[tuple[str, int]]:
        """Return what a device that just came has yet to keep: (fingerprint, epoch)."""
        return [item for item in self._epochs.items() if self._kept[device].get(item[0], 0) < item[1]]

    def raise_to(self, fingerprint: str, epoch: int, devices: Iterable[int]) -> list[int]:
        """
        Begin to raise; return the devices to tell, none where none runs.

        An epoch that is not higher than what counts, or a second raise at a time, is a mistake.
        """
        invariant(epoch > self.current(fingerprint), "an epoch rises", fingerprint=fingerprint, epoch=epoch)
        invariant(fingerprint not in self._raises, "one raise at a time", fingerprint=fingerprint)
        waiting = set(devices)
        if waiting:
            self._raises[fingerprint] = _Raise(epoch, waiting)
        return sorted(waiting)

    def answered(self, device: int, fingerprint: str, epoch: int, *, kept: bool) -> Raised | None:
        """A device keeps that number, or cannot; returns the raise if it has ended by that."""
        if kept:
            mine = self._kept[device]
            mine[fingerprint] = max(epoch, mine.get(fingerprint, 0))
        rising = self._raises.get(fingerprint)
        if rising is None or rising.epoch != epoch or device not in rising.waiting:
            return None
        rising.waiting.discard(device)
        if kept:
            rising.kept.add(device)
        return self._maybe_end(fingerprint, rising)

    def gone(self, device: int) -> list[Raised]:
        """A device's worker ended: nobody waits for its answers."""
        ended = []
        for fingerprint, rising in list(self._raises.items()):
            if device in rising.waiting:
                rising.waiting.discard(device)
                ended.append(self._maybe_end(fingerprint, rising))
        return [one for one in ended if one is not None]

    def give_up(self, fingerprint: str, epoch: int) -> Raised | None:
        """The time for answers is over: returns the raise, if it still was under way."""
        rising = self._raises.get(fingerprint)
        if rising is None or rising.epoch != epoch:
            return None
        rising.waiting.clear()
        return self._maybe_end(fingerprint, rising)

    def _maybe_end(self, fingerprint: str, rising: _Raise) -> Raised | None:
        if rising.waiting:
            return None
        del self._raises[fingerprint]
        kept = bool(rising.kept)
        if kept:
            self._epochs[fingerprint] = max(rising.epoch, self.current(fingerprint))
        return Raised(fingerprint, rising.epoch, kept)

    def validate(self) -> None:
        """Check that nothing that is kept is above what counts, save a raise under way."""
        for device, kept in enumerate(self._kept):
            for fingerprint, epoch in kept.items():
                rising = self._raises.get(fingerprint)
                most = max(self.current(fingerprint), rising.epoch if rising is not None else 0)
                invariant(epoch <= most, "a device keeps a number nobody knows", device=device, epoch=epoch)
        for fingerprint, rising in self._raises.items():
            invariant(bool(rising.waiting), "a raise without anyone to wait for", fingerprint=fingerprint)
