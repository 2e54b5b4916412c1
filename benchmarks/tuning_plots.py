"""Plots the figures of docs/tuning.md from simulations of one recipe.

They show the gain from S, the slots that buffers need, the front that tuning finds, and what a reserve of groups costs
and covers. Waits only for the simulator; the same recipe and profile always give the same figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec.structs import replace

from benchmarks.arguments import command_parser
from omni_async.config import Config, ConfigError, load
from omni_async.config.schedule import SCHEDULES, num_devices
from omni_async.config.writing import replacing
from omni_async.performance.law import async_step
from omni_async.performance.profile import Profile, load_profile
from omni_async.simulation.result import Simulated, times_of
from omni_async.simulation.simulate import simulate
from omni_async.simulation.sweep import choose_bundle
from omni_async.simulation.tune.keys import (
    ENGINES,
    GROUPS,
    RANKS,
    REWARDERS,
    TRAJECTORIES,
    Keys,
    S,
    keys_of,
    roomy,
    with_keys,
)
from omni_async.simulation.tune.plot import picture
from omni_async.simulation.tune.search import Point
from omni_async.simulation.tune.tuning import tune
from omni_async.simulation.world import Outage

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "emulated" / "qwen_image_lora_h800.yaml"
_HELP = """\
Draw the figures of docs/tuning.md:

  python -m benchmarks.tuning_plots                  # writes docs/tuning_{staleness,buffers,front,reserve}.png
  python -m benchmarks.tuning_plots --figures reserve
  python -m benchmarks.tuning_plots --recipe recipes/emulated/remote_judge.yaml --out figures

The recipe needs emulation.profile. A few minutes on one core; nothing is measured, so a busy machine changes nothing.
The reserve's figure is of a recipe whose trainer is the slowest stage; its table is printed, too.
"""
# Training is the slowest stage, so a reserve can be made.
_RESERVE_RECIPE = RECIPE.with_name("qwen_image_full_h200.yaml")
_RESERVE_S = 8
_OUTAGES = (1, 3, 10)  # updates
_STARTS = (0.0, 0.5)  # of an update
_MOST_BUNDLES = 10_000
_UPDATES = 60
_BUDGETS = range(5)
_LAW, _SIMULATED, _SCHEDULE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
)  # Okabe and Ito's colours, which colour-blind readers can distinguish

_FIGURES = ("staleness", "buffers", "front", "reserve")

Say = Callable[[str], None]


class Reserved(NamedTuple):
    """A reserve: the mean staleness, the groups that it is worth, and the updates' time that each outage costs.

    `groups` is None with `staleness.reserve: all`."""

    reserve: int | str
    groups: float | None
    staleness: float
    lost: tuple[float, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("tuning_plots", _HELP)
    parser.add_argument(
        "--recipe",
        type=Path,
        default=RECIPE,
        help="an emulated recipe (default: recipes/emulated/qwen_image_lora_h800.yaml)",
    )
    parser.add_argument("--figures", nargs="+", choices=_FIGURES, default=_FIGURES, help="figures (default: all)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the figures (default: docs)")
    options = parser.parse_args(arguments)
    try:
        config = load(options.recipe, ["schedule=async"])
        if config.emulation is None:
            raise ConfigError(f"{options.recipe}: emulation.profile: required")
        profile = load_profile(config.emulation.profile)
        options.out.mkdir(parents=True, exist_ok=True)
        plots: dict[str, Callable[[], Figure]] = {
            "staleness": lambda: staleness(options.recipe, config, profile, _say),
            "buffers": lambda: buffers(config, profile, _say),
            "front": lambda: picture(
                tune(config, profile, round(num_devices(config)), simulate, budget=120, progress=_tuning)
            ),
            "reserve": _reserve,
        }
        for name in options.figures:
            figure = plots[name]()
            with replacing(options.out / f"tuning_{name}.png") as unfinished:
                figure.savefig(unfinished, dpi=110)
            _say(f"wrote {options.out / f'tuning_{name}.png'}")
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"tuning_plots: {error}\n")
        return 2
    return 0


def staleness(recipe: Path, config: Config, profile: Profile, say: Say) -> Figure:
    """Plot seconds per update against S: by the law, simulated, for schedules that fix S; and the groups' staleness."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    steps, ages = figure.subplots(1, 2)
    split = _split(config)
    jobs = [with_keys(config, roomy(config, split, budget)) for budget in _BUDGETS]
    found = [_simulated(job, profile, say) for job in jobs]
    steps.plot(
        _BUDGETS,
        [async_step(times_of(job, profile), job.staleness.max_updates) for job in jobs],
        color=_LAW,
        label="law",
    )
    steps.plot(
        _BUDGETS, [one.step_s for one in found], color=_SIMULATED, marker="o", linestyle="none", label="simulated"
    )
    for name in (name for name in SCHEDULES if name != "async"):
        job = load(recipe, [f"schedule={name}"])
        one = _simulated(job, profile, say)
        steps.plot([job.staleness.max_updates], [one.step_s], color=_SCHEDULE, marker="_", markersize=14)
        steps.annotate(
            name,
            (job.staleness.max_updates, one.step_s),
            xytext=(10, -3),
            textcoords="offset points",
            fontsize=8,
            color=_SCHEDULE,
        )
    _label(steps, "staleness.max_updates (S)", "seconds per update", _BUDGETS)
    ages.plot(_BUDGETS, [one.staleness_max for one in found], color=_LAW, marker="s", label="maximum")
    ages.plot(_BUDGETS, [one.staleness_mean for one in found], color=_SIMULATED, marker="o", label="mean")
    _label(ages, "staleness.max_updates (S)", "staleness of trained groups, updates", _BUDGETS)
    return figure


