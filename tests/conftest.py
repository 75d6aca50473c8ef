"""
Leak guards for every test: what a test opened, named in /dev/shm, or started, it must have ended.

`no_names_in_shm` and `no_children` hold for every test. `open_descriptors` is asked for by name, since some
libraries open a descriptor at first use and keep it.
"""

import gc
import os
import time
from collections.abc import Iterator

import psutil
import pytest

_CHILDREN_WAIT_S = 5.0
_NAMES_WAIT_S = 1.0


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of this listing
            continue
    return found


@pytest.fixture
def open_descriptors() -> Iterator[None]:
    """The test leaves no descriptor open."""
    before = _descriptors()
    yield
    gc.collect()
    left = {fd: target for fd, target in _descriptors().items() if before.get(fd) != target}
    assert {} == left, "descriptors left open"


def _shm_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("kvpool")}


@pytest.fixture(autouse=True)
def no_names_in_shm() -> Iterator[None]:
    """The test leaves no name of ours in /dev/shm; other pools of this machine have names for a moment."""
    before = _shm_names()
    yield
    end = time.monotonic() + _NAMES_WAIT_S
    while (left := _shm_names() - before) and time.monotonic() < end:
        time.sleep(0.05)
    assert set() == left, "names left in /dev/shm"


@pytest.fixture(autouse=True)
def no_children() -> Iterator[None]:
    """The test leaves no child process; those that are ending get a moment to do so."""
    us = psutil.Process()
    before = set(us.children(recursive=True))
    yield
    new = [child for child in us.children(recursive=True) if child not in before]
    _, alive = psutil.wait_procs(new, timeout=_CHILDREN_WAIT_S)
    assert [] == [child for child in alive if not _is_helper(child)], "processes left"


def _is_helper(child: psutil.Process) -> bool:
    """The resource tracker of multiprocessing serves the whole test process and ends with it."""
    try:
        return "resource_tracker" in " ".join(child.cmdline())
    except psutil.Error:
        return True
