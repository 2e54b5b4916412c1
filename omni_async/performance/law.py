"""Computes the laws of overlap: the least time of an update, sync and async, and the stage times they need.

Seconds per optimizer update throughout.

    T_sync      = T_g + T_r + T_t + T_s
    T_async(S)  = max(T_g + T_p, T_r, T_t + sigma, L / (S + 1))

L is the wave latency: the seconds from the admission of an update's groups until the engines hold the weights learned
from them. Without streaming inside a wave L = T_g + T_r + T_t + T_s; streaming shortens it. S = 0 is the synchronous
loop. For constant service times the law is exact in step without streaming, and wherever the bottleneck is never idle;
otherwise it is a lower bound.

Stage times are computed from a configuration and a profile. With S = 0 everything of a step starts from nothing, so its
jobs can be counted exactly. With S > 0 the updates share the devices and a job may hold samples of two; the result is
then a lower bound: the fewest possible jobs, each as short as possible.

A profile has no time for stages that the measured run never executed. If a job needs them, only the trainer's proximal
pass is estimated from another stage; the others count as 0, which is only reported.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from omni_async.config import Config
from omni_async.control.reward_formula import labels_of
from omni_async.performance.profile import NOTHING, Profile, ServiceTime
from omni_async.performance.scorer_lanes import ScorerLanes, scorer_lanes
from omni_async.types import Value


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds per update of the stages, each on separate devices.

    - Generation T_g, reward T_r and training T_t.
    - The publish T_s; its part `blocked` (sigma) stops the trainer.
    - The pause T_p that a publish forces on generation.
    - The wave latency L. If a publish frees the slots of several updates, L is their mean, so that L / (S + 1) is still
      the
      share of an update."""

    generate: Value
    score: Value
    train: Value
    publish: Value
    blocked: Value = 0.0
    pause: Value = 0.0
    wave: Value | None = None

    @property
    def total(self) -> float:
        """The seconds of an update whose stages run one after the other."""
        return self.generate + self.score + self.train + self.publish

    @property
    def latency(self) -> float:
        return self.total if self.wave is None else self.wave

    @property
    def bottleneck(self) -> tuple[str, float]:
        """The stage that an asynchronous job with enough staleness waits for, and its seconds."""
        stages = {"rollout": self.generate + self.pause, "reward": self.score, "trainer": self.train + self.blocked}
        name = max(stages, key=lambda stage: stages[stage])
        return name, stages[name]


def async_step(times: StageTimes, max_updates: int) -> float:
    """Return the seconds of an update with a staleness budget of `max_updates` updates."""
    return max(times.bottleneck[1], times.latency / (max_updates + 1))


def max_speedup(times: StageTimes) -> float:
    """Return the largest speed-up of any overlap over the synchronous loop on the same partition.

    A larger speed-up has other causes. Infinite if no stage takes any time."""
    return times.total / times.bottleneck[1] if times.bottleneck[1] > 0 else math.inf


def smallest_useful_budget(times: StageTimes, variation: float = 0.0) -> int:
    """Return the smallest S at which the bottleneck is always busy; one more if `variation` exceeds 0.25.

    `variation` is the largest coefficient of variation of a stage."""
    if times.bottleneck[1] == 0:
        return 0
    needed = math.ceil(times.latency / times.bottleneck[1] - 1e-9) - 1
    return max(0, needed) + (variation > 0.25)


def stage_times(
    config: Config, profile: Profile, *, streams: bool, recomputes_proximal: bool, samples_per_rank: float
) -> StageTimes:
    """Return mean stage times, in the profile's seconds.

    Args:
        config: The job.
        profile: Its service times, with estimates.
        streams: The trainer starts a group when it is ready.
        recomputes_proximal: It recomputes log-probs.
        samples_per_rank: Samples of a group, on the rank with most samples."""
    job = _Job(config, profile, streams, recomputes_proximal, samples_per_rank)
    every, budget = config.weights.publish_every, config.staleness.max_updates
    swap, blocked = profile.swap.mean(), profile.export.mean() / every
    publish = profile.export.mean() + profile.publish.mean() + swap
    if config.placement.colocated:
        # Engine, rank and, mostly, reward worker each get the device once per update.
        publish += (2 + config.placement.reward_in_turn) * profile.switch.mean()
    # S + 1 updates hold slots, and a publish frees those of `every` updates at once: the last `every - left_over` of
    # the updates that a publish needs were admitted by the publish `publishes` before it.
    publishes, left_over = divmod(budget + 1, every)
    wave = (job.latency(every - left_over) + publish) / (publishes * every)
    # Versions published faster than the engines take them are skipped, and their pauses too; at most S + 1 updates pass
    # between two versions that are taken.
    unpaused = max(job.generate, job.score, job.train + blocked, wave)
    taken = profile.publish.mean() + swap + _longest_wait(config, profile)
    return StageTimes(
        generate=job.generate,
        score=job.score,
        train=job.train,
        publish=publish / every,
        blocked=blocked,
        pause=swap / (every if taken <= every * unpaused else budget + 1),
        wave=wave * (budget + 1),
    )


