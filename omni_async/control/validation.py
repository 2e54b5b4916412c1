"""Validation rounds: when one is due, and what it found. Rounds take no slot and nothing waits for them, except the end of the run."""

from __future__ import annotations

from collections import defaultdict

from omni_async.control.groups import SampleProgress
from omni_async.types import SampleRequest


class ValidationRound:
    """The samples of one round. Failed samples are counted, and never enter a mean."""

    def __init__(self, version: int, requests: list[SampleRequest]) -> None:
        self.version = version
        self.samples = {request.sample_id: SampleProgress(request) for request in requests}
        self.failed: dict[str, str] = {}

    @property
    def complete(self) -> bool:
        return all(s.score is not None or sample_id in self.failed for sample_id, s in self.samples.items())

    def means(self) -> dict[str, float]:
        """`reward` and every part, averaged over the scored samples."""
        values: dict[str, list[float]] = defaultdict(list)
        for sample in self.samples.values():
            if sample.score is not None:
                values["reward"].append(sample.score.value)
                for name, value in sample.score.parts.items():
                    values[name].append(value)
        return {name: sum(v) / len(v) for name, v in values.items()}

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest version that a sample of this round started with."""
        versions = [s.result.version for s in self.samples.values() if s.result is not None]
        return (min(versions), max(versions)) if versions else (self.version, self.version)


class ValidationSchedule:
    """Due at the first version, at every multiple of `every`, and at the last version."""

    def __init__(self, every: int, last: int) -> None:
        self._every = every
        self._last = last
        self._done: int | None = None

    def due(self, held: int) -> bool:
        """Whether a round should start now that every engine holds `held`; asking marks it as started."""
        previous = self._done
        if previous is not None and held <= previous:
            return False
        crossed = previous is None or held // self._every > previous // self._every or held == self._last
        if crossed:
            self._done = held
        return crossed
