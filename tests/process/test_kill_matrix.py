"""Every process killed in every phase: no wrong byte, no hang, nothing left, and serving resumes by itself."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.process.kill_matrix import BASE, CAPACITY_BYTES, PHASE_S, PHASES, VICTIMS, World, cells
from tests.process.kill_throttle import ThrottledDrive, why_not

SEEDS = range(2, 7)
#: Eight reads of 106,496 bytes at 128 KiB/s take so long, about.
READS_S = 7.0
#: Cells on a throttled drive, whose reads and writes are under way in the kernel when their process dies.
IN_KERNEL = ("reading", "writing")


def run(world: World, seed: int, *, phases: tuple[str, ...] = tuple(PHASES)) -> None:
    """Run all cells of these phases in one world; a broken promise names its cell."""
    try:
        world.prepare()
        for cell in cells(seed, bounded=world.bounded):
            if cell.phase in phases:
                world.run(cell)
        world.finish()
    finally:
        world.close()


def test_the_matrix_has_every_phase_and_every_victim() -> None:
    every = {(cell.victim, cell.phase) for bounded in (False, True) for cell in cells(1, bounded=bounded)}
    assert {(victim, phase) for victim in VICTIMS for phase in PHASES} == every
    assert 40 == len(every)


@pytest.mark.timeout(300)
def test_a_kill_in_any_phase_costs_no_byte_and_no_hang(tmp_path: Path) -> None:
    run(World(tmp_path), 1)


@pytest.mark.timeout(300)
def test_a_kill_while_keys_are_evicted_costs_no_byte_and_no_hang(tmp_path: Path) -> None:
    run(World(tmp_path, capacity_bytes=CAPACITY_BYTES), 1)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("capacity_bytes", [0, CAPACITY_BYTES])
def test_a_kill_at_other_moments_costs_no_byte_and_no_hang(tmp_path: Path, seed: int, capacity_bytes: int) -> None:
    run(World(tmp_path, capacity_bytes=capacity_bytes), seed)


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_kill_on_a_drive_that_the_kernel_slows_costs_no_byte_and_no_hang(tmp_path: Path) -> None:
    with ThrottledDrive(tmp_path) as drive:
        run(World(tmp_path, slow=drive, roots=drive.root), 1, phases=IN_KERNEL)


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_reads_that_outlive_their_worker_change_no_slot_that_somebody_else_has(tmp_path: Path) -> None:
    with ThrottledDrive(tmp_path, bytes_per_s=128 << 10, writes=False) as drive:
        world = World(tmp_path, slow=drive, roots=drive.root, cache="lru")
        try:
            world.prepare()
            workers = [row["pid"] for row in world.workers()]
            for pid in workers:  # what was stored is no longer in staging
                os.kill(pid, signal.SIGKILL)
            world.serves(world.b, BASE[:2])
            drive.on()
            world.submit(world.a, "load", BASE[2:])
            world.wait(lambda: world.told("in_flight_reads") >= 8, PHASE_S, "reads of both workers in the kernel")
            for row in world.workers():
                os.kill(row["pid"], signal.SIGKILL)
            killed = time.monotonic()
            world.stores(world.b, lambda: world.fresh(8))
            held_s = time.monotonic() - killed
            kept = world.fresh(160)
            for first in range(0, len(kept), 20):
                world.end_of(world.b, world.submit(world.b, "store", kept[first : first + 20]))
            while time.monotonic() - killed < READS_S:  # from staging: `World.pump` looks at every byte
                world.end_of(world.b, world.submit(world.b, "load", kept))
                world.rest(0.1)
            assert held_s > READS_S / 4, "the reads of the dead went on, and their slots waited for them"
        finally:
            world.close()
