"""Finds metrics by name, names their charts and describes them.

Names are those of `metrics.jsonl`; `chart` returns the name that a sink shows, which begins with the metric's group.
`markdown` generates the lists of docs/run-directory.md; a test compares them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from functools import cache

from omni_async.records.write.metric import STEP, Group, Metric
from omni_async.records.write.metrics import METRICS

_FIXED = {metric.name: metric for metric in METRICS if not metric.labels}
# Patterns with a number are matched before patterns with any text: `masked/step_03` is not a rule's.
_PATTERNS = sorted(
    ((re.compile(metric.pattern), metric) for metric in METRICS if metric.labels),
    key=lambda one: ".+" in one[0].pattern,
)


@cache
def find(name: str) -> tuple[Metric | None, dict[str, str]]:
    """Return the metric called `name` and the values of its placeholders; None for a custom objective's metric."""
    if (fixed := _FIXED.get(name)) is not None:
        return fixed, {}
    for pattern, metric in _PATTERNS:
        if (match := pattern.fullmatch(name)) is not None:
            return metric, match.groupdict()
    return None, {}


def chart(name: str) -> str:
    """Return the name under which sinks show a metric: `goal/reward`, `scorers/scorer_ocr_calls`."""
    metric, _ = find(name)
    return f"{Group.LEARNING if metric is None else metric.group}/{name.replace('/', '_')}"


def markdown(source: str) -> str:
    """Return the Markdown lists of the metrics of one `source`, one for each group, as in docs/run-directory.md."""
    metrics = [metric for metric in METRICS if metric.source == source]
    groups = sorted({metric.group for metric in metrics})
    lists = ([f"`{group}`:", "", *_items(group, metrics)] for group in groups)
    return "\n\n".join("\n".join(lines) for lines in lists)


def _items(group: Group, metrics: Iterable[Metric]) -> Iterable[str]:
    own = [metric for metric in metrics if metric.group == group]
    if group is not Group.STEPS:
        return [_item(metric.name, metric.better, metric.text) for metric in own]
    names = ", ".join(f"`{metric.name.removesuffix(f'/step_{STEP}')}`" for metric in own)
    return [_item(f"<key>/step_{STEP}", "", f"the value of one denoising step, of {names}")]


def _item(name: str, better: str, text: str) -> str:
    arrow = {"up": " ↑", "down": " ↓", "": ""}[better]
    return textwrap.fill(
        f"- `{name}`{arrow}: {text}", 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
