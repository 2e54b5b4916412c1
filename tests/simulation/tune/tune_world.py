"""Builds a job to tune, and a fast simulator that knows nothing but the law."""

from __future__ import annotations

import msgspec
import yaml
from msgspec.structs import replace

from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import Config
from omni_async.config.algorithm import Correction
from omni_async.config.schedule import num_devices
from omni_async.config.schema import Staleness
from omni_async.config.section import Resources
from omni_async.config.trainer import Trainer
from omni_async.performance.law import stage_times
from omni_async.performance.profile import Profile, ServiceTime
from omni_async.simulation.result import Occupancy, Simulated

GPU = Resources(gpus=1.0)

# Per update of 4 groups of 8: 32 s of generation and 16 s of training on one device each, 8 s of scoring.
RECIPE = """
model: {path: model}
data: {prompts: prompts.txt}
rollout: {workers: 2, group_size: 8, max_inflight: 8, max_batch: 4}
reward: {batch: 2, scorers: [{name: ocr}]}
staleness: {max_updates: 0}
buffer: {trajectories: 64, groups: 12}
trainer: {workers: 1, updates: 50}
placement: {rollout: {gpus: 1}, trainer: {gpus: 1}}
"""

PROFILE = Profile(
    name="steady",
    source="made up",
    generate=ServiceTime(unit_s=1.0),
    score=ServiceTime(unit_s=0.25),
    train=ServiceTime(unit_s=0.5),
    publish=ServiceTime(fixed_s=0.5),
    swap=ServiceTime(fixed_s=0.1),
)


def job(**sections: object) -> Config:
    """Returns a job with engines and ranks on GPUs, reward workers beside them."""
    config = msgspec.convert(yaml.safe_load(RECIPE), Config)
    # The same work at every S.
    bypass = replace(config.algorithm, correction=Correction(mode="bypass"))
    config = replace(config, algorithm=bypass, staleness=Staleness(max_updates=2), trainer=Trainer(workers=1))
    for name, keys in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **keys)})  # type: ignore[arg-type]
    return config


def simulate_by_law(
    config: Config, profile: Profile, *, updates: int | None, seed: int, bundle: int | None, progress: object = None
) -> Simulated:
    """Returns a run as fast as the law and the slots allow. Engines that hold fewer samples than they compute together,
    or that swap weights only when idle, lose a tenth each."""
    share, per_update = samples_per_rank(config), config.trainer.groups_per_update
    times = stage_times(config, profile, streams=True, recomputes_proximal=False, samples_per_rank=share)
    ahead = min(config.staleness.max_updates + 1, config.buffer.groups / per_update)
    step = max(times.bottleneck[1], times.latency * config.weights.publish_every / ahead)
    step *= 1.1 if config.rollout.max_inflight < config.rollout.max_batch else 1.0
    step *= 1.1 if config.weights.swap != "step" else 1.0
    images = per_update * config.rollout.group_size / step
    slots = {"trajectories": config.buffer.trajectories, "replay": config.buffer.groups}
    return Simulated(
        updates=updates or 1,
        virtual_s=step * (updates or 1),
        wall_s=0.0,
        step_s=step,
        step_spread_s=0.0,
        images_per_s=images,
        images_per_s_per_device=images / num_devices(config),
        devices=num_devices(config),
        busy={role: {"busy": 1.0, "starved": 0.0, "backpressured": 0.0} for role in ("rollout", "reward", "trainer")},
        staleness={0: 1},
        staleness_mean=min(ahead - 1, config.staleness.max_updates) if ahead > 1 else 0.0,
        reserve_s=0.0,
        starved_s=0.0,
        staleness_max=config.staleness.max_updates,
        buffers={name: Occupancy(capacity, capacity, capacity) for name, capacity in slots.items()},
        counters={},
        times=times,
        law_s=step,
        bundle=bundle or 1,
    )
