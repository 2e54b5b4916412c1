"""Damages run folders, and checks what every command makes of them:

    python -m tests.fuzz.run_folders --cases 10000
    python -m tests.fuzz.run_folders --first 4711 --cases 1 --verbose

A case is known by its number (and `--seed`). Prints each fault with the command that repeats it. A case that hangs, or
uses too much of the processor or of memory, ends the process; the case and its place are the end of stderr. Exit codes:
0 no fault, others some.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from tests.fuzz.damaged_runs import (
    COMMANDS,
    Case,
    Played,
    be_quick,
    build,
    forbidden,
    play,
    simulate_known_once,
    watch_over,
)


def usual(base: Path, top: Path, commands: Sequence[str]) -> dict[str, Played]:
    """Return what the commands need for the undamaged folder, once everything is imported."""
    for where in (top / "first", top / "second"):
        where.mkdir()
        played = play(base, where, None, commands)
    broken = {one.command: one.problems for one in played if one.problems or one.outcome != "used"}
    if broken:
        raise AssertionError(f"the undamaged folder: {broken}")
    return {one.command: one for one in played}


def run(given: argparse.Namespace, top: Path, out: TextIO, log: TextIO) -> int:
    """Play the cases of the command line, and return how many have faults."""
    base, began, faults = top / "base", time.monotonic(), 0
    build(base)
    simulate_known_once()
    if given.quick:
        be_quick()
    needed = usual(base, top, [name for name in COMMANDS if name != "train" or not given.quick])
    for number in range(given.first, given.first + given.cases):
        case = Case.of(base, given.seed, number, given.quick)
        log.write(f"{case}: {', '.join(case.commands)}\n")
        watch_over(log, given.wall)
        (where := top / f"case-{number}").mkdir()
        played = play(base, where, case, case.commands)
        shutil.rmtree(where, ignore_errors=True)
        if problems := [*forbidden(played, needed, given.cpu)]:
            faults += 1
            again = f"again: python -m tests.fuzz.run_folders --seed {case.seed} --first {number} --cases 1"
            out.write("\n  ".join([f"\nFAULT {case}", *problems, again]) + "\n")
        elif given.verbose:
            outcomes = (f"{one.command} {one.outcome} {one.cpu_s:.2f} s {one.grown >> 20} MiB" for one in played)
            out.write(f"{case}: {', '.join(outcomes)}\n")
    out.write(f"{given.cases} cases, {faults} faults, {time.monotonic() - began:.0f} s\n")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run_folders", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--cases", type=int, default=300, help="how many (default: 300)")
    add("--first", type=int, default=0, help="number of the first (default: 0)")
    add("--seed", type=int, default=0, help="of which the cases are drawn (default: 0)")
    add("--wall", type=float, default=20.0, help="seconds after which a case hangs (default: 20)")
    add("--cpu", type=float, default=2.0, help="seconds of the processor above the undamaged folder (default: 2)")
    add("--quick", action="store_true", help="one command of a case in place of two; draw with no model, train nothing")
    add("--verbose", action="store_true", help="show every case")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    out, log = (os.fdopen(os.dup(descriptor), "w", buffering=1) for descriptor in (1, 2))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # of libraries, and of a damaged file that leads there
        os.dup2(nowhere, descriptor)
    top = Path(tempfile.mkdtemp(prefix="omni-async-fuzz-"))
    try:
        return int(run(given, top, out, log) > 0)
    except AssertionError as error:
        log.write(f"{error}\n")
        return 2
    finally:
        shutil.rmtree(top, ignore_errors=True)


if __name__ == "__main__":
    os._exit(main())  # a case may leave a thread that never ends
