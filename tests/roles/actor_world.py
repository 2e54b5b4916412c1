"""Provides small real counterparts for the roles under test: a coordinator's desk, an engine that the test drives, and
ranks that record their calls. Nothing sleeps: `settle` gives the event loop enough turns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from tensordict import TensorDict

from omni_async.aio.clock import ManualClock
from omni_async.aio.waiting import Event
from omni_async.algorithms.advantages import RewardHistory
from omni_async.config import Config, check, with_spec
from omni_async.config.layout import ParallelLayout
from omni_async.control.control_state import ControlState
from omni_async.media import Media
from omni_async.roles.api import Tracer
from omni_async.roles.plan import plan_updates
from omni_async.roles.update import Update
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.store import LocalStore, ObjectLost
from omni_async.types import (
    Activity,
    Piece,
    Prompt,
    ReadyGroup,
    ReadySample,
    SampleDrift,
    SampleRequest,
    Score,
    ScoreJob,
    SdeWindow,
    TensorSpec,
    TrainGroup,
    VersionSpans,
    WeightManifest,
    WeightReport,
)
from omni_async.weights.snapshot import SharedRows, Snapshot
from tests.support.configs import build
from tests.support.images import as_media
from tests.support.loops import settle

STEPS = 5
PREFERENCES = {
    "data": {"preferences": "pairs.parquet", "shuffle": False},
    "reward": {"batch": 4},
    "rollout.group_size": 2,
    "rollout.sde": None,
    "algorithm": {"name": "diffusion_dpo"},
}


def make_config(**changes: Any) -> Config:
    """Makes a configuration from dotted keys over small defaults."""
    sampling = {"sampling": {"height": 32, "width": 48}, "num_inference_steps": STEPS}
    window = {"window": {"size": 2, "range": [0, STEPS - 1]}}
    sgd = {"name": "sgd", "lr": 1.0, "weight_decay": 0, "max_grad_norm": None}
    defaults: dict[str, Any] = {
        "model": {"pipeline": "qwen_image", "path": "0"},
        "rollout": {"group_size": 4, "max_inflight": 4, "max_batch": 2, "sde": window, **sampling},
        "reward": {"batch": 4},
        "algorithm": {"clip_range": 0.2},
        "trainer": {"updates": 4, "groups_per_update": 2, "optimizer": sgd},
    }
    config = with_spec(build(defaults, changes))
    assert check(config) is None, check(config)
    return config


async def failure_of(work: Awaitable[Any]) -> BaseException:
    """Returns the exception that ends the work."""
    with pytest.raises(Exception) as caught:
        await work
    return caught.value


def hook(owner: Any, name: str, before: Any = None, after: Any = None) -> None:
    """Has an async method await `before()` first, and return `after(result)`."""
    call = getattr(owner, name)

    async def hooked(*given: Any) -> Any:
        if before:
            await before()
        result = await call(*given)
        return after(result) if after else result

    setattr(owner, name, hooked)


def make_request(number: int, **changes: Any) -> SampleRequest:
    request = SampleRequest(
        sample_id=f"g0.s{number}",
        kind="train",
        group=0,
        sample=number,
        prompt=Prompt(0, "a cat"),
        seed=number,
        spec=QwenImageSampling(height=32, width=48),
        num_inference_steps=STEPS,
        noise_level=0.7,
        sde_kind="flow",
        window=SdeWindow(1, 2),
        fields=("latents",),
    )
    return replace(request, **changes)


def make_job(number: int, text: str = "a cat") -> ScoreJob:
    return ScoreJob(f"g0.s{number}", "train", Prompt(number, text), as_media(np.full((8, 8, 3), number, np.uint8)))


def make_group(
    number: int,
    rewards: list[float],
    trajectories: list[Any] | None = None,
    *,
    prompt: int | None = None,
    values: list[tuple[float, ...]] | None = None,
    versions: tuple[int, ...] | None = None,
) -> ReadyGroup:
    """Makes a group. `values` are each sample's rewards by scorer, `versions` those of every sample's trained steps."""
    if trajectories is None:
        trajectories = [f"trajectory {number}.{i}" for i in range(len(rewards))]
    scores = [Score(reward, values=values[i] if values else ()) for i, reward in enumerate(rewards)]
    spans = VersionSpans.of((0, 0) if versions is None else versions)
    samples = tuple(
        ReadySample(f"g{number}.s{i}", trajectory, score, spans)
        for i, (trajectory, score) in enumerate(zip(trajectories, scores, strict=True))
    )
    index = number if prompt is None else prompt
    return ReadyGroup(number, Prompt(index, f"prompt {index}"), SdeWindow(1, 2), 0, samples)


def make_snapshot(version: int, release: Callable[[], None] = lambda: None) -> Snapshot:
    """Makes a snapshot of one byte, the version's number."""
    specs = (TensorSpec("t", "uint8", (1,), (Piece(0, 0, 1),)),)
    return Snapshot(version, "full", specs, [np.full(1, version, np.uint8)], release=release)


