"""
What a run without kvpool answers, and the check that a run with it answers the same from the bytes it loaded.

Theory. "Equal" alone proves little: an engine that ignores its KV, or that recomputed instead of loading, is equal
too. So every check counts the tokens that came from the pool, and has its control: the same prompts on altered
bytes, with verification off, must come out different.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvpool.health import facts
from tests.e2e.pool import Pool, altered, wait_until
from tools.engine_process import Answer, Engine
from tools.tiny_models import VOCABULARY

CHUNK = 256
ATTEMPTS = 5
Prompts = Mapping[str, Sequence[int]]
T = TypeVar("T")
StartEngine = Callable[..., Engine]


def tokens(seed: int, count: int) -> list[int]:
    """Return a prompt of random tokens."""
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(count)]


def chunks(prompt: Sequence[int]) -> int:
    """Return how many whole chunks a prompt has: those are stored."""
    return len(prompt) // CHUNK


def loadable(prompt: Sequence[int]) -> int:
    """Return how many tokens of a stored prompt can be loaded: whole chunks, and at least one token is computed."""
    return (len(prompt) - 1) // CHUNK * CHUNK


class Reference:
    """Answers of engines without kvpool, one engine a model; every answer is computed once."""

    def __init__(self, start: StartEngine) -> None:
        self._start = start
        self._engines: dict[str, Engine] = {}
        self._known: dict[tuple[str, tuple[int, ...], int], list[int]] = {}

    def prepare(self, model: str) -> None:
        """Start the model's engine without waiting for it."""
        if model not in self._engines:
            self._engines[model] = self._start(model, name=f"reference-{model}")

    def answer(self, prompt: Sequence[int], max_tokens: int = 8, *, model: str = "llama") -> list[int]:
        """Return the greedy answer to *prompt*, computed from its first token on."""
        key = (model, tuple(prompt), max_tokens)
        if key not in self._known:
            self.prepare(model)
            engine = self._engines[model].wait_up()
            assert engine.reset()
            answer = engine.ask(prompt, max_tokens)
            assert (None, 0) == (answer.error, answer.cached)
            self._known[key] = answer.tokens
        return self._known[key]

    def seconds(self, prompt: list[int], *, model: str = "llama") -> float:
        """Return how long the engine computes *prompt* until its first token; the shorter time of two."""
        engine = self._engines[model].wait_up()
        times = []
        for _ in range(2):
            assert engine.reset()
            times.append(engine.ask(prompt, 1).first_s or 0.0)
        return min(times)

    def answers(self, prompts: Prompts, *, model: str = "llama") -> dict[str, list[int]]:
        """Return the answers to several prompts by name."""
        return {name: self.answer(prompt, model=model) for name, prompt in prompts.items()}


