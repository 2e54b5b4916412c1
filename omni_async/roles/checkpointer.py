"""Writes checkpoints alongside the training: the trainer waits only while tensors are copied to host memory.

One checkpoint is written at a time; the next waits for it. It gets its final name once every byte is on disk. A failure
to write a checkpoint is reported, and the next is tried when it is due; only the last checkpoint of a run must succeed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import is_cancelled
from omni_async.checkpoint.best import worth_keeping
from omni_async.checkpoint.folders import begin, folder_name, partial, put_in_place, remove, rotate, write_manifest
from omni_async.checkpoint.state import State, made_with, write_state
from omni_async.checkpoint.statement import stated
from omni_async.checkpoint.trajectories import read_group, write_group
from omni_async.config import Config
from omni_async.control.control_state import ControlState, Unfinished
from omni_async.roles.api import CoordinatorForCheckpointer, RankApi, Tracer, UpdateRule
from omni_async.roles.trajectories import Stored, Trajectories, read_trajectory
from omni_async.store import ObjectLost, ObjectStore
from omni_async.types import ReadyGroup

# Time limit for a checkpoint that is being written when the run fails.
_LAST_WRITE_S = 20.0
_NOTHING = Stored(None, 0, ())


@dataclass(eq=False)
class Checkpointer:
    """A writer of checkpoints into a folder. The update rule's state is read when a save begins.

    `contents`: digests of the files that the configuration names; every checkpoint states them."""

    config: Config
    ranks: Sequence[RankApi]
    rule: UpdateRule
    coordinator: CoordinatorForCheckpointer
    store: ObjectStore
    checkpoints: Path
    tracer: Tracer
    contents: Mapping[str, str] = field(default_factory=dict)
    _writing: asyncio.Task[None] | None = field(default=None, init=False)

    async def save(self, version: int) -> None:
        """Begin a checkpoint of the weights' `version`. Returns when the weights may change again."""
        await self.settle(last=False)
        folder = self.checkpoints / folder_name(version)

        try:
            control = await self.coordinator.continuation()
            if control.version != version:
                return  # the run ended before this update was acknowledged: the ledger does not have it
            unfinished = await in_daemon_thread(begin, folder)
        except OSError as error:
            self._writing = asyncio.create_task(_fail(error), name=folder.name)
            return
        with self.tracer.span("checkpoint", version=version):
            engines = await asyncio.gather(*(rank.begin_save(str(unfinished)) for rank in self.ranks))
        self._writing = asyncio.create_task(
            self._write(folder, control, engines[0], self.rule.state()), name=folder.name
        )

    async def settle(self, last: bool = True) -> None:
        """Wait until nothing is being written. Raise a failure of the `last` checkpoint; report any other failure."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            await writing
        except Exception as error:
            await in_daemon_thread(remove, partial(self.checkpoints / writing.get_name()))  # it takes disk space
            if last:
                raise
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            await self.coordinator.phase(
                f"warning: checkpoint {writing.get_name()} could not be written ({why}); the next one is tried as"
                " planned"
            )

    async def close(self) -> None:
        """Allow a checkpoint in progress some time to finish, and none if the caller is cancelled.

        Other actors that it needs may be gone. An unfinished checkpoint stays in its temporary folder."""
        writing, self._writing = self._writing, None
        if writing is not None:
            if not is_cancelled():
                await asyncio.wait((writing,), timeout=_LAST_WRITE_S)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, folder: Path, control: ControlState, engine: dict[str, Any], rule: dict[str, Any]) -> None:
        unfinished = partial(folder)
        await asyncio.gather(*(rank.end_save() for rank in self.ranks))
        kept, gone = [], []
        for group in control.ready:
            try:
                read = (read_trajectory(self.store, sample.trajectory) for sample in group.samples)
                trajectories = await asyncio.gather(*read)
            except ObjectLost:
                gone.append(Unfinished(group.group))  # this attempt would generate it again too
                continue
            await in_daemon_thread(write_group, unfinished, group.group, trajectories)
            kept.append(_with_trajectories(group, [_NOTHING] * len(group.samples)))
        stripped = replace(control, ready=tuple(kept), unfinished=(*control.unfinished, *gone))
        config, statement = self.config, stated(self.config, self.contents)
        state = State(
            stripped, config.model.pipeline, config.algorithm.name, engine, rule, made_with(config), statement
        )

        def best(versions: set[int]) -> set[int]:
            return worth_keeping(self.config, versions, control)

        def complete() -> None:
            write_state(unfinished, state)
            write_manifest(unfinished)
            put_in_place(folder)
            rotate(self.checkpoints, self.config.checkpoint.keep, folder, best)

        await in_daemon_thread(complete)

    async def take_up(self, folder: Path, state: State) -> None:
        """Put the trajectories of ready groups back into the store, and pass the groups to the coordinator."""
        groups, stored = [], Trajectories("checkpoint", self.store)
        for group in state.control.ready:
            trajectories = await in_daemon_thread(read_group, folder, group.group, len(group.samples))
            groups.append(_with_trajectories(group, await stored.put_all(trajectories)))
        if groups:
            await self.coordinator.take_up(groups)


def _with_trajectories(group: ReadyGroup, stored: Sequence[Stored]) -> ReadyGroup:
    """Return the group with its trajectories in the store."""
    samples = tuple(
        replace(sample, trajectory=one.reference, nbytes=one.nbytes, shared=one.shared)
        for sample, one in zip(group.samples, stored, strict=True)
    )
    return replace(group, samples=samples)


async def _fail(error: OSError) -> None:
    raise error
