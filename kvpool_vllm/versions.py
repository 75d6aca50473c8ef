"""The versions of vLLM that kvpool works with, in one place."""

import re

from kvpool.errors import ConfigError

#: Minor versions, with what was done to know that they work.
TESTED: dict[tuple[int, int], str] = {(0, 32): "end to end", (0, 33): "its interface"}


def supported_range() -> str:
    """Return the supported versions in words, for messages and documentation."""
    return ", ".join(f"{major}.{minor} ({how})" for (major, minor), how in sorted(TESTED.items()))


def check_version(version: str) -> None:
    """
    Refuse a vLLM that kvpool was not tested with.

    Args:
        version: `vllm.__version__`, for example `0.32.0` or `0.33.1+cu130`.

    Raises:
        ConfigError: The version is outside `TESTED`; the message names the range.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) not in TESTED:
        raise ConfigError(f"vLLM {version} is not supported by this kvpool, which is tested with: {supported_range()}")
