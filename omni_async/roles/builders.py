"""Builds each role of the table where its worker runs: in the driver's process, or in a separate one.

Heavy imports are local to the functions, in the process that needs them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from omni_async.accelerator import require_accelerator
from omni_async.aio.clock import Clock, WallClock
from omni_async.aio.waiting import first_of
from omni_async.algorithms.kinds import Kind, find_kind
from omni_async.algorithms.registry import find_objective
from omni_async.config import Config
from omni_async.config.layout import ParallelLayout
from omni_async.config.redact import with_secrets
from omni_async.control.coordinator import Coordinator
from omni_async.diffusion.policy import Policy, load_policy
from omni_async.plugins.programs import find_program
from omni_async.plugins.services import Service, ServiceSite, find_service
from omni_async.records.write.ledger_file import JsonlSink
from omni_async.records.write.rundir import RunDirectory
from omni_async.roles.api import CoordinatorForRoles, CoordinatorForService, RankApi, UpdateRule
from omni_async.roles.emulated import EmulatedRank, EmulatedRewarder, EmulatedRule
from omni_async.roles.inputs import RunInputs
from omni_async.roles.libraries import look_without_unused
from omni_async.roles.plan import plan_updates
from omni_async.roles.preferences import PreferenceReader
from omni_async.roles.producer import Producer
from omni_async.roles.publisher import WeightPublisher
from omni_async.roles.rank import Rank
from omni_async.roles.rewarder import Rewarder
from omni_async.rollout.calls import Program
from omni_async.store import ObjectStore
from omni_async.tokens.policy import TokenPolicy, load_token_policy
from omni_async.weights.transport import build_receiver, build_sender
from omni_async.worker import COORDINATOR, ROLLOUT, TRAINER, Worker

if TYPE_CHECKING:
    from omni_async.roles.trainer import Trainer
    from omni_async.training.engine import TrainEngine


@dataclass(frozen=True)
class WorkerContext:
    """The arguments that a worker is built with.

    `folder`: the run's. `peers`: the workers that it calls, by name. `host`: the address of the worker's machine.
    `own_process`: whether the worker has its process, and the process's threads, to itself."""

    worker: Worker
    inputs: RunInputs
    folder: Path
    store: ObjectStore
    peers: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    clock: Clock = field(default_factory=WallClock)
    own_process: bool = False

    @property
    def name(self) -> str:
        return str(self.worker)

    @property
    def config(self) -> Config:
        return self.inputs.config

    @property
    def coordinator(self) -> CoordinatorForRoles:
        return self.peers[COORDINATOR]

    def service_site(self, settings: Any = None) -> ServiceSite:
        """Return the data about its run that a service's worker gets."""
        told, index = self.coordinator, self.worker.index or 0
        return ServiceSite(self.name, index, self.config, settings, self.host, told.phase, told.addresses)

    def limit_threads(self, cpus: float) -> None:
        """Limit torch to the worker's share of the machine; OMP_NUM_THREADS, set at the start, covers the rest."""
        if self.own_process:
            import torch

            torch.set_num_threads(max(1, int(cpus)))

    def prepare_libraries(self) -> None:
        """Import transformers and diffusers without packages that no role uses."""
        if self.own_process:
            look_without_unused()


# ---- builders that the role table names ------------------------------------------------------------------------------


def coordinator(context: WorkerContext) -> CoordinatorForRoles:
    inputs, run = context.inputs, RunDirectory(context.folder)

    def take_over() -> None:
        # Here as well as by the driver, which learns about the update only after a checkpoint may count it.
        run.void_metrics(inputs.start.version, inputs.start.validated)

    counted = inputs.start.ledger if inputs.run is not None else None
    sink = JsonlSink(run.ledger, counted, take_over if inputs.untouched else None)
    # Scorers may have changed since an earlier process of the run used them, but not since this process did.
    has_scored = inputs.start.ledger.events.get("trained", 0) > 0 and not inputs.untouched
    prompts = inputs.prompts, inputs.validation_prompts
    collects = plan_updates(inputs.config).mode == "collect"
    config = inputs.config
    if not _kind(config).rewarded:  # then a group of equal rewards teaches as much as any other
        advantage = replace(config.algorithm.advantage, drop_zero_variance=False)
        config = replace(config, algorithm=replace(config.algorithm, advantage=advantage))
    return Coordinator(config, run.run_id, *prompts, sink, inputs.start, sink.sync, has_scored, collects)


