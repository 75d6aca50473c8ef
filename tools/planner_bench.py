"""
Measure what planning costs the scheduler's thread: 64 waiting requests of 128 k tokens, always changing.

    python tools/planner_bench.py [--requests 64] [--tokens 131072] [--devices 4] [--steps 2000]

Each step is 5 ms of simulated time. In each, one request's residency has changed (its profile is made anew) and the
round under way goes on; speeds move every second (all tables are made anew). The time is that of the thread, so that
a busy machine does not count. Prints JSON.

Does not cover: reading residency from the scheduler client.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from kvpool.core.curves import Curve, Curves
from kvpool.core.planner import Ask, Load, Planner
from kvpool.core.prices import Prices, Scales
from kvpool.core.profiles import RESIDENT, Profile
from kvpool.core.rounds import Rounds

CHUNK_TOKENS = 256
STEP_NS = 5_000_000
_F = ((1024, 0.050), (4096, 0.105), (16384, 0.536), (32768, 1.309), (65536, 3.624), (131072, 11.0))


def _curves() -> Curves:
    line = [(tokens, 0.03 + tokens * 20e-6) for tokens, _ in _F]
    return Curves(Curve(0.03, _F), Curve(0.03, line), Curve(0.03, [(tokens, s / 8 + 0.03) for tokens, s in line]))


def measure(requests: int, tokens: int, devices: int, steps: int) -> dict[str, float]:
    """Return microseconds a step: mean, and the largest three."""
    prices = Prices(_curves(), CHUNK_TOKENS, device_count=devices)
    chunks = tokens // CHUNK_TOKENS - 1

    def ask(number: int, resident: int) -> Ask:
        places = [RESIDENT] * resident + [chunk % devices for chunk in range(resident, chunks)]
        return Ask(str(number), Profile(tokens, 0, places, chunk_tokens=CHUNK_TOKENS), preloading=True)

    asks = {str(number): ask(number, 0) for number in range(requests)}
    rounds, taken_us = Rounds(Planner()), []
    for step in range(steps):
        if step % 200 == 199:
            drive = 1.0 + 0.05 * (step // 200 % 2)
            prices.set_scales(Scales(1.0, 1.0, (drive,) * devices))
        changed = step % requests
        places = np.arange(chunks, dtype=np.int16) % devices
        places[: step % chunks] = RESIDENT
        start = time.thread_time_ns()
        asks[str(changed)].profile = Profile(tokens, 0, places, chunk_tokens=CHUNK_TOKENS)
        rounds.changed()
        rounds.step(lambda: asks, asks.get, lambda: Load(1.0, [0.5] * devices), prices, now_ns=step * STEP_NS)
        taken_us.append((time.thread_time_ns() - start) / 1000)
    largest = sorted(taken_us)[-3:]
    return {"mean_us": statistics.fmean(taken_us), **{f"max{3 - i}_us": value for i, value in enumerate(largest)}}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("requests", 64), ("tokens", 131072), ("devices", 4), ("steps", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    figures = measure(args.requests, args.tokens, args.devices, args.steps)
    print(json.dumps({"arguments": vars(args), "python": platform.python_version(), **figures}, indent=1))


if __name__ == "__main__":
    main()
