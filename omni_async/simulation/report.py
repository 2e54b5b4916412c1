"""Shows the result of a simulation as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from omni_async.config import Config
from omni_async.config.role_table import WORKING
from omni_async.control.admission import withholds
from omni_async.performance.law import async_step, max_speedup, smallest_useful_budget
from omni_async.simulation.result import Simulated
from omni_async.simulation.what_if import WhatIf

_BAR = 40


def show(console: Console, config: Config, found: Simulated, sync: Simulated) -> None:
    """Print one job: the law next to the simulation, the roles, the staleness, the buffers.

    Args:
        console: the console to print to.
        config: the job.
        found: its result.
        sync: the result of the same job, one stage after the other."""
    console.print(_steps(config, found, sync))
    t = found.times
    console.print(
        f"stages by the law: generate {_number(t.generate)} + pauses {_number(t.pause)}, score {_number(t.score)},"
        f" train {_number(t.train)} + copying weights {_number(t.blocked)}, publish {_number(t.publish)}; from"
        f" admission to weights {_number(t.latency)}"
    )
    rate, per_device = found.images_per_s, found.images_per_s_per_device
    console.print(f"{_number(rate)} samples/s over {found.devices:g} devices, {_number(per_device)} each\n")
    roles = _table("what the roles do", "", "busy", "starved", "backpressured")
    for role, shares in found.busy.items():
        roles.add_row(role, *(f"{shares[column]:.1%}" for column in ("busy", "starved", "backpressured")))
    console.print(roles)
    console.print(_staleness(found))
    buffers = _table("slots taken in the buffers", "", "of", "mean", "most")
    for name, occupancy in found.buffers.items():
        buffers.add_row(name, str(occupancy.capacity), f"{occupancy.mean:.1f}", str(occupancy.largest))
    console.print(buffers)
    for remark in _remarks(config, found):
        console.print(remark, style="bold")


def show_sweep(console: Console, rows: Sequence[tuple[str, Config, Simulated]]) -> None:
    """Print a row per schedule and budget; speed-ups are relative to the first row."""
    table = _table(
        "every schedule, with room in the buffers: samples/s of all devices and of each, busy share of the roles,"
        " staleness",
        "schedule",
        *("s/update", "law", "law/sim", "speed-up", "samples/s", "each"),
        *(role for role in WORKING if role in rows[0][2].busy),
        *("stale", "most"),
    )
    for name, _, found in rows:
        table.add_row(
            name,
            _number(found.step_s),
            _number(found.law_s),
            f"{found.bound_fraction:.3f}",
            f"{_ratio(rows[0][2].step_s, found.step_s):.2f}",
            _number(found.images_per_s),
            _number(found.images_per_s_per_device),
            *(f"{found.busy[role]['busy']:.0%}" for role in WORKING if role in found.busy),
            f"{found.staleness_mean:.2f}",
            str(found.staleness_max),
        )
    console.print(table)


def show_what_if(console: Console, found: WhatIf) -> None:
    """Print the effect of one change: the present, a row per change, and the unknowns of either."""
    now, measured = found.present, "nothing measured to compare it with"
    if found.measured_s is not None and found.model_error is not None:
        updates, off = found.measured_updates, found.model_error
        measured = f"{_number(found.measured_s)} s measured over {updates} updates, off by {off:+.1%}"
    console.print(f"profile {found.profile}: {_number(now.step_s)} s per update simulated, {measured}")
    if found.difference:
        console.print(f"{found.difference}\n")
        stages = _table("busy seconds of a worker per update, and the trainer's waits", "", "measured", "simulated")
        for part in found.stages:
            stages.add_row(part.stage, _number(part.measured_s), _number(part.simulated_s))
        if found.stages:
            console.print(stages)
    columns = ("s/update", "samples/s", "gain", "+-", "devices", "each", "stale")
    table = _table("what one change would buy", "change", *columns)
    table.add_column("held up by", no_wrap=True)
    for one in (now, *found.changes):
        table.add_row(
            one.name,
            _number(one.step_s),
            _number(one.images_per_s),
            *(("", "") if one is now else (f"{one.gain:+.1%}", f"{one.uncertainty:.1%}")),
            f"{one.devices:+g}" if one.devices else "",
            "" if one.gain_per_device is None else f"{one.gain_per_device:+.1%}",
            f"{one.staleness_mean:.2f}",
            one.bottleneck,
            style=None if one is now or one.is_clear else "dim",
        )
    console.print(table)
    for left in found.left_out:
        console.print(f"left out: {left.name}: {left.reason}")
    for caveat in found.caveats:
        console.print(f"not simulated: {caveat}")
    console.print(found.learning)


def _steps(config: Config, found: Simulated, sync: Simulated) -> Table:
    budget = config.staleness.max_updates
    name, seconds = found.times.bottleneck
    table = _table("seconds per update", "", "law", "simulated", "law / simulated")
    one_by_one = sync.times.total
    table.add_row("one stage after the other", _number(one_by_one), _number(sync.step_s), f"{sync.bound_fraction:.3f}")
    table.add_row(
        f"this recipe, S = {budget}", _number(found.law_s), _number(found.step_s), f"{found.bound_fraction:.3f}"
    )
    law, simulated = _ratio(one_by_one, found.law_s), _ratio(sync.step_s, found.step_s)
    table.add_row("speed-up", f"{law:.2f}", f"{simulated:.2f}", "")
    table.add_row(f"bottleneck: {name}", _number(seconds), "", "")
    return table


def _staleness(found: Simulated) -> Table:
    table = _table(f"groups by staleness in updates, mean {found.staleness_mean:.2f}", "", "groups")
    table.add_column("")
    total = sum(found.staleness.values())
    for age in range(found.staleness_max + 1):
        count = found.staleness.get(age, 0)
        table.add_row(str(age), f"{count / total:.1%}", "█" * round(_BAR * count / total))
    return table


def _remarks(config: Config, found: Simulated) -> list[str]:
    """Return sentences about the limiting factor of the job, and the key that would change it."""
    times, budget = found.times, config.staleness.max_updates
    name, seconds = times.bottleneck
    needed = smallest_useful_budget(times)
    sentences: list[str] = []
    if async_step(times, budget) > seconds * (1 + 1e-9) and needed > budget:
        allowed = f"with staleness.max_updates = {needed} the law allows {_number(async_step(times, needed))} s"
        if config.schedule not in (None, "async"):
            allowed = f"schedule: {config.schedule} decides it; with schedule: async more can overlap"
        sentences.append(f"The staleness budget holds it up: {allowed}.")
    elif found.busy[name]["busy"] > 0.97:
        busy = found.busy[name]["busy"]
        sentences.append(f"{name} is busy {busy:.0%} of the time: only more of it makes updates faster.")
    for buffer, key in (("trajectories", "buffer.trajectories"), ("replay", "buffer.groups")):
        occupancy = found.buffers[buffer]
        if occupancy.mean > 0.95 * occupancy.capacity and found.bound_fraction < 0.97:
            sentences.append(f"{key} = {occupancy.capacity} is full most of the time: a larger one may help.")
    if withholds(config):
        sentences.append(
            f"Groups are admitted just in time, with a reserve of {_number(found.reserve_s)} s; at most"
            f" {_number(found.starved_s)} s of the trainer's wait per update are its price (staleness.reserve)."
        )
    sentences.append(f"No overlap makes it more than {max_speedup(times):.2f} times as fast as the sum of its stages.")
    return sentences


def _table(title: str, first: str, *numbers: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else float("inf")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"