def kept(where: str, skip: int = 0) -> Any:
    """Makes a call of a `Desk` that appends its arguments, after the first `skip`, to the list `where`."""

    async def call(self: Desk, *given: Any) -> None:
        getattr(self, where).append(given[skip:] if len(given) > skip + 1 else given[skip])
        self._event.notify()

    return call


class Desk:
    """The coordinator as a role sees it: queues of work, and records of calls. `close` ends the run."""

    def __init__(self) -> None:
        self.requests, self.jobs, self.groups = [], [], []
        self.asked, self.reports, self.failed, self.scored_batches, self.wrong = [], [], [], [], []
        self.gone, self.lost = [], []  # groups, engines
        self.updates, self.announced, self.held = [], [], []
        self.waiting, self.taken_up = [], []  # groups for a checkpoint, and from one
        self.scorers, self.timelines, self.phases, self.log = [], [], [], []
        self.addresses = {}  # of services
        self.fields: tuple[str, ...] = ()
        self.collects = False
        self.version = 0  # before the first update
        self.closed = False
        self.refuses: Exception | None = None  # raised by `samples_done` and `report`
        self._event = Event()

    sample_failed = kept("failed", skip=1)
    phase = kept("phases")
    group_gone = kept("gone")
    engine_lost = kept("lost")
    take_up = kept("taken_up")

    async def samples_done(self, engine: str, results: Sequence[Any], activity: Activity | None = None) -> None:
        await self.report(engine, activity)
        self._refuse()
        self.reports.append([*results])
        self._event.notify()

    async def scored(self, worker: str, results: Sequence[Any], activity: Activity | None = None) -> None:
        await self.report(worker, activity)
        self.scored_batches.append([*results])
        self._event.notify()

    async def report(self, worker: str, activity: Activity | None) -> None:
        if activity is not None:
            self._refuse()
            self.timelines.append(activity.spans)
            self.scorers += [activity.scorers] if activity.scorers else []
            self._event.notify()

    def _refuse(self) -> None:
        if self.refuses:
            raise self.refuses

    @property
    def done(self) -> list[Any]:
        return [result for report in self.reports for result in report]

    @property
    def spans(self) -> list[Any]:
        return [span for timeline in self.timelines for span in timeline]

    def offer(self, *work: Any) -> None:
        for item in work:
            queue = {SampleRequest: self.requests, ScoreJob: self.jobs, ReadyGroup: self.groups}[type(item)]
            queue.append(item)
        self._event.notify()

    def close(self) -> None:
        self.closed = True
        self._event.notify()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._event.wait()

    async def _take(self, queue: list[Any], limit: int) -> list[Any]:
        await self.until(lambda: bool(queue) or self.closed)
        if self.closed:
            return []
        taken, queue[:] = queue[:limit], queue[limit:]
        return taken

    async def next_samples(
        self,
        engine: str,
        free: int,
        capacity: int,
        done: Sequence[Any] = (),
        activity: Activity | None = None,
    ) -> list[SampleRequest]:
        self.asked.append((free, capacity))
        if done:
            await self.samples_done(engine, done)
        await self.report(engine, activity)
        return await self._take(self.requests, free)

    async def next_to_score(
        self, worker: str, limit: int, done: Sequence[Any] = (), activity: Activity | None = None
    ) -> list[ScoreJob]:
        if done:
            await self.scored(worker, done)
        await self.report(worker, activity)
        return await self._take(self.jobs, limit)

    async def next_groups(self, version: int, needed: int) -> list[ReadyGroup]:
        return await self._take(self.groups, needed)

    async def scorer_wrong(self, reason: str) -> bool:
        self.wrong.append(reason)
        return not self.scores

    async def closing(self) -> None:
        await self.until(lambda: self.closed)

    @property
    def scores(self) -> dict[str, Any]:
        return {result.sample_id: result for batch in self.scored_batches for result in batch}

    async def require_fields(self, fields: tuple[str, ...]) -> None:
        self.fields = fields

    async def trainer_collects(self, collects: bool) -> None:
        self.collects = collects

    async def update_done(self, report: Any) -> bool:
        self.updates.append(report)
        self.log.append(f"update {report.version}")
        self._event.notify()
        return True

    async def announce(self, version: int, digest: str) -> None:
        self.announced.append((version, digest))
        self.log.append(f"announce {version}")

    async def engine_holds(self, report: Any) -> None:
        self.held.append(report)
        self.log.append(f"{report.engine} holds {report.version}")
        self._event.notify()

    async def continuation(self) -> ControlState:
        version = self.updates[-1].version if self.updates else self.version
        return ControlState(version=version, next_group=77, ready=tuple(self.waiting))

    async def service_ready(self, worker: str, address: str) -> None:
        self.addresses[worker] = address

    async def service_lost(self, worker: str) -> None:
        self.addresses.pop(worker, None)


