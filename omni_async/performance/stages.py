"""From a configuration and a profile to the stage times of one update, by counting jobs."""

from __future__ import annotations

import math

from omni_async.config import Config
from omni_async.performance.law import StageTimes
from omni_async.performance.profile import Profile
from omni_async.performance.service import ServiceTime


def stage_times(config: Config, profile: Profile, *, streams: bool, assesses: bool) -> StageTimes:
    """Means, in the profile's seconds. `streams`: the trainer starts a group when it is ready. `assesses`: it recomputes log-probs."""
    rollout, reward, trainer = config.rollout, config.reward, config.trainer
    samples = trainer.groups_per_update * rollout.group_size
    per_rank = rollout.group_size / trainer.workers
    publishes = 1 / config.weights.publish_every
    in_step = config.staleness.max_updates == 0
    generate = _stage(profile.generate, samples, rollout.workers, engine_batch(config), whole_jobs=in_step)
    score = _stage(profile.score, samples, reward.workers, reward.batch, whole_jobs=not reward.streaming)
    group = profile.train.mean(per_rank) + (profile.assess.mean(per_rank) if assesses else 0.0)
    steps = trainer.steps_per_update * profile.step.mean()
    train = trainer.groups_per_update * group + steps
    blocked, pause = profile.export.mean() * publishes, profile.swap.mean() * publishes
    publish = (profile.export.mean() + profile.publish.mean() + profile.swap.mean()) * publishes
    if config.placement.colocated:
        # Engine, reward worker and rank each get the device once per update.
        publish += 3 * profile.switch.mean()
    first = profile.generate.mean(min(engine_batch(config), math.ceil(samples / rollout.workers)))
    scored = profile.score.mean(min(reward.batch, samples))
    wave = generate + score if not reward.streaming else max(generate + scored, first + score)
    if not streams:
        wave += train
    elif not reward.streaming:
        wave += group + steps
    else:
        wave = max(wave + group + steps, first + scored + train)
    return StageTimes(generate, score, train, publish, blocked, pause, wave + publish)


def engine_batch(config: Config) -> int:
    """Samples an engine computes together: its batch, unless its places or its share of the trajectory buffer are fewer."""
    share = config.buffer.trajectories // config.rollout.workers
    return max(1, min(config.rollout.max_batch, config.rollout.max_inflight, share))


def _stage(service: ServiceTime, samples: int, workers: int, batch: int, whole_jobs: bool) -> float:
    """Seconds until `workers` have done `samples` in jobs of at most `batch`. `whole_jobs`: nothing else fills the last round up."""
    if not whole_jobs:
        return samples / workers * service.mean(batch) / batch
    rounds, rest = divmod(samples, workers * batch)
    return rounds * service.mean(batch) + service.mean(math.ceil(rest / workers))
