"""Formats the benchmark as markdown or for a terminal: the answer first, then a column per arm and a row per number.

The answer is the fastest arm's seconds saved per update, by cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_async.commands.bench.comparison import CATEGORIES, WAITS, ArmSummary, Speedup, answer, compare
from omni_async.commands.bench.plan import BASELINES
from omni_async.commands.bench.result import Overlap
from omni_async.commands.command_line import as_markdown
from omni_async.commands.emulated import emulated
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
_WORTH_A_WORD = 0.01  # of a step


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
    throughput: dict[str, Cell] = {}
    if scale == 1:
        throughput["all devices"] = lambda s: number(s.images_per_s.median)
        throughput["per device"] = lambda s: number(s.images_per_s_per_device.median)
    else:  # such images per second exist neither here nor on the emulated devices
        step["in the profile's time"] = lambda s: number(s.step_s.median / scale)
    step |= {
        "law": lambda s: number(s.law_s),
        "bound fraction": lambda s: number(s.bound_fraction),
        "simulated": lambda s: number(s.simulated_s),
        "simulated / measured - 1": lambda s: percent(s.deviation, signed=True),
        "runs": lambda s: f"{s.runs} of {overlap.repeats}",
    }
    rate = "trained tokens/s" if scale == 1 else "trained tokens/s, in the profile's time"
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
        "trained samples/s": throughput.items(),
        rate: [("all devices", lambda s: number(s.tokens_per_s.median * scale) if s.tokens_per_s is not None else "")],
        "devices": [("all roles", lambda s: f"{s.devices:g}")],
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


def headline(overlap: Overlap) -> str:
    """Return the answer in one sentence: what the fastest arm saves, against which arm."""
    summaries = compare(overlap)
    found = answer(summaries)
    if found is not None:
        return saving(found)
    measured = ", ".join(summaries) or "no arm"
    return f"No comparison: it needs a round with finished runs of sync and of another arm; measured: {measured}"


def saving(found: Speedup) -> str:
    """Return the seconds per update that an arm saves, or needs more, as a sentence."""
    before, after, saved = rounded([found.before_s, found.after_s, abs(found.before_s - found.after_s)])
    took = f"{after} s in place of {before} s, {found.before_s / found.after_s:.2f} times as fast"
    if found.before_s < found.after_s:
        return f"{found.arm} needs {saved} s per update more than {found.baseline}: {took}"
    return f"{found.arm} saves {saved} s per update over {found.baseline}: {took}"


def details(overlap: Overlap) -> Iterator[str]:
    """Yield sentences about the answer: its rounds, and what the trainer still waits for."""
    found = answer(compare(overlap))
    if found is None:
        return
    yield still_waits(found)
    if found.rounds > 1:
        low, high = rounded([found.saved_s.low, found.saved_s.high])
        yield (
            f"These are the seconds of round {found.round + 1}, which has the median speed-up of {found.rounds} rounds;"
            f" quartiles of the saving: {low} to {high} s"
        )
    else:
        yield "This is one round; more (--repeats) show how much the saving varies"


def emulated_devices(overlap: Overlap) -> str:
    """Return a sentence on the emulated devices of the arms; empty if all devices are real."""
    found = (emulated(arm.config) for arm in overlap.arms if arm.config is not None)
    return next(filter(None, found), "")


def still_waits(found: Speedup) -> str:
    """Return a sentence about the waits of the trainer that remain in the arm."""
    left = [one for one in found.causes if one.category in WAITS and one.after_s >= _NEGLIGIBLE * found.after_s]
    if not left:
        return f"The trainer of {found.arm} waits for no active role"
    _, total, *each = rounded([found.before_s, sum(one.after_s for one in left), *(one.after_s for one in left)])
    parts = ", ".join(f"{CATEGORIES[one.category]} {seconds} s" for one, seconds in zip(left, each, strict=True))
    return f"The trainer of {found.arm} still waits {total} s per update: {parts}"


def cause_rows(found: Speedup) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the answer's table; causes without seconds in either arm are omitted."""
    least = _NEGLIGIBLE * found.before_s
    shown = [one for one in found.causes if max(one.before_s, one.after_s, abs(one.saved_s)) >= least]
    seconds = [(one.before_s, one.after_s, one.saved_s) for one in shown]
    seconds.append((found.before_s, found.after_s, found.before_s - found.after_s))
    names = [*(one.name for one in shown), "the update"]
    cells = rounded([value for row in seconds for value in row])
    rows = [[name, *cells[3 * number : 3 * number + 3]] for number, name in enumerate(names)]
    return ["seconds per update", found.baseline, found.arm, "saved"], rows


