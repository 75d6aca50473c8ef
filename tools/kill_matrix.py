"""
The kill matrix at length: every process killed with SIGKILL in every phase, with several seeds.

    python tools/kill_matrix.py [--seeds N] [--first SEED] [--phase PHASE] [--victim VICTIM] [--throttled]

Prints a table of victims and phases: how often a cell held, and the median seconds until the pool served again; then
what broke, with the seed. Exit code 0: every cell held; 1: some did not; 2: it cannot run here.

Covers: what `tests/process/kill_matrix.py` says. `--throttled` has the drives on a device that the kernel slows, so
that reads and writes outlive the killed process (needs root; see `tests/process/kill_throttle.py`).
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.process.kill_matrix import CAPACITY_BYTES, PHASES, VICTIMS, Cell, Outcome, World, cells  # noqa: E402
from tests.process.kill_throttle import ThrottledDrive, why_not  # noqa: E402 - found from the line above


class Results:
    """What became of the cells."""

    def __init__(self) -> None:
        self.held: defaultdict[tuple[str, str], list[Outcome]] = defaultdict(list)
        self.broken: list[tuple[str, str, str]] = []

    def table(self) -> Table:
        """Return victims by phases: cells that held of all, and the median seconds until the pool served again."""
        table = Table("phase", *VICTIMS, title="cells that held / run, median seconds until served again")
        for phase in PHASES:
            table.add_row(phase, *(self._entry(victim, phase) for victim in VICTIMS))
        return table

    def _entry(self, victim: str, phase: str) -> str:
        held = self.held[victim, phase]
        run = len(held) + sum((victim, phase) == broken[:2] for broken in self.broken)
        if not run:
            return ""
        seconds = f"  {statistics.median(outcome.recovered_s for outcome in held):.1f} s" if held else ""
        return f"{len(held)}/{run}{seconds}"


def run_world(wanted: list[Cell], *, bounded: bool, throttled: bool, results: Results, advance: Progress) -> None:
    """Run cells in one world; after a broken one its pool is not used again, and the rest gets another."""
    while wanted:
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-kill-")))
            drive = stack.enter_context(ThrottledDrive(directory)) if throttled else None
            capacity_bytes = CAPACITY_BYTES if bounded else 0
            roots = drive.root if drive else None
            world = World(directory, capacity_bytes=capacity_bytes, slow=drive, roots=roots)
            stack.callback(world.close)
            cell = wanted[0]
            try:
                world.prepare()
                while wanted:
                    cell = wanted.pop(0)
                    advance.update(advance.task_ids[0], description=str(cell))
                    results.held[cell.victim, cell.phase].append(world.run(cell))
                    advance.advance(advance.task_ids[0])
                world.finish()
            except AssertionError as error:
                results.broken.append((cell.victim, cell.phase, str(error)))
                advance.advance(advance.task_ids[0])


def main() -> int:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description="Kill every process of a pool in every phase.")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every cell")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--phase", choices=tuple(PHASES), help="this phase only")
    parser.add_argument("--victim", choices=VICTIMS, help="this process only")
    parser.add_argument("--throttled", action="store_true", help="on a drive that the kernel slows")
    options = parser.parse_args()
    console = Console()
    if options.throttled and why_not():
        console.print(f"a throttled drive cannot be had here: {why_not()}")
        return 2
    plan = [
        (bounded, [cell for cell in cells(seed, bounded=bounded)
                   if options.phase in (None, cell.phase) and options.victim in (None, cell.victim)])
        for seed in range(options.first, options.first + options.seeds)
        for bounded in (False, True)
    ]  # fmt: skip
    results, began = Results(), time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        progress.add_task("", total=sum(len(wanted) for _, wanted in plan))
        for bounded, wanted in plan:
            run_world(wanted, bounded=bounded, throttled=options.throttled, results=results, advance=progress)
    console.print(results.table())
    for _, _, what in results.broken:
        console.print(f"broken: {what}", markup=False)
    cell_count = sum(map(len, results.held.values()))
    console.print(f"{cell_count} cells held, {len(results.broken)} broken, in {time.monotonic() - began:.0f} s")
    return 1 if results.broken else 0


if __name__ == "__main__":
    sys.exit(main())
