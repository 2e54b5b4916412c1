"""Drives the ranks through updates, publishes versions, writes checkpoints: the trainer.

Waits only for the next group (`starved`; unblocked by the group's last score): publishing continues in the publisher
while the next update's first groups are trained. Ends when all updates are done or the coordinator reports the end of
the run, and leaves a checkpoint of the last whole update either way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from omni_async.aio.clock import Clock
from omni_async.aio.threads import in_daemon_thread
from omni_async.algorithms.kinds import trajectory_fields
from omni_async.algorithms.mismatch import CLIPPED_AT_MOST, HONEST_ERROR, Mismatch
from omni_async.algorithms.registry import find_objective
from omni_async.checkpoint.best import is_due
from omni_async.checkpoint.state import fitting, read_state
from omni_async.config import Config
from omni_async.config.layout import ParallelLayout
from omni_async.config.reading import real_path
from omni_async.roles.api import (
    Abandoned,
    CoordinatorForTrainer,
    PolicyUpdate,
    ProducerApi,
    RankApi,
    Tracer,
    UpdateRule,
)
from omni_async.roles.checkpointer import Checkpointer
from omni_async.roles.publisher import WeightPublisher
from omni_async.store import ObjectLost, ObjectStore
from omni_async.training import TrainingError
from omni_async.types import ReadyGroup, UpdateReport, WeightReport
from omni_async.weights.snapshot import SharedRows, Snapshot, fetch

_STORE_TIMEOUT_S = 60.0  # for this process's own connection to the store that it serves


@dataclass(eq=False)
class Trainer:
    """The trainer.

    `ranks[0]` lives in its process on `host`, exports, and provides the metrics; `rule` makes updates on the ranks.
    `checkpoints` is the folder of the run's checkpoints; they state `contents`, digests of the files in `config`."""

    config: Config
    ranks: Sequence[RankApi]
    rule: UpdateRule
    coordinator: CoordinatorForTrainer
    publisher: WeightPublisher
    store: ObjectStore
    checkpoints: str
    clock: Clock
    host: str = "127.0.0.1"
    contents: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tracer = Tracer("trainer", self.coordinator, self.clock)
        self._checkpointer = Checkpointer(
            self.config,
            self.ranks,
            self.rule,
            self.coordinator,
            self.store,
            Path(self.checkpoints),
            self._tracer,
            self.contents,
        )
        self._objective = find_objective(self.config.algorithm.name)
        self._version = 0
        self._preempt = False
        self._compared = False  # whether engine and trainer were compared under the same weights
        self._saved: int | None = None
        self._updated: float | None = None  # when the last update was made
        self._store_of_ranks: Any = None  # serves the ranks' process group until it is released

    async def start(self) -> None:
        """Load the model on every rank, and the checkpoint if `checkpoint.resume` names one."""
        rendezvous = await self._serve_rendezvous() if len(self.ranks) > 1 else None
        resume = self.config.checkpoint.resume
        await asyncio.gather(*(rank.setup(resume, rendezvous) for rank in self.ranks))
        if resume is not None:
            state, _ = fitting(read_state(Path(resume)), self.config, self.contents)
            self._version = state.version
            self.rule.restore(state.rule)
            await self._checkpointer.take_up(Path(resume), state)
            if _lies_in(resume, self.checkpoints):
                self._saved = state.version  # an attempt without updates leaves the run's checkpoint unchanged
        await self.coordinator.require_fields(trajectory_fields(self._objective, self.config))
        await self.coordinator.trainer_collects(self.rule.plan.mode == "collect")

    async def _serve_rendezvous(self) -> str:
        """Serve the store of the ranks' process group while this trainer lives. Return its `tcp://` address."""
        from omni_async.weights.transport.tcp_store import (
            serve_store,  # imports torch, which a lone emulated rank does without
        )

        self._store_of_ranks = await in_daemon_thread(partial(serve_store, self.host, _STORE_TIMEOUT_S))
        return f"tcp://{self.host}:{self._store_of_ranks.port}"

    async def run(self) -> None:
        await self.coordinator.phase(self.rule.plan.said)
        async with self._tracer.task_group():
            try:
                await self._publish()
                while self._version < self.config.trainer.updates and await self._update():
                    every = self.config.weights.publish_every
                    if self._version % every == 0 or self._version == self.config.trainer.updates:
                        await self._publish()
                    if is_due(self.config, self._version):
                        await self._save()
                if self._saved != self._version:
                    await self._save()
                await self._checkpointer.settle()
            finally:
                await self._checkpointer.close()

    async def run_publisher(self) -> None:
        """Run the publisher alongside `run`, until cancelled: all work after an export."""
        await self.publisher.run()

    async def preempt(self) -> None:
        """Abandon the update if it has not changed the weights yet, and save: the machine will be taken away."""
        self._preempt = True

    async def admit(self, engine: str, producer: ProducerApi) -> None:
        """Add an engine and wait until it holds the current weights. Raises EngineError if it does not take them."""
        await self.publisher.admit(engine, producer)

    async def remove_engine(self, engine: str) -> None:
        """Stop publishing to an engine that is gone."""
        self.publisher.remove_engine(engine)

    async def _update(self) -> bool:
        """Make one update. Return False if the run ended, possibly before the update's last group."""
        started, computed_before = self.clock.now(), self._computing_s
        update = self.rule.begin(self._version, self._tracer, lambda: self._preempt)
        while update.missing:
            with self._tracer.span("starved"):
                groups = await self.coordinator.next_groups(self._version, update.missing)
            if not groups:
                return False
            for group in groups:
                if self._preempt:
                    return False
                await self._add(update, group)
        try:
            metrics = await update.finish()
        except Abandoned:
            return False
        self._require_same_arithmetic(metrics)
        self._version += 1
        metrics |= await self._compare(metrics, await self._learn(metrics))
        metrics = self._with_utilisation(metrics, self._computing_s - computed_before)
        trained = tuple(group.group for group in update.groups)
        return await self.coordinator.update_done(
            UpdateReport(self._version, trained, metrics, started, self.clock.now())
        )

    @property
    def _computing_s(self) -> float:
        """Return the seconds that groups and optimizer steps have taken so far."""
        return sum(self._tracer.seconds[kind] for kind in ("proximal", "train"))

    def _with_utilisation(self, metrics: dict[str, float], computing_s: float) -> dict[str, float]:
        """Return the metrics with a rank's rate of computation in place of the operations that ranks counted.

        `tflops/trainer` is the rate while it computes. `mfu/trainer` is its share of the device's maximum, and
        `mfu/overall` the same from update to update, waits included. Unknown values are missing."""
        now, since = self.clock.now(), self._updated
        self._updated = now
        found = {name: value for name, value in metrics.items() if name not in ("flops/sum", "peak_tflops")}
        per_rank, peak = metrics.get("flops/sum", 0.0) / len(self.ranks) / 1e12, metrics.get("peak_tflops")
        if not per_rank or computing_s <= 0:
            return found
        found["tflops/trainer"] = per_rank / computing_s
        if peak is not None:
            found["mfu/trainer"] = per_rank / computing_s / peak
            if since is not None:
                found["mfu/overall"] = per_rank / (now - since) / peak
        return found

    async def _add(self, update: PolicyUpdate, group: ReadyGroup) -> None:
        try:
            await update.add(group)
        except ObjectLost as error:
            await self.coordinator.group_gone(group.group, str(error))

    def _require_same_arithmetic(self, metrics: dict[str, float]) -> None:
        """Refuse a run whose first update shows that engines do not sample the policy that is trained.

        Nothing is published or saved by then. Engines and trainer hold the checkpoint's weights, so ratios are 1 up to
        rounding. With another sign, time, guidance or schedule, or weights that did not arrive, reward would only move
        by chance."""
        most, mismatch = self.config.trainer.max_mismatch, metrics.get("engine_mismatch", 0.0)
        if self._draws and self._version == 0 and most is not None and mismatch > most:
            each = "token" if self.rule.plan.draws_tokens else "latent element"
            raise TrainingError(
                f"the first update's samples are not the policy's: under the same weights, log-probs of engine and"
                f" trainer differ by up to {mismatch:.2g} per {each} (trainer.max_mismatch is {most:g});"
                f" `omni-async parity` shows where they differ"
            )

    async def _learn(self, metrics: dict[str, float]) -> str | None:
        """Have the rule learn from a finished update. Return its sentence for the console, if it has one."""
        if not self._draws:
            return None
        before, message = self.rule.plan.mode, self.rule.learn(metrics)
        if self.rule.plan.mode == before:
            return message
        await self.coordinator.trainer_collects(self.rule.plan.mode == "collect")
        return f"{message}; {self.rule.plan.said}"

    async def _compare(self, metrics: dict[str, float], decided: str | None) -> dict[str, float]:
        """Report the distance between engine and trainer under the same weights: once, and if rounding is exceeded.

        `decided` is the rule's sentence about the update. Returns the largest relative velocity error that rounding
        explains, as a metric, if they were compared."""
        found = Mismatch.of(metrics)
        if found is None or not self._draws:
            if decided is not None:
                await self.coordinator.phase(decided)
            return {}
        outcome = f"; {decided}" if decided else ""
        honest = HONEST_ERROR[self.config.model.dtype]
        where = f"engine and trainer, same weights, update {self._version}: {found.shown}"
        if found.velocity is not None and found.velocity > honest:
            await self.coordinator.phase(
                f"warning: {where}; rounding in {self.config.model.dtype} explains {honest:g}: their schedule, time,"
                f" guidance or weights differ (`omni-async parity` shows where){outcome}"
            )
        elif decided or not self._compared:
            held = found.clipped > CLIPPED_AT_MOST and self.config.algorithm.correction.mode != "auto"
            advice = "; algorithm.correction.mode auto or none would take ratios to the trainer's own policy"
            await self.coordinator.phase(f"warning: {where}{advice}" if held else f"{where}{outcome}")
        self._compared = True
        return {} if found.velocity is None else {"engine_mismatch_honest": honest}

    @property
    def _draws(self) -> bool:
        """Whether engines sample the policy: emulated engines do not."""
        return self.config.rollout.engine != "emulated"

    async def _publish(self) -> None:
        """Copy the weights out (the trainer waits for nothing else) and leave the rest to the publisher.

        A dataset's reader needs no weights, only the version's number."""
        if self.config.data.preferences is not None:
            await self.coordinator.announce(self._version, "")
            for reader in self.config.engine_names:
                await self.coordinator.engine_holds(WeightReport(reader, self._version, ""))
            return
        self.publisher.withdraw()
        with self._tracer.span("export", version=self._version):
            exported = await asyncio.gather(*(rank.export(self._version) for rank in self.ranks))
        if exported[0] is None:
            raise RuntimeError("trainer rank 0 exported nothing")
        self.publisher.publish(self._with_others(exported[0]))

    def _with_others(self, snapshot: Snapshot) -> Snapshot:
        """Have the other ranks that exported rows of this version share them, alongside the training."""
        sharing = self.ranks[1 : ParallelLayout.of(self.config.trainer).shard_size]
        if not sharing:
            return snapshot
        shared = [asyncio.ensure_future(rank.share(snapshot.version)) for rank in sharing]
        for rows in shared:
            rows.add_done_callback(_forget)  # for a withdrawn version; a lost rank fails the next call
        return replace(snapshot, others=partial(fetch, self.store, shared))

    async def _save(self) -> None:
        await self._checkpointer.save(self._version)
        self._saved = self._version


def _forget(rows: asyncio.Future[SharedRows]) -> None:
    if not rows.cancelled():
        rows.exception()


def _lies_in(checkpoint: str, folder: str) -> bool:
    return real_path(checkpoint).parent == real_path(folder)
