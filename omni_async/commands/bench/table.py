"""Formats the benchmark's one table, a column per arm and a row per number, as markdown or for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_async.commands.bench.comparison import CATEGORIES, ArmSummary, compare, fastest
from omni_async.commands.bench.plan import BASELINES
from omni_async.commands.bench.result import Overlap
from omni_async.commands.command_line import as_markdown
from omni_async.config.redact import one_line
from omni_async.config.role_table import WORKING

_STAGES = {
    "generation": "T_g generation",
    "reward": "T_r reward",
    "training": "T_t training",
    "export": "blocked by export",
    "publish": "publish",
}
_NOTHING = "-"
_NEGLIGIBLE = 1e-4  # of a step


@dataclass(frozen=True)
class Section:
    title: str
    rows: list[tuple[str, list[str]]]


Cell = Callable[[ArmSummary], str]


def sections(overlap: Overlap) -> list[Section]:
    """Return the rows, with a cell per arm of the benchmark, in its order; rows without any value are omitted.

    An arm without a number has `failed`, `skipped` or `not run` in the first row."""
    summaries, scale = compare(overlap), overlap.time_scale
    step: dict[str, Cell] = {"median": lambda s: number(s.step_s.median), "quartiles": _quartiles}
    throughput: dict[str, Cell] = {
        "all devices": lambda s: number(s.images_per_s.median),
        "devices": lambda s: f"{s.devices:g}",
        "per device": lambda s: number(s.images_per_s_per_device.median),
    }
    if scale != 1:
        step["in the profile's time"] = lambda s: number(s.step_s.median / scale)
        throughput["per device, in the profile's time"] = lambda s: number(s.images_per_s_per_device.median * scale)
    step |= {
        "law": lambda s: number(s.law_s),
        "bound fraction": lambda s: number(s.bound_fraction),
        "simulated": lambda s: number(s.simulated_s),
        "simulated / measured - 1": lambda s: percent(s.deviation, signed=True),
        "runs": lambda s: f"{s.runs} of {overlap.repeats}",
    }
    # A row of quartiles follows the row of every baseline.
    speedups = [
        row
        for base in BASELINES
        if base in summaries
        for row in ((base, partial(_ratio, base)), ("  quartiles", partial(_ratio_quartiles, base)))
    ]
    roles = [role for role in WORKING if any(role in summary.busy for summary in summaries.values())]
    ages = sorted({age for summary in summaries.values() for age in summary.staleness})
    staleness: dict[str, Cell] = {
        "mean": lambda s: f"{s.staleness_mean:.2f}",
        "maximum": lambda s: str(s.staleness_max),
        **{f"{age}, % of groups": partial(_age, age) for age in ages},
    }
    titled: dict[str, Iterable[tuple[str, Cell]]] = {
        "seconds per update": step.items(),
        "images/s": throughput.items(),
        "speed-up over": speedups,
        "where the seconds go": [(text, partial(_category, name)) for name, text in CATEGORIES.items()],
        "device-seconds (variation)": [(text, partial(_stage, name)) for name, text in _STAGES.items()],
        "busy / starved / backpressured, %": [(role, partial(_shares, role)) for role in roles],
        "staleness, updates": staleness.items(),
        "memory, GiB": [
            ("peak of the job", lambda s: number(s.peak_memory_bytes / 2**30 if s.peak_memory_bytes else None))
        ],
    }
    shown = [summaries.get(arm.name) for arm in overlap.arms]
    found = []
    for title, rows in titled.items():
        filled = [(label, ["" if s is None else cell(s) for s in shown]) for label, cell in rows]
        found.append(Section(title, [(label, cells) for label, cells in filled if any(cells)]))
    states = ["skipped" if arm.skipped else "failed" if arm.failures else "not run" for arm in overlap.arms]
    if not found[0].rows:
        found[0].rows.append(("median", [""] * len(states)))
    medians = found[0].rows[0][1]
    medians[:] = [cell or state for cell, state in zip(medians, states, strict=True)]
    return [section for section in found if section.rows]


def notes(overlap: Overlap) -> Iterator[str]:
    """Yield notes for the table: speed-ups attributed, failed and skipped arms, the law, the machine."""
    summaries = compare(overlap)
    best = fastest(summaries)
    for summary in summaries.values():
        for base, speedup in summary.speedups.items():
            if base == "sync" or summary is best:
                yield f"{summary.name} is {speedup.words}"
    for arm in overlap.arms:
        if arm.skipped:
            yield f"{arm.name}: skipped: {arm.skipped}"
        for run in arm.failures:
            yield f"{arm.name}: run {run.round + 1} failed: {run.reason}"
        if arm.prediction is not None and arm.prediction.not_simulated:
            yield f"{arm.name}: not simulated: {arm.prediction.not_simulated}"
    yield f"law and simulation: {overlap.law}"
    yield (
        f"{overlap.repeats} interleaved repeats of up to {overlap.updates} updates; warm-up and drain left out;"
        f" {overlap.machine}"
    )


def markdown(overlap: Overlap) -> str:
    """Return the table, aligned for reading as plain text, with the notes as a list below it."""
    lines = [["", *(as_markdown(arm.name) for arm in overlap.arms)]]
    for section in sections(overlap):
        lines.append([f"**{section.title}**", *("" for _ in overlap.arms)])
        lines += [[label, *cells] for label, cells in section.rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = [_line(line, widths) for line in lines]
    rule = "|" + "|".join(f"{'-' * (width + 1)}{':' if column else '-'}" for column, width in enumerate(widths)) + "|"
    return "\n".join([text[0], rule, *text[1:], "", *(f"- {as_markdown(note)}" for note in notes(overlap)), ""])


def _line(cells: list[str], widths: list[int]) -> str:
    label, *numbers = zip(cells, widths, strict=True)
    return f"| {' | '.join([label[0].ljust(label[1]), *(cell.rjust(width) for cell, width in numbers)])} |"


def show(overlap: Overlap, console: Console) -> None:
    """Print a table on a terminal, the markdown on a pipe."""
    if not console.is_terminal:
        console.print(markdown(overlap), markup=False, highlight=False, soft_wrap=True)
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for arm in overlap.arms:
        table.add_column(arm.name, justify="right")
    for section in sections(overlap):
        table.add_row(Text(section.title, style="bold"))
        for label, cells in section.rows:
            table.add_row(Text(f"  {label}"), *(Text(cell) for cell in cells))
    console.print(table)
    for note in notes(overlap):
        console.print(one_line(note), markup=False, highlight=False, soft_wrap=True)


def number(value: float | None) -> str:
    """Format a number with three significant digits."""
    if value is None:
        return _NOTHING
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def percent(value: float | None, signed: bool = False) -> str:
    return _NOTHING if value is None else f"{100 * value:{'+' if signed else ''}.1f} %"


def _quartiles(summary: ArmSummary) -> str:
    return f"{number(summary.step_s.low)}..{number(summary.step_s.high)}" if summary.runs > 1 else ""


def _ratio(base: str, summary: ArmSummary) -> str:
    return f"{summary.speedups[base].ratio.median:.2f}" if base in summary.speedups else ""


def _ratio_quartiles(base: str, summary: ArmSummary) -> str:
    if base not in summary.speedups or summary.runs == 1:
        return ""
    ratio = summary.speedups[base].ratio
    return f"{ratio.low:.2f}..{ratio.high:.2f}"


def _category(name: str, summary: ArmSummary) -> str:
    seconds = summary.attribution[name]
    return number(seconds if seconds >= _NEGLIGIBLE * summary.step_s.median else 0.0)


def _shares(role: str, summary: ArmSummary) -> str:
    shares = summary.busy.get(role)
    return (
        " / ".join(f"{100 * shares[name]:.0f}" for name in ("busy", "starved", "backpressured")) if shares else _NOTHING
    )


def _stage(name: str, summary: ArmSummary) -> str:
    stage = summary.stages.get(name)
    if stage is None:
        return _NOTHING
    return number(stage.seconds) if stage.variation is None else f"{number(stage.seconds)} ({stage.variation:.2f})"


def _age(age: int, summary: ArmSummary) -> str:
    total = sum(summary.staleness.values())
    share = summary.staleness.get(age, 0) / total if total else 0.0
    return f"{100 * share:.0f}" if share else ""
