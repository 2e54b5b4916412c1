"""Replays schedules: `python -m tests.simulation.chaos --seed N --trace`, or hunts: `--start N --schedules 100000`."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.simulation.chaos_job import draw
from tests.simulation.chaos_world import World


class ScheduleFailed(AssertionError):
    """A schedule that failed: its seed, why, and how to see it again."""


def play(seed: int, trace: bool = False) -> World:
    try:
        return World(draw(seed), trace).run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ScheduleFailed(
            f"seed {seed}: {type(error).__name__}: {error}\nreplay it with: python -m tests.simulation.chaos --seed"
            f" {seed} --trace"
        ) from error


def count(seeds: Iterable[int], trace: bool = False) -> Counter[str]:
    """Counts in how many schedules each thing happened, and messages. Raises at the first that fails.

    `gc.freeze` spares walks through all of torch; for the time of the call, since leaks would be reported after it."""
    seen: Counter[str] = Counter()
    gc.freeze()
    try:
        for seed in seeds:
            world = play(seed, trace)
            seen.update(what for what, times in world.seen.items() if times)
            seen.update({"schedules": 1, "messages": world.messages})
    finally:
        gc.unfreeze()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="one schedule")
    parser.add_argument("--trace", action="store_true", help="print every message")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=10_000)
    asked, began = parser.parse_args(), time.perf_counter()
    one = asked.seed is not None
    seen = count([asked.seed] if one else range(asked.start, asked.start + asked.schedules), asked.trace)
    sys.stdout.writelines(f"{times:8d}  {what}\n" for what, times in sorted(seen.items()))
    sys.stdout.write(f"{time.perf_counter() - began:.1f} s\n")


if __name__ == "__main__":
    main()
