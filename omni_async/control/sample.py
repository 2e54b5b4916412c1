"""A sample's states, the events that each accepts, and what follows from an event.

         lease          generate           take            score
  QUEUED ------> LEASED --------> GENERATED ----> SCORING --------> SCORED
    ^              |                  ^              |                 |
    |              |                  +-- return ----+                 |
    |              |                  +-- postpone --+                 |
    |              |                  +-- resume -- PAUSED <- pause    |
    +--- lose -----+------- lose (its tensors are gone) ---------------+

An event in the wrong state is an error. `end`, of a group or a round, leads to GONE from every state except LEASED: a
leased sample is ABANDONED until its engine answers. FAILED samples will have no score: their round continues without
them, their group ends.

| state     | trajectory slot | bytes    | is with                                                                  |
|-----------|-----------------|----------|--------------------------------------------------------------------------|
| QUEUED    |                 | expected | no worker: it waits for an engine, the oldest group's sample first       |
| LEASED    | held            | expected | `engine`                                                                 |
| ABANDONED | held            | expected | `engine`, whose answer will be ignored                                   |
| GENERATED | held            | its own  | no worker: it waits for a reward worker                                  |
| SCORING   | held            | its own  | `workers`, one or several; the first score counts                        |
| PAUSED    | held            | its own  | no worker: it waits for the end of a pause                               |
| SCORED    |                 | its own  | its group or round                                                       |
| FAILED    |                 |          | its round                                                                |

Its own bytes are those of trajectory and media, from its score on without media that will not be shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

from msgspec.structs import replace

from omni_async.control.lead import Times
from omni_async.types import SampleKind, SampleRequest, SampleResult, Score, ScoreJob, Terminal

SampleState = IntEnum("SampleState", "QUEUED LEASED ABANDONED GENERATED SCORING PAUSED SCORED FAILED GONE")
SampleEvent = IntEnum(
    "SampleEvent", "LEASE GENERATE LOSE TAKE RETURN POSTPONE PAUSE RESUME SCORE RESTORE FAIL END ANSWER"
)
# Bound to module names because looking up a member of the enum takes longer than the transition.
QUEUED, LEASED, ABANDONED, GENERATED, SCORING, PAUSED, SCORED, FAILED, GONE = SampleState
LEASE, GENERATE, LOSE, TAKE, RETURN, POSTPONE, PAUSE, RESUME, SCORE, RESTORE, FAIL, END, ANSWER = SampleEvent

SAMPLE_TRANSITIONS: dict[tuple[SampleState, SampleEvent], SampleState] = {
    (QUEUED, LEASE): LEASED,
    (QUEUED, RESTORE): SCORED,  # from an earlier attempt of the run
    (QUEUED, END): GONE,
    (LEASED, GENERATE): GENERATED,
    (LEASED, LOSE): QUEUED,
    (LEASED, FAIL): FAILED,
    (LEASED, END): ABANDONED,
    (ABANDONED, ANSWER): GONE,
    (GENERATED, TAKE): SCORING,
    (GENERATED, LOSE): QUEUED,
    (GENERATED, FAIL): FAILED,
    (GENERATED, END): GONE,
    (SCORING, TAKE): SCORING,  # by another worker
    (SCORING, ANSWER): SCORING,  # without a score, while another worker still has it
    (SCORING, RETURN): GENERATED,  # before all others: the trainer needs an older group sooner
    (SCORING, POSTPONE): GENERATED,  # behind all others
    (SCORING, PAUSE): PAUSED,
    (SCORING, SCORE): SCORED,
    (SCORING, LOSE): QUEUED,
    (SCORING, FAIL): FAILED,
    (SCORING, END): GONE,
    (PAUSED, RESUME): GENERATED,  # before all others
    (PAUSED, LOSE): QUEUED,
    (PAUSED, END): GONE,
    (SCORED, LOSE): QUEUED,
    (SCORED, END): GONE,
    (FAILED, END): GONE,
}


class SampleSet:
    """Samples that are useful only together: a group, or a validation round.

    `attempts` is the largest number of generations that any sample needed, `num_missing` the number of samples that are
    neither scored nor failed. `times` are measured for groups. `shown` are the positions of samples that keep their
    media after the score."""

    def __init__(
        self,
        kind: SampleKind,
        number: int,
        requests: list[SampleRequest],
        bucket: int = 0,
        shown: Collection[int] = (),
    ) -> None:
        self.kind = kind
        self.number = number
        self.bucket = bucket
        self.num_shown = len(shown)
        self.samples: tuple[Sample, ...] = tuple(
            Sample(request, self, position in shown) for position, request in enumerate(requests)
        )
        self.num_missing = len(requests)
        self.attempts = 1
        self.times = Times()
        self._num_sharers: Counter[str] = Counter()

    def show_none(self) -> None:
        """Let no sample keep its media after the score."""
        self.num_shown = 0
        for sample in self.samples:
            sample.shown = False

    def share(self, result: SampleResult, own: int) -> int:
        """Record that a sample begins (1) or ends (-1) to hold its result.

        Returns the bytes of the shared objects that no other sample of the set holds."""
        alone = 0
        for name, size in result.shared:
            self._num_sharers[name] += own
            alone += size * (self._num_sharers[name] == (own > 0))
        return alone


class Sample:
    """One sample.

    `failures` counts its own failed generations, not losses with its engine or batch. `suspected` counts the reward
    workers and scorers that died or went down while they had it, possibly by chance. `went_down` are the workers whose
    scorer went down since the last suspicion."""

    __slots__ = (
        "engine",
        "failures",
        "owner",
        "request",
        "result",
        "score",
        "score_failures",
        "shown",
        "state",
        "suspected",
        "went_down",
        "workers",
    )

    def __init__(self, request: SampleRequest, owner: SampleSet, shown: bool) -> None:
        self.request = request
        self.owner = owner
        self.shown = shown
        self.state = QUEUED
        self.engine = ""
        self.workers: tuple[str, ...] = ()
        self.result: SampleResult | None = None
        self.score: Score | None = None
        self.failures = self.score_failures = self.suspected = 0
        self.went_down: frozenset[str] = frozenset()

    def release_media(self) -> None:
        """Forget the media, which no scorer needs any more, unless they may be shown."""
        if not self.shown and self.result is not None and self.result.media is not None:
            self.result = replace(self.result, media=None, media_bytes=0)

    def job(self, alone: bool = False) -> ScoreJob:
        assert self.result is not None
        request = self.request
        made = request.kind, request.prompt, self.result.media, request.attempt
        return ScoreJob(request.sample_id, *made, alone, request.group, request.sample)


class Complete(NamedTuple):
    """A group or round whose last sample is scored."""

    owner: SampleSet


class Pause(NamedTuple):
    """A sample that is scored again after a pause."""

    sample: Sample


class Failure(NamedTuple):
    """A sample that will have no score. Its group ends with `event`, its round continues without it."""

    sample: Sample
    event: Terminal
    reason: str


class EndRun(NamedTuple):
    """The end of the run: a scorer fails for every sample."""

    reason: str


Outcome = Complete | Pause | Failure | EndRun
