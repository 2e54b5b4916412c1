"""Defines what is known of a metric: its name, group, unit, meaning and better direction."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal, NamedTuple

_PLACEHOLDER = re.compile(r"<(\w+)>")
STEP = "<step>"


class Group(StrEnum):
    """Sections of charts, in their alphabetical order.

    MLflow, Weights & Biases and TensorBoard all turn the part before the slash of a chart's name into a section and
    sort sections by name. The groups' names make alphabetical order the reading order."""

    GOAL = "goal"
    PARTS = "goal_parts"
    LEARNING = "learning"
    POLICY = "off_policy"
    STEPS = "off_policy_by_step"
    SCORERS = "scorers"
    THROUGHPUT = "throughput"
    WAITING = "waiting"


class Metric(NamedTuple):
    """A metric, or several of one pattern.

    `name` may have placeholders: `reward/<part>`; `<step>` and `<n>` match digits. `better`: the better direction,
    empty if it depends. `source`: the run itself, an objective, or a validation round."""

    name: str
    group: Group
    text: str
    unit: str = ""
    better: Literal["up", "down", ""] = ""
    source: Literal["run", "objective", "validation"] = "run"

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the placeholders."""
        return tuple(_PLACEHOLDER.findall(self.name))

    @property
    def pattern(self) -> str:
        """The regular expression of its names, with a group per placeholder."""
        fixed = re.split(r"(<\w+>)", self.name)
        return "".join(_placeholder(part) if part.startswith("<") else re.escape(part) for part in fixed)


def _placeholder(part: str) -> str:
    return f"(?P<{part[1:-1]}>{'[0-9]+' if part in (STEP, '<n>') else '.+'})"
