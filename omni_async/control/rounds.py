"""Defines a finished validation round, and compares rounds over the samples that both have scored. Pure functions.

A mean over the scored samples alone is no measure of a policy: a round whose hard samples fail has a higher mean. So
two rounds are compared over their common samples: the same prompt, target, noise, sampling and formula of the reward.
Rounds with the same digest `drawn` have these in common, at the same positions of `scores`.

Such comparisons can be cyclic: A beats B, B beats C and C beats A, each over other samples. `ranked` therefore takes
the rounds in the order of their versions, and puts each above the highest round that it equals or beats. A later round
never changes the order of earlier rounds, so the best round remains the best until a later round beats it.

A round that was recorded before samples were counted has no `scores`; `scored` and `asked` may be missing, too. Missing
fields are unknown. Its recorded mean is compared, unless the numbers of scored samples are known and differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from omni_async.control.reasons import listed
from omni_async.types import Count, Value

# A round with a smaller share of its samples scored cannot be the best.
LEAST_SHARE = 0.9
REWARD = "reward"


class Round(Struct, frozen=True):
    """A finished validation round.

    `version` is the policy's. `reward` and `parts` are means over the scored samples, `scored` of `asked`; null if no
    sample was scored or the mean is not finite. `reasons`: why the others have no score -> how many. `scores`: `reward`
    and every part -> a value per sample in the order of the requests, null for an unscored sample. `drawn`: the digest
    of the prompts, the noise, the sampling and the reward's formula. None and empty fields are unknown: an earlier
    version of omni_async recorded the round without them."""

    version: int
    reward: float | None
    parts: dict[str, float | None] = {}
    scored: int | None = None
    asked: int | None = None
    reasons: dict[str, int] = {}
    drawn: str = ""
    scores: dict[str, tuple[float | None, ...]] = {}

    @property
    def may_be_best(self) -> bool:
        """Return whether it has a reward, and enough samples have a score or their number is unknown."""
        return self.reward is not None and math.isfinite(self.reward) and not too_few(self.scored, self.asked)

    @property
    def is_incomplete(self) -> bool:
        """Return whether samples are known to have no score."""
        return self.scored is not None and self.asked is not None and self.scored < self.asked

    @property
    def left_out(self) -> str:
        """Format `1 of 2 samples not scored: no face found; it cannot be the best`; nothing if none is known."""
        return not_scored(self.scored, self.asked, self.reasons)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Return the reward of every sample, None for an unscored sample; empty if they were not recorded."""
        return self.scores.get(REWARD, ())

    def same_samples(self, other: Round) -> bool:
        """Return whether both have scored the same samples, so that their means are comparable."""
        if self.scores and other.scores:
            return self.drawn == other.drawn and self._missing == other._missing
        return self.scored == other.scored or None in (self.scored, other.scored)

    @property
    def _missing(self) -> list[int]:
        return [position for position, reward in enumerate(self.rewards) if reward is None]


class Change(Struct, frozen=True):
    """The numbers of two rounds over the `samples`, of `asked`, that both have scored.

    `before` and `after` are versions; `numbers`: `reward` and the parts that both have -> mean before and after.
    `samples` is None if there is no record of the scored samples."""

    before: Count
    after: Count
    numbers: dict[str, tuple[Value, Value]]
    samples: Count | None = None
    asked: Count | None = None

    @property
    def reward(self) -> tuple[float, float]:
        return self.numbers[REWARD]

    @property
    def over(self) -> str:
        """Format ` over the 1 of 2 samples that both have scored`; nothing if these are all or unknown."""
        if self.samples is None or self.samples == self.asked:
            return ""
        return f" over the {self.samples} of {self.asked} samples that both have scored"


class NotComparable(ValueError):
    """Raised for two rounds without a number over the same samples; the text gives the reason."""


def too_few(scored: int | None, asked: int | None) -> bool:
    """Return whether fewer than 90 % of a round's samples have a score; False if that is unknown."""
    return scored is not None and asked is not None and scored < LEAST_SHARE * asked


def not_scored(scored: int | None, asked: int | None, reasons: dict[str, int]) -> str:
    """Format `1 of 2 samples not scored: no face found; it cannot be the best`.

    The text is empty if all have a score or their number is unknown."""
    if scored is None or asked is None or scored >= asked:
        return ""
    why = f": {listed(reasons)}" if reasons else ""
    barred = "; it cannot be the best" if too_few(scored, asked) else ""
    return f"{asked - scored} of {asked} samples not scored{why}{barred}"


