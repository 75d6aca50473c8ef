"""
What lies below a device's directory: its namespaces, their keys over all ranks, and what else takes room.

Theory. The directory is the truth, so every tool and every decision about room walks it. A namespace is found by the
shape of its path (`core/layout.py`), with or without its manifest. Its ranks' folders are walked side by side, folder
by folder, so that a key comes out once with all its ranks' files, and memory never holds more than one folder. Sizes
are what the filesystem counts (`st_blocks`); folders count too, by the mean of the first FOLDERS_MEASURED. A key was
last used when the newest of its files was modified: publishing sets that time, and a load of an old file renews it.

Names that no object has are told apart. What vanishes while it is looked at is passed over.

Does not cover: what is in the files (`io/object_check.py`), removing them (`io/remover.py`).
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvpool.core import layout
from kvpool.io.files import Manifest

#: Folders whose size is asked for; the others count as the mean of these.
FOLDERS_MEASURED = 256
BLOCK_BYTES = 512

_SHAPE = (
    re.compile(r"[^.].*", re.DOTALL),
    re.compile(r"block_size_\d+_blocks_per_file_\d+"),
    re.compile(r"tp_\d+_pp_size_\d+_pcp_size_\d+"),
    re.compile(r"rank_(\d+)"),
    re.compile(r"[^.].*", re.DOTALL),
)
_MANIFEST_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """
    One namespace as it lies on a device.

    Attributes:
        directories: Rank -> absolute path of its folder. A rank may lack.
        manifest: What rank 0's manifest (or else another rank's) says; None where none can be read.
    """

    directories: dict[int, str]
    manifest: Manifest | None

    @property
    def first(self) -> str:
        """The folder that names the namespace: its lowest rank's."""
        return self.directories[min(self.directories)]

    @property
    def model(self) -> str:
        """The model's name, from the manifest or else from the path."""
        if self.manifest is not None:
            return self.manifest.spec.model_name
        return self.first.split("/")[-5]

    @property
    def fingerprint(self) -> str:
        """64 hex digits; empty without a manifest."""
        return self.manifest.spec.fingerprint if self.manifest is not None else ""

    def paths_of(self, key: bytes) -> tuple[str, ...]:
        """Return where the key's files are, or would be, in rank order."""
        return tuple(layout.object_path(directory, key) for directory in self.directories.values())

    @property
    def rank_count(self) -> int:
        """Ranks that a key must have."""
        return self.manifest.spec.rank_count if self.manifest is not None else max(self.directories) + 1


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """The files of one key: per rank (path, bytes as the filesystem counts), and when the newest was modified."""

    key: bytes
    files: dict[int, tuple[str, int]]
    used_s: float

    @property
    def stored_bytes(self) -> int:
        """Bytes of all ranks."""
        return sum(size for _, size in self.files.values())


