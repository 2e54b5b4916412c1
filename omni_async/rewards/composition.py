"""Composes the reward of a recipe: a weighted sum over its scorers, each checked before it counts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from omni_async.config import schema
from omni_async.config.redact import one_line
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.base import Scorer, Unbounded, WrongScorer, shown_to
from omni_async.rewards.checks import describe, require_media, require_scores
from omni_async.rewards.failures import Discreet, place_of, told
from omni_async.types import Prompt, Score


def _labels(configs: Sequence[schema.Scorer]) -> list[str]:
    """Return one label per scorer: its name, numbered from the second of the same name on."""
    seen: Counter[str] = Counter()
    labels = []
    for config in configs:
        seen[config.name] += 1
        labels.append(config.name if seen[config.name] == 1 else f"{config.name}_{seen[config.name]}")
    return labels


def _built(label: str, config: schema.Scorer) -> Scorer:
    """Build a scorer.

    WrongScorer, one line without the scorer's credentials, if that fails; ScorerConfigError if its parameters do not
    fit."""
    try:
        return registry.build(config)
    except registry.ScorerConfigError:
        raise
    except BaseException as error:  # noqa: BLE001 (its constructor is foreign code, and may exit)
        raise WrongScorer(f"scorer {label!r} cannot be built: {one_line(told(error), 500)}{place_of(error)}") from None


class Member(NamedTuple):
    label: str
    weight: float
    scorer: Scorer


class WeightedScorer:
    """A weighted sum: value = sum of weight x value; `values` holds every scorer's own unweighted value.

    With one scorer, parts keep their names; with several they are `<scorer>/<part>`, and every scorer's own unweighted
    value is the part `<scorer>/value`. Texts are joined with ` | `."""

    name = "reward"

    def __init__(self, configs: Sequence[schema.Scorer]) -> None:
        if not configs:
            raise registry.ScorerConfigError(f"reward.scorers is empty; registered are {', '.join(registry.names())}")
        self.members = [
            Member(label, config.weight, Discreet(_built(label, config), registry.secrets_of(config)))
            for label, config in zip(_labels(configs), configs, strict=True)
        ]

    @classmethod
    def alone(cls, scorer: Scorer) -> WeightedScorer:
        """Wrap a scorer that is built already, with weight 1."""
        reward = cls.__new__(cls)
        reward.members = [Member(scorer.name, 1.0, scorer)]
        return reward

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        require_media(media, prompts)
        if not media:
            return []
        columns = [
            require_scores(label, scorer.score(shown_to(label, scorer, media), prompts), prompts)
            for label, _, scorer in self.members
        ]
        return [self.combine(row, prompt) for row, prompt in zip(zip(*columns, strict=True), prompts, strict=True)]

    def combine(self, row: Sequence[Score], prompt: Prompt, max_abs: float = sys.float_info.max) -> Score:
        """Combine the scores of every member, in their order, into one sample's score.

        Unbounded if the sum, or what a member adds to it, is beyond `max_abs`."""
        for (label, weight, _), score in zip(self.members, row, strict=True):
            _require_bounded(f"scorer {label!r}", weight * score.value, prompt, max_abs)
        combined = self._combine(row)
        _require_bounded("the sum of all scorers", combined.value, prompt, max_abs)
        return combined

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


def _require_bounded(whose: str, value: float, prompt: Prompt, max_abs: float) -> None:
    if not abs(value) <= max_abs:
        raise Unbounded(f"{whose}, {describe(0, prompt)}: a reward of {value:g}, beyond reward.max_abs = {max_abs:g}")