def buffers(config: Config, profile: Profile, say: Say) -> Figure:
    """Plot images per second against the slots of either buffer, at S = 1 and S = 2; the other buffer is unbounded."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    by_groups, by_samples = figure.subplots(1, 2, sharey=True)
    per_update, batch = config.trainer.groups_per_update, config.rollout.max_batch
    for budget, colour in ((1, _LAW), (2, _SIMULATED)):
        keys = roomy(config, _split(config), budget)
        groups = [per_update * eighths // 8 for eighths in range(2, 8 * (budget + 1) + 1, 2)]
        samples = [config.rollout.workers * batch * quarters // 4 for quarters in range(1, 17)]
        for axes, path, slots in ((by_groups, GROUPS, groups), (by_samples, TRAJECTORIES, samples)):
            speeds = [
                _simulated(with_keys(config, {**keys, path: value}), profile, say).images_per_s for value in slots
            ]
            axes.plot(slots, speeds, color=colour, marker=".", label=f"S = {budget}")
    _label(by_groups, f"buffer.groups (an update has {per_update})", "images/s")
    _label(by_samples, f"buffer.trajectories (engines compute {config.rollout.workers * batch} together)", None)
    return figure


def _reserve() -> Figure:
    config = load(_RESERVE_RECIPE, ["schedule=async"])
    assert config.emulation is not None
    per_update = config.trainer.groups_per_update
    reserves: list[int | str] = [0, per_update // 2, per_update, 2 * per_update, 4 * per_update, "auto", "all"]
    found = reserved(config, load_profile(config.emulation.profile), reserves, _say)
    sys.stdout.writelines(f"{line}\n" for line in reserve_table(found, per_update))
    return reserve_plot(found, per_update)


def reserved(config: Config, profile: Profile, reserves: Sequence[int | str], say: Say) -> list[Reserved]:
    """Simulate each reserve without an outage, and with outages of all engines that begin at several moments."""
    config = with_keys(config, roomy(config, _split(config), _RESERVE_S))
    bundle = choose_bundle(config, _UPDATES, _MOST_BUNDLES, fewest=0)
    found = []
    for reserve in reserves:
        job = replace(config, staleness=replace(config.staleness, reserve=reserve))
        usual = simulate(job, profile, updates=_UPDATES, bundle=bundle)
        lost = []
        for updates in _OUTAGES:
            begins = [(0.4 * _UPDATES + start) * usual.step_s for start in _STARTS]
            outages = [Outage("generate", begin, updates * usual.step_s) for begin in begins]
            ends = [simulate(job, profile, updates=_UPDATES, bundle=bundle, outage=one).virtual_s for one in outages]
            lost.append((fmean(ends) - usual.virtual_s) / usual.step_s)
        worth = None if reserve == "all" else usual.reserve_s / usual.step_s * config.trainer.groups_per_update
        found.append(Reserved(reserve, worth, usual.staleness_mean, tuple(lost)))
        say(f"reserve {reserve}: {usual.step_s:.4g} s per update, staleness {usual.staleness_mean:.2f}")
    return found


def reserve_table(found: Sequence[Reserved], per_update: int) -> Iterator[str]:
    """Yield the lines of a Markdown table, with a line per reserve."""
    outages = " | ".join(f"lost to {updates}" for updates in _OUTAGES)
    yield f"| `staleness.reserve` | updates | mean staleness | {outages} |"
    yield f"|---|---:|---:|{'---:|' * len(_OUTAGES)}"
    for one in found:
        worth = "" if one.groups is None else f"{one.groups / per_update:.1f}"
        lost = " | ".join(f"{max(0.0, updates):.1f}" for updates in one.lost)
        yield f"| `{one.reserve}` | {worth} | {one.staleness:.2f} | {lost} |"


def reserve_plot(found: Sequence[Reserved], per_update: int) -> Figure:
    """Plot mean staleness, and the time lost to outages of several lengths, against the reserve.

    `auto` is a star where its reserve lies; `all` is a dashed line."""
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    ages, losses = figure.subplots(1, 2)
    numbers = [one for one in found if isinstance(one.reserve, int)]
    named = {one.reserve: one for one in found if not isinstance(one.reserve, int)}
    groups = [one.reserve for one in numbers]
    curves = [(ages, _LAW, "", [one.staleness for one in found])]
    for updates, colour, number in zip(_OUTAGES, (_LAW, _SIMULATED, _SCHEDULE), range(len(_OUTAGES)), strict=True):
        label = f"engines away for {updates} update{'s' * (updates > 1)}"
        curves.append((losses, colour, label, [one.lost[number] for one in found]))
    for axes, colour, label, values in curves:
        by_reserve = dict(zip((one.reserve for one in found), values, strict=True))
        axes.plot(groups, [by_reserve[one] for one in groups], color=colour, marker="o", label=label or "groups")
        if (auto := named.get("auto")) is not None:
            star = {"marker": "*", "markersize": 14, "linestyle": "none", "label": None if label else "auto"}
            axes.plot([auto.groups], [by_reserve["auto"]], color=colour, **star)
        if "all" in named:
            axes.axhline(by_reserve["all"], color=colour, linestyle="--", linewidth=1, label=None if label else "all")
    _label(ages, f"staleness.reserve, groups (an update has {per_update})", "mean staleness, updates")
    _label(losses, f"staleness.reserve, groups (an update has {per_update})", "time lost, updates")
    return figure


def _split(config: Config) -> Keys:
    return keys_of(config, (ENGINES, REWARDERS, RANKS))


def _simulated(config: Config, profile: Profile, say: Say) -> Simulated:
    found = simulate(config, profile, updates=_UPDATES)
    keys = keys_of(config, (S, GROUPS, TRAJECTORIES))
    say(
        f"{config.schedule} {', '.join(f'{path} {value}' for path, value in keys.items())}: {found.step_s:.4g} s per"
        " update"
    )
    return found


def _label(axes: Axes, x: str, y: str | None, ticks: Sequence[int] | None = None) -> None:
    axes.set_xlabel(x)
    if y is not None:
        axes.set_ylabel(y)
    if ticks is not None:
        axes.set_xticks(list(ticks))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _tuning(made: int, point: Point) -> None:
    _say(f"tuning: simulation {made}: {point.images_per_s:.3g} images/s")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
