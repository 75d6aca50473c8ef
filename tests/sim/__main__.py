"""Run one schedule, or a range of them: `python -m tests.sim SEED [COUNT]`."""

import sys

from .world import run_seed


def main(arguments: list[str]) -> int:
    """Run and tell."""
    first = int(arguments[0])
    for seed in range(first, first + (int(arguments[1]) if len(arguments) > 1 else 1)):
        world = run_seed(seed)
        print(seed, world.kernel.happened, sorted(world.plan.faults), world.counts)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
