"""
Which keys this device has: per namespace a map from key to the ranks whose file exists.

Theory. An entry is per key, not per object: a number whose bit r says that rank r's file was seen,
published, or named by a snapshot, and whose bit rank_count + r says that only the snapshot knows it so
far. Entries lie packed (`packed_map.py`). Beside them stands, per key, the mask of the ranks whose
object is in staging and stays there for now. The two flags that the coordinator is told, STORED and
RESIDENT, follow from those; every change of flags becomes one TellKey. The directory is the truth and
the index a hint: a load opens the file by name whatever the index says, and what the open says corrects
the index. What only the snapshot knows goes when a whole scan has not seen it.
"""

from dataclasses import dataclass, field

from kvpool.core.object_events import Action, ObjectId, TellKey, TellKeysStored
from kvpool.core.packed_map import PackedMap
from kvpool.errors import ProtocolError, invariant
from kvpool.wire.messages import RESIDENT, STORED

GROUP_BYTES = 4
MISSING_MAX = 1 << 16


def key_group(key: bytes) -> int:
    """Return the KV-cache group of *key*: its last four bytes, big-endian, as vLLM packs an OffloadKey."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


@dataclass(slots=True, eq=False)
class Namespace:
    """
    One namespace on this device.

    Attributes:
        slot_bytes: Slot size of each KV group's objects.
        full: The mask with every rank's bit.
        masks: Per key the ranks whose file exists, never 0, and above them those of which only a snapshot says so.
        young: Keys that got slots for their store since this process started; what else is loaded is older than it.
        changes: How often `masks` has changed, for who keeps a copy.
        staying: Ranks whose object is in staging and stays there for now, per key; never 0.
        removing: Keys whose files are being removed: not in `masks`, neither stored nor loaded until that has ended.
        retired: It was reset: no key of it is known any more, whatever comes.
    """

    namespace: int
    rank_count: int
    slot_bytes: dict[int, int]
    full: int = field(init=False)
    masks: PackedMap = field(init=False)
    young: PackedMap = field(default_factory=lambda: PackedMap(1))
    changes: int = 0
    staying: dict[bytes, int] = field(default_factory=dict)
    removing: set[bytes] = field(default_factory=set)
    retired: bool = False

    def __post_init__(self) -> None:
        self.full = (1 << self.rank_count) - 1
        self.masks = PackedMap(-(-2 * self.rank_count // 8))

    def mask(self, key: bytes) -> int:
        """Return the ranks whose file exists, as far as is known."""
        return self.masks.get(key) & self.full

    def flags(self, key: bytes) -> int:
        """Return the key's STORED | RESIDENT."""
        stored = STORED if self.mask(key) == self.full else 0
        return stored | (RESIDENT if self.staying.get(key, 0) == self.full else 0)

    def size_of(self, key: bytes) -> int:
        """Return the slot size of the key's objects; ProtocolError when no group has such keys."""
        size = self.slot_bytes.get(key_group(key)) if len(key) > GROUP_BYTES else None
        if size is None:
            raise ProtocolError("key of no KV group of this namespace", key=key.hex(), namespace=self.namespace)
        return size


