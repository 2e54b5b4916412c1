"""Tracks validation rounds: when one is due, its samples, and its results.

Rounds take no slot and nothing waits for them, except the end of the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import stdev

from omni_async.config import Config
from omni_async.control.sample_table import SampleSet, SampleState
from omni_async.reward_formula import RewardFormula
from omni_async.types import SampleRequest, Score


def mean_parts(scores: Iterable[Score]) -> dict[str, float]:
    """Return the mean of every part, over the scores that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            values[name].append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


class ValidationRound(SampleSet):
    """The samples of one round. Failed samples are counted, and never enter a mean."""

    def __init__(self, version: int, requests: list[SampleRequest]) -> None:
        super().__init__("validation", version, requests)
        self.version = version

    @property
    def failed(self) -> list[str]:
        """Return the samples that the round goes on without."""
        left = (each for each in self.samples if each.state in (SampleState.FAILED, SampleState.SCORED))
        return [each.request.sample_id for each in left if each.score is None]

    def leave_incomplete(self, formula: RewardFormula) -> None:
        """Go on without samples that a scorer has failed, and is left out of: their rewards are not comparable."""
        for sample in self.samples:
            if sample.score is not None and not formula.is_whole(sample.request.prompt, sample.score):
                sample.score = None

    def means(self) -> dict[str, float]:
        """Return the means of `reward` and of every part over the scored samples."""
        scores = [sample.score for sample in self.samples if sample.score is not None]
        reward = {"reward": sum(score.value for score in scores) / len(scores)} if scores else {}
        return reward | mean_parts(scores) | reward  # a part of that name does not take its place

    def precision(self) -> tuple[int, float | None]:
        """Return how many samples were scored, and the standard error of their mean reward; None of one prompt.

        Prompts are what differs independently: it is that of the mean over the prompts' own means."""
        rewards: dict[int, list[float]] = defaultdict(list)
        for sample in self.samples:
            if sample.score is not None:
                rewards[sample.request.prompt.index].append(sample.score.value)
        means = [sum(values) / len(values) for values in rewards.values()]
        error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
        return sum(map(len, rewards.values())), error

    @property
    def versions(self) -> tuple[int, int]:
        """Return the oldest and newest version that a sample of this round started with."""
        versions = [s.result.version for s in self.samples if s.result is not None]
        return (min(versions), max(versions)) if versions else (self.version, self.version)


class Validation:
    """The rounds of a run that are under way, by version.

    They are due at the first version, at every multiple of `validation.every`, and at the last version; never without
    that section. `requests_of(version)` makes the samples of one; `begun` is the last version a round began with."""

    def __init__(
        self, config: Config, requests_of: Callable[[int], list[SampleRequest]], begun: int | None = None
    ) -> None:
        self._every = config.validation.every if config.validation else None
        self._last = config.trainer.updates
        self._begun = begun
        self._requests_of = requests_of
        self.rounds: dict[int, ValidationRound] = {}

    @property
    def done(self) -> int | None:
        """Return the last version whose round is over, or would be repeated for nothing."""
        return min(self.rounds) - 1 if self.rounds else self._begun

    def cancel(self) -> list[ValidationRound]:
        """Cancel rounds under way at the end of the run, and return them: they count as not begun."""
        self._begun = self.done
        rounds, self.rounds = [*self.rounds.values()], {}
        return rounds

    def begin(self, held: int) -> ValidationRound | None:
        """Return the round that is due now that every engine holds `held`; None if none is due."""
        if not self._is_due(held):
            return None
        self._begun = held
        requests = self._requests_of(held)
        if not requests:
            return None
        self.rounds[held] = ValidationRound(held, requests)
        return self.rounds[held]

    def _is_due(self, held: int) -> bool:
        if self._every is None:
            return False
        if self._begun is None:
            return True
        crossed = held // self._every > self._begun // self._every
        return held > self._begun and (crossed or held == self._last)
