"""
A digest of a model's weight files, as far as that is quick.

Theory. Reading hundreds of gigabytes at each start would cost more than the cache saves. So of each file count its
name, size, the header if it is safetensors (names, shapes and types of all tensors), and fixed samples of the
content: weights that were trained further differ nearly everywhere. File times are no part of it: the same weights
have other times in another image or on another host.

What was digested once is remembered in the user's cache folder, by device, inode, size and times of the file: there
times only say that nothing was written since. Without that folder, or with a broken one, files are read again.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

#: Of each weight file, this many pieces of this size are digested, evenly spread.
SAMPLES = 64
SAMPLE_BYTES = 4096
#: Raised when a digest is computed otherwise, so that remembered ones are not used.
DIGEST_VERSION = 1
#: Files remembered; the oldest are forgotten first.
REMEMBERED_MAX = 4096
#: Longest header of a safetensors file that is digested.
_HEADER_BYTES_MAX = 64 << 20
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

UNKNOWN = "unknown"


def weights_digest(model: str, revision: str | None) -> str:
    """
    Digest the weight files of a model: names, sizes, headers and samples of the content.

    Returns:
        A digest; UNKNOWN when no local files are found, so that name and revision have to do.
    """
    files = weight_files(model, revision)
    if not files:
        return UNKNOWN
    remembered = _read_remembered()
    known = dict(remembered)
    digest = hashlib.sha256()
    for path in files:
        mark = _mark(path)
        if mark not in known:
            known[mark] = _file_digest(path)
        digest.update(f"{path.name}\0{known[mark]}\0".encode())
    if known != remembered:
        _remember(known)
    return digest.hexdigest()


def weight_files(model: str, revision: str | None) -> list[Path]:
    """Return a model's local weight files, sorted; none where it is not on this machine."""
    if Path(model).is_file():
        return [Path(model)]  # one file that is a whole model (GGUF)
    folder = _folder(model, revision)
    return sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES) if folder is not None else []


def remembered_path() -> Path:
    """Return the file that remembers digests."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "kvpool" / "weights.json"


def _folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ValueError, OSError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[bytes]:
    """Give the size, the header if it is safetensors, and evenly spread samples of a file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        yield size.to_bytes(8, "little")
        if path.suffix == ".safetensors":
            file.seek(0)
            header_bytes = int.from_bytes(file.read(8), "little")
            yield file.read(min(header_bytes, _HEADER_BYTES_MAX))
        step = max(1, size // SAMPLES)
        for offset in range(0, size, step):
            file.seek(offset)
            yield file.read(SAMPLE_BYTES)


# ------------------------------------------------------------ what was digested once


def _mark(path: Path) -> str:
    """Return what a file has as long as nothing is written to it; the change time cannot be set back."""
    facts = path.stat()
    return f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}:{facts.st_ctime_ns}"


def _read_remembered() -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        told = json.loads(remembered_path().read_text())
        if isinstance(told, dict) and told.get("version") == DIGEST_VERSION and isinstance(told.get("files"), dict):
            return {str(mark): digest for mark, digest in told["files"].items() if isinstance(digest, str)}
    return {}


def _remember(known: dict[str, str]) -> None:
    """Write the file anew and put it in place whole; ranks do so at the same time, and the last one wins."""
    path = remembered_path()
    kept = dict(list(known.items())[-REMEMBERED_MAX:])
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".weights-", delete=False) as file:
            try:
                json.dump({"version": DIGEST_VERSION, "files": kept}, file)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
