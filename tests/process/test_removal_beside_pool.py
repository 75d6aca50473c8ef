"""gc and purge beside a running pool: its index and its usage stay right."""

from pathlib import Path

import pytest

from kvpool.cli import main as cli
from kvpool.client.scheduler import Hit, Miss
from tests.process.pool_harness import wait_until
from tests.process.real_pool import RealPool, key_of, pump_until


@pytest.mark.parametrize("command", [["gc", "--to", "0B"], ["purge", "--model", "tiny", "--yes"]])
def test_what_a_command_removes_is_a_miss_at_once_and_counts_no_more(tmp_path: Path, command: list[str]) -> None:
    pool = RealPool(tmp_path, capacity_bytes=1 << 30)
    try:
        rank, scheduler = pool.start_rank(), pool.start_scheduler()
        pool.stored(rank, range(16))
        keys = [key_of(number) for number in range(16)]
        scheduler.announce("request", keys)
        pump_until(scheduler, lambda: all(isinstance(scheduler.lookup("request", key), Hit) for key in keys))
        used = wait_until(lambda: pool.told("used_bytes"))
        config = tmp_path / "pool.toml"
        devices = [f'[[device]]\nname = "{name}"\npath = "{tmp_path / name}"\n' for name in ("d0", "d1")]
        config.write_text(f'[pool]\nrun_dir = "{pool.run_dir}"\nstaging = "16MiB"\n' + "".join(devices))
        assert 0 == cli.main([command[0], "--config", str(config), *command[1:]])
        pump_until(scheduler, lambda: all(isinstance(scheduler.lookup("request", key), Miss) for key in keys), 5.0)
        wait_until(lambda: 0 == pool.told("index_objects"))
        wait_until(lambda: pool.told("used_bytes") < used / 4)
        assert () == pool.end_of(rank, pool.store(rank, range(16))).failed
        pump_until(scheduler, lambda: all(isinstance(scheduler.lookup("request", key), Hit) for key in keys))
    finally:
        pool.close()
