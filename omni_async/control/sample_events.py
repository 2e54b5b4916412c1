"""Handles the events of samples: generated, scored, failed, lost. Each sample ends as a part of a whole group or round,
or is made again, or ends its group.

Pure bookkeeping between the messages of engines and reward workers and the groups they belong to; waits for nothing. A
failure is tried again a bounded number of times and never becomes a number; a sample that was only lost is made again
from the same seeds. While nothing was ever scored, a scorer that fails a few samples of different prompts with errors
that stay the same ends the run: it would fail the others, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from omni_async.config import Config
from omni_async.control.flow import SampleFlow
from omni_async.control.group_table import GroupTable
from omni_async.control.groups import GroupProgress, SampleProgress, require_trained_steps
from omni_async.control.held_bytes import HeldBytes
from omni_async.control.signal import has_signal
from omni_async.control.validation import Validation, ValidationRound
from omni_async.control.versions import Versions, WeightMismatch
from omni_async.types import SampleKind, SampleRequest, SampleResult, Score, ScoreResult, Terminal


class Ends(Protocol):
    """The consequences of sample events, which the coordinator carries out."""

    def end_group(self, group: GroupProgress, event: Terminal, reason: str) -> None: ...

    def end_round(self, round_: ValidationRound) -> None:
        """Ends the round if it is complete."""

    def group_ready(self) -> None: ...

    def end_run(self, reason: str) -> None: ...


# Of so many groups, or prompts of a validation round, a sample must fail before the scorer is to blame: some prompts
# may be bad ones.
_ALL_WRONG = 4


class SampleEvents:
    """The handler of sample events. `images` counts the training samples that were generated, those of earlier attempts
    included; `has_scored`: these scorers have scored a sample before."""

    def __init__(
        self,
        config: Config,
        samples: SampleFlow,
        groups: GroupTable,
        validation: Validation,
        versions: Versions,
        held_bytes: HeldBytes,
        ends: Ends,
        images: int,
        has_scored: bool = False,
    ) -> None:
        self._config = config
        self._samples = samples
        self._groups = groups
        self._validation = validation
        self._versions = versions
        self._held_bytes = held_bytes
        self._ends = ends
        self._down: set[str] = set()  # reward workers that wait for a scorer
        # Kind, group and prompt of samples that a scorer failed twice in the same way.
        self._wrong: set[tuple[str, int, int]] = set()
        self.has_scored = has_scored
        self.images = images

    # ---- generation --------------------------------------------------------------------------------------------------

    def samples_done(self, engine: str, results: list[SampleResult]) -> None:
        """Takes generated samples. Raises, in the caller that reports it, the error of a result that cannot be right;
        the sample is made again."""
        for result in results:
            request = self._samples.answered(engine, result.sample_id)
            if request is None:
                continue
            progress = self._progress(request)
            if progress is None:
                self._samples.release(result.sample_id)  # the group ended while the sample was being made
                self._held_bytes.release([result.sample_id])
                continue
            try:
                require_trained_steps(request, result)
                self._versions.require_made(result)
            except (ValueError, WeightMismatch) as error:
                self._samples.release(result.sample_id)
                self._generation_failed(request, progress, str(error))
                raise
            progress.result = result
            if request.kind == "train":
                self.images += 1
                problem = self._held_bytes.made(result.sample_id, result.nbytes)
                if problem is not None:
                    self._ends.end_run(problem)
                    return
            self._samples.generated(progress.job())

    def sample_failed(self, engine: str, sample_id: str, error: str) -> None:
        """Generates the sample again with the same seed; after `rollout.retries` the group is dropped."""
        request = self._samples.answered(engine, sample_id)
        if request is None:
            return
        self._samples.release(sample_id)
        if (progress := self._progress(request)) is not None:
            self._generation_failed(request, progress, error)
        else:
            self._held_bytes.release([sample_id])

    def _generation_failed(self, request: SampleRequest, progress: SampleProgress, error: str) -> None:
        progress.failures += 1
        owner = self._owner(request.kind, request.group)
        if owner is None or progress.failures <= self._config.rollout.retries:
            self._generate_again(owner, [progress])
        elif isinstance(owner, ValidationRound):
            self._fail_validation(request, error)
        else:
            self._ends.end_group(owner, "dropped", f"generation failed {progress.failures} times: {error}")

    def _fail_validation(self, request: SampleRequest, error: str) -> None:
        self._samples.release(request.sample_id)
        if round_ := self._validation.fail(request, error):
            self._ends.end_round(round_)

    def _owner(self, kind: SampleKind, group: int) -> GroupProgress | ValidationRound | None:
        """Returns the live group or round of a sample."""
        return self._groups.live.get(group) if kind == "train" else self._validation.rounds.get(group)

    def _progress(self, request: SampleRequest) -> SampleProgress | None:
        """Returns the live sample behind a request; None if its group or round is over or the sample has a result
        already."""
        owner = self._owner(request.kind, request.group)
        progress = owner.samples.get(request.sample_id) if owner else None
        return progress if progress is not None and progress.result is None else None

    # ---- scoring -----------------------------------------------------------------------------------------------------

    def scored(self, worker: str, kinds: dict[str, str], results: list[ScoreResult]) -> None:
        """Records scores and failures. `kinds` maps the sample ids to train or validation, as their jobs do."""
        outage = bool(self._down - {worker})
        if any(result.postponed for result in results):
            self._down.add(worker)
        for result in results:
            if not self._samples.being_scored(worker, result.sample_id):
                continue  # a second answer, or the group ended meanwhile
            owner = self._owner(
                "validation" if kinds[result.sample_id] == "validation" else "train", _group_of(result.sample_id)
            )
            if owner is None:
                self._samples.release(result.sample_id)
                continue
            progress = owner.samples[result.sample_id]
            if result.attempt != progress.request.attempt:
                continue  # the score of a sample that was lost meanwhile
            if (result.wrong or result.final) and self._is_wrong(progress.request):
                self._ends.end_run(f"nothing could be scored so far, and the error stays the same: {result.error}")
                return
            if result.gone:
                self._samples.release(result.sample_id)
                self._generation_failed(progress.request, progress, result.error or "its media are gone")
            elif result.postponed:
                self._samples.postpone_score(progress.job())
                if result.suspect:
                    self._went_down(owner, progress, worker, result.error or "its scorer went down", outage)
            elif result.score is None:
                self._score_failed(owner, progress, result.error or "no score", result.final)
            else:
                self._samples.release(result.sample_id)
                self._scored(owner, progress, result.score)

    def _is_wrong(self, request: SampleRequest) -> bool:
        """Returns whether the scorer is to blame, after another sample that it fails for good."""
        if self.has_scored:
            return False
        self._wrong.add((request.kind, request.group, request.prompt.index))
        at_once = (self._config.staleness.max_updates + 1) * self._config.trainer.groups_per_update
        return len(self._wrong) >= min(_ALL_WRONG, at_once)

    def _scored(self, owner: GroupProgress | ValidationRound, progress: SampleProgress, score: Score) -> None:
        self.has_scored = True
        if isinstance(owner, ValidationRound):
            progress.score = score
            self._ends.end_round(owner)
            return
        owner.scored(progress, score)
        if not owner.complete:
            return
        advantage = self._config.algorithm.advantage
        # Against the rewards its prompt had before, even a group of equal rewards has a signal.
        may_drop = advantage.drop_zero_variance and not advantage.track_prompts
        if may_drop and not has_signal(owner.scores, each_scorer=advantage.aggregate != "rewards"):
            self._ends.end_group(owner, "rejected", "zero reward variance")
        else:
            self._groups.complete(owner)
            self._ends.group_ready()

    def asks(self, worker: str) -> None:
        """Records that a reward worker asks for samples: its scorers answer."""
        self._down.discard(worker)

    def _went_down(
        self, owner: GroupProgress | ValidationRound, progress: SampleProgress, worker: str, error: str, outage: bool
    ) -> None:
        """Records that a scorer went down over a sample, with nothing wrong before. While other workers wait for a
        scorer too, that is expected: only a repetition with the same worker is held against the sample."""
        again = worker in progress.went_down
        if outage and not again:
            progress.went_down |= {worker}
            return
        progress.went_down = frozenset({worker})
        self._suspect(owner, progress, error)

    def _suspect(self, owner: GroupProgress | ValidationRound, progress: SampleProgress, error: str) -> None:
        """Counts that a worker or a scorer died or went down over the sample: once may be chance, repeatedly it is due
        to the sample."""
        progress.suspected += 1
        if progress.suspected <= self._config.reward.retries:
            self._samples.suspect(progress.request.sample_id)
            return
        self._samples.withdraw(progress.request.sample_id)  # it waits to be scored again
        if isinstance(owner, ValidationRound):
            self._fail_validation(progress.request, error)
        else:
            self._ends.end_group(owner, "rejected", f"its scoring was cut off {progress.suspected} times: {error}")

    def _score_failed(
        self, owner: GroupProgress | ValidationRound, progress: SampleProgress, error: str, final: bool
    ) -> None:
        """Queues the sample to be scored again after a pause, unless the failure is `final`; after `reward.retries` the
        group is rejected, or the round goes on without the sample."""
        progress.score_attempts += 1
        if progress.score_attempts <= self._config.reward.retries and not final:
            self._samples.retry_score(progress.job(), progress.score_attempts)
        elif isinstance(owner, ValidationRound):
            self._fail_validation(progress.request, error)
        else:
            self._ends.end_group(
                owner, "rejected", error if final else f"reward failed {progress.score_attempts} times: {error}"
            )

    # ---- losses ------------------------------------------------------------------------------------------------------

    def scorer_lost(self, worker: str) -> None:
        """Hands the samples that a lost reward worker had taken to others."""
        self._down.discard(worker)
        for job in self._samples.scorer_lost(worker):
            owner = self._owner(job.kind, _group_of(job.sample_id))
            if owner is not None:  # else an earlier one of these ended the group
                self._suspect(owner, owner.samples[job.sample_id], f"{worker} was lost")

    def objects_lost(self, engine: str) -> None:
        """Generates again the samples that the engine had generated and the trainer has not taken."""
        for group in self._groups.live.values():
            self._generate_again(group, _made_by(engine, group.samples.values()))
        for round_ in self._validation.rounds.values():
            self._generate_again(round_, _made_by(engine, round_.missing))

    def group_gone(self, group: int, reason: str) -> None:
        """Takes back a group that the trainer has taken and cannot read: it is generated again, and taken before any
        other."""
        owner = self._groups.give_back(group)
        if owner is None:
            return
        owner.losses += 1
        if owner.losses > self._config.rollout.retries:
            self._ends.end_group(owner, "dropped", f"its trajectories were lost {owner.losses} times: {reason}")
        else:
            self._generate_again(owner, [*owner.samples.values()])

    def _generate_again(self, owner: GroupProgress | ValidationRound | None, lost: Sequence[SampleProgress]) -> None:
        """Queues lost samples to be made again from the same seeds; their scores do not count."""
        if isinstance(owner, GroupProgress) and lost:
            self._groups.incomplete(owner)
        for progress in lost:
            self._samples.withdraw(progress.request.sample_id)
            self._held_bytes.make_again(progress.request.sample_id)
            self._samples.add([owner.again(progress) if isinstance(owner, GroupProgress) else progress.again()])


def _made_by(engine: str, samples: Iterable[SampleProgress]) -> list[SampleProgress]:
    return [sample for sample in samples if sample.result is not None and sample.result.engine == engine]


def _group_of(sample_id: str) -> int:
    return int(sample_id.split(".", 1)[0][1:])
