"""Shows and writes scores: statistics of the reward and of its parts, a histogram, rows, and a grid of images.

With repetitions a row's numbers are means over them, and `own` is the judge's own noise: the standard deviation of
repeated scores of one sample, pooled over the samples. Compare it with the standard deviation between samples, the
signal that lets a reward distinguish them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec import Struct
from rich.markup import escape
from rich.table import Table

from omni_async.commands.command_line import as_csv
from omni_async.commands.scoring.scoring import Scored
from omni_async.config import ConfigError
from omni_async.config.redact import one_line

if TYPE_CHECKING:
    from rich.console import Console

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_BINS, _BAR = 10, 40
_SHOWN = 3  # best and worst rows
_IN_GRID = 8
_LONGEST_CELL = 60


class Statistics(Struct, frozen=True):
    """The statistics of one number over samples.

    `std` is between the means of samples (n - 1), `own` within samples (None: not known). `quantiles` are at 5, 25, 50,
    75 and 95 percent."""

    mean: float
    std: float | None
    own: float | None
    min: float
    max: float
    quantiles: tuple[float, ...]


def numbers_of(row: Scored) -> dict[str, float]:
    """Return the row's reward and parts, means over its repetitions; empty if it has no score."""
    return {name: float(np.mean(values)) for name, values in _values(row).items()}


def _values(row: Scored) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for score in row.scores:
        for name, value in {"reward": score.value, **score.parts}.items():
            found.setdefault(name, []).append(value)
    return found


def statistics(rows: Sequence[Scored]) -> dict[str, Statistics]:
    """Return the statistics of the reward, first, and of every part, over the rows that have it."""
    of_rows = [_values(row) for row in rows]
    names = {name: None for values in of_rows for name in values}
    return {name: _statistics([values[name] for values in of_rows if name in values]) for name in names}


def _statistics(samples: list[list[float]]) -> Statistics:
    means = np.array([np.mean(values) for values in samples])
    free = sum(len(values) - 1 for values in samples)
    spread = (np.var(np.subtract(values, values[0])) * len(values) for values in samples)  # exactly 0 for equal values
    own = math.sqrt(sum(spread) / free) if free else None
    std = float(np.std(means, ddof=1)) if len(means) > 1 else None
    quantiles = tuple(float(q) for q in np.quantile(means, _QUANTILES))
    return Statistics(float(means.mean()), std, own, float(means.min()), float(means.max()), quantiles)


# ---- the console -----------------------------------------------------------------------------------------------------


def show(console: Console, rows: Sequence[Scored], repeat: int) -> None:
    """Print everything: statistics, histogram, best and worst rows, errors."""
    scored = ranked(rows)
    failed = [row for row in rows if not row.scores]
    console.print(f"{len(scored)} of {len(rows)} samples scored" + (f", {repeat} times each" if repeat > 1 else ""))
    if scored:
        found = statistics(scored)
        console.print(_table(found, repeat > 1))
        if repeat > 1:
            console.print(_noise(found["reward"]))
        console.print("\n".join(histogram([numbers_of(row)["reward"] for row in scored])), markup=False)
        console.print(_extremes(scored))
    for reason, names in _errors(rows).items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        why = reason.removeprefix(f"{names[0]}: ")
        console.print(one_line(f"error: {names[0]}{more}: {why}"), markup=False, soft_wrap=True)
    if failed:
        console.print(f"{len(failed)} of {len(rows)} samples could not be scored")
    if cached := sum(row.cached for row in rows):
        console.print(f"{cached} answers of scorers came from reward.cache")


def ranked(rows: Sequence[Scored]) -> list[Scored]:
    """Return the rows that have a score, the worst first."""
    return sorted((row for row in rows if row.scores), key=lambda row: numbers_of(row)["reward"])


