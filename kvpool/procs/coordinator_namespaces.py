"""
The namespaces that a pool's clients brought, under the pool's numbers.

Theory. A namespace is its fingerprint: bytes of equal fingerprint are interchangeable. Two clients
that agree on the fingerprint but not on the rest disagree on what the bytes are, so the second is
refused; so is a second fingerprint from one engine. Numbers are given once and stay for the pool's life; a namespace
that is reset gets another one, under which it is served as its new epoch (`core/epochs.py`).
"""

import re

from kvpool.core.epochs import EPOCH_OF
from kvpool.errors import ConfigError
from kvpool.wire.messages import NamespaceSpec

#: Namespaces that one pool serves in its life.
NAMESPACES_MAX = 256
#: Digits of a fingerprint that name a namespace.
NAME_DIGITS_MIN = 8
RANKS_MAX = 1024
GROUPS_MAX = 256

FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class Namespaces:
    """See the module."""

    def __init__(self) -> None:
        #: What is served, by number: epochs, as workers and files know them.
        self.specs: dict[int, NamespaceSpec] = {}
        #: What clients say, by number.
        self.bases: dict[int, NamespaceSpec] = {}
        self._numbers: dict[str, int] = {}
        self._given = 0

    def find(self, spec: NamespaceSpec) -> int | None:
        """
        Return the number of an open namespace, None if it is new.

        Raises:
            ConfigError: Not a sound specification, or not the one that is open under its fingerprint.
        """
        check_namespace(spec)
        number = self._numbers.get(spec.fingerprint)
        if number is None:
            if len(self._numbers) >= NAMESPACES_MAX:
                raise ConfigError("the pool has served too many namespaces: restart it", namespaces_max=NAMESPACES_MAX)
            return None
        known = self.bases[number]
        different = [name for name in spec.__struct_fields__ if getattr(spec, name) != getattr(known, name)]
        if different:
            raise ConfigError(
                "namespace differs from the one open under the same fingerprint: all ranks and engines must agree",
                different=", ".join(different),
                model_name=spec.model_name,
            )
        return number

    @property
    def next_number(self) -> int:
        """The number that the next new namespace will get."""
        return self._given + 1

    def open(self, base: NamespaceSpec, spec: NamespaceSpec) -> int:
        """Give what clients call *base*, and what is served as *spec* now, its number."""
        self._given = number = self.next_number
        self.specs[number], self.bases[number] = spec, base
        self._numbers[base.fingerprint] = number
        return number

    def close(self, fingerprint: str) -> int | None:
        """Serve what clients call that fingerprint no more under its number; return it, if it was open."""
        number = self._numbers.pop(fingerprint, None)
        if number is not None:
            del self.specs[number], self.bases[number]
        return number

    def named(self, name: str) -> list[NamespaceSpec]:
        """Return what clients say, of the open namespaces of that model name, or that start of a fingerprint."""
        return [
            base
            for base in self.bases.values()
            if base.model_name == name or (len(name) >= NAME_DIGITS_MIN and base.fingerprint.startswith(name))
        ]


def check_namespace(spec: NamespaceSpec) -> None:
    """
    Raise ConfigError unless *spec* is sound.

    A name that becomes a component of a path may not lead out of it.
    """
    if EPOCH_OF in spec.identity:
        raise ConfigError("an identity may not name an epoch: the pool does", key=f"identity.{EPOCH_OF}")
    if not FINGERPRINT.fullmatch(spec.fingerprint):
        raise ConfigError("fingerprint must be 64 lower-case hex digits", key="fingerprint", value=spec.fingerprint)
    for key in ("model_name", "dtype"):
        value = getattr(spec, key)
        if value in ("", ".", "..") or "/" in value or "\0" in value or len(value.encode()) > 200:
            raise ConfigError("must be one path component of at most 200 bytes", key=key, value=value)
    if not 1 <= spec.rank_count <= RANKS_MAX:
        raise ConfigError(f"must be 1 to {RANKS_MAX}", key="rank_count", value=spec.rank_count)
    groups = [group.group for group in spec.groups]
    if not 1 <= len(groups) <= GROUPS_MAX or groups != sorted(set(groups)) or groups[0] < 0:
        raise ConfigError(f"must be 1 to {GROUPS_MAX} different groups, ascending", key="groups", value=str(groups))
    for group in spec.groups:
        if group.object_bytes < 1:
            raise ConfigError("must be at least 1", key=f"groups[{group.group}].object_bytes", value=group.object_bytes)
