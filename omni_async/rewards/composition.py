"""Composes the reward of a recipe: a weighted sum over its scorers, each checked before it counts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from omni_async.config import schema
from omni_async.config.redact import one_line
from omni_async.rewards import registry
from omni_async.rewards.base import Scorer, Unbounded, WrongScorer, describe
from omni_async.rewards.cache import identity_of
from omni_async.rewards.failures import Discreet, place_of, told
from omni_async.types import Prompt, Score


def _labels(names: Sequence[str]) -> list[str]:
    """Return one label per scorer: its name, numbered from the second of the same name on."""
    numbers = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return [name if number == 1 else f"{name}_{number}" for name, number in zip(names, numbers, strict=True)]


def _built(label: str, config: schema.Scorer, gpus: float) -> Scorer:
    """Build a scorer.

    WrongScorer, one line without the scorer's credentials, if that fails; ScorerConfigError if its parameters do not
    fit."""
    try:
        return registry.build(config, gpus)
    except registry.ScorerConfigError:
        raise
    except BaseException as error:  # noqa: BLE001 (its constructor is foreign code, and may exit)
        raise WrongScorer(f"scorer {label!r} cannot be built: {one_line(told(error), 500)}{place_of(error)}") from None


class Member(NamedTuple):
    """A scorer of a reward. `identity`: of its answers, see `cache.identity_of`; None: they are not kept."""

    label: str
    weight: float
    scorer: Scorer
    identity: bytes | None = None


class WeightedScorer:
    """A weighted sum: value = sum of weight x value; `values` holds every scorer's own unweighted value.

    With one scorer, parts keep their names; with several they are `<scorer>/<part>`, and every scorer's own unweighted
    value is the part `<scorer>/value`. Texts are joined with ` | `."""

    name = "reward"

    def __init__(self, configs: Sequence[schema.Scorer], gpus: float = 0.0) -> None:
        if not configs:
            raise registry.ScorerConfigError(f"reward.scorers is empty; registered are {', '.join(registry.names())}")
        self.members: list[Member] = []
        for label, config in zip(_labels([one.name for one in configs]), configs, strict=True):
            scorer = _built(label, config, gpus)
            shown = Discreet(scorer, registry.secrets_of(config))
            self.members.append(Member(label, config.weight, shown, identity_of(config, scorer)))

    @classmethod
    def alone(cls, scorer: Scorer) -> WeightedScorer:
        """Wrap a scorer that is built already, with weight 1."""
        reward = cls.__new__(cls)
        reward.members = [Member(scorer.name, 1.0, scorer)]
        return reward

    def combine(self, row: Sequence[Score], prompt: Prompt, max_abs: float = sys.float_info.max) -> Score:
        """Combine the scores of every member into one sample's score.

        Args:
            row: one score of each member, in their order.
            prompt: the sample's, which errors name.
            max_abs: `reward.max_abs`.

        Raises:
            Unbounded: the sum, or what a member adds to it, is beyond `max_abs`."""
        for (label, weight, *_), score in zip(self.members, row, strict=True):
            _require_bounded(f"scorer {label!r}", weight * score.value, prompt, max_abs)
        value = sum(weight * score.value for (_, weight, *_), score in zip(self.members, row, strict=True))
        _require_bounded("the sum of all scorers", value, prompt, max_abs)
        values = tuple(score.value for score in row)
        if len(row) == 1:
            return Score(value=value, parts=row[0].parts, text=row[0].text, values=values)
        parts: dict[str, float] = {}
        for (label, *_), score in zip(self.members, row, strict=True):
            parts[f"{label}/value"] = score.value
            parts.update({f"{label}/{part}": number for part, number in score.parts.items()})
        texts = [score.text for score in row if score.text is not None]
        return Score(value=value, parts=parts, text=" | ".join(texts) if texts else None, values=values)


def _require_bounded(whose: str, value: float, prompt: Prompt, max_abs: float) -> None:
    if not abs(value) <= max_abs:
        raise Unbounded(f"{whose}, {describe(0, prompt)}: a reward of {value:g}, beyond reward.max_abs = {max_abs:g}")
