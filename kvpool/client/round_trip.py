"""
A rank's round trip at its start: a pattern goes device memory -> staging -> disk -> staging -> device memory.

Theory. That keys, layout, copies, files and checksums of both directions mean the same bytes is proven by moving some,
through the ordinary path: an ordinary store and an ordinary load, under a key that no request has (`TRIAL_KEY`). The
worker reads it from the device and removes it then. One object to each device, one after the other, on a thread of its
own, while the engine starts and serves; the memory is given back at its end.

Only wrong bytes are a failure. Where the object could not be stored or loaded, nothing is proven: it is tried again a
few times, and then left.

Does not cover: what the pattern's memory is (`kvpool_vllm/round_trip.py`), what a failure stops (`client/rank.py`).
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvpool.errors import Code
from kvpool.wire.messages import TRIAL_KEY

log = logging.getLogger(__name__)

#: What a round trip came to, as health tells it.
OFF, NOT_YET, PASSED, FAILED, UNPROVEN = "off", "not yet", "passed", "failed", "unproven"
#: Pauses before each attempt, seconds: the pool may be full, or not wholly there.
PAUSES_S = (0.0, 1.0, 5.0, 30.0)
#: Longest wait for one job; the pool's own deadlines are shorter.
JOB_S = 120.0
_KEY_BYTES = 32


class TrialMemory(Protocol):
    """Memory of the kind that KV lies in, for one object of one KV group."""

    group: int

    def fill(self, seed: bytes) -> object:
        """Put the pattern of *seed* there; return the place for the copier."""

    def clear(self) -> None:
        """Put zeros there."""

    def holds(self, seed: bytes) -> bool:
        """Tell whether the pattern of *seed* is there."""


class Outcome(NamedTuple):
    """One of the words above, and why it is not PASSED."""

    word: str
    why: str = ""


#: Submits one object: kind ("store", "load"), key, device, place. Returns the failure, None where there was none.
Move = Callable[[str, bytes, int, object], Code | None]


def trial_key(engine: str, device: int, group: int) -> bytes:
    """Return the key of an engine's trial on one device; the same on all ranks, as keys are stored by all or none."""
    digest = hashlib.sha256(f"{device} {engine}".encode()).digest()
    return TRIAL_KEY + digest[: _KEY_BYTES - len(TRIAL_KEY)] + group.to_bytes(4, "big")


def make_round_trip(memory: TrialMemory, move: Move, *, engine: str, rank: int, devices: Sequence[str]) -> Outcome:
    """Move the pattern through each device and back."""
    for device, name in enumerate(devices):
        key, seed = trial_key(engine, device, memory.group), f"{engine} {rank} {device}".encode()
        place = memory.fill(seed)
        code = move("store", key, device, place)
        if code is not None:
            return Outcome(UNPROVEN, f"device {name}: not stored: {code.name}")
        memory.clear()
        code = move("load", key, device, place)
        if code is Code.CORRUPT:
            return Outcome(FAILED, f"device {name}: what was stored does not have its checksum")
        if code is not None:
            return Outcome(UNPROVEN, f"device {name}: not loaded: {code.name}")
        if not memory.holds(seed):
            return Outcome(FAILED, f"device {name}: other bytes came back than were stored")
    return Outcome(PASSED)


class RoundTrip:
    """
    Makes the trip once, on a thread of its own.

    Args:
        memory: Makes the memory; called on that thread, may raise where there is none left.
        move: See `Move`; blocks.
        ended: Called with the outcome.
    """

    def __init__(
        self,
        memory: Callable[[], TrialMemory],
        move: Move,
        *,
        engine: str,
        rank: int,
        devices: Sequence[str],
        ended: Callable[[Outcome], None],
    ) -> None:
        self._stop = threading.Event()
        self._make = memory
        self._move = move
        self._engine, self._rank, self._devices = engine, rank, devices
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name="kvpool-round-trip", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Make no further attempt."""
        self._stop.set()

    def _run(self) -> None:
        outcome = Outcome(UNPROVEN)
        for pause_s in PAUSES_S:
            if self._stop.wait(pause_s):
                return
            began = time.monotonic()
            outcome = self._attempt()
            if outcome.word != UNPROVEN:
                break
        took_ms = (time.monotonic() - began) * 1e3
        if outcome.word == PASSED:
            log.info("kvpool rank %d: the round trip at start passed in %.0f ms", self._rank, took_ms)
        elif outcome.word == FAILED:
            log.error("kvpool rank %d: the round trip at start FAILED, nothing is stored or loaded: %s",
                      self._rank, outcome.why)  # fmt: skip
        else:
            log.warning("kvpool rank %d: the round trip at start proved nothing: %s", self._rank, outcome.why)
        self._ended(outcome)

    def _attempt(self) -> Outcome:
        try:
            return make_round_trip(
                self._make(), self._move, engine=self._engine, rank=self._rank, devices=self._devices
            )
        except Exception as error:  # noqa: BLE001 - border: memory and copies are the engine's code
            return Outcome(UNPROVEN, f"{type(error).__name__}: {error}")