class LossyStore(LocalStore):
    """A store that has lost the references in `lost`."""

    def __init__(self, *lost: Any) -> None:
        self.lost: set[Any] = set(lost)

    async def get(self, reference: Any) -> Any:
        if isinstance(reference, Hashable) and reference in self.lost:
            raise ObjectLost(f"{reference} is gone")
        return await super().get(reference)


class HandEngine:
    """An engine whose samples finish when the test decides; the last step is of the version held then."""

    name = "rollout-0"

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[None]] = {}
        self.started: list[str] = []
        self.swaps: list[tuple[int, list[str]]] = []  # versions, and the samples that ran during the swap
        self.version = self.closed = 0
        self.arrives: str | None = None  # another digest than the published one
        self.swap_gate: asyncio.Event | None = None

    async def start(self) -> WeightReport:
        return WeightReport(self.name, 0, "", uses="attention SDPA")

    async def generate(self, request: SampleRequest) -> Trajectory:
        self.started.append(request.sample_id)
        future = self.running[request.sample_id] = asyncio.get_running_loop().create_future()
        first = self.version
        try:
            await future
        finally:
            del self.running[request.sample_id]
        versions = VersionSpans.of((first,) * (request.num_inference_steps - 1) + (self.version,))
        image = torch.arange(3, dtype=torch.uint8)[:, None, None].expand(3, request.spec.height, request.spec.width)
        return Trajectory(TensorDict({"latents": torch.zeros(3, 6, 4)}, []), Media(image=image), versions)

    async def finish(self, *samples: int | str, error: Exception | None = None) -> None:
        """Ends samples, and returns when all that follows has happened."""
        for future in [self.running[f"g0.s{number}"] for number in samples]:
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        await settle()

    async def stage(self, manifest: WeightManifest, buckets: list[Any]) -> str:
        self.staged = buckets
        return self.arrives or manifest.digest

    async def swap(self, version: int) -> WeightReport:
        if self.swap_gate is not None:
            await self.swap_gate.wait()
        self.swaps.append((version, sorted(self.running)))
        self.version = version
        return WeightReport(self.name, version, f"digest-{version}")

    async def close(self) -> None:
        self.closed += 1
        for future in self.running.values():
            if not future.done():
                future.set_exception(EngineError(f"{self.name} was closed"))


