"""Measures the gain of overlap on every shipped profile, and prints one table.

Runs `omni-async bench overlap` for each emulated recipe. Real Ray actors, buffers and payloads; the devices replay the
profile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import EMULATED, add_emulated, command_parser, parse_emulated
from omni_async.commands.bench.comparison import ArmSummary, compare
from omni_async.commands.bench.overlap import run_overlap
from omni_async.commands.bench.result import Overlap, Spread
from omni_async.config import ConfigError
from omni_async.config.writing import write_atomic

_BASELINE, _ASYNC = "sync", "async:2"
_HELP = """\
Every emulated recipe in step and with S = 2, in turns on a local Ray: measured against the law, and against the
simulator.

  python -m benchmarks.overlap_profiles                                  # all recipes, five repeats: about an hour
  python -m benchmarks.overlap_profiles remote_judge wan22_dance --repeats 3

Complete results in OUT are kept: the same command continues after Ctrl-C. OUT gets profiles.md (also printed), and per
recipe overlap.json, overlap.html, overlap.md and overlap.png.

Exit codes: 0 done, 1 a run failed, 2 wrong usage, 130 interrupted.
"""
_COLUMNS = (
    "profile",
    "sync: law s",
    "measured s",
    "of the law",
    "async, S = 2: law s",
    "measured s (quartiles)",
    "bound fraction",
    "speed-up: law",
    "measured (quartiles)",
    "of the law's",
    "simulated / measured - 1: sync",
    "async",
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("overlap_profiles", _HELP)
    add_emulated(parser)
    parser.add_argument("--repeats", type=int, default=5, help="rounds, each with one run of either arm (default: 5)")
    parser.add_argument("--steps", type=int, default=6, help="updates measured in a run (default: 6)")
    parser.add_argument("--out", type=Path, default=Path("runs/overlap-profiles"))
    options = parse_emulated(parser, arguments)
    if min(options.repeats, options.steps) < 1:
        parser.error("--repeats and --steps: expected at least 1")
    found: dict[str, Overlap] = {}
    try:
        for name in options.recipes:
            found[name] = run_overlap(
                EMULATED / f"{name}.yaml",
                out=options.out / name,
                repeats=options.repeats,
                steps=options.steps,
                arms=(_BASELINE, _ASYNC),
            )
    except ConfigError as error:
        sys.stderr.write(f"overlap_profiles: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted; the same command continues with what is missing in {options.out}\n")
        return 130
    text = markdown(found)
    write_atomic(options.out / "profiles.md", text.encode())
    sys.stdout.write(text)
    return 1 if any(overlap.failed for overlap in found.values()) else 0


def markdown(found: dict[str, Overlap]) -> str:
    """Return a row per recipe; a recipe is omitted unless both arms finished in some round."""
    rows = [_COLUMNS, ("---", *("---:" for _ in _COLUMNS[1:]))]
    for name, overlap in found.items():
        summaries = compare(overlap)
        if _ASYNC in summaries and _BASELINE in summaries[_ASYNC].speedups:  # they share a round
            rows.append((name, *_cells(summaries[_BASELINE], summaries[_ASYNC])))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(before: ArmSummary, after: ArmSummary) -> list[str]:
    if before.law_s is None or after.law_s is None:
        raise ValueError("emulated devices have a law")
    law, measured = before.law_s / after.law_s, after.speedups[_BASELINE].ratio
    return [
        f"{before.law_s:.3g}",
        f"{before.step_s.median:.3g}",
        f"{before.law_s / before.step_s.median:.3f}",
        f"{after.law_s:.3g}",
        _spread(after.step_s),
        f"{after.law_s / after.step_s.median:.3f}",
        f"{law:.2f}",
        _spread(measured),
        f"{measured.median / law:.3f}",
        *("-" if summary.deviation is None else f"{100 * summary.deviation:+.1f} %" for summary in (before, after)),
    ]


def _spread(values: Spread) -> str:
    return f"{values.median:.3g} ({values.low:.3g} to {values.high:.3g})"


if __name__ == "__main__":
    sys.exit(main())
