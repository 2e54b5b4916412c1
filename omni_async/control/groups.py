"""Tracks one admitted prompt group on its way from prompt to `ReadyGroup`. Pure bookkeeping: no waiting, no tensors."""

from __future__ import annotations

from msgspec.structs import replace

from omni_async.types import (
    LedgerEntry,
    Prompt,
    ReadyGroup,
    ReadySample,
    SampleRequest,
    SampleResult,
    Score,
    ScoreJob,
    SdeWindow,
    Terminal,
)


def trained_steps(request: SampleRequest) -> tuple[int, ...]:
    """Returns the numbers of step versions that a result of `request` may carry. A training sample without a window
    carries those of all its steps, or none if it comes from a dataset."""
    if request.window is not None:
        return (request.window.size,)
    return (request.num_inference_steps, 0) if request.kind == "train" else (0,)


def require_trained_steps(request: SampleRequest, result: SampleResult) -> None:
    """Raises ValueError unless the result has a version for every trained step of its request."""
    found, window = result.step_versions.num_steps, request.window
    if window is not None and found == window.size:  # nearly every sample: the rest need not be asked
        return
    expected = trained_steps(request)
    if found not in expected:
        raise ValueError(
            f"sample {result.sample_id} of {result.engine}: {found} step versions for {expected[0]} trained steps"
        )


class SampleProgress:
    """One sample: requested, generated (has a result), scored. `failures` counts its own, not those of an engine or a
    batch that it was lost with; `suspected` counts the reward workers and scorers that died or went down over it,
    possibly by chance; `went_down` are the workers whose scorer did since then."""

    __slots__ = ("failures", "request", "result", "score", "score_attempts", "suspected", "went_down")

    def __init__(self, request: SampleRequest) -> None:
        self.request = request
        self.result: SampleResult | None = None
        self.score: Score | None = None
        self.score_attempts = 0
        self.failures = 0
        self.suspected = 0
        self.went_down: frozenset[str] = frozenset()

    def again(self) -> SampleRequest:
        """Discards all results of the sample and returns the request to make it again, from the same seed."""
        self.request = replace(self.request, attempt=self.request.attempt + 1)
        self.result = self.score = None
        return self.request

    def job(self) -> ScoreJob:
        if self.result is None:
            raise ValueError(f"sample {self.request.sample_id} is not generated yet")
        return ScoreJob(
            self.request.sample_id, self.request.kind, self.request.prompt, self.result.media, self.request.attempt
        )


class GroupProgress:
    """A group and its samples, all drawn as `bucket` says. `attempts` is the most generations any of its samples
    needed, `losses` how often the trainer could not read it."""

    def __init__(
        self,
        group: int,
        prompt: Prompt,
        window: SdeWindow | None,
        admitted_version: int,
        requests: list[SampleRequest],
        bucket: int = 0,
    ) -> None:
        self.group = group
        self.prompt = prompt
        self.window = window
        self.bucket = bucket
        self.admitted_version = admitted_version
        self.samples = {request.sample_id: SampleProgress(request) for request in requests}
        self.attempts = 1
        self.losses = 0
        self._num_unscored = len(requests)

    def would_be(self, ready: ReadyGroup) -> bool:
        """Returns whether the group will have the same prompt, window, bucket, samples and trained steps as `ready`
        when it is complete."""
        steps = {sample.sample_id: sample.step_versions.num_steps for sample in ready.samples}
        return (
            (self.prompt, self.window, self.bucket) == (ready.prompt, ready.window, ready.bucket)
            and self.samples.keys() == steps.keys()
            and all(steps[name] in trained_steps(sample.request) for name, sample in self.samples.items())
        )

    def restore(self, ready: ReadyGroup) -> None:
        """Restores the group as it was when it was complete."""
        for sample in ready.samples:
            progress = self.samples[sample.sample_id]
            versions = sample.step_versions
            first = versions.first if versions else ready.admitted_version
            progress.result = SampleResult(
                sample.sample_id,
                "checkpoint",
                sample.trajectory,
                sample.media,
                first,
                versions,
                0.0,
                0.0,
                sample.nbytes,
            )
            self.scored(progress, sample.score)

    def again(self, progress: SampleProgress) -> SampleRequest:
        """Returns the request to make one of its samples again."""
        self._num_unscored += progress.score is not None
        request = progress.again()
        self.attempts = max(self.attempts, request.attempt)
        return request

    def scored(self, progress: SampleProgress, score: Score) -> None:
        """Records the sample's first score."""
        progress.score = score
        self._num_unscored -= 1

    @property
    def scores(self) -> list[Score]:
        return [s.score for s in self.samples.values() if s.score is not None]

    @property
    def complete(self) -> bool:
        return self._num_unscored == 0

    @property
    def mean_reward(self) -> float | None:
        scores = self.scores
        return sum(s.value for s in scores) / len(scores) if scores else None

    @property
    def step_versions(self) -> tuple[int, int] | None:
        """Returns the oldest and newest version of any trained step so far."""
        taken = {
            span[0]
            for sample in self.samples.values()
            if sample.result is not None
            for span in sample.result.step_versions.spans
        }
        return (min(taken), max(taken)) if taken else None

    def entry(self, run: str, event: Terminal, reason: str | None, trained_version: int | None) -> LedgerEntry:
        """Returns the group's line of the ledger. Staleness is the version trained from, one before `trained_version`,
        minus the oldest that took a step, or minus the one of admission where no policy took any."""
        versions = self.step_versions
        oldest = versions[0] if versions else self.admitted_version
        return LedgerEntry(
            run=run,
            group=self.group,
            prompt=self.prompt.index,
            event=event,
            reason=reason,
            admitted_version=self.admitted_version,
            trained_version=trained_version,
            staleness=trained_version - 1 - oldest if trained_version is not None else None,
            step_versions=versions,
            attempts=self.attempts,
            reward=self.mean_reward,
        )

    def ready(self) -> ReadyGroup:
        samples = []
        for progress in self.samples.values():
            result, score = progress.result, progress.score
            if result is None or score is None:
                raise ValueError(f"group {self.group} is not complete: sample {progress.request.sample_id}")
            samples.append(
                ReadySample(
                    result.sample_id, result.trajectory, result.media, score, result.step_versions, result.nbytes
                )
            )
        return ReadyGroup(self.group, self.prompt, self.window, self.admitted_version, tuple(samples), self.bucket)
