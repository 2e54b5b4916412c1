"""Compares the law's limit with the control plane's result in virtual time, for every emulated recipe.

Both in step, and with staleness budgets.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from benchmarks.arguments import EMULATED, add_emulated, command_parser, parse_emulated
from omni_async.config import Config, load
from omni_async.performance.profile import Profile, load_profile
from omni_async.simulation.result import Simulated
from omni_async.simulation.simulate import simulate
from omni_async.simulation.sweep import scheduled, with_budget

_BUDGETS = (1, 2)
_UPDATES, _IN_STEP_UPDATES = 200, 40
_HELP = """\
Every emulated recipe on the simulator: seconds per update against the law's, in step and with S = 1 and 2, several
seeds of the service times.

  python -m benchmarks.overlap_simulated                      # all recipes, five seeds: about three minutes of one core
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
    return cells


def _simulated(config: Config, profile: Profile, updates: int, seeds: int) -> list[Simulated]:
    return [simulate(config, profile, updates=updates, seed=seed) for seed in range(seeds)]


def _bound(found: Sequence[Simulated]) -> float:
    return statistics.median(s.bound_fraction for s in found)


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main())
