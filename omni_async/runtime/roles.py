"""Builds each role from the configuration: the one place where both runtimes get their producers, rewarders, ranks and
coordinator from.

Module-level functions with plain arguments, so that the Ray runtime can send them to other processes. Heavy imports
happen inside, in the process that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_async.accelerator import require_accelerator
from omni_async.actors.api import CoordinatorApi, ProducerApi, PublisherApi, RankApi, UpdateRule
from omni_async.actors.emulated import EmulatedRank, EmulatedRewarder, EmulatedRule
from omni_async.actors.plan import plan_updates
from omni_async.actors.preferences import PreferenceReader
from omni_async.actors.producer import Producer
from omni_async.actors.publisher import WeightPublisher
from omni_async.actors.rank import Rank
from omni_async.actors.rewarder import Rewarder
from omni_async.aio.clock import Clock, WallClock
from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import find_objective
from omni_async.config import Config
from omni_async.control.coordinator import Coordinator
from omni_async.control.held_ledger import HeldBackSink
from omni_async.control.ledger import JsonlSink
from omni_async.layout import ParallelLayout
from omni_async.policy import load_policy
from omni_async.runtime.preflight import RunInputs
from omni_async.store import ObjectStore
from omni_async.tracking.rundir import RunDirectory
from omni_async.weights.transport import build_receiver, build_sender

if TYPE_CHECKING:
    from omni_async.actors.trainer import Trainer
    from omni_async.training.engine import TrainEngine


def limit_threads(cpus: float) -> None:
    """Sets torch's thread count for this process (OMP_NUM_THREADS, set at its start, covers the rest)."""
    import torch

    torch.set_num_threads(max(1, int(cpus)))


def build_coordinator(inputs: RunInputs, run_id: str, ledger: str) -> Coordinator:
    def take_over() -> JsonlSink:
        if inputs.untouched:
            # Here as well as by the driver, which learns of the update only after a checkpoint may count it.
            RunDirectory(Path(ledger).parent).void_metrics(inputs.start.version, inputs.start.validated)
        return JsonlSink(Path(ledger), inputs.start.ledger if inputs.run is not None else None)

    sink = HeldBackSink(take_over) if inputs.untouched else take_over()
    # Scorers may have been changed since an earlier process of the run made use of them, but not since this one did.
    has_scored = inputs.start.ledger.events.get("trained", 0) > 0 and not inputs.untouched
    return Coordinator(
        inputs.config, run_id, inputs.prompts, inputs.validation_prompts, sink, inputs.start, sink.sync, has_scored
    )


def build_producer(
    name: str, inputs: RunInputs, coordinator: CoordinatorApi, store: ObjectStore, clock: Clock | None = None
) -> Producer:
    from omni_async.rollout.factory import build_engine

    engine = build_engine(inputs.config, name, inputs.family, inputs.profile)
    receiver = build_receiver(inputs.config, name, store)
    return Producer(name, inputs.config, engine, coordinator, store, clock or WallClock(), receiver)


def build_reader(name: str, inputs: RunInputs, coordinator: CoordinatorApi, store: ObjectStore) -> PreferenceReader:
    """Builds the role that replaces producers and rewarders where the samples are a dataset's."""
    from omni_async.runtime.preferences import PreferencePairs

    config = inputs.config
    if config.data.preferences is None:
        raise ValueError("a preference reader needs data.preferences")
    policy = load_policy(inputs.family, config.model.path)
    return PreferenceReader(
        name, config, PreferencePairs(config.data.preferences), policy, coordinator, store, WallClock()
    )


def build_rewarder(
    name: str, inputs: RunInputs, coordinator: CoordinatorApi, store: ObjectStore, clock: Clock | None = None
) -> Rewarder:
    config, clock = inputs.config, clock or WallClock()
    if inputs.profile is not None:
        return EmulatedRewarder(name, config, inputs.profile, coordinator, store, clock)
    from omni_async.rewards.composition import WeightedScorer
    from omni_async.rewards.probe import Probe

    return Rewarder(
        name, config, WeightedScorer(config.reward.scorers), coordinator, store, clock, Probe.of(config, inputs.prompts)
    )


def build_publisher(
    config: Config,
    producers: Mapping[str, ProducerApi],
    coordinator: CoordinatorApi,
    store: ObjectStore,
    weights: str,
    host: str = "127.0.0.1",
    clock: Clock | None = None,
) -> WeightPublisher:
    """Builds the publisher, which runs in the trainer's process. `weights` is the folder that a transport may put files
    into."""
    sender = build_sender(config, store, Path(weights), host)
    return WeightPublisher(config, producers, coordinator, sender, clock or WallClock())


def build_rank(rank: int, inputs: RunInputs, store: ObjectStore) -> Rank:
    layout = ParallelLayout.of(inputs.config.trainer, rank)

    def build_engine() -> TrainEngine:
        from omni_async.training.engine import TrainEngine

        device: Any = None  # the one of this rank
        if (gpus := inputs.config.placement.trainer.gpus) > 0:
            require_accelerator("placement.trainer.gpus", gpus)
        else:
            import torch

            device = torch.device("cpu")
        return TrainEngine(inputs.config, load_policy(inputs.family, inputs.config.model.path), layout, device)

    paired = find_kind(find_objective(inputs.config.algorithm.name).kind).paired
    return Rank(layout, build_engine, store, paired)


def build_trainer(
    inputs: RunInputs,
    others: Sequence[RankApi],
    coordinator: CoordinatorApi,
    publisher: PublisherApi,
    store: ObjectStore,
    checkpoints: str,
    host: str = "127.0.0.1",
    clock: Clock | None = None,
) -> Trainer:
    """Builds the trainer with rank 0; `others` are the ranks from 1 on, in other processes."""
    from omni_async.actors.trainer import Trainer

    config, plan = inputs.config, plan_updates(inputs.config)
    ranks: list[RankApi]
    rule: UpdateRule
    if inputs.profile is not None:
        rank = EmulatedRank(config, inputs.profile, store)
        ranks, rule = [rank], EmulatedRule(config, plan, rank)
    else:
        from omni_async.actors.update import PolicyGradient

        ranks = [build_rank(0, inputs, store), *others]
        rule = PolicyGradient(config, plan, ranks)
    return Trainer(config, ranks, rule, coordinator, publisher, store, checkpoints, clock or WallClock(), host)
