"""
Facts about a process that the kernel knows: CPU, memory, descriptors, threads, bytes moved.

Covers: reading them with psutil, for any process of the same user, over one sampling interval.
Does not cover: what a process knows of itself (`wire.messages.Report`), what it means (`checks`).

A process that is gone, or that may not be looked at, has no facts: absent, never an exception.
"""

import time
from collections.abc import Iterable

import psutil

from kvpool.health import facts
from kvpool.health.facts import Facts


def cpu_seconds(pid: int) -> float | None:
    """
    Return user and system seconds of a process, of all its threads, exited ones too, or None if it is gone.

    Source: the kernel's per-process CPU clock, whose id is made from the pid (clock_getcpuclockid(3));
    /proc/PID/stat counts in ticks of 10 ms, too coarse for a second of work.
    """
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return None


def snapshot(pid: int) -> Facts:
    """Return what the kernel says of *pid* now; without `cpu_percent`, which takes an interval."""
    found: Facts = {}
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            memory = process.memory_info()
            found[facts.UPTIME_S] = round(time.time() - process.create_time(), 3)
            found[facts.MEMORY_BYTES] = memory.rss - memory.shared
            found[facts.THREADS] = process.num_threads()
        found[facts.DESCRIPTORS] = process.num_fds()
        moved = process.io_counters()
        found[facts.READ_BYTES], found[facts.WRITTEN_BYTES] = moved.read_bytes, moved.write_bytes
    except psutil.Error:
        pass  # gone or not ours: what was read so far is still true
    seconds = cpu_seconds(pid)
    if seconds is not None:
        found[facts.CPU_S] = seconds
    return found


def sample(pids: Iterable[int], *, interval_s: float) -> dict[int, Facts]:
    """
    Return the facts of each process that exists, `cpu_percent` over *interval_s* among them.

    Sleeps once for the interval, however many processes there are.
    """
    before = {pid: (time.monotonic(), cpu_seconds(pid)) for pid in pids}
    time.sleep(interval_s)
    sampled: dict[int, Facts] = {}
    for pid, (then, seconds) in before.items():
        found = snapshot(pid)
        now = time.monotonic()
        cpu_now = found.get(facts.CPU_S)
        if seconds is not None and isinstance(cpu_now, float):
            found[facts.CPU_PERCENT] = round(100 * (cpu_now - seconds) / (now - then), 2)
        if found:
            sampled[pid] = found
    return sampled
