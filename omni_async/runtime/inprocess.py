"""Runs every role on one event loop: for tests, debugging, and machines without Ray. Classes and messages are the same
as on Ray; nothing is serialised."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Coroutine
from typing import Any

from omni_async.control.clock import Clock
from omni_async.control.coordinator import Coordinator
from omni_async.runtime import roles
from omni_async.runtime.preflight import RunInputs
from omni_async.store import LocalStore, ObjectStore
from omni_async.tracking.rundir import RunDirectory


class InProcessCluster:
    """A cluster of roles in this process. `clock`, the wall clock by default, stamps what happens. Emulated devices
    sleep on the event loop's time."""

    def __init__(self, inputs: RunInputs, run: RunDirectory, clock: Clock | None = None) -> None:
        config = inputs.config
        self.store: ObjectStore = LocalStore()
        self.coordinator: Coordinator = roles.build_coordinator(inputs, run.run_id, str(run.ledger))
        self._inputs = inputs
        self._clock = clock
        self._actors: dict[str, Any] = {}
        producers = {}
        if config.data.preferences is not None:
            for name in config.engine_names:
                self._actors[name] = roles.build_reader(name, inputs, self.coordinator, self.store)
        else:
            producers = {
                name: roles.build_producer(name, inputs, self.coordinator, self.store, clock)
                for name in config.engine_names
            }
            names = [f"reward-{worker}" for worker in range(config.reward.workers)]
            rewarders = {
                name: roles.build_rewarder(name, inputs, self.coordinator, self.store, clock) for name in names
            }
            self._actors |= producers | rewarders
        publisher = roles.build_publisher(
            config, producers, self.coordinator, self.store, str(run.weights), clock=clock
        )
        self._trainer = roles.build_trainer(
            inputs, [], self.coordinator, publisher, self.store, str(run.checkpoints), clock=clock
        )

    async def connect(self) -> None:
        """Does nothing: there is only this process."""

    async def start(self) -> None:
        # One after the other: diffusers and transformers patch torch.nn.Module while they load, for every thread of the
        # process. Reward workers first: a wrong scorer is reported before models load.
        rewarders = [actor for name, actor in self._actors.items() if name.startswith("reward")]
        others = [actor for actor in self._actors.values() if actor not in rewarders]
        for role in (*rewarders, self._trainer, *others):
            await role.start()

    def workers(self) -> dict[str, Coroutine[Any, Any, Any]]:
        return {
            name: actor.run() for name, actor in self._actors.items() if self._inputs.config.data.preferences is None
        }

    def work(self) -> dict[str, Coroutine[Any, Any, Any]]:
        readers = {
            name: actor.run()
            for name, actor in self._actors.items()
            if self._inputs.config.data.preferences is not None
        }
        return {**readers, "trainer": self._trainer.run()}

    def services(self) -> dict[str, Coroutine[Any, Any, Any]]:
        return {"publisher": self._trainer.run_publisher()}

    async def remove_worker(self, name: str, reason: str) -> None:
        """Removes a worker. What it stored is in the store that all roles share, and stays."""
        del self._actors[name]
        if name.startswith("reward"):
            await self.coordinator.scorer_lost(name)
        else:
            await self._trainer.remove_engine(name)
            await self.coordinator.engine_lost(name, reason)

    async def start_worker(self, name: str) -> Coroutine[Any, Any, Any]:
        build = roles.build_rewarder if name.startswith("reward") else roles.build_producer
        worker: Any = build(name, self._inputs, self.coordinator, self.store, self._clock)
        await worker.start()
        self._actors[name] = worker
        if not name.startswith("reward"):
            await self.coordinator.engine_joins(name)
            try:
                await self._trainer.admit(name, worker)
            except BaseException:
                with contextlib.suppress(Exception):
                    await self.remove_worker(name, "it did not join")
                raise
        return worker.run()

    async def drain_worker(self, name: str) -> None:
        await self._actors[name].leave()

    async def preempt(self) -> None:
        await self._trainer.preempt()

    async def find_lost(self) -> str | None:
        return None

    def parts(self) -> dict[str, dict[str, Any]]:
        here = {"pid": os.getpid(), "node": "local"}
        return dict.fromkeys(("coordinator", *self._actors, "trainer"), here)

    async def close(self) -> None:
        """Does nothing: roles free what they hold when their work ends."""
