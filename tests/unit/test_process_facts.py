"""Facts that the kernel tells of a process, looked up for this one and for one that is gone."""

import os
import subprocess
import sys
import time

from kvpool.health import facts, process_facts


def test_this_process_has_every_fact() -> None:
    seen = process_facts.sample([os.getpid()], interval_s=0.05)[os.getpid()]
    expected = {
        facts.UPTIME_S,
        facts.CPU_PERCENT,
        facts.CPU_S,
        facts.MEMORY_BYTES,
        facts.DESCRIPTORS,
        facts.THREADS,
        facts.READ_BYTES,
        facts.WRITTEN_BYTES,
    }
    assert expected == set(seen)
    assert all(isinstance(value, int | float) and value >= 0 for value in seen.values())


def test_a_process_that_is_gone_has_no_facts() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert {} == process_facts.sample([child.pid], interval_s=0.01)
    assert process_facts.cpu_seconds(child.pid) is None


def test_a_sleeping_process_uses_no_cpu_and_a_running_one_does() -> None:
    script = "import sys; print(1, flush=True); sys.stdin.read() if len(sys.argv) == 1 else None\nwhile True: pass"
    children = [
        subprocess.Popen([sys.executable, "-c", script, *more], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for more in ([], ["run"])
    ]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline()
        seen = process_facts.sample([child.pid for child in children], interval_s=0.2)
        asleep, running = (float(seen[child.pid][facts.CPU_PERCENT]) for child in children)
        assert asleep < 5 < running
    finally:
        for child in children:
            child.kill()
            child.communicate()


def test_the_cpu_clock_is_finer_than_a_tick() -> None:
    first = process_facts.cpu_seconds(os.getpid())
    until = time.process_time() + 0.002
    while time.process_time() < until:
        pass
    second = process_facts.cpu_seconds(os.getpid())
    assert first is not None and second is not None
    assert 0.002 <= second - first < 0.01