def common(before: Round, after: Round) -> list[int]:
    """Return the positions of the samples that both rounds have scored. Raises NotComparable for no such sample."""
    if before.drawn != after.drawn:
        raise NotComparable("their prompts, noise, sampling or scorers differ")
    pairs = zip(before.rewards, after.rewards, strict=False)
    found = [position for position, pair in enumerate(pairs) if None not in pair]
    if not found:
        raise NotComparable("no sample has a score in both")
    return found


def compare(before: Round, after: Round) -> Change:
    """Return the numbers of two rounds over the samples that both have scored. Raises NotComparable."""
    if before.reward is None or after.reward is None:
        raise NotComparable("one of them has no reward")
    if not (before.scores and after.scores):
        return _as_recorded(before, after)
    positions = common(before, after)
    numbers: dict[str, tuple[float, float]] = {}
    for name in before.scores.keys() & after.scores.keys():
        columns = before.scores[name], after.scores[name]
        pairs = [(columns[0][at], columns[1][at]) for at in positions]
        both = [(one, other) for one, other in pairs if one is not None and other is not None]
        if both:
            numbers[name] = (mean([one for one, _ in both]), mean([other for _, other in both]))
    ordered = {name: numbers[name] for name in before.scores if name in numbers}
    return Change(before.version, after.version, ordered, len(positions), after.asked)


def _as_recorded(before: Round, after: Round) -> Change:
    """Compare means, because one of the rounds was recorded without its samples' scores."""
    if None not in (before.scored, after.scored) and before.scored != after.scored:
        raise NotComparable(
            f"{before.scored} and {after.scored} samples were scored, and it was not recorded which these are"
        )
    numbers = {
        name: (one, other)
        for name, one in {REWARD: before.reward, **before.parts}.items()
        if one is not None and (other := {REWARD: after.reward, **after.parts}.get(name)) is not None
    }
    return Change(before.version, after.version, numbers)


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one number."""
    return sum(values) / len(values)


def first_and_last(rounds: Iterable[Round]) -> tuple[Round, Round] | None:
    """Return the rounds of the oldest and the newest version that have a reward; None unless there are two."""
    found = sorted((one for one in rounds if one.reward is not None), key=lambda one: one.version)
    return (found[0], found[-1]) if len(found) > 1 else None


class _Candidate(NamedTuple):
    """A round that may be the best, the positions of its samples without a score, and the sum of its rewards.

    A pair is compared in as many steps as samples are missing: a run may have hundreds of rounds of a thousand samples.
    """

    round: Round
    missing: frozenset[int]
    total: float

    @classmethod
    def of(cls, one: Round) -> _Candidate:
        missing = frozenset(position for position, reward in enumerate(one.rewards) if reward is None)
        return cls(one, missing, math.fsum(reward for reward in one.rewards if reward is not None))

    def mean_without(self, positions: Iterable[int]) -> float | None:
        """Return the mean reward without the samples at these positions, None if no other has a score."""
        gone = [reward for at in positions if (reward := self.round.rewards[at]) is not None]
        count = len(self.round.rewards) - len(self.missing) - len(gone)
        return (self.total - math.fsum(gone)) / count if count > 0 else None


def ranked(rounds: Iterable[Round]) -> list[Round]:
    """Return the rounds that may be the best, best first; of equal rounds the newer first, as it is trained longer."""
    order: list[_Candidate] = []
    for one in sorted(rounds, key=lambda one: one.version):
        if one.may_be_best:
            newer = _Candidate.of(one)
            place = next((place for place, older in enumerate(order) if _equals_or_beats(newer, older)), len(order))
            order.insert(place, newer)
    return [one.round for one in order]


# Relative difference of means that counts as rounding: the means are computed from sums over more samples.
_ROUNDING = 1e-12


def _equals_or_beats(newer: _Candidate, older: _Candidate) -> bool:
    """Compare two rounds that may be the best. The newer measurement counts if the samples differ."""
    one, other = newer.round, older.round
    if one.scores and other.scores and (one.drawn, len(one.rewards)) != (other.drawn, len(other.rewards)):
        return True
    if one.scores and other.scores and newer.missing != older.missing:
        after = newer.mean_without(older.missing - newer.missing)
        before = older.mean_without(newer.missing - older.missing)
        if after is not None and before is not None:
            return after >= before - _ROUNDING * abs(before)
    elif (one.scores and other.scores) or one.scored == other.scored or None in (one.scored, other.scored):
        return (one.reward or 0.0) >= (other.reward or 0.0)
    return (one.scored or 0) > (other.scored or 0)
