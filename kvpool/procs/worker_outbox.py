"""
What an I/O worker has to say, gathered over one pass of its loop and sent in few messages.

Theory. One pass handles many completions; their answers go out together at its end: per client and job one
`Ready`, `LoadFailed`, `StoreAnswer`; per namespace one `KeysTold`; per engine one `WorkerStoresEnded`. Handling
messages one by one costs ten times what sixteen to a message cost (DESIGN: Messages). Order within one job is kept.

Does not cover: who is connected, and what to do when a peer is gone.
"""

from collections import defaultdict

from kvpool.core import object_events as events
from kvpool.wire.codec import split
from kvpool.wire.messages import (
    STORED,
    KeyState,
    KeysTold,
    LoadFailed,
    Message,
    ObjectFailed,
    Ready,
    SlotGrant,
    StoreAnswer,
    WorkerStoresEnded,
)

#: An action that only says something.
Say = (
    events.SendReady
    | events.SendLoadFailed
    | events.SendGranted
    | events.SendExists
    | events.SendDropped
    | events.TellKey
    | events.TellKeysStored
    | events.TellStoreEnded
)


class Outbox:
    """
    Answers waiting for the end of the pass.

    Args:
        device: The device's index, which goes with every key told.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        #: (client, job) -> answers, in the order they were given.
        self._ready: defaultdict[tuple[int, int], list[SlotGrant]] = defaultdict(list)
        self._failed: defaultdict[tuple[int, int], list[ObjectFailed]] = defaultdict(list)
        self._granted: defaultdict[tuple[int, int], list[SlotGrant]] = defaultdict(list)
        self._exist: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._dropped: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        #: namespace -> key -> flags; the last word counts.
        self._keys: defaultdict[int, dict[bytes, int]] = defaultdict(dict)
        #: engine -> (kept, dropped).
        self._ended: dict[str, tuple[list[bytes], list[bytes]]] = {}

    def add(self, action: Say, *, slot_offset: int = 0) -> None:
        """Take one answer. *slot_offset*: byte offset of the action's slot in its segment, where it has one."""
        match action:
            case events.SendReady(client=client, job=job, index=index, slot=slot):
                self._ready[client, job].append(SlotGrant(index, slot.segment, slot_offset))
            case events.SendLoadFailed(client=client, job=job, index=index, code=code):
                self._failed[client, job].append(ObjectFailed(index, int(code)))
            case events.SendGranted(client=client, job=job, index=index, slot=slot):
                self._granted[client, job].append(SlotGrant(index, slot.segment, slot_offset))
            case events.SendExists(client=client, job=job, index=index):
                self._exist[client, job].append(index)
            case events.SendDropped(client=client, job=job, index=index):
                self._dropped[client, job].append(index)
            case events.TellKey(namespace=namespace, key=key, flags=flags):
                self._keys[namespace][key] = flags
            case events.TellKeysStored(namespace=namespace, keys=keys):
                self._keys[namespace].update(dict.fromkeys(keys, STORED))
            case events.TellStoreEnded(engine=engine, key=key, kept=kept):
                ended = self._ended.setdefault(engine, ([], []))
                ended[0 if kept else 1].append(key)

    def take_for_clients(self) -> list[tuple[int, Message]]:
        """Return and forget the messages for ranks, as (client, message)."""
        messages: list[tuple[int, Message]] = []
        for (client, job), slots in self._ready.items():
            messages += [(client, Ready(job=job, slots=part)) for _, part in split(slots)]
        for (client, job), objects in self._failed.items():
            messages += [(client, LoadFailed(job=job, objects=part)) for _, part in split(objects)]
        for (client, job), slots in self._granted.items():
            messages += [(client, StoreAnswer(job=job, slots=part)) for _, part in split(slots)]
        for (client, job), indices in self._exist.items():
            messages += [(client, StoreAnswer(job=job, exist=part)) for _, part in split(indices)]
        for (client, job), indices in self._dropped.items():
            messages += [(client, StoreAnswer(job=job, dropped=part)) for _, part in split(indices)]
        for answers in (self._ready, self._failed, self._granted, self._exist, self._dropped):
            answers.clear()
        return messages

    def take_for_coordinator(self) -> list[Message]:
        """Return and forget the messages for the coordinator: flags first, then ends of stores."""
        messages: list[Message] = []
        for namespace, flags in self._keys.items():
            entries = [KeyState(key, value, self._device) for key, value in flags.items()]
            messages += [KeysTold(namespace=namespace, entries=part) for _, part in split(entries)]
        for engine, (kept, dropped) in self._ended.items():
            messages += [WorkerStoresEnded(engine=engine, kept=part, dropped=[]) for _, part in split(kept)]
            messages += [WorkerStoresEnded(engine=engine, kept=[], dropped=part) for _, part in split(dropped)]
        self._keys.clear()
        self._ended.clear()
        return messages
