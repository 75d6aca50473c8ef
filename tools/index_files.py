"""
A device's folder full of objects, made quickly: nearly all of them sparse files without a byte, some of them whole.

What an index costs depends on names and folders, not on bytes. So a million objects fit a disk: a sparse file is there,
has an object's size, and a load of it would find no trailer. Those of the first *whole* are real and can be loaded.

Does not cover: what is measured on it (`index_bench`).
"""

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvpool.core import layout, trailer
from kvpool.core.trailer import Expected
from kvpool.io.checksum import payload_checksum
from kvpool.io.files import DeviceFiles
from kvpool.wire.messages import GroupSpec, NamespaceSpec

#: Payload of an object.
OBJECT_BYTES = 1 << 20
TOLD_EVERY = 5000

Progress = Callable[[int, int], None]


def key_of(number: int) -> bytes:
    """Return the key of object *number*, like vLLM's: 32 bytes of hash and the number of the KV group."""
    return hashlib.sha256(f"kvpool index {number}".encode()).digest() + bytes(4)


def namespace_of(object_bytes: int = OBJECT_BYTES) -> NamespaceSpec:
    """Return the namespace of the objects."""
    identity = {"model": "kvpool-index", "object_bytes": str(object_bytes)}
    return NamespaceSpec(
        fingerprint=hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest(),
        model_name="kvpool-index",
        block_size=16,
        blocks_per_file=16,
        tp=1,
        pp=1,
        pcp=1,
        dtype="bytes",
        rank_count=1,
        groups=[GroupSpec(group=0, object_bytes=object_bytes)],
        identity=identity,
    )


def make_files(root: Path, objects: int, whole: int, progress: Progress) -> None:
    """Make the objects below *root* that are not there yet, in the order of their folders."""
    spec = namespace_of()
    directory = DeviceFiles(str(root)).open_namespace(spec)[0]
    size = trailer.slot_bytes(OBJECT_BYTES)
    made: set[str] = set()
    for done, number in enumerate(sorted(range(objects), key=key_of), start=1):
        key = key_of(number)
        folder = layout.object_directory(key)
        for part in (folder[:3], folder):
            if part not in made:
                os.makedirs(f"{directory}/{part}", 0o700, exist_ok=True)
                made.add(part)
        path = f"{directory}/{folder}/{layout.object_name(key)}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if number < whole:
                os.write(fd, content_of(number, spec))
            else:
                os.ftruncate(fd, size)
        finally:
            os.close(fd)
        if done % TOLD_EVERY == 0 or done == objects:
            progress(done, objects)


def content_of(number: int, spec: NamespaceSpec) -> bytes:
    """Return what the file of a whole object holds."""
    payload = random.Random(number).randbytes(OBJECT_BYTES)
    expected = Expected(key_of(number), 0, bytes.fromhex(spec.fingerprint), OBJECT_BYTES)
    padding = bytes(trailer.slot_bytes(OBJECT_BYTES) - trailer.TRAILER_BYTES - OBJECT_BYTES)
    return payload + padding + trailer.pack(expected, payload_checksum(payload))


def remove_files(root: Path, progress: Progress, objects: int) -> None:
    """Remove everything below *root*, deepest first."""
    done = 0
    for folder, _, names in _bottom_up(str(root)):
        for name in names:
            os.unlink(f"{folder}/{name}")
            done += 1
            if done % TOLD_EVERY == 0:
                progress(done, objects)
        os.rmdir(folder)
    progress(objects, objects)


def _bottom_up(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    yield from os.walk(root, topdown=False)


class Bar:
    """A line of progress with the remaining time, for whoever watches."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._started_s = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        """So much is done."""
        spent_s = time.monotonic() - self._started_s
        left_s = spent_s / max(done, 1) * (of - done)
        end = "\n" if done >= of else ""
        print(f"\r{self._what}: {done} of {of}, {left_s:.0f} s left   ", end=end, flush=True)
