"""Owns every live sample, and moves it from state to state (`omni_async.control.sample`).

Pure bookkeeping: waits for nothing, holds no timer and calls nobody. A method returns an `Outcome` if the coordinator
has to act on what happened.

A transition releases everything that the old state held and the new state does not. Slots are taken *before* work
begins, so a finished sample never waits for room. The bytes of validation samples do not count.

With `reward.streaming: false`, training samples are scored when no engine has one or could get one: none is queued, or
no slot is free. A full buffer is therefore emptied, and nothing waits forever.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain, islice

from msgspec.structs import replace

from omni_async.config import Config
from omni_async.control.held_bytes import Change, HeldBytes
from omni_async.control.lead import Stage
from omni_async.control.sample import (
    ABANDONED,
    ANSWER,
    END,
    FAIL,
    FAILED,
    GENERATE,
    GENERATED,
    GONE,
    LEASE,
    LEASED,
    LOSE,
    PAUSE,
    PAUSED,
    POSTPONE,
    QUEUED,
    RESTORE,
    RESUME,
    RETURN,
    SAMPLE_TRANSITIONS,
    SCORE,
    SCORED,
    SCORING,
    TAKE,
    Complete,
    EndRun,
    Failure,
    Outcome,
    Pause,
    Sample,
    SampleEvent,
    SampleSet,
    SampleState,
)
from omni_async.control.scorer_faults import ScorerFaults
from omni_async.types import SampleKind, SampleRequest, SampleResult, Score, ScoreJob, ScoreResult

_AT_ENGINE = frozenset({LEASED, ABANDONED})
_DONE = frozenset({SCORED, FAILED})
_HOLDS_SLOT = frozenset({LEASED, ABANDONED, GENERATED, SCORING, PAUSED})
_HOLDS_EXPECTED_BYTES = frozenset({QUEUED, LEASED, ABANDONED})
_HOLDS_ITS_BYTES = frozenset({GENERATED, SCORING, PAUSED, SCORED})
_UNSCORED = frozenset({GENERATED, SCORING, PAUSED})

_Effect = tuple[SampleState, int, int, int, int, int, int, Change | None]


def _effect(before: SampleState, after: SampleState) -> _Effect:
    """Return the new state of a transition, and its change of each of the table's counts."""

    def change(*states: SampleState) -> int:
        return (after in states) - (before in states)

    held = Change(change(*_HOLDS_EXPECTED_BYTES), change(*_HOLDS_ITS_BYTES), change(*_UNSCORED))
    slots, missing, at_engines = change(*_HOLDS_SLOT), -change(*_DONE, GONE), change(*_AT_ENGINE)
    counts = change(QUEUED), at_engines, change(GENERATED), change(SCORING)
    return after, slots, missing, *counts, held if any(held) else None


# By state and event: lists, because they are looked up for every event of every sample.
_EFFECTS: list[list[_Effect | None]] = [[None] * (len(SampleEvent) + 1) for _ in range(len(SampleState) + 1)]
for (_before, _event), _after in SAMPLE_TRANSITIONS.items():
    _EFFECTS[_before][_event] = _effect(_before, _after)


