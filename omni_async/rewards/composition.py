"""The reward of a recipe: a weighted sum over its scorers, each checked before it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from omni_async.config import schema
from omni_async.rewards import registry
from omni_async.rewards.checks import require_images, require_scores
from omni_async.rewards.hiding import hiding
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


class WeightedScorer:
    """value = sum of weight x value; `values` holds every scorer's own unweighted value. With one scorer, parts keep their names; with
    several they are `<scorer>/<part>`, and every scorer's own unweighted value is the part `<scorer>/value`. Texts are joined with ` | `."""

    name = "reward"

    def __init__(self, configs: Sequence[schema.Scorer]) -> None:
        if not configs:
            raise registry.ScorerConfigError(f"reward.scorers is empty; registered are {', '.join(registry.names())}")
        self._members = [(label, config.weight, registry.build(config)) for label, config in zip(_labels(configs), configs, strict=True)]
        self._secrets = [registry.secrets_of(config) for config in configs]

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        require_images(self.name, images, prompts)
        if not images:
            return []
        columns = []
        for (label, _, scorer), secrets in zip(self._members, self._secrets, strict=True):
            with hiding(secrets):
                scores = scorer.score(images, prompts)
            require_scores(label, scores, prompts)
            columns.append(scores)
        combined = [self._combine(row) for row in zip(*columns, strict=True)]
        require_scores(self.name, combined, prompts)
        return combined

    def _combine(self, row: tuple[Score, ...]) -> Score:
        value = sum(weight * score.value for (_, weight, _), score in zip(self._members, row, strict=True))
        values = tuple(score.value for score in row)
        if len(row) == 1:
            return Score(value=value, parts=row[0].parts, text=row[0].text, values=values)
        parts: dict[str, float] = {}
        for (label, _, _), score in zip(self._members, row, strict=True):
            parts[f"{label}/value"] = score.value
            parts.update({f"{label}/{part}": number for part, number in score.parts.items()})
        texts = [score.text for score in row if score.text is not None]
        return Score(value=value, parts=parts, text=" | ".join(texts) if texts else None, values=values)