def _table(found: dict[str, Statistics], repeated: bool) -> Table:
    table = Table("", "mean", "std", *(["own std"] if repeated else []), "min", *map(_percent, _QUANTILES), "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, one in found.items():
        own = [one.own] if repeated else []
        table.add_row(escape(name), *map(_shown, (one.mean, one.std, *own, one.min, *one.quantiles, one.max)))
    return table


def _percent(quantile: float) -> str:
    return "median" if quantile == 0.5 else f"{quantile:.0%}"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _noise(reward: Statistics) -> str:
    """Return a sentence that compares the judge's noise with the spread between samples."""
    if reward.own is None or reward.std is None:
        return "own std needs samples that were scored twice, and std more than one sample"
    ratio = f", {reward.own / reward.std:.2g} of it" if reward.std > 0 else ""
    return f"reward: std between samples {reward.std:.4g}, the judge's own {reward.own:.4g}{ratio}"


def histogram(values: Sequence[float]) -> list[str]:
    """Return a line per bin of equal width: its range, a bar, and the number of values."""
    low, high = min(values), max(values)
    if not high > low:
        return [f"{low:10.4g}            {'█' * _BAR} {len(values)}"]
    counts, edges = np.histogram(np.array(values), bins=_BINS, range=(low, high))
    longest = max(counts)
    return [
        f"{edges[i]:10.4g} {edges[i + 1]:10.4g} {'█' * math.ceil(_BAR * count / longest):{_BAR}} {count}"
        for i, count in enumerate(counts)
    ]


def _extremes(scored: list[Scored]) -> Table:
    count = min(_SHOWN, max(1, len(scored) // 2))
    are_texts = any(row.sample.text is not None for row in scored)
    table = Table("", "reward", "file", "prompt", "answer" if are_texts else "read")
    table.columns[1].justify = "right"
    best, worst = [*reversed(scored)][:count], scored[:count]
    for title, rows in (("best", best), ("worst", worst if len(scored) > 1 else [])):
        for row in rows:
            cells = (row.sample.name, row.sample.prompt.text, _answer(row) or row.scores[-1].text or "")
            table.add_row(title, _shown(numbers_of(row)["reward"]), *(escape(_cut(cell)) for cell in cells))
    return table


def _answer(row: Scored) -> str | None:
    """Return the text that was scored; None for files."""
    return None if row.sample.text is None else row.sample.text.text


def _cut(text: str) -> str:
    text = one_line(" ".join(text.split()))
    return text if len(text) <= _LONGEST_CELL else f"{text[: _LONGEST_CELL - 3]}..."


def _errors(rows: Sequence[Scored]) -> dict[str, list[str]]:
    """Return the rows' names by their error."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.error is not None:
            found.setdefault(row.error, []).append(row.sample.name)
    return found


# ---- files -----------------------------------------------------------------------------------------------------------


def records(rows: Sequence[Scored]) -> list[dict[str, Any]]:
    """Return a row per sample, all with the same columns; empty cells are None."""
    parts = {name: None for row in rows for name in numbers_of(row) if name != "reward"}
    repeated = any(len(row.scores) > 1 for row in rows)
    are_texts = any(row.sample.text is not None for row in rows)
    found = []
    for row in rows:
        numbers = numbers_of(row)
        rewards = [score.value for score in row.scores]
        own = {"reward_std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None} if repeated else {}
        found.append(
            {
                **{"file": row.sample.name, "prompt": row.sample.prompt.text, "target": row.sample.prompt.target},
                **({"answer": _answer(row)} if are_texts else {}),
                **{"reward": numbers.get("reward"), **own},
                **{f"reward/{name}": numbers.get(name) for name in parts},
                **{"read": row.scores[-1].text if row.scores else None, "error": row.error},
            }
        )
    return found


def write_rows(path: Path, rows: Sequence[Scored]) -> None:
    """Write a row per sample as `.csv` or `.parquet`. Raises OSError."""
    found = records(rows)
    if path.suffix.lower() == ".csv":
        path.write_bytes(as_csv(found))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    numbers = {name for name in found[0] if name.startswith("reward")}
    schema = pa.schema([(name, pa.float64() if name in numbers else pa.string()) for name in found[0]])
    pq.write_table(pa.Table.from_pylist(found, schema=schema), path)


def as_json(recipe: Path, rows: Sequence[Scored], repeat: int) -> bytes:
    """Return statistics and rows as JSON."""
    found = {name: msgspec.to_builtins(one) for name, one in statistics(rows).items()}
    for one in found.values():
        one["quantiles"] = {f"{q:g}": value for q, value in zip(_QUANTILES, one["quantiles"], strict=True)}
    content = {
        "recipe": str(recipe),
        "repeat": repeat,
        "samples": len(rows),
        "failed": sum(not row.scores for row in rows),
        "cached": sum(row.cached for row in rows),
        "statistics": found,
        "rows": records(rows),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def write_grid(path: Path, rows: Sequence[Scored]) -> None:
    """Write a grid of images: the worst samples, then the best; at least one row has a score. Raises OSError."""
    from omni_async.records.write.images import caption, image_grid, tile

    scored = ranked(rows)
    count = min(_IN_GRID, max(1, len(scored) // 2))
    best = [("best", row) for row in scored[::-1][:count]]
    worst = [("worst", row) for row in scored[:count]] if len(scored) > 1 else []
    items = []
    for title, row in [*worst, *best]:
        shown = msgspec.structs.replace(row.scores[-1], value=numbers_of(row)["reward"])
        try:
            image = tile(row.sample.media())
        except ConfigError as error:  # it existed a moment ago
            raise OSError(f"{error}") from None
        items.append((image, f"{title}: {caption(row.sample.prompt, shown)}"))
    image_grid(items, columns=count).save(path)
