"""Tracks validation rounds: when a round is due, its samples, and its results.

Rounds take no slot, and only the end of the run waits for them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import stdev

import msgspec
import xxhash

from omni_async.config import Config
from omni_async.config.held import spread
from omni_async.control.reasons import count
from omni_async.control.reward_formula import RewardFormula
from omni_async.control.rounds import REWARD, Round
from omni_async.control.sample import Sample, SampleSet, SampleState
from omni_async.types import SampleRequest, Score


def mean_parts(scores: Iterable[Score]) -> dict[str, float]:
    """Return the mean of every part, over the scores that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            values[name].append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def digest_of(requests: Sequence[SampleRequest], formula: RewardFormula) -> str:
    """Return the digest of a round's requests and reward formula, without the policy and the scorers' params.

    Rounds with the same digest are compared sample by sample."""
    drawn = [
        [
            one.prompt.content,
            [one.seed, one.initial_seed, one.spec, one.num_inference_steps, one.calls],
        ]
        for one in requests
    ]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode([drawn, formula.settings], enc_hook=str, order="sorted"))


class ValidationRound(SampleSet):
    """The samples of a round. Failed samples are counted with their reasons, and never enter a mean.

    `num_shown`: how many of them are shown, at most."""

    def __init__(self, version: int, requests: list[SampleRequest], num_shown: int) -> None:
        super().__init__("validation", version, requests, shown=spread(len(requests), num_shown))
        self.version = version
        self._why: dict[str, str] = {}  # sample -> why it has no score

    @property
    def failed(self) -> list[str]:
        """Return the samples that are finished without a score."""
        left = (each for each in self.samples if each.state in (SampleState.FAILED, SampleState.SCORED))
        return [each.request.sample_id for each in left if each.score is None]

    def leave_out(self, sample: Sample, reason: str) -> None:
        """Record why a sample has no score."""
        self._why[sample.request.sample_id] = reason

    def leave_incomplete(self, formula: RewardFormula) -> None:
        """Leave out samples for which an optional scorer failed: their rewards are not comparable."""
        for sample in self.samples:
            if sample.score is not None and (absent := formula.unanswered(sample.request.prompt, sample.score)):
                self.leave_out(sample, f"no answer of {', '.join(absent)}")
                sample.score = None

    def result(self, formula: RewardFormula) -> Round:
        """Return the round's record: means, every sample's score, and reasons for missing scores.

        Args:
            formula: the formula of the rewards; with several scorers, reasons name the failed scorer."""
        means = {name: value if math.isfinite(value) else None for name, value in self.means().items()}
        scores = [sample.score for sample in self.samples]
        columns = {name: tuple(None if one is None else _number(one, name) for one in scores) for name in means}
        reasons: dict[str, int] = defaultdict(int)
        for sample in self.samples:
            if sample.score is None:
                reasons[self._why.get(sample.request.sample_id, "")] += 1
        return Round(
            self.version,
            means.pop(REWARD, None),
            means,
            scored=sum(one is not None for one in scores),
            asked=len(scores),
            reasons=count(reasons, name_scorer=len(formula.labels) > 1),
            drawn=digest_of([sample.request for sample in self.samples], formula),
            scores=columns,
        )

    def means(self) -> dict[str, float]:
        """Return the means of `reward` and of every part over the scored samples."""
        scores = [sample.score for sample in self.samples if sample.score is not None]
        reward = {"reward": sum(score.value for score in scores) / len(scores)} if scores else {}
        return reward | mean_parts(scores) | reward  # a part named `reward` does not replace the reward

    def standard_error(self) -> float | None:
        """Return the standard error of the mean reward of the scored samples; None for a single prompt.

        Only prompts are independent, so it is computed over the means of the prompts."""
        rewards: dict[int, list[float]] = defaultdict(list)
        for sample in self.samples:
            if sample.score is not None:
                rewards[sample.request.prompt.index].append(sample.score.value)
        means = [sum(values) / len(values) for values in rewards.values()]
        return stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None

    @property
    def versions(self) -> tuple[int, int]:
        """Return the oldest and newest version that a sample of this round started with."""
        versions = [s.result.version for s in self.samples if s.result is not None]
        return (min(versions), max(versions)) if versions else (self.version, self.version)


def _number(score: Score, name: str) -> float | None:
    value = score.value if name == REWARD else score.parts.get(name)
    return value if value is not None and math.isfinite(value) else None


class Validation:
    """The rounds of a run that are under way, by version.

    They are due at the first version, at every multiple of `validation.every`, and at the last version; never without
    that section. `requests_of(version)` returns a round's requests. `begun` is the version of the last begun round."""

    def __init__(
        self, config: Config, requests_of: Callable[[int], list[SampleRequest]], begun: int | None = None
    ) -> None:
        self._every = config.validation.every if config.validation else None
        self._last = config.trainer.updates
        self._num_shown = config.tracking.images
        self._begun = begun
        self._requests_of = requests_of
        self.rounds: dict[int, ValidationRound] = {}

    @property
    def done(self) -> int | None:
        """Return the last version without an unfinished round up to it; a resumed run repeats only later rounds."""
        return min(self.rounds) - 1 if self.rounds else self._begun

    def cancel(self) -> list[ValidationRound]:
        """Cancel and return the rounds under way at the end of the run; they count as not begun."""
        self._begun = self.done
        rounds, self.rounds = [*self.rounds.values()], {}
        return rounds

    def begin(self, held: int) -> ValidationRound | None:
        """Begin and return the round that is due when every engine holds `held`; None if no round is due."""
        if not self._is_due(held):
            return None
        self._begun = held
        requests = self._requests_of(held)
        if not requests:
            return None
        self.rounds[held] = ValidationRound(held, requests, self._num_shown)
        return self.rounds[held]

    def _is_due(self, held: int) -> bool:
        if self._every is None:
            return False
        if self._begun is None:
            return True
        crossed = held // self._every > self._begun // self._every
        return held > self._begun and (crossed or held == self._last)
