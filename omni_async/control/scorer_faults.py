"""In the coordinator: decides from the verdicts of all reward workers that a scorer is wrong.

Pure bookkeeping: records for every reward worker whether its scorers have scored a sample, and whether it waits for a
scorer that is down. A scorer is wrong if it has scored nothing yet and fails permanently for samples of several
prompts.
"""

from __future__ import annotations

from typing import Protocol

from omni_async.config import Config
from omni_async.types import SampleRequest

# A scorer counts as wrong after permanent failures in this many groups, or prompts of a validation round: some prompts
# may be bad.
_ALL_WRONG = 4


class Suspect(Protocol):
    """A sample that may have brought scorers down; `went_down` are their workers since it was suspected last."""

    went_down: frozenset[str]


class ScorerFaults:
    """The faults of the scorers. `has_scored`: the current scorers have scored a sample of this run before."""

    def __init__(self, config: Config, has_scored: bool) -> None:
        self._enough = min(_ALL_WRONG, config.slots)
        self._down: set[str] = set()  # reward workers that wait for a scorer
        self._proven: set[str] = set()  # reward workers whose scorers have scored
        # Kind, group and prompt of samples that were rejected, or failed twice with the same error.
        self._failed: set[tuple[str, int, int]] = set()
        self.has_scored = has_scored

    def end_outage(self, worker: str) -> None:
        """Record that a reward worker waits for no scorer: it requests samples, or is lost."""
        self._down.discard(worker)

    def record_score(self, worker: str) -> None:
        """Record that the scorers of a reward worker have scored a sample."""
        self.has_scored = True
        self._proven.add(worker)

    def record_outage(self, worker: str, sample: Suspect) -> bool:
        """Record that a scorer was down when its worker submitted this sample. Return whether the sample is suspected.

        Only the first sample of an outage can have caused it, and only if the scorer worked before. While other workers
        wait for a scorer too, an outage is expected, and only a repetition with the same worker counts."""
        may_be_cause = worker in self._proven and worker not in self._down
        others_down = bool(self._down - {worker})
        self._down.add(worker)
        if not may_be_cause:
            return False
        if others_down and worker not in sample.went_down:
            sample.went_down |= {worker}
            return False
        sample.went_down = frozenset({worker})
        return True

    def record_permanent_failure(self, request: SampleRequest) -> bool:
        """Record a sample for which a scorer fails permanently. Return whether the scorer is wrong."""
        if self.has_scored:
            return False
        self._failed.add((request.kind, request.group, request.prompt.index))
        return len(self._failed) >= self._enough
