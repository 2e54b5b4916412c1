"""Defines the messages about groups and updates, the ledger's lines, and the spans of the timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from omni_async.types.bounds import Number, Text, Value
from omni_async.types.prompts import Prompt
from omni_async.types.samples import Score, SdeWindow, VersionSpans

Terminal = Literal["trained", "rejected", "dropped"]


class ReadySample(msgspec.Struct, frozen=True, gc=False):
    """A scored sample, without media, which training never reads; `nbytes` and `shared` are those of its result."""

    sample_id: str
    trajectory: Any
    score: Score
    step_versions: VersionSpans
    nbytes: int = 0
    shared: tuple[tuple[str, int], ...] = ()


class ReadyGroup(msgspec.Struct, frozen=True):
    """A whole prompt group, generated and scored, as the trainer takes it.

    `bucket` is the position of its `SamplingSpec` in `rollout.specs`."""

    group: int
    prompt: Prompt
    window: SdeWindow | None
    admitted_version: int
    samples: tuple[ReadySample, ...]
    bucket: int = 0

    @property
    def rewards(self) -> list[float]:
        return [s.score.value for s in self.samples]

    @property
    def oldest_version(self) -> int:
        """Return the oldest version of any trained step.

        Samples that no policy generated (a dataset's) count with the version they were admitted under."""
        taken = {span[0] for sample in self.samples for span in sample.step_versions.spans}
        return min(taken) if taken else self.admitted_version


class TrainGroup(msgspec.Struct, frozen=True):
    """The part of a ready group that is trained on; a rank fetches its trajectories separately.

    One entry per chosen sample, in the same order everywhere.

    `version` is the policy version trained from; `step_versions` are the versions that took each sample's trained
    steps. `spec` is the `SamplingSpec` of all samples. `seeds` determine a sample's training noise and its subset of
    steps; the two samples of a preference pair share one. `weights[i][k]`, if given, are importance weights computed
    over the whole update; they replace weights that the trainer would compute from the group alone. `weighed`: they
    are computed, so a proximal pass returns its drifts. `proximal_ratio`: the ratio is relative to the proximal policy,
    regardless of `algorithm.correction`. `prompt`: the group's, for kinds whose rows are tokens; other kinds find the
    prompt's encoding in the trajectories."""

    group: int
    version: int
    spec: Any
    advantages: tuple[float, ...]
    seeds: tuple[int, ...]
    step_versions: tuple[VersionSpans, ...]
    weights: tuple[Sequence[float], ...] | None = None
    proximal_ratio: bool = False
    prompt: Prompt | None = None
    weighed: bool = False


class SampleDrift(msgspec.Struct, frozen=True):
    """The distance between the proximal policy and the policy that generated a sample.

    Per trained step the log-ratio in nats, and the exact KL in nats; both are summed over all `num_elements` latent
    elements. `steps` are the numbers of these denoising steps. Ranks send an `array` of doubles, which travels as
    bytes, and a `range`: an answer may have thousands of tokens."""

    log_ratio: Sequence[float]
    kappa: Sequence[float] | None
    num_elements: int
    steps: Sequence[int]


# Characters of a prompt in its groups' lines of the ledger.
SHOWN_OF_PROMPT = 300


class LedgerEntry(msgspec.Struct, frozen=True, omit_defaults=False):
    """A line of `ledger.jsonl`: how one admitted group ended.

    `prompt` is the prompt's number, `text` its first characters; empty in lines of earlier versions. `left_out` are
    failed scorers that its rewards omit."""

    run: Text
    group: Number
    prompt: Number
    event: Terminal
    reason: Text | None
    admitted_version: Number
    trained_version: Number | None
    staleness: Number | None
    step_versions: tuple[Number, Number] | None
    attempts: Number
    reward: Value | None
    left_out: tuple[str, ...] = ()
    text: Text = ""


class UpdateReport(msgspec.Struct, frozen=True):
    """The trainer's report after an update; `version` is the policy version it produced (the number of updates)."""

    version: int
    groups: tuple[int, ...]
    metrics: dict[str, float]
    started: float
    finished: float


class Span(msgspec.Struct, frozen=True):
    """A stretch of time of one actor, in seconds since the epoch.

    `kind`: generate, score, train, publish, swap, ..., or the waits `starved` (no input) and `backpressured` (no room
    downstream)."""

    actor: str
    kind: str
    start: float
    end: float
    args: dict[str, Any] = {}
