"""Damages run folders, and checks what every command makes of them:

    python -m tests.fuzz.run_folders --cases 10000 --workers 2
    python -m tests.fuzz.run_folders --first 4711 --cases 1 --verbose

A case is known by its number (and `--seed`). Prints each fault with the command that repeats it. Exit codes: 0 no
fault, 1 some.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from omni_async.cli import main as report
from tests.fuzz.damaged_runs import (
    Case,
    Played,
    be_quick,
    build,
    forbidden,
    play,
    simulate_known_once,
    watch_over,
)

_BATCH = 50  # cases of a process


@dataclass(frozen=True)
class Result:
    """Outcome of a case."""

    case: Case
    played: list[Played]
    problems: list[str]


def cases(given: argparse.Namespace) -> Iterator[Result]:
    """Play the cases of the command line in forked processes, and yield their results as they end."""
    top = Path(tempfile.mkdtemp(prefix="omni-async-fuzz-"))
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    try:
        base = top / "base"
        _in_child(lambda: build(base))
        if given.quick:
            be_quick()
        usual = _usual(base, top)
        numbers = range(given.first, given.first + given.cases)
        todo = [Case.of(base, given.seed, number, given.quick) for number in numbers]
        if given.only:
            todo = [replace(case, commands=(given.only,)) for case in todo if given.only in case.commands]
        yield from _all(top, base, todo, usual, given)
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _all(
    top: Path, base: Path, todo: list[Case], usual: dict[str, Played], given: argparse.Namespace
) -> Iterator[Result]:
    waiting = [todo[at : at + _BATCH] for at in range(0, len(todo), _BATCH)][::-1]
    running: dict[int, tuple[list[Case], Path]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < given.workers:
                batch = waiting.pop()
                slot = Path(tempfile.mkdtemp(prefix="slot-", dir=top))
                running[_fork(slot, base, batch, given.wall)] = batch, slot
            pid, status = os.wait()
            if pid not in running:
                continue
            batch, slot = running.pop(pid)
            results, log = _read(slot)
            for case, played in zip(batch, results, strict=False):
                yield Result(case, played, [*forbidden(played, usual, given.cpu)])
            if left := batch[len(results) :]:
                how = f"signal {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "was ended"
                yield Result(left[0], [], [f"{how} (hung, or used too much): {_place_in(log)}"])
                if left[1:]:
                    waiting.append(left[1:])
            shutil.rmtree(slot, ignore_errors=True)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _place_in(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line[2:] for line in lines if line.startswith("> ")]
    last = log.rpartition("(most recent call first):")[2].splitlines()  # the first thread
    frames = [line.strip().replace('File "', "").replace('", line ', ":") for line in last if " File " in line]
    return f"{' then '.join(told[-3:])}: {' < '.join(frames[:8])}"


def _fork(slot: Path, base: Path, batch: Sequence[Case], wall_s: float) -> int:
    """Play a batch in a child. A line of `slot`/results is a case; the child's last action is in `slot`/log."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    log = slot / "log"
    with log.open("a", buffering=1) as told, (slot / "results").open("a", buffering=1) as results:
        try:
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nowhere, descriptor)
            for number, case in enumerate(batch):
                told.truncate(0)
                watch_over(log, wall_s)
                where = slot / f"case-{number}"
                where.mkdir()
                played = play(base, where, case, lambda text: told.write(f"> {text}\n"))
                results.write(json.dumps([asdict(one) for one in played]) + "\n")
                shutil.rmtree(where, ignore_errors=True)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 (the parent reads it)
            told.write(f"> the harness itself: {error!r}\n")
        finally:
            os._exit(1)


def _read(slot: Path) -> tuple[list[list[Played]], str]:
    lines, log = ((slot / name).read_text(errors="replace") for name in ("results", "log"))
    return [[Played(**one) for one in json.loads(line)] for line in lines.splitlines()], log


def _in_child(work: Callable[[], object]) -> None:
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            work()
            os._exit(0)
        os._exit(1)
    if os.waitpid(pid, 0)[1]:
        raise AssertionError("the harness cannot make its runs, or play the undamaged one")


def _usual(base: Path, top: Path) -> dict[str, Played]:
    """Return what the commands need for the undamaged folder, and import here what they import late.

    They run in a child: threads that one begins would be missing in a child of its process."""
    with contextlib.redirect_stdout(io.StringIO()):  # begins no thread
        simulate_known_once()
        for run in (base / "runs").iterdir():
            report(["report", str(run), "--out", str(top / "report.html")])
    told, before = top / "usual", {*sys.modules}

    def twice() -> None:
        for where in (top / "first", top / "second"):
            where.mkdir()
            played = play(base, where, None)
        told.write_text(json.dumps([[asdict(one) for one in played], [*sys.modules]]))

    _in_child(twice)
    played, modules = json.loads(told.read_text())
    for name in modules:
        if name not in before and name != "__mp_main__":
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    usual = {one["command"]: Played(**one) for one in played}
    broken = {name: one.problems for name, one in usual.items() if one.problems or one.outcome != "used"}
    if broken:
        raise AssertionError(f"the undamaged folder: {broken}")
    return usual


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run_folders", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("--cases", type=int, default=300, help="how many (default: 300)")
    add("--first", type=int, default=0, help="number of the first (default: 0)")
    add("--seed", type=int, default=0, help="of which the cases are drawn (default: 0)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    add("--wall", type=float, default=20.0, help="seconds after which a case hangs (default: 20)")
    add("--cpu", type=float, default=2.0, help="seconds of the processor above the undamaged folder (default: 2)")
    add("--quick", action="store_true", help="one command of a case in place of two; draw with no model, train nothing")
    add("--only", default="", metavar="COMMAND", help="the cases of this command")
    add("--verbose", action="store_true", help="show every case")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and its children with it
    began, done, faults = time.monotonic(), 0, 0
    for result in cases(given):
        done += 1
        case = result.case
        if result.problems:
            faults += 1
            again = f"python -m tests.fuzz.run_folders --seed {case.seed} --first {case.number} --cases 1"
            problems = "".join(f"  {one}\n" for one in result.problems)
            _print(f"\nFAULT {case}\n{problems}  again: {again}")
        elif given.verbose:
            outcomes = (f"{one.command} {one.outcome} {one.cpu_s:.2f} s {one.grown >> 20} MiB" for one in result.played)
            _print(f"{case}: {', '.join(outcomes)}")
        if done % 500 == 0:
            _print(f"-- {done} of {given.cases}, {faults} faults, {time.monotonic() - began:.0f} s")
    _print(f"{done} cases, {faults} faults, {time.monotonic() - began:.0f} s")
    return int(faults > 0)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