def producer(context: WorkerContext) -> Producer:
    from omni_async.rewards.probe import Probe
    from omni_async.rollout.factory import build_engine

    inputs, config = context.inputs, context.config
    if inputs.profile is None and config.rollout.engine != "emulated":
        context.limit_threads(config.placement.rollout.cpus)
        context.prepare_libraries()
    engine = build_engine(config, context.name, inputs.family, inputs.profile)
    receiver = build_receiver(config, context.name, context.store)
    program = built_program(config)
    probe = None if inputs.profile is not None or program is None else Probe.of(config, inputs.prompts)
    peers = context.coordinator, context.store, context.clock
    return Producer(context.name, config, engine, *peers, receiver, program, probe)


def built_program(config: Config) -> Program | None:
    """Build the recipe's rollout program, if it names one. Raises RuntimeError, with its name, if that fails."""
    section = config.rollout.program
    if section is None:
        return None
    where = f"rollout.program {section.name!r} was not built"
    try:
        made: Program = find_program(section.name).load()(config)
    except Exception as error:
        raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
    if not callable(made):
        raise RuntimeError(f"{where}: expected a Program, got a {type(made).__name__}")
    return made


def reader(context: WorkerContext) -> PreferenceReader:
    """Build the role that replaces producers and rewarders if the samples are a dataset's."""
    from omni_async.data.preferences import PreferencePairs

    config = context.config
    context.limit_threads(config.placement.rollout.cpus)
    context.prepare_libraries()
    if config.data.preferences is None:
        raise ValueError("a preference reader needs data.preferences")
    policy = load_policy(context.inputs.family, config.model.path)
    pairs = PreferencePairs(config.data.preferences, config.data.columns)
    return PreferenceReader(context.name, config, pairs, policy, context.coordinator, context.store, context.clock)


def rewarder(context: WorkerContext) -> Rewarder:
    inputs, config = context.inputs, context.config
    if inputs.profile is not None:
        return EmulatedRewarder(context.name, config, inputs.profile, context.coordinator, context.store, context.clock)
    from omni_async.rewards.functions import receive
    from omni_async.rewards.loaded import LoadedReward
    from omni_async.rewards.pooled import build_for
    from omni_async.rewards.probe import Probe

    receive(inputs.passed)
    reward = LoadedReward.load(config.reward, config.placement.reward.gpus, partial(build_for, config.reward))
    probe = Probe.of(config, inputs.prompts)
    return Rewarder(context.name, config, reward, context.coordinator, context.store, context.clock, probe)


def trainer(context: WorkerContext) -> Trainer | Rank:
    """Build rank 0 with the trainer and the publisher around it, or one of the other ranks."""
    inputs, config, run = context.inputs, context.config, RunDirectory(context.folder)
    if inputs.profile is None:
        context.limit_threads(config.placement.trainer.cpus)
        context.prepare_libraries()
    if context.worker.index is not None:
        return _rank(context, context.worker.index)
    from omni_async.roles.trainer import Trainer

    plan, ranks = plan_updates(config), list[RankApi]()
    rule: UpdateRule
    if inputs.profile is not None:
        rank = EmulatedRank(config, inputs.profile, context.store)
        ranks, rule = [rank], EmulatedRule(config, plan, rank)
    else:
        from omni_async.roles.update import PolicyGradient

        others = sorted(_peers(context, TRAINER).items(), key=lambda peer: Worker.parse(peer[0]).index or 0)
        ranks = [_rank(context, 0), *(peer for _, peer in others)]
        rule = PolicyGradient(config, plan, ranks)
    sender = build_sender(config, context.store, run.weights, context.host)
    publisher = WeightPublisher(config, _peers(context, ROLLOUT), context.coordinator, sender, context.clock)
    return Trainer(
        config,
        ranks,
        rule,
        context.coordinator,
        publisher,
        context.store,
        str(run.checkpoints),
        context.clock,
        context.host,
        inputs.contents,
    )


