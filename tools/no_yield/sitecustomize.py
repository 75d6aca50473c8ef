"""
Let an engine on few cores wait by short sleeps where it would yield; put this folder on its PYTHONPATH.

Theory. vLLM's processes call `sched_yield` in a loop while they wait for each other, also with one rank. Linux 6.18
charges a task a whole slice for each yield, so that its virtual runtime, and with it that of whatever wakes up beside
it, runs ahead of the other tasks' by minutes: measured on two cores, a pool's processes stood runnable for up to 30 s.
Where every rank has a core to itself and others are free this does not show.
"""

import os
import time

#: Long enough that a core is free for others, short beside a step of the smallest model.
NAP_S = 50e-6


def _nap() -> None:
    time.sleep(NAP_S)


os.sched_yield = _nap
