"""
What tells two namespaces of one model name apart, in words for the one who wonders why nothing is found.

Covers: naming the fields that differ. Does not cover: what an identity is made of (`kvpool_vllm/identity.py`).
"""

from kvpool.wire.messages import NamespaceSpec

#: Longest value that is quoted; digests and lists say no more in full.
VALUE_CHARS_MAX = 80


def differences(stored: NamespaceSpec, wanted: NamespaceSpec) -> list[str]:
    """Return what *stored* and *wanted* differ in, each as `field: stored -> wanted`; what both lack is equal."""
    fields = [name for name in stored.__struct_fields__ if name not in ("fingerprint", "identity")]
    found = [(name, str(getattr(stored, name)), str(getattr(wanted, name))) for name in fields]
    found.extend(
        (name, stored.identity.get(name, "(not said)"), wanted.identity.get(name, "(not said)"))
        for name in sorted(stored.identity.keys() | wanted.identity.keys())
    )
    return [f"{name}: {_short(old)} -> {_short(new)}" for name, old, new in found if old != new]


def _short(value: str) -> str:
    return value if len(value) <= VALUE_CHARS_MAX else f"{value[:VALUE_CHARS_MAX]}..."
