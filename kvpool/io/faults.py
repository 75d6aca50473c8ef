"""
Faults on purpose, for tests: errors, short reads, delays and a bandwidth limit, by probability with a seed.

Nothing sleeps: a delay is a time at which the request is really made (`due_ns`), which the engine keeps in a heap.
"""

import errno
import os
import random

import msgspec

from kvpool.errors import ConfigError


class FaultSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """
    What goes wrong, how often.

    Attributes:
        seed: Of all chance here.
        open_error, read_error, write_error: Probability that the call fails with EIO.
        no_space: Probability that a write fails with ENOSPC.
        short_read: Probability that a read brings only a part (a multiple of 4096, at least one).
        delay: Probability that a read or write is made `delay_s` late.
        read_bytes_per_s, write_bytes_per_s: Bandwidth; 0 is as fast as the device.
        bytes_per_s: Bandwidth of each direction at any time; 0 is as fast as the device.
        while_exists: Path of a file; all the rest goes wrong only while it is there. Empty: always.
    """

    seed: int = 0
    open_error: float = 0.0
    read_error: float = 0.0
    write_error: float = 0.0
    no_space: float = 0.0
    short_read: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.1
    read_bytes_per_s: int = 0
    write_bytes_per_s: int = 0
    bytes_per_s: int = 0
    while_exists: str = ""


class Faults:
    """Decides, request by request."""

    def __init__(self, settings: FaultSettings) -> None:
        self.settings = settings
        self._chance = random.Random(settings.seed)
        self._busy_until_ns = {"read": 0, "write": 0}

    @classmethod
    def from_json(cls, text: str) -> "Faults":
        """
        Return the faults described by the JSON object *text*.

        Raises:
            ConfigError: It is not one of :class:`FaultSettings`.
        """
        try:
            return cls(msgspec.json.decode(text, type=FaultSettings))
        except msgspec.MsgspecError as error:
            raise ConfigError("faults for tests", value=text, error=str(error)) from error

    def open_errno(self) -> int:
        """Return the errno with which this open fails; 0: it is made."""
        return errno.EIO if self._happens(self.settings.open_error) else 0

    def read_errno(self) -> int:
        """Return the errno with which this read fails; 0: it is made."""
        return errno.EIO if self._happens(self.settings.read_error) else 0

    def write_errno(self) -> int:
        """Return the errno with which this write fails; 0: it is made."""
        if self._happens(self.settings.no_space):
            return errno.ENOSPC
        return errno.EIO if self._happens(self.settings.write_error) else 0

    def read_bytes(self, wanted: int) -> int:
        """Return how many of *wanted* bytes this read brings."""
        if wanted > 4096 and self._happens(self.settings.short_read):
            return 4096 * self._chance.randrange(1, -(-wanted // 4096))
        return wanted

    def due_ns(self, direction: str, byte_count: int, now_ns: int) -> int:
        """Return when a *direction* ("read", "write") of that many bytes is to be made; *now_ns*: at once."""
        due_ns = now_ns
        rate = self.settings.read_bytes_per_s if direction == "read" else self.settings.write_bytes_per_s
        if not rate or not self._active():
            rate = self.settings.bytes_per_s
        if rate:
            due_ns = max(now_ns, self._busy_until_ns[direction]) + byte_count * 10**9 // rate
            self._busy_until_ns[direction] = due_ns
        if self._happens(self.settings.delay):
            due_ns += int(self.settings.delay_s * 1e9)
        return due_ns

    def _happens(self, probability: float) -> bool:
        return probability > 0 and self._chance.random() < probability and self._active()

    def _active(self) -> bool:
        return not self.settings.while_exists or os.path.exists(self.settings.while_exists)
