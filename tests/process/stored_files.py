"""Device directories with objects as an engine publishes them, made in an instant."""

import os
import random
import time
from pathlib import Path

from kvpool.core import layout, trailer
from kvpool.core.trailer import Expected
from kvpool.io.checksum import payload_checksum
from kvpool.io.files import DeviceFiles
from kvpool.wire.messages import NamespaceSpec
from tests.process.pool_harness import namespace

PAYLOAD_BYTES = 5000
SLOT_BYTES = trailer.slot_bytes(PAYLOAD_BYTES)


def key_of(number: int) -> bytes:
    """Return a key like vLLM's."""
    return random.Random(number).randbytes(32) + bytes(4)


class Stored:
    """One namespace on one device."""

    def __init__(self, root: Path, letter: str = "a", ranks: int = 1, model: str = "tiny") -> None:
        root.mkdir(mode=0o700, exist_ok=True)
        spec = namespace(letter, rank_count=ranks, object_bytes=(PAYLOAD_BYTES,))
        self.root = root
        self.spec = NamespaceSpec(
            **{name: getattr(spec, name) for name in spec.__struct_fields__} | {"model_name": model}
        )
        self.files = DeviceFiles(str(root))
        self.directories = self.files.open_namespace(self.spec)

    def path(self, number: int, rank: int = 0) -> Path:
        """Return where an object's file is."""
        return Path(layout.object_path(self.directories[rank], key_of(number)))

    def content(self, number: int, rank: int = 0) -> bytes:
        """Return what an object's file holds."""
        payload = random.Random(number).randbytes(PAYLOAD_BYTES)
        expected = Expected(key_of(number), rank, bytes.fromhex(self.spec.fingerprint), PAYLOAD_BYTES)
        padding = bytes(SLOT_BYTES - trailer.TRAILER_BYTES - PAYLOAD_BYTES)
        return payload + padding + trailer.pack(expected, payload_checksum(payload))

    def put(self, *numbers: int, hours: float = 0.0) -> None:
        """Store these objects of all ranks, last used so long ago."""
        when = time.time() - 3600 * hours
        for number in numbers:
            for rank in range(self.spec.rank_count):
                path = self.path(number, rank)
                for folder in (path.parent.parent, path.parent):
                    folder.mkdir(mode=0o700, exist_ok=True)
                path.write_bytes(self.content(number, rank))
                path.chmod(0o600)
                os.utime(path, (when, when))

    def there(self, *numbers: int) -> list[int]:
        """Return those of *numbers* that have all ranks' files."""
        ranks = range(self.spec.rank_count)
        return [number for number in numbers if all(self.path(number, rank).exists() for rank in ranks)]
