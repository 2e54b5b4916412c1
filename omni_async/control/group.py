"""A group's states, the events that each accepts, and the group itself.

             complete          take                train            publish
  MAKING ----------------> READY ----> TRAINING ----------> TRAINED ------> GONE
    ^                        |          |    ^
    +- spoil: samples are ---+   return |    | take
       gone                             v    |
                                 REMAKING -> REMADE     as MAKING and READY

`end` (rejected, dropped) leads to GONE from everywhere but TRAINED.

| state    | holds                            | waits for                                                    |
|----------|----------------------------------|--------------------------------------------------------------|
| MAKING   | slot, place in the replay buffer | its samples                                                  |
| READY    | slot, place in the replay buffer | the trainer                                                  |
| TRAINING | slot                             | the trainer's update                                         |
| REMAKING | slot                             | its samples: the trainer could not read it                   |
| REMADE   | slot                             | the trainer, which takes it before any younger group         |
| TRAINED  | slot                             | every engine to hold the weights that came out of its update |
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum

from omni_async.config.algorithm import Advantage
from omni_async.config.redact import redact_text
from omni_async.control.reward_formula import NoReward, RewardFormula
from omni_async.control.sample import Sample, SampleSet
from omni_async.types import (
    SHOWN_OF_PROMPT,
    LedgerEntry,
    Prompt,
    ReadyGroup,
    ReadySample,
    SampleRequest,
    SampleResult,
    Score,
    SdeWindow,
    Terminal,
)

GroupState = IntEnum("GroupState", "MAKING READY TRAINING REMAKING REMADE TRAINED GONE")
GroupEvent = IntEnum("GroupEvent", "COMPLETE SPOIL TAKE RETURN TRAIN PUBLISH END")
MAKING, READY, TRAINING, REMAKING, REMADE, TRAINED, GONE = GroupState
COMPLETE, SPOIL, TAKE, RETURN, TRAIN, PUBLISH, END = GroupEvent

GROUP_TRANSITIONS: dict[tuple[GroupState, GroupEvent], GroupState] = {
    (MAKING, COMPLETE): READY,
    (MAKING, END): GONE,
    (READY, SPOIL): MAKING,
    (READY, TAKE): TRAINING,
    (READY, END): GONE,
    (TRAINING, RETURN): REMAKING,
    (TRAINING, TRAIN): TRAINED,
    (TRAINING, END): GONE,  # the trainer will not report it any more
    (REMAKING, COMPLETE): REMADE,
    (REMAKING, END): GONE,
    (REMADE, SPOIL): REMAKING,
    (REMADE, TAKE): TRAINING,
    (REMADE, END): GONE,
    (TRAINED, PUBLISH): GONE,
}


def has_signal(scores: Sequence[Score], *, each_scorer: bool = False) -> bool:
    """Return False if all rewards of the group are equal, or if it has fewer than two: then every advantage is 0.

    With `each_scorer` the scorers' own values count too: advantages computed per scorer may differ although the sums
    are equal."""
    columns: list[list[float]] = [[score.value for score in scores]]
    if each_scorer:
        # A scorer that was not called, or is left out, has no value for any of the samples.
        values = zip(*(score.values for score in scores), strict=True)
        columns += [[value for value in column if value is not None] for column in values]
    return any(len(column) > 1 and min(column) != max(column) for column in columns)


class Group(SampleSet):
    """An admitted group and its samples, all generated in the shape of `bucket`.

    `losses` counts how often the trainer could not read it. `ready` is the message for the trainer, set once the group
    is complete. `left_out` are the scorers that its rewards do without."""

    def __init__(
        self,
        number: int,
        prompt: Prompt,
        window: SdeWindow | None,
        admitted_version: int,
        requests: list[SampleRequest],
        bucket: int = 0,
        shown: Collection[int] = (),
    ) -> None:
        super().__init__("train", number, requests, bucket, shown)
        self.prompt = prompt
        self.window = window
        self.admitted_version = admitted_version
        self.trained_version: int | None = None
        self.state = MAKING
        self.losses = 0
        self.ready: ReadyGroup | None = None
        self.left_out: tuple[str, ...] = ()

    def restored(self, ready: ReadyGroup) -> Iterator[tuple[Sample, SampleResult, Score]]:
        """Yield the group's samples with their results and scores from `ready`."""
        former = {sample.sample_id: sample for sample in ready.samples}
        for sample in self.samples:
            one = former[sample.request.sample_id]
            versions = one.step_versions
            first = versions.first if versions else ready.admitted_version
            made = first, versions, 0.0, 0.0, one.nbytes
            result = SampleResult(one.sample_id, "checkpoint", one.trajectory, None, *made, shared=one.shared)
            yield sample, result, one.score

    @property
    def scores(self) -> list[Score]:
        return [s.score for s in self.samples if s.score is not None]

    def reason_to_reject(self, formula: RewardFormula, advantage: Advantage) -> str | None:
        """Return why the fully scored group has nothing to teach; None if it goes to the trainer.

        A scorer that failed for one sample is left out of all samples."""
        try:
            scores, self.left_out = formula.level(self.prompt, self.scores)
        except NoReward as error:
            return str(error)
        if self.left_out:
            for sample, score in zip(self.samples, scores, strict=True):
                sample.score = score
        # Compared with earlier rewards of its prompt, even a group of equal rewards has a signal.
        may_reject = advantage.drop_zero_variance and not advantage.track_prompts
        if may_reject and not has_signal(scores, each_scorer=advantage.aggregate != "rewards"):
            return "zero reward variance"
        return None

    @property
    def step_versions(self) -> tuple[int, int] | None:
        """Return the oldest and newest version of any trained step so far."""
        taken = {span[0] for s in self.samples if s.result is not None for span in s.result.step_versions.spans}
        return (min(taken), max(taken)) if taken else None

    def entry(self, run: str, event: Terminal, reason: str | None) -> LedgerEntry:
        """Return the group's line of the ledger.

        Staleness is the version trained from (`trained_version` - 1) minus the oldest version that took a step. If no
        policy took a step, it is computed from the version of admission.

        Args:
            run: the run's id.
            event: how the group ended.
            reason: why it was not trained; None if it was. The line masks credentials."""
        versions, scores, trained = self.step_versions, self.scores, self.trained_version
        oldest = versions[0] if versions else self.admitted_version
        return LedgerEntry(
            run=run,
            group=self.number,
            prompt=self.prompt.index,
            event=event,
            reason=reason and redact_text(reason),
            admitted_version=self.admitted_version,
            trained_version=trained,
            staleness=None if trained is None else trained - 1 - oldest,
            step_versions=versions,
            attempts=self.attempts,
            reward=sum(score.value for score in scores) / len(scores) if scores else None,
            left_out=self.left_out,
            text=self.prompt.text[:SHOWN_OF_PROMPT],
        )

    def make_ready(self) -> ReadyGroup:
        """Return the group in the form that the trainer takes. Raises ValueError unless every sample is scored."""
        samples = []
        for sample in self.samples:
            made, score = sample.result, sample.score
            if made is None or score is None:
                raise ValueError(f"group {self.number} is not complete: sample {sample.request.sample_id}")
            bytes_ = made.nbytes, made.shared
            samples.append(ReadySample(made.sample_id, made.trajectory, score, made.step_versions, *bytes_))
        return ReadyGroup(self.number, self.prompt, self.window, self.admitted_version, tuple(samples), self.bucket)
