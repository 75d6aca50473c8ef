"""
Round trips at the start of ranks: objects that are stored, read from the device once, and removed.

Theory. A trial's object is an ordinary one under a key that no request has (`TRIAL_KEY`). What is not ordinary is here:
a load of it waits until it has been written, so that the bytes come from the device and not from staging (the cache
does not keep such objects), and its file goes as soon as it was read, or when its rank leaves. What an earlier run
left, since it was killed, goes when the scan finds it.

Does not cover: the pattern and its comparison (`client/round_trip.py`).
"""

from collections.abc import Callable

from kvpool.core.object_events import ObjectId
from kvpool.wire.messages import TRIAL_KEY, Load

#: A client, and what it asked for.
_Load = tuple[int, Load]


def is_trial(target: ObjectId) -> bool:
    """Tell whether an object belongs to a trial."""
    return target.key.startswith(TRIAL_KEY)


class Trials:
    """
    The trials of one device.

    Args:
        forget: Removes an object's file, and the key from the index.
    """

    def __init__(self, forget: Callable[[ObjectId], None]) -> None:
        self._forget = forget
        #: On the device, and not read yet.
        self._written: set[ObjectId] = set()
        #: Loads that wait for the end of a write: client, message.
        self._waiting: dict[ObjectId, _Load] = {}

    def hold(self, client: int, message: Load, target: ObjectId, *, being_stored: bool) -> bool:
        """Tell whether a load of *target* has to wait; it is kept until :meth:`take_ready`."""
        if is_trial(target) and being_stored:
            self._waiting[target] = (client, message)
            return True
        return False

    def published(self, target: ObjectId) -> None:
        """A trial's object is on the device."""
        self._written.add(target)

    def take_ready(self, being_stored: Callable[[ObjectId], bool]) -> list[_Load]:
        """Return the loads that need wait no longer; asked for at the end of every pass."""
        over = [waiting for waiting in self._waiting if not being_stored(waiting)]
        return [self._waiting.pop(waiting) for waiting in over]

    def read(self, target: ObjectId) -> None:
        """A trial's object was read: its file has done its work."""
        self._written.discard(target)
        self._forget(target)

    def left(self, client: int, namespace: int, rank: int) -> None:
        """That rank will read none any more."""
        self._waiting = {target: load for target, load in self._waiting.items() if load[0] != client}
        for target in [known for known in self._written if (known.namespace, known.rank) == (namespace, rank)]:
            self.read(target)

    def found(self, namespace: int, rank: int, keys: list[bytes]) -> list[bytes]:
        """A scan found *keys*: return those of no trial; remove what earlier runs left."""
        for key in keys:
            target = ObjectId(namespace, key, rank)
            if is_trial(target) and target not in self._written:
                self._forget(target)
        return [key for key in keys if not key.startswith(TRIAL_KEY)]
