"""Faults on purpose: as probable as asked, the same for the same seed, refused when misspelt."""

import errno
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.io.faults import Faults, FaultSettings


def test_without_settings_nothing_goes_wrong():
    faults = Faults(FaultSettings())
    assert [0, 0, 0] == [faults.open_errno(), faults.read_errno(), faults.write_errno()]
    assert 8192 == faults.read_bytes(8192)
    assert 5 == faults.due_ns("read", 10, 5)


def test_the_same_seed_gives_the_same_faults():
    one, other = (Faults(FaultSettings(seed=5, read_error=0.5)) for _ in range(2))
    first = [one.read_errno() for _ in range(100)]
    assert first == [other.read_errno() for _ in range(100)]
    assert {0, errno.EIO} == set(first)


def test_a_short_read_brings_whole_pages_and_less_than_all():
    faults = Faults(FaultSettings(short_read=1))
    brought = {faults.read_bytes(5 * 4096) for _ in range(200)}
    assert {4096, 8192, 12288, 16384} == brought
    assert 4096 == faults.read_bytes(4096)


def test_a_bandwidth_is_shared_by_the_requests_of_one_direction():
    faults = Faults(FaultSettings(read_bytes_per_s=1000))
    assert [10**9, 2 * 10**9] == [faults.due_ns("read", 1000, 0) for _ in range(2)]
    assert 3 == faults.due_ns("write", 1000, 3)
    assert 11 * 10**9 == faults.due_ns("read", 1000, 10 * 10**9)


def test_a_device_of_known_speed_gets_slower_while_its_fault_lasts(tmp_path: Path) -> None:
    flag = tmp_path / "slow"
    faults = Faults(FaultSettings(bytes_per_s=1000, read_bytes_per_s=100, while_exists=str(flag)))
    assert 10**9 == faults.due_ns("read", 1000, 0)
    flag.touch()
    assert 11 * 10**9 == faults.due_ns("read", 1000, 0)
    assert 10**9 == faults.due_ns("write", 1000, 0)


def test_full_is_told_from_broken():
    assert errno.ENOSPC == Faults(FaultSettings(no_space=1, write_error=1)).write_errno()
    assert errno.EIO == Faults(FaultSettings(write_error=1)).write_errno()


def test_settings_come_as_json():
    assert FaultSettings(delay=0.5, delay_s=2) == Faults.from_json('{"delay": 0.5, "delay_s": 2}').settings


@pytest.mark.parametrize("text", ["", "{", '{"typo": 1}', '{"delay": "often"}'])
def test_what_is_no_setting_is_refused(text):
    with pytest.raises(ConfigError):
        Faults.from_json(text)
