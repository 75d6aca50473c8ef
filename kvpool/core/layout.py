"""
Names of files and folders below a device.

Covers: keys to file names and back, the folders of a namespace, text made safe as one path component.
Does not cover: making, claiming or scanning folders (`kvpool.io.files`, `kvpool.procs.scanner`).

    <device>/<model_name>/block_size_<n>_blocks_per_file_<n>/tp_<n>_pp_size_<n>_pcp_size_<n>/rank_<n>/<dtype>
        /manifest.json
        /<hhh>/<hh>/<full_hash>.bin            KV group 0
        /<hhh>/<hh>/<full_hash>_g<group>.bin   the others

`hhh` and `hh` are the first three and the next two hex digits of the block hash. A key is vLLM's OffloadKey:
the block hash, 32 bytes or whatever length the hash algorithm has, then the KV group index, four bytes big-endian.
"""

import hashlib
import re

from kvpool.core.epochs import epoch_of
from kvpool.errors import invariant
from kvpool.wire.messages import NamespaceSpec

GROUP_BYTES = 4
#: A name of 255 bytes is what filesystems allow: 2 x 112 hex digits, `_g4294967295`, `.bin`, and room.
HASH_BYTES_MAX = 112
COMPONENT_CHARS_MAX = 96
MANIFEST_NAME = "manifest.json"
#: Below a device; what is kvpool's own and no namespace.
PRIVATE_NAME = ".kvpool"
QUARANTINE_NAME = "quarantine"

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_OBJECT_NAME = re.compile(rf"((?:[0-9a-f]{{2}}){{1,{HASH_BYTES_MAX}}})(?:_g([1-9][0-9]{{0,9}}))?\.bin", re.ASCII)
_TEMPORARY_NAME = re.compile(r"\.kvpool-[0-9a-f]+-[0-9]+\.tmp", re.ASCII)


def object_directory(key: bytes) -> str:
    """Return the folder of *key*'s file, relative to its namespace directory: `<hhh>/<hh>`."""
    digits = key[: min(3, len(key) - GROUP_BYTES)].hex().ljust(5, "0")
    return f"{digits[:3]}/{digits[3:5]}"


def object_name(key: bytes) -> str:
    """Return the name of *key*'s file."""
    invariant(GROUP_BYTES < len(key) <= HASH_BYTES_MAX + GROUP_BYTES, "length of a key", key=key)
    group = int.from_bytes(key[-GROUP_BYTES:], "big")
    return f"{key[:-GROUP_BYTES].hex()}_g{group}.bin" if group else f"{key[:-GROUP_BYTES].hex()}.bin"


def object_path(namespace_directory: str, key: bytes) -> str:
    """Return the path of *key*'s file below *namespace_directory*, the directory of one rank."""
    return f"{namespace_directory}/{object_directory(key)}/{object_name(key)}"


def maybe_key(name: str) -> bytes | None:
    """Return the key whose file has that name; None where no key's file has it."""
    match = _OBJECT_NAME.fullmatch(name)
    if match is None:
        return None
    group = int(match[2] or 0)
    if group >= 1 << (8 * GROUP_BYTES):
        return None
    return bytes.fromhex(match[1]) + group.to_bytes(GROUP_BYTES, "big")


def temporary_name(writer: str, number: int) -> str:
    """
    Return the name of a file that is not published yet, for filesystems without unnamed files.

    Args:
        writer: Hexadecimal; no other process has it, on whatever host.
    """
    return f".kvpool-{writer}-{number}.tmp"


def is_temporary(name: str) -> bool:
    """Tell whether a file of that name is one that was never published."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def safe_component(text: str) -> str:
    """
    Return *text* as one path component: ASCII letters, digits, `.`, `_`, `-`; never hidden, `..` or empty.

    Texts that differ may become equal; the fingerprint in the manifest tells their namespaces apart.
    Too long ones are cut and end with a digest of the whole.
    """
    safe = _UNSAFE.sub("_", text)
    if not safe or safe.startswith("."):
        safe = f"_{safe}"
    if len(safe) > COMPONENT_CHARS_MAX:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        safe = f"{safe[: COMPONENT_CHARS_MAX - 17]}-{digest}"
    return safe


def model_directories(spec: NamespaceSpec) -> tuple[str, str]:
    """Return the two folder names a namespace may have: the plain one (first come, never reset), and its very own."""
    plain = safe_component(spec.model_name)
    own = f"{plain}+{spec.fingerprint[:8]}"
    return own if epoch_of(spec) else plain, own


def rank_directory(spec: NamespaceSpec, model_directory: str, rank: int) -> str:
    """Return the namespace directory of one rank, relative to the device."""
    return (
        f"{model_directory}/block_size_{spec.block_size}_blocks_per_file_{spec.blocks_per_file}"
        f"/tp_{spec.tp}_pp_size_{spec.pp}_pcp_size_{spec.pcp}/rank_{rank}/{safe_component(spec.dtype)}"
    )
