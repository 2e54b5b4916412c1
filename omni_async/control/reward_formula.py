"""Selects the scorers of a sample, and computes its reward from their scores. Pure; imports no torch.

The columns of a reward are either a scorer's value with its weight, or the parts of its score that `components` names,
each with its own weight. `advantage.aggregate` can normalise columns separately. With values v and weights w

  sum       value = sum_k w_k v_k
  product   value = prod_k v_k ** w_k, v_k >= 0

The value is `reward.gated` instead if a scorer's value is below its `gate`. A scorer that a prompt is not routed to
(`when`) has no part in its reward.

Samples are compared within their group. An optional scorer that failed for one sample is therefore left out of all
samples of the group: no sample is better than another because more scorers have scored it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from omni_async.config.reward import Reward, Scorer
from omni_async.config.tree import file_of
from omni_async.types import Prompt, Score

# Bound of a value that does not count in the reward, but whose mean and spread are metrics.
_LARGEST = 1e100
# An emulated run has scorers only in its profile.
_EMULATED = (Scorer(name="replay"),)


class NoReward(ValueError):
    """The values give no reward that can be trained on; the text gives the reason."""


class Column(NamedTuple):
    """A number that counts: the value of scorer number `scorer`, or a part of its score."""

    scorer: int
    part: str | None
    weight: float


def labels_of(scorers: Sequence[Scorer]) -> tuple[str, ...]:
    """Return one label per scorer: its name, with a number from the second scorer of that name on.

    A scorer `path/file.py:name` has the label `file.py:name`."""
    names = [one.name if file_of(one.name) is None else one.name.rpartition("/")[2] for one in scorers]
    numbers = [names[: i + 1].count(name) for i, name in enumerate(names)]
    return tuple(name if number == 1 else f"{name}_{number}" for name, number in zip(names, numbers, strict=True))


def is_asked(scorer: Scorer, prompt: Prompt) -> bool:
    """Return whether the scorer scores samples of the prompt."""
    for key, wanted in scorer.when.items():
        if key not in prompt.metadata or prompt.metadata[key] not in (
            wanted if isinstance(wanted, tuple) else [wanted]
        ):
            return False
    return True


def _counted(scorer: Scorer) -> list[tuple[str | None, float]]:
    """Return the parts of a scorer's score that count, with their weights; None means its value."""
    return [*scorer.components.items()] or [(None, 1.0)]


