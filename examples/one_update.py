"""The asynchronous loop in one process: `python examples/one_update.py [UPDATES]`.

Three loops run concurrently and never wait for a round to end. They meet in the coordinator, which holds no tensor:

  generate   lease samples, let the engine denoise them, hand them over
  score      take generated samples one by one, return rewards
  train      take the next complete group, accumulate its gradient, step, publish the new weights

Every class is the one that a job uses. A job adds what this file leaves out: batches, retries, validation, checkpoints,
a process for each role (`omni_async/roles`), and their replacement (`omni_async/runtime`).
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from omni_async.aio.clock import WallClock
from omni_async.aio.threads import in_daemon_thread
from omni_async.algorithms.kinds import trajectory_fields
from omni_async.algorithms.registry import find_objective
from omni_async.config import Config, load
from omni_async.config.layout import ParallelLayout
from omni_async.control.coordinator import Coordinator
from omni_async.data.prompts import load_prompts
from omni_async.diffusion.policy import load_policy
from omni_async.plugins.families import find_family
from omni_async.rewards import registry
from omni_async.rewards.base import shown_to
from omni_async.roles.api import Tracer
from omni_async.roles.plan import plan_updates
from omni_async.roles.rank import Rank
from omni_async.roles.update import PolicyGradient
from omni_async.rollout.base import RolloutEngine
from omni_async.rollout.factory import build_engine
from omni_async.store import LocalStore, ObjectStore
from omni_async.training.engine import TrainEngine
from omni_async.types import SampleRequest, SampleResult, ScoreResult, UpdateReport, WeightManifest

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
NAME = "rollout-0"  # of the only engine


async def generate(coordinator: Coordinator, engine: RolloutEngine, store: ObjectStore, capacity: int) -> None:
    """Keep the engine full. `next_samples` waits while the staleness budget or a buffer is used up."""
    running: set[asyncio.Task[None]] = set()

    async def one(request: SampleRequest) -> None:
        started = time.time()
        made = await engine.generate(request)  # new weights may arrive between two of its denoising steps
        trained = made.versions.of_steps(request.window.steps) if request.window else made.versions
        trajectory, media = await store.put(made.tensors), await store.put(made.media.numpy())
        result = SampleResult(
            request.sample_id, NAME, trajectory, media, made.versions.first, trained, started, time.time()
        )
        await coordinator.samples_done(NAME, [result])

    while requests := await coordinator.next_samples(NAME, capacity - len(running), capacity):
        running |= {asyncio.create_task(one(request)) for request in requests}
        while len(running) >= capacity:
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)


async def score(coordinator: Coordinator, scorer: Any, store: ObjectStore) -> None:
    """Score each sample as soon as it is generated. The last score of a group makes the group ready."""
    results: list[ScoreResult] = []
    while jobs := await coordinator.next_to_score("reward-0", 1, results):  # hands in the last score first
        media = shown_to(scorer.name, scorer, [await store.get(job.media) for job in jobs])
        scores = await in_daemon_thread(scorer.score, media, [job.prompt for job in jobs])
        results = [
            ScoreResult(job.sample_id, job.attempt, score=found) for job, found in zip(jobs, scores, strict=True)
        ]


async def train(coordinator: Coordinator, config: Config, rank: Rank, engine: RolloutEngine) -> None:
    """Train on each group when it is ready, and publish after each update."""
    rule = PolicyGradient(config, plan_updates(config), [rank])
    await publish(coordinator, rank, engine, 0)
    for version in range(config.trainer.updates):
        started, update = time.time(), rule.begin(version, Tracer("trainer", coordinator, WallClock()))
        while update.missing:
            for group in await coordinator.next_groups(version, update.missing):
                await update.add(group)
        metrics = await update.finish()  # the last gradients, then the optimizer step
        rewards = [reward for group in update.groups for reward in group.rewards]
        ages = [version - group.oldest_version for group in update.groups]
        print(f"update {version + 1}: reward {sum(rewards) / len(rewards):.3f}, staleness {ages}")
        groups = tuple(group.group for group in update.groups)
        await coordinator.update_done(UpdateReport(version + 1, groups, metrics, started, time.time()))
        await publish(coordinator, rank, engine, version + 1)


async def publish(coordinator: Coordinator, rank: Rank, engine: RolloutEngine, version: int) -> None:
    """Copy the weights out and let the engine swap to them; this frees the slots of the trained groups."""
    snapshot = await rank.export(version)
    assert snapshot is not None
    manifest: WeightManifest = snapshot.manifest()
    await coordinator.announce(version, manifest.digest)
    await engine.stage(manifest, snapshot.buckets)
    await coordinator.engine_holds(await engine.swap(version))
    snapshot.release()


async def main(updates: int = 1) -> None:
    settings = ["rollout.engine=diffusers", "validation=null", "trainer.groups_per_update=4"]
    config = load(RECIPE, [*settings, f"trainer.updates={updates}"])
    family, store = find_family(config.model.pipeline), LocalStore()
    prompts = load_prompts(str(config.data.prompts), "data.prompts", 4000)
    coordinator = Coordinator(config, "example", prompts, [], ledger_sink=lambda entry: None)
    engine, scorer = build_engine(config, NAME, family, None), registry.build(config.reward.scorers[0])
    layout = ParallelLayout.of(config.trainer, rank=0)
    rank = Rank(layout, lambda: TrainEngine(config, load_policy(family, config.model.path), layout, None), store)
    await coordinator.require_fields(trajectory_fields(find_objective(config.algorithm.name), config))
    await engine.start()
    await rank.setup(resume=None, rendezvous=None)
    async with asyncio.TaskGroup() as loops:  # the run ends when the engine holds the last version
        loops.create_task(generate(coordinator, engine, store, config.rollout.max_inflight))
        loops.create_task(score(coordinator, scorer, store))
        loops.create_task(train(coordinator, config, rank, engine))
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
