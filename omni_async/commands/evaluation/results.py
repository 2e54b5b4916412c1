"""Compares models by the scores of their samples, and shows and writes the comparison.

Compares every number of a score: the reward, and the scorers' parts. Samples without a score are left out, from a
paired difference together with their partner, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from rich.markup import escape
from rich.table import Table

from omni_async.commands.command_line import as_csv
from omni_async.commands.evaluation.models import Model
from omni_async.commands.evaluation.statistics import LEVEL, Estimate, Paired, clustered_mean, holm, paired_test
from omni_async.config.writing import write_atomic
from omni_async.control.reasons import count, listed
from omni_async.types import SampleRequest, Score

if TYPE_CHECKING:
    from rich.console import Console

Scores = Mapping[str, Mapping[tuple[int, int], Score]]  # every model's scores, by prompt and sample

METHOD = {
    "interval": f"{LEVEL:.0%}, cluster-robust by prompt, t with one degree of freedom less than there are prompts",
    "p": "two-sided sign-flip permutation test of the paired differences from the first model, signs by prompt",
    "p_holm": "corrected for the number of models compared with the first, by Holm's procedure, for each number alone",
}


class Row(Struct, frozen=True):
    """One number of one model: its mean, and the difference from the first model, None for the first model.

    `comparable`: whether the mean is over the same samples as the first model's; the difference always is."""

    model: str
    number: str
    estimate: Estimate
    paired: Paired | None = None
    comparable: bool = True


class Failed(Struct, frozen=True):
    """A sample without a score."""

    model: str
    prompt: int
    sample: int
    why: str


class Results(Struct, frozen=True):
    """The comparison; `asked` is the number of requested samples per model."""

    rows: list[Row]
    failed: list[Failed]
    asked: int


def compare(labels: Sequence[str], scores: Scores, failed: Sequence[Failed], asked: int) -> Results:
    """Return means, intervals and paired tests.

    Args:
        labels: the models; the others are compared with the first.
        scores: the models' scores.
        failed: samples without a score.
        asked: the number of requested samples per model."""
    numbers = {name: None for label in labels for score in scores[label].values() for name in _numbers(score)}
    rows: list[Row] = []
    for name in numbers:
        values = {
            label: {key: found[name] for key, score in scores[label].items() if name in (found := _numbers(score))}
            for label in labels
        }
        of_number = [
            Row(
                label,
                name,
                clustered_mean([*own.values()], [prompt for prompt, _ in own]),
                _paired(own, values[labels[0]]) if label != labels[0] else None,
                own.keys() == values[labels[0]].keys(),
            )
            for label, own in values.items()
            if own
        ]
        rows += _corrected(of_number)
    return Results(rows, [*failed], asked)


def _numbers(score: Score) -> dict[str, float]:
    return {"reward": score.value, **{f"reward/{name}": value for name, value in score.parts.items()}}


def _paired(own: Mapping[tuple[int, int], float], first: Mapping[tuple[int, int], float]) -> Paired:
    shared = [key for key in own if key in first]
    return paired_test([own[key] - first[key] for key in shared], [prompt for prompt, _ in shared])


def _corrected(rows: list[Row]) -> list[Row]:
    """Return the rows of one number with p values corrected for the number of tests."""
    tested = [number for number, row in enumerate(rows) if row.paired is not None and row.paired.p is not None]
    for number, p in zip(tested, holm([rows[n].paired.p for n in tested]), strict=True):  # type: ignore[union-attr, misc]
        rows[number] = replace(rows[number], paired=replace(rows[number].paired, p_holm=p))  # type: ignore[type-var]
    return rows


# ---- the console -----------------------------------------------------------------------------------------------------