class Scene:
    """An engine on a pool that was started by `kvpool serve`, and what it should answer."""

    def __init__(
        self, pool: Pool, engine: Engine, reference: Reference, *, model: str = "llama", ranks: int = 1
    ) -> None:
        self.pool = pool
        self.engine = engine
        self.reference = reference
        self.model = model
        self.clients = ranks + 1  # and the scheduler
        self.objects_of: dict[str, list[Path]] = {}
        #: Tokens that the connector supplied in the last :meth:`fresh`, as the engine counts them.
        self.external = 0

    def restart(self, *, faults: dict[str, Any] | None = None, **settings: Any) -> None:
        """Restart the pool with other settings; return when the engine uses the new one."""
        self.pool.stop()
        self.start(faults=faults, **settings)

    def start(self, *, faults: dict[str, Any] | None = None, **settings: Any) -> None:
        """Start the pool; return when the engine uses it."""
        self.pool.configure(**settings)
        self.pool.start(faults=faults)
        self.wait_attached()

    def wait_attached(self) -> None:
        """Return when the engine uses the pool; it is kept busy: an idle scheduler does nothing, nor looks for one."""

        def attached() -> bool:
            self.engine.ask(tokens(0, 8), 1)
            return self.pool.attached() >= self.clients

        wait_until(attached, "the engine uses the new pool")

    def fresh(self, prompts: Prompts) -> dict[str, Answer]:
        """Empty the engine's own cache and ask; what is not computed then came from the pool."""
        return self.fresh_of(lambda _: prompts)[1]

    def fresh_of(self, make: Callable[[int], Prompts]) -> tuple[Prompts, dict[str, Answer]]:
        """Do as :meth:`fresh` with the prompts that *make* gives for attempt number 0, 1, …; return those too."""

        def ask(attempt: int) -> tuple[Prompts, dict[str, Answer]]:
            prompts = make(attempt)
            external = self.engine.external_tokens()
            answers = self.engine.generate(prompts)
            self.external = self.engine.external_tokens() - external
            return prompts, answers

        return self.in_time(ask)

    def in_time(self, act: Callable[[int], T]) -> T:
        """
        Return what *act* returns, with the engine's own cache emptied before.

        It acts again where the pool's answer came after the time that a scheduler waits for it (50 ms): then a hit is a
        miss by design, and on a busy machine that happens.
        """
        for attempt in range(ATTEMPTS):
            late = self.late()
            assert self.engine.reset()
            result = act(attempt)
            if late == self.late():
                break
        return result

    def situation(self) -> dict[str, object]:
        """Return what the pool's processes count, for the message of a failed check."""
        rows = self.pool.rows()
        return {f"{row.get(facts.ROLE)} {index}": {k: v for k, v in row.items() if v} for index, row in enumerate(rows)}

    def late(self) -> int:
        """Return how many announcements of the engine were answered too late."""
        self.pool.rows()
        self.engine.ask(tokens(0, 8), 1)  # a scheduler answers what it was asked when it schedules
        rows = [row for row in self.pool.rows() if row.get(facts.ROLE) == facts.SCHEDULER_CLIENT]
        return sum(int(row.get(facts.ANSWERS_LATE, 0)) for row in rows)

    def store(self, prompts: Prompts, *, objects_per_chunk: int = 1) -> None:
        """Ask each prompt alone, wait for its objects, and remember which they are."""
        for name, prompt in prompts.items():
            before = self.pool.objects()
            answer = self.engine.ask(prompt)
            assert (0, self.reference.answer(prompt, model=self.model)) == (answer.cached, answer.tokens)
            # The last step's stores are submitted by the step after it.
            self.engine.ask(tokens(0, 8), 2)
            after = self.pool.wait_objects(len(before) + chunks(prompt) * objects_per_chunk)
            self.objects_of[name] = sorted(set(after) - set(before))

    def check(self, prompts: Prompts, loaded: Mapping[str, int]) -> None:
        """Assert that answers equal those without kvpool, and that *loaded* tokens of each came from the pool."""
        self.check_of(lambda _: prompts, loaded)

    def check_of(self, make: Callable[[int], Prompts], loaded: Mapping[str, int]) -> Prompts:
        """Assert what :meth:`check` does of the prompts that *make* gives (see :meth:`fresh_of`); return those."""
        prompts, answers = self.fresh_of(make)
        expected = self.reference.answers(prompts, model=self.model)
        assert expected == {name: answer.tokens for name, answer in answers.items()}
        assert dict(loaded) == {name: answer.cached for name, answer in answers.items()}, self.situation()
        assert sum(loaded.values()) == self.external
        return prompts

    def check_with_control(self, prompts: Prompts, loaded: Mapping[str, int]) -> None:
        """Assert what :meth:`check` does, and that the same run on altered bytes differs for every prompt."""
        self.check(prompts, loaded)
        self.check_control(prompts, loaded)

    def check_control(self, prompts: Prompts, loaded: Mapping[str, int]) -> None:
        """Assert that answers from altered bytes differ, for every prompt of which anything is loaded."""
        prompts = {name: prompt for name, prompt in prompts.items() if loaded[name]}
        expected = self.reference.answers(prompts, model=self.model)
        self.pool.stop()
        with altered(self.pool):
            self.start(verify=False)
            answers = self.fresh(prompts)
            situation = self.situation()
            self.pool.stop()
        self.start(verify=True)
        assert self.engine.reset()
        counts = {name: answer.cached for name, answer in answers.items()}
        assert [] == [name for name, count in counts.items() if count < loaded[name]], (counts, situation)
        equal = [name for name, answer in answers.items() if answer.tokens == expected[name]]
        assert [] == equal, "answers did not depend on the bytes that were loaded"
