"""Tracks validation rounds: when one is due, its samples, and its results.

Rounds take no slot and nothing waits for them, except the end of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from omni_async.config import Config
from omni_async.control.sample_table import SampleSet, SampleState
from omni_async.types import SampleRequest


class ValidationRound(SampleSet):
    """The samples of one round. Failed samples are counted, and never enter a mean."""

    def __init__(self, version: int, requests: list[SampleRequest]) -> None:
        super().__init__("validation", version, requests)

    @property
    def version(self) -> int:
        return self.number

    @property
    def failed(self) -> list[str]:
        """Return the samples that the round goes on without."""
        return [sample.request.sample_id for sample in self.samples if sample.state is SampleState.FAILED]

    def means(self) -> dict[str, float]:
        """Return the means of `reward` and of every part over the scored samples."""
        values: dict[str, list[float]] = defaultdict(list)
        for sample in self.samples:
            if sample.score is not None:
                values["reward"].append(sample.score.value)
                for name, value in sample.score.parts.items():
                    values[name].append(value)
        return {name: sum(v) / len(v) for name, v in values.items()}

    @property
    def versions(self) -> tuple[int, int]:
        """Return the oldest and newest version that a sample of this round started with."""
        versions = [s.result.version for s in self.samples if s.result is not None]
        return (min(versions), max(versions)) if versions else (self.version, self.version)


class ValidationSchedule:
    """The schedule of rounds: due at the first version, at every multiple of `every`, and at the last version."""

    def __init__(self, every: int, last: int, done: int | None = None) -> None:
        self._every = every
        self._last = last
        self.done = done  # the last version a round began with

    @classmethod
    def of(cls, config: Config, done: int | None) -> ValidationSchedule | None:
        """Return the schedule of a run of which the round of version `done` is over; None if it has no validation."""
        return cls(config.validation.every, config.trainer.updates, done) if config.validation else None

    def due(self, held: int) -> bool:
        """Return whether a round should start now that every engine holds `held`, and mark it as started."""
        previous = self.done
        if previous is not None and held <= previous:
            return False
        crossed = previous is None or held // self._every > previous // self._every or held == self._last
        if crossed:
            self.done = held
        return crossed


class Validation:
    """The rounds of a run that are under way, by version.

    `requests_of(version)` makes the samples of one; without a schedule there are none, and those up to `before` stay
    the last."""

    def __init__(
        self,
        schedule: ValidationSchedule | None,
        requests_of: Callable[[int], list[SampleRequest]],
        before: int | None = None,
    ) -> None:
        self._schedule = schedule
        self._before = before
        self._requests_of = requests_of
        self.rounds: dict[int, ValidationRound] = {}

    @property
    def done(self) -> int | None:
        """Return the last version whose round is over, or would be repeated for nothing."""
        if self._schedule is None:
            return self._before
        return min(self.rounds) - 1 if self.rounds else self._schedule.done

    def cancel(self) -> list[ValidationRound]:
        """Cancel rounds under way at the end of the run, and return them: they count as not begun."""
        if self._schedule is not None:
            self._schedule.done = self.done
        rounds, self.rounds = [*self.rounds.values()], {}
        return rounds

    def begin(self, held: int) -> ValidationRound | None:
        """Return the round that is due now that every engine holds `held`; None if none is due."""
        if self._schedule is None or not self._schedule.due(held):
            return None
        requests = self._requests_of(held)
        if not requests:
            return None
        self.rounds[held] = ValidationRound(held, requests)
        return self.rounds[held]