def _causes_in_words(found: Speedup) -> str:
    """Return the causes of at least 1 % of the baseline's update: `generation overlapped with training 3 s, ...`."""
    large = [one for one in found.causes if abs(one.saved_s) >= _WORTH_A_WORD * found.before_s]
    seconds = rounded([abs(one.saved_s) for one in large])
    return ", ".join(f"{one.name} {text} s" for one, text in zip(large, seconds, strict=True))


def notes(overlap: Overlap) -> Iterator[str]:
    """Yield notes for the table: savings over every baseline, failed and skipped arms, the law, the machine."""
    summaries = compare(overlap)
    best = answer(summaries)
    for summary in summaries.values():
        for base, found in summary.speedups.items():
            if base == "sync" or (best is not None and best.arm == summary.name):
                yield "; ".join(filter(None, [saving(found), _causes_in_words(found)]))
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
    """Return the answer, the table and its notes, aligned for reading as plain text."""
    lines = [f"**{as_markdown(headline(overlap))}**", ""]
    if marked := emulated_devices(overlap):
        lines += [f"{as_markdown(marked)}.", ""]
    if (found := answer(compare(overlap))) is not None:
        header, rows = cause_rows(found)
        lines += _aligned([header, *rows])
        lines += ["", *(f"- {as_markdown(detail)}" for detail in details(overlap)), ""]
    table = [["", *(arm.name for arm in overlap.arms)]]
    for section in sections(overlap):
        table.append([f"**{section.title}**", *("" for _ in overlap.arms)])
        table += [[label, *cells] for label, cells in section.rows]
    return "\n".join([*lines, *_aligned(table), "", *(f"- {as_markdown(note)}" for note in notes(overlap)), ""])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a markdown table: its first row is the header, and all columns but the first are numbers."""
    rows = [[as_markdown(cell) for cell in rows[0]], *rows[1:]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [_line(row, widths) for row in rows]
    rule = "|" + "|".join(f"{'-' * (width + 1)}{':' if column else '-'}" for column, width in enumerate(widths)) + "|"
    return [text[0], rule, *text[1:]]


def _line(cells: Sequence[str], widths: list[int]) -> str:
    label, *numbers = zip(cells, widths, strict=True)
    return f"| {' | '.join([label[0].ljust(label[1]), *(cell.rjust(width) for cell, width in numbers)])} |"


def show(overlap: Overlap, console: Console) -> None:
    """Print the answer and the tables on a terminal, the markdown on a pipe."""
    if not console.is_terminal:
        console.print(markdown(overlap), markup=False, highlight=False, soft_wrap=True)
        return
    console.print(Text(one_line(headline(overlap)), style="bold"), soft_wrap=True)
    if marked := emulated_devices(overlap):
        console.print(f"{marked}.", markup=False, highlight=False, soft_wrap=True)
    if (found := answer(compare(overlap))) is not None:
        header, rows = cause_rows(found)
        causes = _table(header)
        for label, *cells in rows:
            causes.add_row(Text(label), *(Text(cell) for cell in cells))
        console.print(causes)
        for detail in details(overlap):
            console.print(one_line(detail), markup=False, highlight=False, soft_wrap=True)
    table = _table(["", *(arm.name for arm in overlap.arms)])
    for section in sections(overlap):
        table.add_row(Text(section.title, style="bold"))
        for label, cells in section.rows:
            table.add_row(Text(f"  {label}"), *(Text(cell) for cell in cells))
    console.print(table)
    for note in notes(overlap):
        console.print(one_line(note), markup=False, highlight=False, soft_wrap=True)


def _table(header: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(Text(header[0]))
    for name in header[1:]:
        table.add_column(Text(name), justify="right")
    return table


def number(value: float | None) -> str:
    """Format a number with three significant digits."""
    if value is None:
        return _NOTHING
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def rounded(values: Sequence[float]) -> list[str]:
    """Format numbers with equally many decimals, so that they can be added: the largest has three digits."""
    largest = max(map(abs, values), default=0.0)
    decimals = max(0, 2 - math.floor(math.log10(largest))) if 0 < largest < math.inf else 0
    return [f"{round(value, decimals) + 0.0:.{decimals}f}" for value in values]  # no -0.0


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
