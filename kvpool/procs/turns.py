"""
How an I/O worker lets its walking helpers go on or wait: one byte, down the helper's standard input.

A helper asks before each folder, so it stops within one read of a folder. Words that were overtaken by later ones do
not count. Without a worker at the other end (standard input at its end) a helper goes on.

Does not cover: when they wait (`core/scan_pace.py`).
"""

import contextlib
import os
import select
import subprocess
from collections.abc import Sequence

from kvpool.errors import unreachable

GO, WAIT = b"g", b"w"


class Turns:
    """The helper's end. *fd*: where the worker's words come."""

    def __init__(self, fd: int = 0) -> None:
        self._fd = fd
        self._led = True
        self._waits = False

    def wait(self) -> None:
        """Return at once, or when the worker lets this helper go on."""
        while self._led and (self._waits or select.select([self._fd], [], [], 0)[0]):
            words = os.read(self._fd, 4096)
            self._led = bool(words)
            self._waits = words[-1:] == WAIT


class Walker:
    """
    A walking helper, seen from its worker.

    Attributes:
        fd: Its output; does not block.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start it; raises OSError where that cannot be."""
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=True)
        if self._process.stdin is None or self._process.stdout is None:
            unreachable("a helper's input and output are pipes")
        self._words, self.fd = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._told = GO
        for fd in (self._words, self.fd):
            os.set_blocking(fd, False)

    def let(self, going: bool) -> None:
        """Let it go on, or wait. A word that finds no room is said again by the next call."""
        word = GO if going else WAIT
        if word != self._told:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._words, word)
                self._told = word

    def end(self, *, kill: bool) -> None:
        """Wait for its end, and close its pipes."""
        if kill:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()