class RewardFormula:
    """The formula of a recipe's reward. `labels` name its scorers; `columns` are the numbers that count."""

    def __init__(self, config: Reward) -> None:
        self._config = config
        self.scorers = config.scorers or _EMULATED
        self.labels = labels_of(self.scorers)
        self.columns = tuple(
            Column(number, part, scorer.weight * weight)
            for number, scorer in enumerate(self.scorers)
            for part, weight in _counted(scorer)
        )
        self._optional = any(scorer.on_failure == "leave_out" for scorer in self.scorers)

    @property
    def weights(self) -> list[float]:
        return [column.weight for column in self.columns]

    @property
    def settings(self) -> list[Any]:
        """Return the settings of the formula as plain values, without the scorers' own parameters."""
        scorers = [[one.name, one.weight, one.components, one.when, one.gate] for one in self.scorers]
        return [scorers, self._config.combine, self._config.gated]

    def asked(self, prompt: Prompt) -> list[int]:
        """Return the numbers of the scorers of the prompt's samples."""
        return [number for number, scorer in enumerate(self.scorers) if is_asked(scorer, prompt)]

    def missing(self, prompt: Prompt) -> str | None:
        """Return an error text if no scorer would score the prompt's samples; else None."""
        if self.asked(prompt):
            return None
        keys = sorted({key for scorer in self.scorers for key in scorer.when})
        return f"no scorer is asked for it: none has a `when` that fits its metadata ({', '.join(keys)})"

    def combine(self, scores: Mapping[int, Score]) -> Score:
        """Return a sample's score. Its `values` are the columns, with None for scorers that have not answered.

        With one scorer, parts keep their names; with several they are `<scorer>/<part>`, and every scorer's own value
        is the part `<scorer>/value`. Texts are joined with ` | `.

        Args:
            scores: by the number of the scorer, for scorers that were called and have answered; at least one.

        Raises:
            NoReward: a component is missing, or a value is beyond `reward.max_abs`, or does not fit into a product."""
        values = tuple(self._value(column, scores.get(column.scorer)) for column in self.columns)
        value = self._reward(values, {number: score.value for number, score in scores.items()})
        if len(self.scorers) == 1:
            (only,) = scores.values()
            return Score(value, only.parts, only.text, values)
        parts: dict[str, float] = {}
        for number, score in sorted(scores.items()):
            label = self.labels[number]
            parts[f"{label}/value"] = score.value
            parts |= {f"{label}/{part}": found for part, found in score.parts.items()}
        texts = [score.text for _, score in sorted(scores.items()) if score.text is not None]
        return Score(value, parts, " | ".join(texts) if texts else None, values)

    def _value(self, column: Column, score: Score | None) -> float | None:
        if score is None:
            return None
        if column.part is None:
            return score.value
        if column.part not in score.parts:
            has = ", ".join(score.parts) or "none"
            raise NoReward(
                f"scorer {self.labels[column.scorer]!r}: its score has no part {column.part!r}, which"
                f" `components` names; it has {has}"
            )
        return score.parts[column.part]

    def _reward(self, values: Sequence[float | None], whole: Mapping[int, float]) -> float:
        """Return the reward of the columns' `values`; gates are compared with `whole`, the scorers' own values."""
        total, product = 0.0, self._config.combine == "product"
        counted = [(column, value) for column, value in zip(self.columns, values, strict=True) if value is not None]
        if product:
            total = 1.0
        for column, value in counted:
            label = self.labels[column.scorer]
            term = self._power(label, value, column.weight) if product else column.weight * value
            self._require_bounded(f"scorer {label!r}", term)
            total = total * term if product else total + term
        self._require_bounded("the product of all scorers" if product else "the sum of all scorers", total)
        for number, value in whole.items():
            if abs(value) > _LARGEST:
                raise NoReward(f"scorer {self.labels[number]!r}: a value of {value:g}, beyond {_LARGEST:g}")
            gate = self.scorers[number].gate
            if gate is not None and value < gate:
                return self._config.gated
        return total

    def _power(self, label: str, value: float, weight: float) -> float:
        if value < 0 or (value == 0 and weight < 0):
            raise NoReward(f"scorer {label!r}: a value of {value:g} ** {weight:g} has no place in a product")
        try:
            return value**weight
        except OverflowError:
            return math.inf

    def _require_bounded(self, whose: str, value: float) -> None:
        if not abs(value) <= self._config.max_abs:
            raise NoReward(f"{whose}: a reward of {value:g}, beyond reward.max_abs = {self._config.max_abs:g}")

    def unanswered(self, prompt: Prompt, score: Score) -> list[str]:
        """Return the labels of the scorers that should have scored the sample and have no part in its score."""
        if not self._optional:
            return []
        asked = set(self.asked(prompt))
        columns = zip(self.columns, score.values, strict=True)
        absent = {column.scorer for column, value in columns if value is None and column.scorer in asked}
        return [self.labels[number] for number in sorted(absent)]

    # ---- groups ------------------------------------------------------------------------------------------------------

    def level(self, prompt: Prompt, scores: Sequence[Score]) -> tuple[list[Score], tuple[str, ...]]:
        """Leave scorers without a value for one sample of a group out of all its samples.

        Args:
            prompt: the group's.
            scores: one per sample, from `combine`.

        Returns:
            The samples' scores, and the labels of the scorers that are left out.

        Raises:
            NoReward: no scorer is left, or the remaining scorers give no reward."""
        if not self._optional:
            return [*scores], ()
        asked = set(self.asked(prompt))
        gone = {
            column.scorer
            for position, column in enumerate(self.columns)
            if column.scorer in asked and any(score.values[position] is None for score in scores)
        }
        if not gone:
            return [*scores], ()
        if gone == asked:
            names = ", ".join(self.labels[number] for number in sorted(gone))
            raise NoReward(f"no scorer has answered for every sample of the group; left out would be {names}")
        return [self._without(score, asked - gone) for score in scores], tuple(self.labels[i] for i in sorted(gone))

    def _without(self, score: Score, kept: set[int]) -> Score:
        values = tuple(
            value if column.scorer in kept else None for column, value in zip(self.columns, score.values, strict=True)
        )
        whole = {number: score.parts[f"{self.labels[number]}/value"] for number in kept}
        return msgspec.structs.replace(score, value=self._reward(values, whole), values=values)
