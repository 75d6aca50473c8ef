"""
What a reset is to one I/O worker: the number kept on its device, and old folders moved out of the way.

Old folders are found by their manifests: same clients' fingerprint, lower epoch. Each is moved to the trash whole, when
a newer epoch is opened (also after a crash between keeping the number and moving them), and a helper removes it.

Does not cover: who is closed by a reset (`procs/io_worker.py`).
"""

import contextlib
import glob
import logging
import os
import subprocess

import msgspec

from kvpool.core import layout
from kvpool.core.epochs import base_of, epoch_of
from kvpool.io import epoch_files
from kvpool.io.files import DeviceFiles, Manifest
from kvpool.procs import sweeper
from kvpool.wire.messages import NamespaceSpec

log = logging.getLogger("kvpool.worker")


class WorkerEpochs:
    """The epochs kept on one device. *device*: its name, for logs."""

    def __init__(self, files: DeviceFiles, device: str) -> None:
        self._files = files
        self._device = device
        self._sweeper: subprocess.Popen[bytes] | None = None

    def kept(self) -> dict[str, int]:
        """
        Return fingerprint -> epoch.

        Raises:
            OSError, msgspec.MsgspecError: It cannot be known; nothing may be served from this device.
        """
        return epoch_files.read_epochs(self._files.private)

    def keep(self, fingerprint: str, epoch: int) -> str:
        """Keep *epoch* durably; return why that failed, or nothing."""
        try:
            epoch_files.keep_epoch(self._files.private, fingerprint, epoch)
        except (OSError, msgspec.MsgspecError) as error:
            log.error("device %s: a reset cannot be made durable: %s", self._device, error)
            return str(error) or type(error).__name__
        return ""

    def clear_older(self, spec: NamespaceSpec) -> None:
        """Move the folders of *spec*'s earlier epochs to the trash, and let a helper empty it."""
        try:
            moved = sum(self._discard(path, spec) for path in self._manifests(spec))
        except OSError as error:
            log.warning("device %s: files from before a reset stay for now: %s", self._device, error)
            return
        if moved:
            log.info("device %s: %d folders of %s from before a reset are being removed",
                     self._device, moved, spec.model_name)  # fmt: skip
        self.sweep()

    def _manifests(self, spec: NamespaceSpec) -> list[str]:
        plain = glob.escape(f"{self._files.root}/{layout.safe_component(spec.model_name)}")
        return [path for stem in (plain, f"{plain}+*") for path in glob.glob(f"{stem}/*/*/*/*/{layout.MANIFEST_NAME}")]

    def _discard(self, path: str, spec: NamespaceSpec) -> bool:
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError), open(path, "rb") as file:
            found = msgspec.json.decode(file.read(), type=Manifest).spec
            if base_of(found) == base_of(spec) and epoch_of(found) < epoch_of(spec):
                return epoch_files.discard(self._files.private, os.path.dirname(path), base_of(found)[:8])
        return False

    def begin(self) -> None:
        """At the worker's start: remove what an earlier one left half done."""
        epoch_files.remove_leftovers(self._files.private)
        self.sweep()

    def sweep(self) -> None:
        """Empty the trash, in the background."""
        if not epoch_files.has_trash(self._files.private) or (self._sweeper and self._sweeper.poll() is None):
            return
        command = sweeper.command(epoch_files.trash_of(self._files.private))
        try:
            self._sweeper = subprocess.Popen(command, stdin=subprocess.DEVNULL, close_fds=True)
        except OSError as error:
            log.warning("device %s: the trash stays for now: %s", self._device, error)

    def close(self) -> None:
        """End the helper."""
        if self._sweeper is not None:
            self._sweeper.kill()
            self._sweeper.wait()
