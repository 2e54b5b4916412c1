"""Loads the scorers of a recipe's reward, with the secrets to mask and the identities of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from omni_async.config import reward as sections
from omni_async.config.redact import one_line
from omni_async.control.reward_formula import RewardFormula
from omni_async.rewards import registry
from omni_async.rewards.base import Scorer, WrongScorer, concurrency_of
from omni_async.rewards.cache import identity_of
from omni_async.rewards.failures import place_of, told

Build = Callable[[sections.Scorer, float], Scorer]


class LoadedScorer(NamedTuple):
    """A scorer that is built.

    `secrets` are masked in its exceptions. `identity` is part of the keys of its cached answers; None: no cache."""

    scorer: Scorer
    secrets: frozenset[str] = frozenset()
    identity: bytes | None = None


def _built(label: str, config: sections.Scorer, gpus: float, build: Build) -> LoadedScorer:
    """Build a scorer.

    Raises WrongScorer, one line without the scorer's credentials, if that fails; ScorerConfigError if its parameters do
    not fit; ValueError if its `concurrency` is unusable."""
    try:
        scorer = build(config, gpus)
    except registry.ScorerConfigError:
        raise
    except BaseException as error:  # noqa: BLE001 (its constructor is foreign code, and may exit)
        raise WrongScorer(f"scorer {label!r} cannot be built: {one_line(told(error), 500)}{place_of(error)}") from None
    concurrency_of(scorer)
    # At once: a later constructor may remove environment variables, and a source file may change.
    return LoadedScorer(scorer, registry.secrets_of(config), identity_of(config, scorer))


@dataclass(frozen=True)
class LoadedReward:
    """The scorers of a reward, in the order of the recipe, and the `formula` that combines their scores."""

    formula: RewardFormula
    scorers: Sequence[LoadedScorer]

    @classmethod
    def load(cls, reward: sections.Reward, gpus: float = 0.0, build: Build = registry.build) -> LoadedReward:
        """Load every scorer.

        Args:
            reward: the recipe's section.
            gpus: the accelerators of this worker.
            build: builds a scorer from its entry of `reward.scorers`."""
        if not reward.scorers:
            raise registry.ScorerConfigError(f"reward.scorers is empty; registered are {', '.join(registry.names())}")
        formula = RewardFormula(reward)
        named = zip(formula.labels, reward.scorers, strict=True)
        return cls(formula, [_built(label, config, gpus, build) for label, config in named])

    @classmethod
    def of(cls, reward: sections.Reward, *scorers: Scorer) -> LoadedReward:
        """Return a reward of already built scorers, which replace the scorers that `reward` names.

        Their answers are not cached, because their parameters are unknown."""
        configs = tuple(sections.Scorer(name=scorer.name) for scorer in scorers)
        formula = RewardFormula(msgspec.structs.replace(reward, scorers=configs))
        return cls(formula, [LoadedScorer(one) for one in scorers])
