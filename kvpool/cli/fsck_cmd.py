"""
`kvpool fsck`: is every file on a device what it says it is.

Theory. One walk finds the namespaces and their keys (`io/inventory.py`) and what they weigh, a second one reads
every object in a few threads and checks trailer and payload (`io/object_check.py`). Nothing is locked: objects are
immutable, so a check beside a running pool sees each file whole or not at all, and what a repair moves away is a miss.

    problem                                            --repair
    an object's bytes are not those published          moved to the quarantine: a miss, stored again when it comes
    a file or folder that others may read              mode 0600, 0700
    a temporary file of a dead process                 removed
    a manifest that cannot be read, or is another's    told only: the next pool that opens the namespace writes it
    a file that cannot be read                         told only: look at the drive

Does not cover: keys that lack some rank's object (told as a count: a store may be under way), files of others.
"""

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from kvpool.cli.devices import Advance, ConfigOption, Device, JsonOption, PathOption, devices_of, progress
from kvpool.core import layout
from kvpool.core.key_index import key_group
from kvpool.errors import Exit, KvpoolError
from kvpool.health.render import size_text
from kvpool.io.files import DIRECTORY_MODE, FILE_MODE, LEFTOVER_AGE_S, MANIFEST_VERSION, DeviceFiles
from kvpool.io.inventory import Space, Walk, find_spaces, manifest_of
from kvpool.io.object_check import Verdict, Wanted, check_object

#: Readers; more only helps where files are small.
THREADS = 4
#: Problems told one by one; the others are counted.
TOLD_MAX = 100