class AccountingRank:
    """A rank with a model of one number, theta: the loss of a row of a group's sample i is -weight x advantage x
    (i + 1) x theta. It records its calls. A sample has `rows` rows. `drifts` are by trajectory, `metrics` by step.
    Trajectories in `lost` cannot be fetched."""

    def __init__(
        self,
        log: list[str] | None = None,
        *,
        rank: int = 0,
        world: int = 1,
        sequence: int = 1,
        rows: int = 2,
        drifts: Mapping[str, SampleDrift] | None = None,
        metrics: Sequence[dict[str, float]] = (),
    ) -> None:
        self.log = log if log is not None else []
        self.writes = rank == 0
        self.disk_is_full = False
        self.theta = self.gradient = 0.0
        self.weight = 0.0  # of the rows since the last step
        self.step_weights, self.scales = list[float](), list[float]()
        self.recomputed, self.batches = list[TrainGroup](), list[TrainGroup]()
        self.fetched: dict[int, tuple[Any, ...]] = {}  # whole groups
        self.mine: dict[int, range] = {}  # samples of each
        self.lost: set[Any] = set()
        self.setup_calls: list[tuple[str | None, str | None]] = []
        self._layout, self._rows = ParallelLayout(rank, world, sequence), rows
        self.drifts, self._metrics = drifts or {}, metrics

    @property
    def groups(self) -> list[list[float]]:
        """Advantages, in order."""
        return [list(batch.advantages) for batch in self.batches]

    async def setup(self, resume: str | None, rendezvous: str | None) -> None:
        self.setup_calls.append((resume, rendezvous))

    async def fetch(self, group: int, trajectories: Sequence[Any], start: int) -> None:
        mine = self._layout.dealt(len(trajectories), start)
        if missing := [trajectories[i] for i in mine if trajectories[i] in self.lost]:
            raise ObjectLost(f"{missing[0]} is gone")
        self.fetched[group] = tuple(trajectories)
        self.mine[group] = mine

    async def recompute_proximal(self, batch: TrainGroup) -> list[SampleDrift]:
        self.recomputed.append(batch)
        self.log.append("proximal")
        return [self.drifts[self.fetched[batch.group][i]] for i in self.mine[batch.group]]

    async def accumulate(self, batch: TrainGroup, row_weight: float) -> None:
        size = len(self.fetched[batch.group])
        assert {
            len(column) for column in (batch.advantages, batch.seeds, batch.step_versions, batch.weights or batch.seeds)
        } == {size}
        weights = batch.weights or ((1.0,) * self._rows,) * size
        for i in self.mine[batch.group]:
            self.weight += row_weight * len(weights[i])
            self.gradient += row_weight * sum(weights[i]) * batch.advantages[i] * (i + 1)
        self.batches.append(batch)
        self.log.append("accumulate")

    async def step(self, grad_scale: float) -> dict[str, float]:
        self.theta += grad_scale * self.gradient
        self.step_weights.append(self.weight)
        self.scales.append(grad_scale)
        self.weight = self.gradient = 0.0
        self.log.append("step")
        number = len(self.step_weights)
        return {"loss": float(number), **(self._metrics[number - 1] if number <= len(self._metrics) else {})}

    async def discard(self) -> None:
        self.weight = self.gradient = 0.0
        self.log.append("discard")

    async def export(self, version: int) -> Snapshot | None:
        self.log.append(f"export {version}")
        return make_snapshot(version) if self.writes else None

    async def share(self, version: int) -> SharedRows:
        assert f"export {version}" in self.log
        self.log.append(f"share {version}")
        return SharedRows((TensorSpec("t", "uint8", (1,), ()),), [])

    async def begin_save(self, folder: str) -> dict[str, Any]:
        self._folder = Path(folder)
        if self.writes:
            self.log.append(f"save {self._folder.name.removeprefix('.').removesuffix('.partial')}")
        return {"theta": self.theta}

    async def end_save(self) -> None:
        if self.disk_is_full:
            raise OSError("no space left on device")
        if self.writes:
            (self._folder / "theta").write_text(str(self.theta))


REWARDS = [[0.1, 0.9, 0.4, 0.3], [2.0, 1.0, 1.5, 0.0], [0.2, 0.2, 0.3, 0.7], [1.0, 3.0, 2.0, 2.5]]
GROUP_STD = {"algorithm.advantage": {"std": "group"}}
FINAL_LATENTS = {"rollout.sde": None, "algorithm.clip_range": None}


def make_update(
    config: Config, ranks: list[Any], version: int = 0, history: RewardHistory | None = None, **more: Any
) -> Update:
    tracer = Tracer("trainer", Desk(), ManualClock())
    return Update(config, plan_updates(config), ranks, tracer, version, history or RewardHistory(), **more)


def run_update(config: Config, ranks: list[Any], groups: list[ReadyGroup], **kwargs: Any) -> dict[str, float]:
    async def main() -> dict[str, float]:
        update = make_update(config, ranks, **kwargs)
        for missing, group in zip(range(len(groups), 0, -1), groups, strict=True):
            assert update.missing == missing
            await update.add(group)
        assert update.missing == 0
        return await update.finish()

    return asyncio.run(main())


def account(rewards: list[list[float]] = REWARDS, rank: AccountingRank | None = None, **changes: Any) -> AccountingRank:
    rank = rank or AccountingRank()
    config = make_config(**{"trainer.groups_per_update": len(rewards), **changes})
    run_update(config, [rank], [make_group(i, values) for i, values in enumerate(rewards)])
    return rank