def _peers(context: WorkerContext, role: str) -> dict[str, Any]:
    return {name: peer for name, peer in context.peers.items() if Worker.parse(name).role == role}


def _rank(context: WorkerContext, rank: int) -> Rank:
    config, layout = context.config, ParallelLayout.of(context.config.trainer, rank)

    def build_engine() -> TrainEngine:
        from omni_async.training.engine import TrainEngine

        device: Any = None  # this rank's accelerator
        if (gpus := config.placement.trainer.gpus) > 0:
            require_accelerator("placement.trainer.gpus", gpus)
        else:
            import torch

            device = torch.device("cpu")
        family, path = context.inputs.family, config.model.path
        policy: Policy | TokenPolicy
        policy = load_token_policy(family, path) if family.draws == "tokens" else load_policy(family, path)
        return TrainEngine(config, policy, layout, device)

    return Rank(layout, build_engine, context.store, _kind(config).paired)


def _kind(config: Config) -> Kind:
    return find_kind(find_objective(config.algorithm.name).kind)


def service(context: WorkerContext) -> ServiceHost:
    """Build a worker of a role from another package."""
    role, asked = context.worker.role, context.coordinator
    (section,) = (one for one in context.config.roles if one.name == role)
    settings = with_secrets(section.settings, f"roles: settings of {role!r}")
    try:
        made = find_service(role).load()(context.service_site(settings))
    except Exception as error:
        raise ServiceNotStarted(f"{context.name} was not built: {type(error).__name__}: {error}") from error
    if not isinstance(made, Service):
        raise ServiceNotStarted(f"{context.name} was not built: expected a Service, got a {type(made).__name__}")
    return ServiceHost(context.name, made, asked)


# ---- the host of a service -------------------------------------------------------------------------------------------

# Time limit for a service's cleanup: the replacement of a lost service waits for it.
_CLOSING_S = 10.0


class ServiceEnded(RuntimeError):
    """Raised when a service ends before the run does."""


class ServiceNotStarted(RuntimeError):
    """Raised when a service does not start, or the object is not a Service."""


@dataclass(eq=False)
class ServiceHost:
    """One worker of a service: adapts another package's role to the run's protocol.

    Waits for the end of the run (`closing`) or a call of `leave`; the service decides what it does meanwhile."""

    name: str
    service: Service
    coordinator: CoordinatorForService

    def __post_init__(self) -> None:
        self._leaving = asyncio.Event()
        self._closed = False

    async def start(self) -> None:
        """Wait until the service is ready, and publish its address."""
        try:
            try:
                address = await self.service.start()
            except Exception as error:
                raise ServiceNotStarted(f"{self.name} did not start: {type(error).__name__}: {error}") from error
            if not isinstance(address, str):
                raise TypeError(f"{self.name}: start() returns its address, a text, got {type(address).__name__}")
            await self.coordinator.service_ready(self.name, address)
        except BaseException:
            await self.close()
            raise

    async def run(self) -> None:
        """Serve until the run is over, or drained after `leave`. Raises ServiceEnded if the service ends earlier."""
        try:
            await first_of(self._serve(), self.coordinator.closing(), self._drained())
        except Exception:
            with contextlib.suppress(Exception):  # the failure itself is raised
                await self.coordinator.service_lost(self.name)  # first of all, so that no request is sent there
            raise
        finally:
            await self.close()

    async def leave(self) -> None:
        """Make the worker finish its requests, and end. Its address is no longer given out."""
        await self.coordinator.service_lost(self.name)
        self._leaving.set()

    async def _serve(self) -> None:
        await self.service.run()
        raise ServiceEnded(f"{self.name}: its service ended before the run")

    async def _drained(self) -> None:
        await self._leaving.wait()
        await self.service.drain()

    async def close(self) -> None:
        """Clean the service up, once: after its work, or without any work because another role did not start."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):  # a failed cleanup does not matter
            async with asyncio.timeout(_CLOSING_S):
                await self.service.close()