def _longest_wait(config: Config, profile: Profile) -> float:
    """Return the longest wait, in seconds, of an arrived version for the boundary named by `weights.swap`."""
    batch = engine_batch(config)
    batches = {
        "step": 1 / config.rollout.num_inference_steps,
        "request": 2,
        "drain": 1 + math.ceil(config.rollout.max_inflight / batch),
    }
    if profile.tokens is UNSET:
        return batches[config.weights.swap] * profile.generate.mean(batch)
    token = profile.tokens.token.mean(batch)
    longest = max(profile.tokens.lengths) * token  # it may have just begun
    return token if config.weights.swap == "step" else batches[config.weights.swap] * longest


def engine_batch(config: Config) -> int:
    """Return how many samples an engine computes together: its batch, unless its slots or buffer share are fewer."""
    share = math.ceil(config.buffer.trajectories / config.rollout.workers)
    return max(1, min(config.rollout.max_batch, config.rollout.max_inflight, share))


class _Job:
    """The stages of one configuration, and their combined latency."""

    def __init__(
        self, config: Config, profile: Profile, streams: bool, recomputes_proximal: bool, per_rank: float
    ) -> None:
        rollout, reward, trainer = config.rollout, config.reward, config.trainer
        self._in_step = config.staleness.max_updates == 0
        self._scores_late = self._in_step and (not reward.streaming or config.placement.reward_in_turn)
        self._streams = streams and not config.placement.colocated
        self._profile = profile
        self._engines, self._batch = rollout.workers, engine_batch(config)
        self._group_size, self._slots = rollout.group_size, config.buffer.trajectories
        self._samples = trainer.groups_per_update * rollout.group_size
        self._group = profile.train.mean(per_rank) + (profile.proximal.mean(per_rank) if recomputes_proximal else 0.0)
        self._steps = trainer.steps_per_update * profile.step.mean()
        self.train = trainer.groups_per_update * self._group + self._steps
        if self._in_step:
            self.generate = self._generated(self._samples)
        else:
            self.generate = _share(profile.generate, self._samples, self._engines, self._batch)
        self._scorers = [
            _Scorer.of(lane, profile, reward.workers, self._samples) for lane in scorer_lanes(config, profile)
        ]
        # Scorers work concurrently, so the slowest counts.
        self.score = max((_share(one.time, self._samples, one.calls, one.batch) for one in self._scorers), default=0.0)
        if self._in_step and not reward.streaming:
            self.score = max((one.all_at_once(self._samples) for one in self._scorers), default=0.0)

    def latency(self, updates: int) -> float:
        """Return the seconds from the admission of the groups of that many updates until the last update ends."""
        if self._in_step:
            return self._step()
        samples, train = updates * self._samples, updates * self.train
        if not self._streams:
            return max(self._ready(samples) + self.train, self._ready(self._samples) + train)
        return max(self._ready(samples) + self._group + self._steps, self._ready(self._group_size) + train)

    def _ready(self, samples: int) -> float:
        """Return the seconds until that many samples are generated and scored, with S > 0."""
        one_scored, one_generated = self._one_scored(), self._first(1)
        return max(self._generated(samples) + one_scored, one_generated + self._scored(samples))

    def _step(self) -> float:
        """Return the seconds of a step with S = 0.

        All engines start at once, so samples arrive in rounds. The later stages are busy without a break from the first
        round on, or from the last. Answers of tokens arrive one by one instead."""
        together, group = self._engines * self._batch, self._group_size
        rest = self._samples % together
        # If the last round is not shared evenly, some engines end a sample earlier.
        last = rest % self._engines * math.ceil(rest / self._engines) or rest or together
        last = last if self._profile.tokens is UNSET else 1
        # If not all samples have a slot at once, the first engines take most of the slots.
        fewest = min(self._batch, self._samples // self._engines) if self._samples <= self._slots else 1
        first = self._first(max(1, fewest))
        if self._scores_late:
            scored = self.generate + self.score
        else:
            scored = max(self.generate + self._scored(last), first + self._scored(self._samples))
        if not self._streams:
            return scored + self.train
        before = self.generate if self._scores_late else min(self.generate, first * math.ceil(group / together))
        return max(
            scored + self._group + self._steps,
            before + self._scored((group - 1) % together + 1) + self.train,
            self.generate + self._one_scored() + math.ceil(last / group) * self._group + self._steps,
            self._unfinished(fewest),
        )

    def _unfinished(self, answers: int) -> float:
        """Return the least seconds of a step by the groups that are unfinished at any token; 0 without tokens.

        Until the answers that an engine draws together, at least `answers`, have so many tokens, these groups cannot be
        trained."""
        tokens = self._profile.tokens
        if tokens is UNSET:
            return 0.0
        groups = self.train - self._steps
        after = [seconds + share * groups for seconds, share in tokens.unfinished(self._group_size, max(1, answers))]
        return max(after) + self._one_scored() + self._steps

    def _generated(self, samples: int) -> float:
        """Return the seconds until all engines together have generated the samples, sharing them evenly.

        Answers of tokens end one by one. Their work is counted, and that an engine's longest answer ends last: the mean
        if an engine draws all of its answers at once, otherwise a lower bound."""
        generate, tokens = self._profile.generate, self._profile.tokens
        if tokens is UNSET:
            return _makespan(generate, samples, self._engines, self._batch)
        together = min(math.ceil(samples / self._engines), self._batch)
        tail = tokens.token.fixed_s * (tokens.longest(together) - tokens.mean_length)
        return max(generate.mean(together) + tail, _share(generate, samples, self._engines, self._batch))

    def _first(self, samples: int) -> float:
        """Return the least seconds until the first of samples that are generated together is done."""
        tokens = self._profile.tokens
        if tokens is UNSET:
            return self._profile.generate.mean(samples)
        return tokens.prefill.mean(samples) + min(tokens.lengths) * tokens.token.mean(samples)

    def _scored(self, samples: int) -> float:
        """Return the least seconds that the reward workers need to score the samples, in any order of arrival."""
        return max((_makespan(one.time, samples, one.calls, one.batch) for one in self._scorers), default=0.0)

    def _one_scored(self) -> float:
        return max((one.time.mean(1) for one in self._scorers), default=0.0)


def pool_time(config: Config, profile: Profile, pool: str, workers: int) -> float:
    """Return the seconds that a pool of so many workers needs for an update's samples, all its calls busy.

    The slowest of its scorers counts, because they work concurrently; 0 if it has none."""
    samples = config.trainer.groups_per_update * config.rollout.group_size
    slowest = 0.0
    for label, scorer in zip(labels_of(config.reward.scorers), config.reward.scorers, strict=True):
        if scorer.pool == pool:
            own = profile.scorer(label)
            calls = own.concurrency if scorer.concurrency is None else scorer.concurrency
            batch = scorer.batch or config.reward.batch
            bounded = _share(own.time, samples, workers * calls, batch) if calls is not None else own.time.mean(1)
            slowest = max(slowest, bounded)
    return slowest


class _Scorer(NamedTuple):
    """A scorer of all reward workers together: `calls` of at most `batch` samples at once."""

    time: ServiceTime
    calls: int
    batch: int

    @classmethod
    def of(cls, lanes: ScorerLanes, profile: Profile, workers: int, samples: int) -> _Scorer:
        """Return the scorer of so many workers; without a bound, it makes one call for each sample at once."""
        time = profile.scorer(lanes.label).time
        if lanes.concurrency is None:
            return cls(time, samples, 1)
        return cls(time, workers * lanes.concurrency, lanes.batch)

    def all_at_once(self, samples: int) -> float:
        """Return the seconds for samples that are all available; every call takes as many as it may."""
        rounds, rest = divmod(samples, self.calls * self.batch)
        return rounds * self.time.mean(self.batch) + self.time.mean(min(self.batch, rest))


def _makespan(service: ServiceTime, samples: int, workers: int, batch: int) -> float:
    """Return the seconds until `workers`, which share the samples evenly, have done them in jobs of at most `batch`."""
    rounds, rest = divmod(math.ceil(samples / workers), batch)
    return rounds * service.mean(batch) + service.mean(rest)


def _share(service: ServiceTime, samples: int, workers: int, batch: int) -> float:
    """Return the seconds of each of `workers` if all run only full batches."""
    return samples / workers * service.mean(batch) / batch


def with_estimates(profile: Profile, config: Config) -> Profile:
    """Return the profile; if it has no time for `proximal`, a forward pass, estimate that from `train`.

    The profile is unchanged if it has a time for `proximal`, or for neither."""
    if profile.proximal != NOTHING or profile.train == NOTHING:
        return profile
    return replace(profile, proximal=profile.train.scaled(1 / _passes(config)))


def _passes(config: Config) -> int:
    """Count a group's training in forward passes.

    Backward costs two, or one through frozen weights; with gradient checkpointing activations are computed a second
    time."""
    backward = 1 if config.model.lora is not None else 2
    return 1 + config.trainer.gradient_checkpointing + backward


def unmeasured(profile: Profile, config: Config, *, recomputes_proximal: bool) -> list[str]:
    """Return a sentence for every stage that the job needs but the profile has no time for.

    Args:
        profile: As it was read, without estimates.
        config: The job.
        recomputes_proximal: The trainer recomputes log-probs."""
    sentences: list[str] = []
    if recomputes_proximal and profile.proximal == NOTHING and profile.train != NOTHING:
        sentences.append(
            f"profile {profile.name} has no time for proximal, the pass that recomputes log-probs for the correction:"
            f" estimated as 1/{_passes(config)} of a group's training; a run that needs the pass measures it"
        )
    needed = ["generate", "train", "step", "export", "publish", "swap"]
    needed += ["score"] if not config.unscored else []
    needed += ["switch"] if config.placement.colocated else []
    stages = profile.stages()
    if missing := [stage for stage in needed if stages[stage] == NOTHING]:
        sentences.append(f"profile {profile.name} has no time for {', '.join(missing)}: counted as 0 s")
    return sentences