def show(console: Console, results: Results) -> None:
    """Print a table per number, the models whose means are not comparable, and the failures."""
    for name in dict.fromkeys(row.number for row in results.rows):
        table = Table("", "mean", "95 %", "samples", "minus first", "95 %", "p", "p (Holm)", title=escape(name))
        for column in table.columns[1:]:
            column.justify = "right"
        for row in results.rows:
            if row.number == name:
                table.add_row(escape(row.model), *_cells(row.estimate), str(row.estimate.samples), *_test_cells(row))
        table.title_justify = "left"
        console.print(table)
    if others := [*dict.fromkeys(row.model for row in results.rows if not row.comparable)]:
        text = (
            f"means of {', '.join(others)} are over other samples than the first model's, and not comparable with them;"
            " minus first is over the samples that both have"
        )
        console.print(text, markup=False, soft_wrap=True)
    for model, reasons in left_out(results.failed).items():
        number = sum(reasons.values())
        text = f"{model}: {number} of {results.asked} samples not scored: {listed(reasons)}"
        console.print(text, markup=False, soft_wrap=True)


def left_out(failed: Sequence[Failed]) -> dict[str, dict[str, int]]:
    """Return each model's reasons for unscored samples (reason -> samples), for models that have any."""
    found: dict[str, dict[str, int]] = {}
    for one in failed:
        reasons = found.setdefault(one.model, {})
        reasons[one.why] = reasons.get(one.why, 0) + 1
    return {model: count(reasons) for model, reasons in found.items()}


def _cells(estimate: Estimate | None) -> tuple[str, str]:
    if estimate is None:
        return "", ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:.4g}", ""
    return f"{estimate.mean:.4g}", f"{estimate.low:.4g} .. {estimate.high:.4g}"


def _test_cells(row: Row) -> tuple[str, ...]:
    if row.paired is None:
        return "", "", "", ""
    return *_cells(row.paired.difference), _p(row.paired.p), _p(row.paired.p_holm)


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


# ---- files -----------------------------------------------------------------------------------------------------------


def write(
    folder: Path, results: Results, models: Sequence[Model], requests: Sequence[SampleRequest], scores: Scores
) -> None:
    """Write `results.json`, `results.csv` and, a row per sample, `scores.csv`. Raises OSError."""
    write_atomic(
        folder / "results.json", msgspec.json.format(msgspec.json.encode(as_json(results, models)), indent=1) + b"\n"
    )
    write_atomic(folder / "results.csv", as_csv([_flat(row) for row in results.rows]))
    why = {(one.model, one.prompt, one.sample): one.why for one in results.failed}
    parts = {name: None for found in scores.values() for score in found.values() for name in _numbers(score)}
    rows = []
    for model in models:
        for request in requests:
            key = request.prompt.index, request.sample
            score = scores[model.label].get(key)
            numbers = {} if score is None else _numbers(score)
            rows.append(
                {
                    **{"model": model.label, "prompt": request.prompt.index, "sample": request.sample},
                    **{"text": request.prompt.text, "target": request.prompt.target},
                    **{name: numbers.get(name) for name in parts},
                    **{"read": score and score.text, "error": why.get((model.label, *key))},
                }
            )
    write_atomic(folder / "scores.csv", as_csv(rows))


def as_json(results: Results, models: Sequence[Model]) -> dict[str, Any]:
    """Return everything as plain values."""
    reasons = left_out(results.failed)
    return {
        "method": METHOD,
        "first": models[0].label,
        "asked": results.asked,
        "models": [
            {
                "model": model.label,
                "version": model.version,
                "path": str(model.weights),
                "failed": sum(one.model == model.label for one in results.failed),
                "reasons": reasons.get(model.label, {}),
                "numbers": {
                    row.number: {
                        **msgspec.to_builtins(row.estimate),
                        "comparable": row.comparable,
                        "minus_first": msgspec.to_builtins(row.paired),
                    }
                    for row in results.rows
                    if row.model == model.label
                },
            }
            for model in models
        ],
        "failed": msgspec.to_builtins(results.failed),
    }


def _flat(row: Row) -> dict[str, Any]:
    estimate, paired = row.estimate, row.paired
    found: dict[str, Any] = {"model": row.model, "number": row.number, **msgspec.to_builtins(estimate)}
    found["comparable"] = row.comparable
    difference = paired and paired.difference
    for key in ("mean", "se", "low", "high", "samples"):
        found[f"minus_first_{key}"] = None if difference is None else getattr(difference, key)
    return found | {"p": paired and paired.p, "p_holm": paired and paired.p_holm}
