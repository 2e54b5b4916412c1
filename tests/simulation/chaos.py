"""Replays schedules: `python tests/simulation/chaos.py --seed N --trace`, or hunts: `--start N --schedules 100000`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from chaos_job import draw
from chaos_world import World


class ScheduleFailed(AssertionError):
    """A schedule that failed: its seed, why, and how to see it again."""


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """Leaves existing objects out of collections, which would walk through all of torch each time. Only within the
    block, not to the end of the process: libraries whose objects are never collected report them as leaks, a hundred
    lines of them."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def play(seed: int, trace: bool = False) -> World:
    world = World(draw(seed), trace)
    try:
        return world.run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ScheduleFailed(
            f"seed {seed}: {type(error).__name__}: {error}\nreplay it with: python tests/simulation/chaos.py --seed"
            f" {seed} --trace"
        ) from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="one schedule")
    parser.add_argument("--trace", action="store_true", help="print every message")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--keep-going", action="store_true", help="count failures instead of ending at the first")
    asked = parser.parse_args()
    seen: Counter[str] = Counter()
    began, failures = time.perf_counter(), 0
    seeds = [asked.seed] if asked.seed is not None else range(asked.start, asked.start + asked.schedules)
    with frozen():
        for number, seed in enumerate(seeds, start=1):
            try:
                world = play(seed, asked.trace)
            except ScheduleFailed as failure:
                if asked.seed is not None and not asked.keep_going:
                    raise
                failures += 1
                if not asked.keep_going:
                    sys.stdout.write(f"after {number} schedules: {failure}\n")
                    return 1
                sys.stdout.write(f"{failure}\n".splitlines(keepends=True)[0])
                continue
            seen.update({what: 1 for what, times in world.seen.items() if times})
            seen["messages"] += world.messages
    sys.stdout.writelines(f"{times:8d}  {what}\n" for what, times in sorted(seen.items()))
    sys.stdout.write(f"{len(seeds)} schedules, {failures} failed, {time.perf_counter() - began:.1f} s\n")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
