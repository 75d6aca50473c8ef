"""
A device's directory: what its filesystem can do, whose folder is whose, and files set aside.

Covers: the device's root and `.kvpool` in it, trying out direct I/O, unnamed files and naming, claiming the folders of
a namespace by `manifest.json`, moving bad files to the quarantine.
Does not cover: object files themselves (`kvpool.io.ring_engine`), walking them (`kvpool.procs.scanner`).

The folder with the plain model name belongs to the fingerprint whose manifest is in it first; another fingerprint of
the same name gets a folder of its own. Rank 0's manifest decides, for all ranks. Folders are 0700, files 0600.
"""

import contextlib
import enum
import errno
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from kvpool.core import layout
from kvpool.errors import DeviceError
from kvpool.io.thread_ring import rename_noreplace
from kvpool.wire.messages import NamespaceSpec

#: Files kept in the quarantine; one more and the oldest goes.
QUARANTINE_FILES_MAX = 64
#: Names this process among all that write to a directory, on whatever host: process ids do not.
WRITER = secrets.token_hex(8)
#: A trial file or a manifest is written in moments; an older temporary was left by a process that was killed.
LEFTOVER_AGE_S = 60.0
MANIFEST_VERSION = 1
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
_TRIAL_BYTES = 4096
#: How filesystems say that they lack a feature.
_CANNOT = (
    errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR, errno.ENOSYS, errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOENT
)  # fmt: skip


class Naming(enum.Enum):
    """How a written file gets its final name, without ever replacing one where that can be had."""

    LINK = "link"
    RENAME_NOREPLACE = "rename without replace"
    RENAME = "rename"


