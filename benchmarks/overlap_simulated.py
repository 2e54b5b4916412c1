"""Compares the law's limit with the control plane's result in virtual time, for every emulated recipe.

In step, with staleness budgets, and with groups admitted just in time against every slot filled at once.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from msgspec.structs import replace

from benchmarks.arguments import EMULATED, add_emulated, command_parser, parse_emulated
from omni_async.config import Config, load
from omni_async.performance.profile import Profile, load_profile
from omni_async.simulation.result import Simulated
from omni_async.simulation.simulate import simulate
from omni_async.simulation.sweep import scheduled, with_budget

_BUDGETS = (1, 2)
_CAP = 8  # S of the last columns
_UPDATES, _IN_STEP_UPDATES = 200, 40
_HELP = """\
Every emulated recipe on the simulator: seconds per update against the law's, in step and with S = 1 and 2, several
seeds of the service times. The last columns have S = 8: mean staleness with every slot filled at once
(staleness.reserve=all) and just in time (auto), and the throughput of the latter relative to the former.

  python -m benchmarks.overlap_simulated                      # all recipes, five seeds: about six minutes of one core
  python -m benchmarks.overlap_simulated remote_judge --seeds 9

Printed is a markdown table: medians, with the lowest and the highest of the seeds.
"""
_COLUMNS = ("profile", "in step: law s", "simulated s", "law / simulated")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("overlap_simulated", _HELP)
    add_emulated(parser)
    parser.add_argument("--seeds", type=int, default=5, help="of the service times (default: 5)")
    options = parse_emulated(parser, arguments)
    if options.seeds < 1:
        parser.error("--seeds: expected at least 1")
    columns = [*_COLUMNS]
    for budget in _BUDGETS:
        columns += [f"S = {budget}: law s", "simulated s", "bound fraction", "mean staleness"]
    columns += [f"S = {_CAP}: staleness, all", "just in time", "throughput"]
    print_row(columns)
    print_row(["---", *("---:" for _ in columns[1:])])
    for name in options.recipes:
        print_row(row(name, options.seeds))
    return 0


def print_row(cells: Sequence[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def row(name: str, seeds: int) -> list[str]:
    config = load(EMULATED / f"{name}.yaml")
    assert config.emulation is not None, "a recipe of the folder has a profile"
    profile = load_profile(config.emulation.profile)
    in_step = _simulated(scheduled(config, "sync"), profile, _IN_STEP_UPDATES, seeds)
    cells = [
        f"`{name}`",
        f"{in_step[0].law_s:.4g}",
        _spread([s.step_s for s in in_step], ".4g"),
        f"{_bound(in_step):.3f}",
    ]
    for budget in _BUDGETS:
        found = _simulated(with_budget(config, budget), profile, _UPDATES, seeds)
        bound, age = [s.bound_fraction for s in found], statistics.median(s.staleness_mean for s in found)
        cells += [
            f"{found[0].law_s:.4g}",
            _spread([s.step_s for s in found], ".4g"),
            _spread(bound, ".3f"),
            f"{age:.2f}",
        ]
    widest = with_budget(config, _CAP)
    arms = [replace(widest, staleness=replace(widest.staleness, reserve=reserve)) for reserve in ("all", "auto")]
    eager, timely = (_simulated(arm, profile, _UPDATES, seeds) for arm in arms)
    cells += [f"{statistics.median(s.staleness_mean for s in found):.2f}" for found in (eager, timely)]
    ratios = [one.step_s / two.step_s for one, two in zip(eager, timely, strict=True)]
    return [*cells, _spread(ratios, ".3f")]


def _simulated(config: Config, profile: Profile, updates: int, seeds: int) -> list[Simulated]:
    return [simulate(config, profile, updates=updates, seed=seed) for seed in range(seeds)]


def _bound(found: Sequence[Simulated]) -> float:
    return statistics.median(s.bound_fraction for s in found)


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main())