@dataclass(slots=True)
class Walk:
    """
    One walk through namespaces; its counts are whole when its iterators have ended.

    Attributes:
        object_bytes, objects, keys: Of objects seen.
        other_bytes: Of everything else seen, folders among it.
        strays: Paths of files that are no objects and no manifests.
        unreadable: Folders that could not be read.
        before_folder: Called before each folder is read: it may wait.
    """

    object_bytes: int = 0
    objects: int = 0
    keys: int = 0
    other_bytes: int = 0
    strays: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    before_folder: Callable[[], None] = lambda: None
    _folders: int = 0
    _measured: int = 0
    _measured_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that was seen, and the folders."""
        mean = self._measured_bytes / self._measured if self._measured else 0.0
        return self.object_bytes + self.other_bytes + int(mean * self._folders)

    # ------------------------------------------------------------ namespaces

    def keys_of(self, space: Space) -> Iterator[KeyFiles]:
        """Yield every key of *space*, in the order of its folders."""
        for upper in self._union(space.directories):
            folders = {rank: f"{path}/{upper}" for rank, path in space.directories.items()}
            for lower in self._union(folders):
                yield from self._folder(f"{upper}/{lower}", {rank: f"{at}/{lower}" for rank, at in folders.items()})

    def _union(self, folders: dict[int, str]) -> list[str]:
        """Return the names of all folders in *folders*; files there are not objects."""
        names: set[str] = set()
        for folder in folders.values():
            for entry in self._entries(folder):
                if entry.is_dir(follow_symlinks=False):
                    names.add(entry.name)
                elif entry.name == layout.MANIFEST_NAME:
                    self.other_bytes += _stored_bytes(entry)[0]
                else:
                    self._stray(entry)
        return sorted(names)

    def _folder(self, name: str, folders: dict[int, str]) -> Iterator[KeyFiles]:
        found: dict[bytes, dict[int, tuple[str, int]]] = {}
        used: dict[bytes, float] = {}
        for rank, folder in folders.items():
            for entry in self._entries(folder):
                key = layout.maybe_key(entry.name)
                if key is None or layout.object_directory(key) != name or not entry.is_file(follow_symlinks=False):
                    self._stray(entry)
                    continue
                size, modified_s = _stored_bytes(entry)
                if size < 0:
                    continue
                found.setdefault(key, {})[rank] = (entry.path, size)
                used[key] = max(used.get(key, 0.0), modified_s)
        for key, files in found.items():
            made = KeyFiles(key, files, used[key])
            self.keys += 1
            self.objects += len(files)
            self.object_bytes += made.stored_bytes
            yield made

    # ------------------------------------------------------------ everything else

    def count_rest(self, root: str, spaces: list[Space]) -> None:
        """Count what is below *root* and in no namespace: the quarantine, what does not look like a namespace."""
        inside = {path for space in spaces for path in space.directories.values()}
        waiting = [root]
        while waiting:
            for entry in self._entries(waiting.pop()):
                if entry.is_dir(follow_symlinks=False):
                    if entry.path not in inside:
                        waiting.append(entry.path)
                else:
                    self.other_bytes += max(0, _stored_bytes(entry)[0])

    # ------------------------------------------------------------ inside

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        self.before_folder()
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError:
            self.unreadable.append(folder)
            return []
        self._folders += 1
        if self._measured < FOLDERS_MEASURED:
            with contextlib.suppress(OSError):
                self._measured_bytes += os.stat(folder).st_blocks * BLOCK_BYTES
                self._measured += 1
        return found

    def _stray(self, entry: os.DirEntry[str]) -> None:
        self.strays.append(entry.path)
        self.other_bytes += max(0, _stored_bytes(entry)[0])


def _stored_bytes(entry: os.DirEntry[str]) -> tuple[int, float]:
    """Return a file's bytes as the filesystem counts, and when it was modified; -1 where it is gone."""
    try:
        facts = entry.stat(follow_symlinks=False)
    except OSError:
        return -1, 0.0
    return facts.st_blocks * BLOCK_BYTES, facts.st_mtime


def find_spaces(root: str) -> list[Space]:
    """Return the namespaces below the device's directory *root*, by path."""
    by_path: dict[tuple[str, ...], dict[int, str]] = {}
    for parts in _matching(root, 0):
        rank = _SHAPE[3].fullmatch(parts[3])
        if rank is not None:
            by_path.setdefault((*parts[:3], parts[4]), {})[int(rank[1])] = "/".join([root, *parts])
    return [
        Space(directories=dict(sorted(directories.items())), manifest=manifest_of(directories))
        for _, directories in sorted(by_path.items())
    ]


def _matching(folder: str, depth: int) -> Iterator[tuple[str, ...]]:
    """Yield the paths below *folder*, as parts, whose parts have the shapes from *depth* on."""
    if depth == len(_SHAPE):
        yield ()
        return
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in sorted(names):
            if _SHAPE[depth].fullmatch(name):
                for rest in _matching(f"{folder}/{name}", depth + 1):
                    yield (name, *rest)


def manifest_of(directories: dict[int, str]) -> Manifest | None:
    """Return what the lowest rank's manifest that can be read says."""
    for _, directory in sorted(directories.items()):
        path = f"{directory}/{layout.MANIFEST_NAME}"
        with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as file:
            return msgspec.json.decode(file.read(_MANIFEST_BYTES_MAX), type=Manifest)
    return None