RepairOption = Annotated[bool, typer.Option("--repair", help="Put right what can be; see below.")]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be."""

    kind: str
    path: str
    what: str
    repaired: bool


@dataclass(slots=True)
class Report:
    """
    What was found on one device.

    Attributes:
        incomplete: Keys that lack some rank's object.
        strangers: Files that are not kvpool's.
        gone: Objects removed while they were checked.
    """

    device: str
    path: str
    namespaces: int = 0
    keys: int = 0
    objects: int = 0
    object_bytes: int = 0
    incomplete: int = 0
    strangers: int = 0
    gone: int = 0
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)


def fsck(
    config: ConfigOption = None,
    path: PathOption = None,
    repair: RepairOption = False,
    as_json: JsonOption = False,
) -> None:
    """
    Check every file of the given devices: trailers, checksums, manifests, modes, leftovers. A pool may be running.

    With --repair, objects with wrong bytes are moved to the quarantine, modes are tightened, leftovers removed.

    Exit code: 0 nothing is wrong, 1 problems were found (and repaired where asked and possible), 2 it could not run.
    """
    reports = []
    for device in devices_of(config, path):
        try:
            reports.append(Checker(device, repair=repair).run(hidden=as_json))
        except (KvpoolError, OSError) as error:
            typer.echo(f"kvpool: {device.name}: {error}", err=True)
            raise typer.Exit(Exit.NOT_THERE) from error
    if as_json:
        print(json.dumps({"clean": not any(r.problems for r in reports), "devices": [asdict(r) for r in reports]}))
    else:
        for report in reports:
            _print(report)
    raise typer.Exit(Exit.DEGRADED if any(report.problems for report in reports) else Exit.OK)


def _print(report: Report) -> None:
    for problem in report.problems[:TOLD_MAX]:
        done = " (repaired)" if problem.repaired else ""
        print(f"{problem.kind}: {problem.path}: {problem.what}{done}")
    if len(report.problems) > TOLD_MAX:
        print(f"... and {len(report.problems) - TOLD_MAX} more")
    rate = report.object_bytes / report.seconds if report.seconds else 0.0
    seen = f"{report.objects} objects of {report.keys} keys in {report.namespaces} namespaces"
    print(f"{report.device}: {seen}, {size_text(report.object_bytes)} read at {size_text(rate)}/s")
    for count, what in (
        (report.incomplete, "keys lack some rank's object (a miss; a store may be under way)"),
        (report.strangers, "files are not kvpool's and were left alone"),
        (report.gone, "objects were removed meanwhile"),
    ):
        if count:
            print(f"{report.device}: {count} {what}")
    found = len(report.problems)
    repaired = sum(problem.repaired for problem in report.problems)
    print(f"{report.device}: " + (f"{found} problem(s), {repaired} repaired" if found else "clean"))


class Checker:
    """One check of one device."""

    def __init__(self, device: Device, *, repair: bool) -> None:
        self._root = device.path
        self._repair = repair
        self._files: DeviceFiles | None = None
        self._report = Report(device.name, device.path)
        #: Folders above objects' own whose mode was looked at.
        self._looked: set[str] = set()

    def run(self, *, hidden: bool) -> Report:
        """Check everything."""
        started_s = time.monotonic()
        self._check_folder(self._root)
        spaces = find_spaces(self._root)
        walk = Walk()
        with progress(None, hidden=hidden) as advance:
            for space in spaces:
                self._check_space(space)
                for _ in walk.keys_of(space):
                    advance(f"counting: {walk.objects} objects", 0)
        self._note_strays(walk)
        with progress(walk.object_bytes, hidden=hidden) as advance:
            self._check_objects(spaces, advance)
        self._report.namespaces = len(spaces)
        self._report.seconds = time.monotonic() - started_s
        return self._report

    # ------------------------------------------------------------ namespaces

    def _check_space(self, space: Space) -> None:
        for rank, directory in space.directories.items():
            folder = directory
            while folder != self._root:
                self._check_folder(folder)
                folder = os.path.dirname(folder)
            self._check_manifest(space, rank, f"{directory}/{layout.MANIFEST_NAME}")

    def _check_manifest(self, space: Space, rank: int, path: str) -> None:
        if not os.path.exists(path):
            self._problem("manifest", path, "is missing")
            return
        own = manifest_of({rank: os.path.dirname(path)})
        if own is None:
            self._problem("manifest", path, "cannot be read")
        elif own.format_version != MANIFEST_VERSION:
            self._problem("manifest", path, f"has format {own.format_version}, known is {MANIFEST_VERSION}")
        elif own.spec.fingerprint != space.fingerprint:
            self._problem("manifest", path, f"is of another fingerprint than rank {min(space.directories)}'s")
        elif space.manifest is not None and rank == min(space.directories):
            spec = space.manifest.spec
            places = {layout.rank_directory(spec, model, rank) for model in layout.model_directories(spec)}
            if os.path.relpath(os.path.dirname(path), self._root) not in places:
                self._problem("manifest", path, "does not belong where it lies")
        self._check_mode(path, FILE_MODE)

    def _check_folder(self, path: str) -> None:
        if path not in self._looked:
            self._looked.add(path)
            self._check_mode(path, DIRECTORY_MODE)

    def _check_mode(self, path: str, most: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            mode = stat.S_IMODE(os.stat(path).st_mode)
            if mode & ~most:
                self._problem("mode", path, f"{mode:04o}: others may look at it", self._set_mode(path, most))

    def _set_mode(self, path: str, mode: int) -> bool:
        if not self._repair:
            return False
        try:
            os.chmod(path, mode)
        except OSError:
            return False
        return True

    def _note_strays(self, walk: Walk) -> None:
        for path in walk.unreadable:
            self._problem("unreadable", path, "this folder cannot be read")
        for path in [*walk.strays, *_private_leftovers(self._root)]:
            if not layout.is_temporary(os.path.basename(path)):
                self._report.strangers += 1
                continue
            with contextlib.suppress(FileNotFoundError):
                if time.time() - os.stat(path).st_mtime > LEFTOVER_AGE_S:
                    self._problem("leftover", path, "was never published", self._remove(path))

    def _remove(self, path: str) -> bool:
        if not self._repair:
            return False
        try:
            os.unlink(path)
        except OSError:
            return False
        return True

    # ------------------------------------------------------------ objects

    def _check_objects(self, spaces: list[Space], advance: Advance) -> None:
        wanted = self._wanted(spaces)
        with ThreadPoolExecutor(THREADS) as pool:
            while batch := list(islice(wanted, 16 * THREADS)):
                for one, verdict in zip(batch, pool.map(check_object, batch), strict=True):
                    self._note(one, verdict)
                advance(f"checking: {self._report.objects} objects", self._report.object_bytes)

    def _wanted(self, spaces: list[Space]) -> Iterator[Wanted]:
        walk = Walk()
        for space in spaces:
            spec = space.manifest.spec if space.manifest is not None else None
            fingerprint = bytes.fromhex(spec.fingerprint) if spec is not None else None
            sizes = {group.group: group.object_bytes for group in spec.groups} if spec is not None else {}
            folder = ""
            for found in walk.keys_of(space):
                self._report.keys += 1
                self._report.incomplete += len(found.files) < space.rank_count
                for rank, (path, _) in found.files.items():
                    if os.path.dirname(path) != folder:
                        folder = os.path.dirname(path)
                        self._check_mode(folder, DIRECTORY_MODE)
                    yield Wanted(path, found.key, rank, fingerprint, sizes.get(key_group(found.key)))

    def _note(self, wanted: Wanted, verdict: Verdict) -> None:
        if verdict.gone:
            self._report.gone += 1
            return
        self._report.objects += 1
        self._report.object_bytes += verdict.bytes
        if verdict.unreadable:
            self._problem("unreadable", wanted.path, verdict.unreadable)
        elif verdict.wrong:
            self._problem("corrupt", wanted.path, verdict.wrong, self._set_aside(wanted.path))
        elif verdict.mode:
            what = f"{verdict.mode:04o}: others may look at it"
            self._problem("mode", wanted.path, what, self._set_mode(wanted.path, FILE_MODE))

    def _set_aside(self, path: str) -> bool:
        if not self._repair:
            return False
        if self._files is None:
            self._files = DeviceFiles(self._root)
        self._files.set_aside(path)
        return True

    def _problem(self, kind: str, path: str, what: str, repaired: bool = False) -> None:
        self._report.problems.append(Problem(kind, path, what, repaired))


def _private_leftovers(root: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [str(entry) for entry in Path(root, layout.PRIVATE_NAME).iterdir() if entry.is_file()]
    return []
