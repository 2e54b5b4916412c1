"""Loads the scorers of a recipe's reward, each in a form whose exceptions can be shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from omni_async.config import schema
from omni_async.config.redact import one_line
from omni_async.control.reward_formula import RewardFormula
from omni_async.rewards import registry
from omni_async.rewards.base import Scorer, WrongScorer
from omni_async.rewards.cache import identity_of
from omni_async.rewards.failures import Discreet, place_of, told

Build = Callable[[schema.Scorer, float], Scorer]


def _built(label: str, config: schema.Scorer, gpus: float, build: Build) -> Scorer:
    """Build a scorer.

    Raises WrongScorer, one line without the scorer's credentials, if that fails; ScorerConfigError if its parameters do
    not fit."""
    try:
        return build(config, gpus)
    except registry.ScorerConfigError:
        raise
    except BaseException as error:  # noqa: BLE001 (its constructor is foreign code, and may exit)
        raise WrongScorer(f"scorer {label!r} cannot be built: {one_line(told(error), 500)}{place_of(error)}") from None


class Member(NamedTuple):
    """A scorer of a reward. `identity`: of its answers, see `cache.identity_of`; None if they are not cached."""

    label: str
    config: schema.Scorer
    scorer: Discreet
    identity: bytes | None = None


@dataclass(frozen=True)
class LoadedReward:
    """The scorers of a reward, `members`, in the order of the recipe, and the `formula` that combines their scores."""

    formula: RewardFormula
    members: list[Member]

    @classmethod
    def load(cls, reward: schema.Reward, gpus: float = 0.0, build: Build = registry.build) -> LoadedReward:
        """Load every scorer.

        Args:
            reward: the recipe's section.
            gpus: the accelerators of this worker.
            build: builds a scorer from its entry of `reward.scorers`."""
        if not reward.scorers:
            raise registry.ScorerConfigError(f"reward.scorers is empty; registered are {', '.join(registry.names())}")
        formula = RewardFormula(reward)
        members = []
        for label, config in zip(formula.labels, reward.scorers, strict=True):
            scorer = _built(label, config, gpus, build)
            shown = Discreet(scorer, registry.secrets_of(config))
            members.append(Member(label, config, shown, identity_of(config, scorer)))
        return cls(formula, members)

    @classmethod
    def of(cls, reward: schema.Reward, *scorers: Scorer) -> LoadedReward:
        """Return a reward of already built scorers, which replace the scorers that `reward` names."""
        configs = tuple(schema.Scorer(name=scorer.name) for scorer in scorers)
        formula = RewardFormula(msgspec.structs.replace(reward, scorers=configs))
        named = zip(formula.labels, configs, scorers, strict=True)
        return cls(formula, [Member(label, config, Discreet(one, frozenset())) for label, config, one in named])