@dataclass(frozen=True, slots=True)
class Features:
    """What the filesystem can do: direct I/O, unnamed files that can be linked, and how files get names."""

    direct: bool
    unnamed: bool
    naming: Naming


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`manifest.json`: the full identity of a namespace, in readable form."""

    format_version: int
    spec: NamespaceSpec


class DeviceFiles:
    """
    One device's directory.

    Attributes:
        root: The directory's absolute path.
        name: The device's name, for errors.
        private: The folder in it that is no namespace.
        others: Fingerprint -> the namespace that was first in the plain folder of its model name.
        features: What the filesystem can do.
    """

    def __init__(self, root: str, *, name: str = "device") -> None:
        """
        Open (and if needed make) the directory.

        Raises:
            DeviceError: It cannot be made, or nothing can be written into it.
        """
        self.root = os.path.abspath(root)
        self.name = name
        self.private = f"{self.root}/{layout.PRIVATE_NAME}"
        self._quarantine = f"{self.private}/{layout.QUARANTINE_NAME}"
        self._number = 0
        self.others: dict[str, NamespaceSpec] = {}
        with self._reported("prepare"):
            os.makedirs(self.root, DIRECTORY_MODE, exist_ok=True)
            _make_directories(self.root, f"{layout.PRIVATE_NAME}/{layout.QUARANTINE_NAME}")
            self._remove_leftovers(self.private)
            self.features = self._try_out()

    # ------------------------------------------------------------ namespaces

    def open_namespace(self, spec: NamespaceSpec) -> list[str]:
        """
        Return the namespace directories (absolute), one for each rank; make and claim them if they are new.

        Raises:
            DeviceError: The filesystem failed, or the fingerprint's own folder holds another one.
        """
        with self._reported("open namespace"):
            plain, own = layout.model_directories(spec)
            for model_directory in (plain, own):
                if self._claim(layout.rank_directory(spec, model_directory, 0), spec):
                    break
            else:
                raise DeviceError("folder belongs to another namespace", device=self.name, path=f"{self.root}/{own}")
            ranks = [layout.rank_directory(spec, model_directory, rank) for rank in range(spec.rank_count)]
            for directory in ranks[1:]:
                self._claim(directory, spec)
            return [f"{self.root}/{directory}" for directory in ranks]

    def _claim(self, directory: str, spec: NamespaceSpec) -> bool:
        """Make *directory* and its manifest; tell whether the manifest there is of *spec*'s fingerprint."""
        _make_directories(self.root, directory)
        path = f"{self.root}/{directory}/{layout.MANIFEST_NAME}"
        for _ in range(3):
            found = self._maybe_manifest(path)
            if found is not None:
                if found.spec.fingerprint != spec.fingerprint:
                    self.others.setdefault(spec.fingerprint, found.spec)
                return found.spec.fingerprint == spec.fingerprint
            self._publish_manifest(path, spec)
        raise OSError(errno.EIO, "manifest does not stay", path)

    def _maybe_manifest(self, path: str) -> Manifest | None:
        """Return the manifest at *path*; None if there is none. One that cannot be read is set aside."""
        try:
            with open(path, "rb") as file:
                return msgspec.json.decode(file.read(), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError:  # objects prove themselves by their trailers, whatever the manifest says
            self.set_aside(path)
            return None

    def _publish_manifest(self, path: str, spec: NamespaceSpec) -> None:
        text = msgspec.json.format(msgspec.json.encode(Manifest(format_version=MANIFEST_VERSION, spec=spec)), indent=2)
        temporary = self._temporary()
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            with open(fd, "wb") as file:
                file.write(text + b"\n")
                file.flush()
                os.fsync(fd)
            with contextlib.suppress(FileExistsError):
                self._name_file(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def _name_file(self, temporary: str, path: str) -> None:
        if self.features.naming is Naming.LINK:
            os.link(temporary, path)
        elif self.features.naming is Naming.RENAME_NOREPLACE:
            rename_noreplace(temporary, path)
        elif not os.path.exists(path):
            os.rename(temporary, path)

    # ------------------------------------------------------------ quarantine

    def set_aside(self, path: str) -> None:
        """
        Move the file *path* to the quarantine; it is gone under its name afterwards, whatever happens.

        Raises:
            DeviceError: Not even its removal works.
        """
        with self._reported("set aside"), contextlib.suppress(FileNotFoundError):
            self._number += 1
            try:
                os.rename(path, f"{self._quarantine}/{os.getpid()}-{self._number}-{os.path.basename(path)}")
            except OSError as error:
                if error.errno == errno.ENOENT:
                    os.makedirs(self._quarantine, DIRECTORY_MODE, exist_ok=True)
                os.unlink(path)
            self._thin_quarantine()

    def quarantined(self) -> list[str]:
        """Return the paths of the files set aside, oldest first."""
        with self._reported("quarantine"), os.scandir(self._quarantine) as entries:
            return [entry.path for entry in sorted(entries, key=lambda entry: entry.stat().st_ctime_ns)]

    def _thin_quarantine(self) -> None:
        for path in self.quarantined()[:-QUARANTINE_FILES_MAX]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    # ------------------------------------------------------------ trying out

    def _try_out(self) -> Features:
        unnamed = self._can(self._write_unnamed, os.O_DIRECT) or self._can(self._write_unnamed, 0)
        direct = self._can(self._write_named, os.O_DIRECT)
        if not direct:
            self._write_named(0)  # must work; raises what is wrong with the device
        naming = Naming.RENAME
        if self._can(self._rename_trial):
            naming = Naming.RENAME_NOREPLACE
        if self._can(self._link_trial):
            naming = Naming.LINK
        return Features(direct=direct, unnamed=unnamed and naming is Naming.LINK, naming=naming)

    @staticmethod
    def _can(trial: Callable[..., object], *arguments: object) -> bool:
        try:
            trial(*arguments)
        except OSError as error:
            if error.errno in _CANNOT:
                return False
            raise
        return True

    def _write_named(self, flag: int) -> str:
        path = self._temporary()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flag, FILE_MODE)
        try:
            self._write_trial(fd)
        finally:
            os.close(fd)
            os.unlink(path)
        return path

    def _write_unnamed(self, flag: int) -> None:
        fd = os.open(self.private, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC | flag, FILE_MODE)
        directory_fd = os.open(self.private, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        path = self._temporary()
        try:
            self._write_trial(fd)
            os.link(f"/proc/self/fd/{fd}", os.path.basename(path), dst_dir_fd=directory_fd, follow_symlinks=True)
            os.unlink(path)
        finally:
            os.close(directory_fd)
            os.close(fd)

    def _link_trial(self) -> None:
        source, target = self._temporary(), self._temporary()
        os.close(os.open(source, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        try:
            os.link(source, target)
            os.unlink(target)
        finally:
            os.unlink(source)

    def _rename_trial(self) -> None:
        source, target = self._temporary(), self._temporary()
        os.close(os.open(source, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))
        try:
            rename_noreplace(source, target)
            source = target
        finally:
            os.unlink(source)

    @staticmethod
    def _write_trial(fd: int) -> None:
        with mmap.mmap(-1, _TRIAL_BYTES) as page:
            os.write(fd, page)

    def _temporary(self) -> str:
        self._number += 1
        return f"{self.private}/{layout.temporary_name(WRITER, self._number)}"

    @staticmethod
    def _remove_leftovers(directory: str) -> None:
        with os.scandir(directory) as entries:
            for entry in entries:
                if layout.is_temporary(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - entry.stat().st_mtime > LEFTOVER_AGE_S:  # else it may be another's, at work
                            os.unlink(entry.path)

    def close(self) -> None:
        """Nothing is held open."""

    @contextlib.contextmanager
    def _reported(self, operation: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DeviceError(
                error.strerror or str(error),
                device=self.name,
                operation=operation,
                errno=errno.errorcode.get(error.errno or 0, str(error.errno)),
                path=str(error.filename or self.root),
            ) from error


def _make_directories(root: str, relative: str) -> None:
    """Make each folder of *relative* below *root*, private to the owner whatever the umask lets through."""
    path = root
    for part in relative.split("/"):
        path = f"{path}/{part}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)
