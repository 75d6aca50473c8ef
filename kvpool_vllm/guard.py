"""
The border between kvpool and vLLM: what fails on our side becomes a miss or a dropped save, and is said once.

Everything vLLM calls runs through one :class:`Guard` per role. The first failure disables that role for good: an
exception here is a bug or a broken machine, and going on could serve wrong bytes. vLLM itself goes on.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from vllm.logger import init_logger

logger = init_logger(f"vllm.{__name__}")

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Runs calls of one role until the first one fails."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._broken = False

    @property
    def broken(self) -> bool:
        """A call has failed; nothing of this role runs any more."""
        return self._broken

    def run(self, default: R, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what *call* returns, or *default* when it, or an earlier one, has failed."""
        if self._broken:
            return default
        try:
            return call(*args, **kwargs)
        except Exception:
            self._broken = True
            logger.exception(
                "kvpool (%s) failed and is switched off until the engine restarts; vLLM goes on without it", self._role
            )
            return default
