"""The reward of a recipe: a weighted sum over its scorers, each checked before it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from omni_async.config import schema
from omni_async.rewards import registry
from omni_async.rewards.base import Scorer
from omni_async.rewards.checks import require_images, require_scores
from omni_async.rewards.hiding import Discreet
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    import numpy as np


def _labels(configs: Sequence[schema.Scorer]) -> list[str]:
    """One label per scorer: its name, numbered from the second of the same name on."""
    seen: Counter[str] = Counter()
    labels = []
    for config in configs:
        seen[config.name] += 1
        labels.append(config.name if seen[config.name] == 1 else f"{config.name}_{seen[config.name]}")
    return labels


class Member(NamedTuple):
    label: str
    weight: float
    scorer: Scorer


class WeightedScorer:
    """value = sum of weight x value; `values` holds every scorer's own unweighted value. With one scorer, parts keep their names; with
    several they are `<scorer>/<part>`, and every scorer's own unweighted value is the part `<scorer>/value`. Texts are joined with ` | `."""

    name = "reward"

    def __init__(self, configs: Sequence[schema.Scorer]) -> None:
        if not configs:
            raise registry.ScorerConfigError(f"reward.scorers is empty; registered are {', '.join(registry.names())}")
        self.members = [
            Member(label, config.weight, Discreet(registry.build(config), registry.secrets_of(config)))
            for label, config in zip(_labels(configs), configs, strict=True)
        ]

    @classmethod
    def alone(cls, scorer: Scorer) -> WeightedScorer:
        """One that is built already, with weight 1."""
        reward = cls.__new__(cls)
        reward.members = [Member(scorer.name, 1.0, scorer)]
        return reward

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        require_images(self.name, images, prompts)
        if not images:
            return []
        columns = [require_scores(label, scorer.score(images, prompts), prompts) for label, _, scorer in self.members]
        return [self.combine(row, prompt) for row, prompt in zip(zip(*columns, strict=True), prompts, strict=True)]

    def combine(self, row: Sequence[Score], prompt: Prompt) -> Score:
        """One sample's score from that of every member, in their order. ScoreError if the sum is not finite."""
        [score] = require_scores(self.name, [self._combine(row)], [prompt])
        return score

    def _combine(self, row: Sequence[Score]) -> Score:
        value = sum(weight * score.value for (_, weight, _), score in zip(self.members, row, strict=True))
        values = tuple(score.value for score in row)
        if len(row) == 1:
            return Score(value=value, parts=row[0].parts, text=row[0].text, values=values)
        parts: dict[str, float] = {}
        for (label, _, _), score in zip(self.members, row, strict=True):
            parts[f"{label}/value"] = score.value
            parts.update({f"{label}/{part}": number for part, number in score.parts.items()})
        texts = [score.text for score in row if score.text is not None]
        return Score(value=value, parts=parts, text=" | ".join(texts) if texts else None, values=values)