class KeyIndex:
    """
    The index of one device. Changes append TellKey to *actions*, the table's list for the current event.

    Attributes:
        missing: Objects whose file was looked for and not found, the last MISSING_MAX: not read ahead until stored.
    """

    def __init__(self) -> None:
        self.namespaces: dict[int, Namespace] = {}
        self.missing: dict[ObjectId, None] = {}

    def add_namespace(self, namespace: int, rank_count: int, slot_bytes: dict[int, int]) -> None:
        """Open a namespace; opening it again must say the same."""
        known = self.namespaces.get(namespace)
        if known is None:
            self.namespaces[namespace] = Namespace(namespace, rank_count, dict(slot_bytes))
            return
        invariant(known.rank_count == rank_count, "namespace changed its ranks", namespace=namespace)
        invariant(known.slot_bytes == slot_bytes, "namespace changed its slot sizes", namespace=namespace)

    def add(self, object_id: ObjectId, actions: list[Action]) -> None:
        """That object's file exists; not for long, if it is being removed."""
        space = self.namespaces[object_id.namespace]
        key = object_id.key
        if key in space.removing or space.retired:
            return
        bit = 1 << object_id.rank
        old = space.masks.get(key)
        new = (old | bit) & ~(bit << space.rank_count)
        if new == old:
            return
        space.masks[key] = new
        if not old & bit:
            self.missing.pop(object_id, None)
            space.changes += 1
            if new & space.full == space.full:
                actions.append(TellKey(namespace=space.namespace, key=key, flags=space.flags(key)))

    def remember(self, space: Namespace, keys: list[bytes], masks: list[int], actions: list[Action]) -> None:
        """Those files existed when a snapshot was written. What was learned since then counts more."""
        told, masks_of, shift, full = [], space.masks, space.rank_count, space.full
        careful = bool(space.retired or space.removing or self.missing)
        for key, named in zip(keys, masks, strict=True):
            new = self._believed(space, key, named & full) if careful else named & full
            if not new:
                continue
            old = masks_of.add(key, new | new << shift)
            if old >= 0:
                new &= ~old
                masks_of[key] = old | new | new << shift
            if not new or (max(old, 0) | new) & full != full:
                continue
            if key in space.staying:
                actions.append(TellKey(namespace=space.namespace, key=key, flags=space.flags(key)))
            else:
                told.append(key)
        if told:
            actions.append(TellKeysStored(namespace=space.namespace, keys=told))

    def _believed(self, space: Namespace, key: bytes, named: int) -> int:
        """Return those ranks of *named* of which nobody knows better."""
        if space.retired or key in space.removing:
            return 0
        if self.missing:
            for rank in range(space.rank_count):
                if named >> rank & 1 and ObjectId(space.namespace, key, rank) in self.missing:
                    named &= ~(1 << rank)
        return named

    def forget_unseen(self, space: Namespace, keys: list[bytes], actions: list[Action]) -> None:
        """A whole walk has not seen what only a snapshot says of these keys."""
        for key in keys:
            both = space.masks.get(key)
            old, unseen = both & space.full, both >> space.rank_count
            left = old & ~unseen
            if not unseen:
                continue
            if left:
                space.masks[key] = left
            else:
                space.masks.pop(key)
            space.changes += 1
            if old == space.full:
                actions.append(TellKey(namespace=space.namespace, key=key, flags=space.flags(key)))

    def remove(self, object_id: ObjectId, actions: list[Action]) -> None:
        """That object's file is not there. Told even if nothing changed: whoever asked believed otherwise."""
        space = self.namespaces[object_id.namespace]
        key = object_id.key
        bit = 1 << object_id.rank
        left = space.masks.get(key) & ~(bit | bit << space.rank_count)
        if left:
            space.masks[key] = left
        else:
            space.masks.pop(key)
        space.young.pop(key)
        space.changes += 1
        self.missing[object_id] = None
        if len(self.missing) > MISSING_MAX:
            del self.missing[next(iter(self.missing))]
        actions.append(TellKey(namespace=space.namespace, key=key, flags=space.flags(key)))

    def condemn(self, space: Namespace, key: bytes, actions: list[Action]) -> None:
        """The files of *key* are about to be removed."""
        space.masks.pop(key)
        space.young.pop(key)
        space.changes += 1
        space.removing.add(key)
        actions.append(TellKey(namespace=space.namespace, key=key, flags=space.flags(key)))

    def retire(self, namespace: int) -> None:
        """Forget its keys, without a word: the coordinator has forgotten the namespace already."""
        space = self.namespaces[namespace]
        space.retired = True
        space.masks.clear()
        space.young.clear()
        self.missing = {known: None for known in self.missing if known.namespace != namespace}

    def is_removing(self, object_id: ObjectId) -> bool:
        """Return whether that object's file is being removed."""
        return object_id.key in self.namespaces[object_id.namespace].removing

    def stays(self, object_id: ObjectId, actions: list[Action]) -> None:
        """That object is in staging and stays there."""
        space = self.namespaces[object_id.namespace]
        key = object_id.key
        old = space.staying.get(key, 0)
        new = old | 1 << object_id.rank
        if new != old:
            space.staying[key] = new
            if new == space.full:
                actions.append(TellKey(namespace=space.namespace, key=key, flags=space.flags(key)))

    def goes(self, object_id: ObjectId, actions: list[Action]) -> None:
        """That object may leave staging from now on, or has left it."""
        space = self.namespaces[object_id.namespace]
        key = object_id.key
        old = space.staying.get(key, 0)
        left = old & ~(1 << object_id.rank)
        if left:
            space.staying[key] = left
        else:
            space.staying.pop(key, None)
        if old == space.full and left != old:
            actions.append(TellKey(namespace=space.namespace, key=key, flags=space.flags(key)))

    def has(self, object_id: ObjectId) -> bool:
        """Return whether that object's file is known to exist."""
        return bool(self.namespaces[object_id.namespace].mask(object_id.key) >> object_id.rank & 1)

    def validate(self) -> None:
        """Check that every mask is within its namespace and not empty."""
        invariant(not any(self.has(object_id) for object_id in self.missing), "a file is known and missing")
        for space in self.namespaces.values():
            space.masks.validate()
            for key, mask in space.staying.items():
                invariant(0 < mask <= space.full, "mask of a key is not one", key=key.hex(), mask=mask)
            for key, both in space.masks.items():
                mask, unseen = both & space.full, both >> space.rank_count
                invariant(mask > 0 and not unseen & ~mask, "mask of a key is not one", key=key.hex(), mask=both)
            invariant(
                not (space.retired and len(space.masks)), "a retired namespace has keys", namespace=space.namespace
            )
            for key in space.removing:
                invariant(key not in space.masks, "a key is stored while its files are removed", key=key.hex())