class SampleTable:
    """The table of live samples.

    `engines` share the work; `lost_workers` get none. `images` counts the generated training samples, including earlier
    attempts. `has_scored`: the current scorers have scored a sample before. `now` reads the clock of `Times`."""

    def __init__(self, config: Config, now: Callable[[], float], images: int = 0, has_scored: bool = False) -> None:
        self._config = config
        self._now = now
        self._capacity = config.buffer.trajectories
        self._share = config.validation.share if config.validation else 1.0
        self.samples: dict[str, Sample] = {}
        self.bytes = HeldBytes(config)
        self.engines: set[str] = set()
        self.lost_workers: set[str] = set()
        self.images = images
        self.drawn = self.encoded = self.cached = self.steps = self.shared_steps = 0
        self.faults = ScorerFaults(config, has_scored)
        # Indexes and counts over `samples`. `_take` skips samples that have left QUEUED meanwhile.
        self._slots = 0
        self.at_engines: dict[SampleKind, Stage] = {"train": Stage(), "validation": Stage()}
        self.at_workers: dict[SampleKind, Stage] = {"train": Stage(), "validation": Stage()}
        self._num_leased_to: Counter[tuple[SampleKind, str]] = Counter()
        self._training: list[tuple[int, int, Sample]] = []  # a heap by group and sample
        self._validation: deque[Sample] = deque()
        self._to_score: dict[SampleKind, OrderedDict[str, Sample]]
        self._to_score = {"validation": OrderedDict(), "train": OrderedDict()}

    # ---- transitions -------------------------------------------------------------------------------------------------

    def _move(self, sample: Sample, event: SampleEvent) -> None:
        """Apply the transition table, and update the counts of held resources. Raises ValueError."""
        before, owner = sample.state, sample.owner
        effect = _EFFECTS[before][event]
        if effect is None:
            raise ValueError(f"sample {sample.request.sample_id} is {before.name}: {event.name} cannot happen to it")
        after, slots, missing, queued, at_engines, generated, scoring, held = effect
        sample.state = after
        kind = owner.kind
        if slots:
            self._slots += slots
        if missing:
            owner.num_missing += missing
        if queued or at_engines:
            self.at_engines[kind].change(queued, at_engines, self._now())
            if at_engines:
                self._num_leased_to[kind, sample.engine] += at_engines
        if generated or scoring:
            self.at_workers[kind].change(generated, scoring, self._now())
        if held is not None and kind == "train":
            result = sample.result
            alone = owner.share(result, held.own) if result is not None and result.shared and held.own else 0
            self.bytes.change(owner.bucket, sample.shown, held, result, alone)
        if after is SCORED or after is FAILED:
            sample.release_media()
        if before is GENERATED:
            del self._to_score[kind][sample.request.sample_id]
        elif before is SCORING and after is not SCORING:
            sample.workers = ()
        if after is GENERATED:
            self._to_score[kind][sample.request.sample_id] = sample
            if event is RETURN or event is RESUME:
                self._to_score[kind].move_to_end(sample.request.sample_id, last=False)
        elif after is GONE:
            del self.samples[sample.request.sample_id]

    def add_samples(self, owner: SampleSet) -> None:
        """Queue the samples of an admitted group or a new round."""
        owner.times.admitted = now = self._now()
        self.at_engines[owner.kind].change(len(owner.samples), 0, now)
        if owner.kind == "train":
            if not self.bytes.may_show(len(owner.samples), owner.num_shown):
                owner.show_none()
            self.bytes.reserve(owner.bucket, len(owner.samples), owner.num_shown)
        for sample in owner.samples:
            self.samples[sample.request.sample_id] = sample
            self._queue(sample)

    def _queue(self, sample: Sample) -> None:
        if sample.owner.kind == "validation":
            self._validation.append(sample)
        else:
            heapq.heappush(self._training, (sample.owner.number, sample.request.sample, sample))

    def restore(self, sample: Sample, result: SampleResult, score: Score) -> str | None:
        """Restore a queued sample's result and score from an earlier attempt of the run.

        Args:
            sample: the sample.
            result: the result of its generation.
            score: the score of that result.

        Returns:
            An error text if `buffer.max_bytes` is too small; else None."""
        sample.result, sample.score = result, score
        self._move(sample, RESTORE)
        return self.bytes.problem(result.sample_id)

    def make_again(self, sample: Sample) -> None:
        """Queue a lost sample for generation from the same seed; discard its result and score."""
        self._move(sample, LOSE)
        sample.request = replace(sample.request, attempt=sample.request.attempt + 1)
        sample.result = sample.score = None
        sample.owner.attempts = max(sample.owner.attempts, sample.request.attempt)
        self._queue(sample)

    def end_samples(self, owner: SampleSet) -> None:
        """Release the samples of a group or round that is over."""
        for sample in owner.samples:
            self._move(sample, END)
        owner.samples = ()

    # ---- generation --------------------------------------------------------------------------------------------------

    @property
    def may_lease(self) -> bool:
        """Return whether a sample is queued and a slot is free."""
        return self._slots < self._capacity and any(stage.num_waiting for stage in self.at_engines.values())

    def lease(self, engine: str, free: int, capacity: int) -> list[SampleRequest]:
        """Lease samples to an engine, as many as it may have now.

        Validation samples are first, in at most `validation.share` of its slots while training samples wait. Then
        samples of the oldest groups follow. Engines are kept equally full of training samples.

        Args:
            engine: its name; an engine that has left the run gets no samples.
            free: how many more samples it can take.
            capacity: how many it can hold in all."""
        if engine not in self.engines:
            return []
        free = min(free, self._capacity - self._slots)
        training = self.at_engines["train"]
        queued, leased = training.num_waiting, training.num_samples
        chosen: list[Sample] = []
        if waiting := self.at_engines["validation"].num_waiting:
            share = math.ceil(self._share * min(capacity, math.ceil(self._capacity / len(self.engines))))
            allowed = share - self._num_leased_to["validation", engine] if queued else free
            chosen = self._take("validation", max(0, min(free, allowed, waiting)), engine)
        if queued:
            even = math.ceil((queued + leased) / len(self.engines))
            count = min(free - len(chosen), max(1, even - self._num_leased_to["train", engine]), queued)
            chosen += self._take("train", count, engine)
        return [sample.request for sample in chosen]

    def _take(self, kind: SampleKind, count: int, engine: str) -> list[Sample]:
        found: list[Sample] = []
        while len(found) < count:
            sample = self._validation.popleft() if kind == "validation" else heapq.heappop(self._training)[2]
            if sample.state is QUEUED:  # a restored sample that is generated again is queued twice
                sample.engine = engine
                sample.owner.times.leased(self.at_engines[kind], self._now())
                self._move(sample, LEASE)
                found.append(sample)
        return found

    def answered(self, engine: str, sample_id: str) -> Sample | None:
        """Return the LEASED sample of this answer; None if the answer is no longer useful."""
        sample = self.samples.get(sample_id)
        if sample is None or sample.engine != engine or sample.state not in _AT_ENGINE:
            return None
        if sample.state is ABANDONED:
            self._move(sample, ANSWER)
            return None
        return sample

    def generated(self, sample: Sample, result: SampleResult) -> str | None:
        """Store the result of a leased sample. Return an error text if `buffer.max_bytes` is too small; else None."""
        sample.result = result
        self._move(sample, GENERATE)
        sample.owner.times.generated(self._now())
        self.drawn += sample.request.calls
        self.encoded += result.encoded
        if sample.owner.kind == "validation":
            return None
        self.images += 1
        self.steps += sample.request.calls * sample.request.num_inference_steps
        self.shared_steps += result.shared_steps
        return self.bytes.problem(result.sample_id)

    @property
    def spare_s(self) -> tuple[float, float]:
        """Return for how many seconds so far no training sample waited for engines, and for reward workers."""
        now = self._now()
        return self.at_engines["train"].spare_s(now), self.at_workers["train"].spare_s(now)

    def begin_update(self) -> None:
        """Reset the counts that are reported for each update."""
        self.drawn = self.encoded = self.cached = self.steps = self.shared_steps = 0
        self.bytes.begin_update()

    def generation_failed(self, sample: Sample, error: str) -> Failure | None:
        """Queue the sample for another generation from the same seed; after `rollout.retries` it fails."""
        sample.failures += 1
        if sample.failures <= self._config.rollout.retries:
            self.make_again(sample)
            return None
        self._move(sample, FAIL)
        return Failure(sample, "dropped", f"generation failed {sample.failures} times: {error}")

    def leases_of(self, engine: str) -> list[str]:
        """Return the ids of the samples that the engine has not answered."""
        return [name for name, sample in self.samples.items() if sample.engine == engine and sample.state in _AT_ENGINE]

    def made_by(self, engine: str) -> list[Sample]:
        """Return the samples whose tensors are stored in the engine and still needed."""
        made = [each for each in self.samples.values() if each.result is not None and each.result.engine == engine]
        return [each for each in made if each.owner.kind == "train" or each.state not in _DONE]

    # ---- scoring -----------------------------------------------------------------------------------------------------

    @property
    def may_score(self) -> bool:
        return bool(self._to_score["validation"]) or (bool(self._to_score["train"]) and self._may_score_training())

    def _may_score_training(self) -> bool:
        training = self.at_engines["train"]
        none_to_lease = training.num_waiting == 0 or self._slots == self._capacity
        return self._config.reward.streaming or (training.num_samples == 0 and none_to_lease)

    def jobs(self, worker: str, limit: int) -> list[ScoreJob]:
        """Hand up to `limit` samples to a reward worker, validation samples first, each kind in the order of arrival.

        A sample suspected of bringing down workers or scorers is handed out alone, so that a repetition implicates no
        other sample. A first suspicion may be chance and is ignored, unless a second would reject the sample."""
        if worker in self.lost_workers:
            return []
        training = self._to_score["train"].values() if self._may_score_training() else ()
        chosen = list(islice(chain(self._to_score["validation"].values(), training), limit))
        suspect = min(2, max(1, self._config.reward.retries - 1))
        first_suspect = next((i for i, sample in enumerate(chosen) if sample.suspected >= suspect), limit)
        chosen = chosen[: max(1, first_suspect)]
        for sample in chosen:
            self.hand_out(sample, worker)
        return [sample.job(alone=first_suspect == 0) for sample in chosen]

    def hand_out(self, sample: Sample, worker: str) -> None:
        """Give the sample to one more reward worker."""
        sample.owner.times.handed_out(self.at_workers[sample.owner.kind], self._now())
        self._move(sample, TAKE)
        sample.workers += (worker,)

    def scored(self, worker: str, result: ScoreResult) -> Outcome | None:
        """Record a worker's answer. Return what follows from it for the group, the round or the run, if anything."""
        sample = self.samples.get(result.sample_id)
        if sample is None or worker not in sample.workers or result.attempt != sample.request.attempt:
            return None  # a duplicate, or the group has ended or the sample was lost meanwhile
        if result.score is None:
            return self._not_scored(sample, worker, result)
        self.faults.record_score(worker)
        self.cached += result.cached
        sample.score = result.score
        self._move(sample, SCORE)
        if sample.owner.num_missing:
            return None
        sample.owner.times.ready = self._now()
        return Complete(sample.owner)

    def _not_scored(self, sample: Sample, worker: str, result: ScoreResult) -> Outcome | None:
        error = result.error or "no score"
        if (result.wrong or result.fault == "reject") and self.faults.record_permanent_failure(sample.request):
            return EndRun(f"nothing could be scored so far, and the error stays the same: {result.error}")
        if result.fault == "replace":
            return self.generation_failed(sample, error)
        if result.fault == "outage":
            self._give_back(sample, worker, POSTPONE)
            return self._suspect(sample, error) if self.faults.record_outage(worker, sample) else None
        sample.score_failures += 1
        if result.fault == "retry" and sample.score_failures <= self._config.reward.retries:
            self._give_back(sample, worker, PAUSE)
            return Pause(sample) if sample.state is PAUSED else None
        self._move(sample, FAIL)
        tries = "" if result.fault == "reject" else f"reward failed {sample.score_failures} times: "
        return Failure(sample, "rejected", tries + error)

    def _give_back(self, sample: Sample, worker: str, event: SampleEvent) -> None:
        """Take the sample from a worker that has no score for it; apply `event` if no other worker has the sample."""
        left = tuple(other for other in sample.workers if other != worker)
        self._move(sample, ANSWER if left else event)
        sample.workers = left

    def resume(self, sample: Sample) -> None:
        """Queue the sample to be scored again, unless it has left its pause early."""
        if sample.state is PAUSED:
            self._move(sample, RESUME)

    def _suspect(self, sample: Sample, error: str) -> Failure | None:
        """Count that a worker or scorer went down while it had the sample; a few times may be chance."""
        sample.suspected += 1
        if sample.suspected <= self._config.reward.retries:
            return None
        self._move(sample, FAIL)
        return Failure(sample, "rejected", f"its scoring was cut off {sample.suspected} times: {error}")

    def worker_lost(self, worker: str) -> Iterator[Failure]:
        """Queue a lost worker's samples before all others. Yield failures one by one: each may end the next sample."""
        self.lost_workers.add(worker)
        self.faults.end_outage(worker)
        taken = [sample for sample in self.samples.values() if worker in sample.workers]
        for sample in reversed(taken):
            self._give_back(sample, worker, RETURN)
        for sample in taken:
            if sample.state is not GONE and (failure := self._suspect(sample, f"{worker} was lost")) is not None:
                yield failure

    def statistics(self) -> dict[str, int]:
        """Return the slots of the trajectory buffer, and the number of samples that wait for a score."""
        waiting = sum(map(len, self._to_score.values()))
        return {"capacity": self._capacity, "reserved": self._slots, "ready": waiting}
