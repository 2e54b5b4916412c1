"""Runs an engine in this process: requests in batches, and swaps of weights, in one worker thread at a time.

Requests wait in a queue. A runner task takes the oldest one with all requests that can share its batch, up to
`max_batch`, in arrival order, and generates them in one worker thread. It waits for a request or a swap; `generate`,
`swap` and `close` unblock it. The same thread swaps in a staged version: between any two steps, or between two batches
with `batching` "request".

The requests of a batch depend on the order of `generate` calls and never on time: calls made in one event-loop tick are
all queued before the runner reads the queue.
"""

from __future__ import annotations

import asyncio
import queue
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from omni_async.aio.threads import in_daemon_thread
from omni_async.diffusion.components import named_parameters
from omni_async.rollout.base import EngineError, StagedVersion, Trajectory
from omni_async.rollout.payloads import Staged, adapted_weights, take_in
from omni_async.rollout.upload import Upload
from omni_async.types import SampleRequest, WeightManifest, WeightReport

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


@dataclass(eq=False)
class Waiting:
    """A request in the queue, its caller's result, and the engine's preparation of the request, if it has one."""

    request: SampleRequest
    result: asyncio.Future[Trajectory]
    prepared: Any = None


class _Swap(NamedTuple):
    staged: Staged
    done: asyncio.Future[WeightReport]


class InProcessEngine(ABC):
    """A `RolloutEngine` whose model is in this process; subclasses load it and generate a batch.

    `device` defaults to the current accelerator, otherwise the CPU."""

    def __init__(
        self,
        name: str,
        *,
        max_batch: int,
        batching: Literal["step", "request"] = "step",
        device: torch.device | str | None = None,
    ) -> None:
        self.name = name
        self._max_batch = max_batch
        self._stepwise = batching == "step"
        self._device = torch.device(device or torch.accelerator.current_accelerator(True) or "cpu")
        self._components: dict[str, nn.Module] = {}
        self._version = 0
        self._digest = ""
        self._staged: StagedVersion[Staged] = StagedVersion(name)
        self._waiting: deque[Waiting] = deque()
        self._swaps: queue.SimpleQueue[_Swap] = queue.SimpleQueue()
        self._work = asyncio.Event()
        self._closing = False
        self._runner: asyncio.Task[None] | None = None
        # Adapted weights as they were before the first LoRA version, in host memory whatever the device.
        self._base: dict[str, torch.Tensor] = {}
        self._upload = Upload(self._device)

    @abstractmethod
    def _load(self) -> None:
        """Load `_components` and everything else, in the worker thread; set `_digest` if it is known."""

    @abstractmethod
    def _check(self, request: SampleRequest) -> None:
        """Raise ValueError if the engine can generate no such sample."""

    @abstractmethod
    def _batch_key(self, waiting: Waiting) -> Hashable:
        """Return a key that requests of a batch share."""

    @abstractmethod
    def _generate(self, batch: Sequence[Waiting]) -> Iterator[tuple[int, Trajectory | ValueError]]:
        """Generate a batch, in the worker thread. Yield the outcomes by position in the batch.

        An exception is the outcome of all positions that were not yielded."""

    async def _prepare(self, queued: Sequence[Waiting]) -> None:  # noqa: B027 - optional
        """Prepare requests before a batch is chosen among them, and settle the unusable ones."""

    def _published(self) -> dict[str, torch.Tensor]:
        """Return the weights that versions consist of, by their names on the wire."""
        return {name: parameter.data for name, parameter in named_parameters(self._components)}

    async def start(self) -> WeightReport:
        self._loop = asyncio.get_running_loop()
        await in_daemon_thread(self._load)
        self._runner = asyncio.create_task(self._serve(), name=f"{self.name}-runner")
        return self._report()

    async def generate(self, request: SampleRequest) -> Trajectory:
        self._check(request)
        self._require_open()
        waiting = Waiting(request, self._loop.create_future())
        self._waiting.append(waiting)
        self._work.set()
        return await waiting.result

    async def stage(self, manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
        return await take_in(self.name, self._staged, manifest, buckets)

    async def swap(self, version: int) -> WeightReport:
        self._require_open()
        swap = _Swap(self._staged.take(version), self._loop.create_future())
        self._swaps.put(swap)
        self._work.set()
        return await swap.done

    async def close(self) -> None:
        self._closing = True
        self._work.set()
        if self._runner is not None:
            await self._runner
            self._runner = None

    def _require_open(self) -> None:
        """Raise EngineError unless the engine has started and is not closing."""
        if self._runner is None or self._closing:
            raise EngineError(f"{self.name} is not running")

    def _require_unclosed(self) -> None:
        """Raise EngineError if the engine is closing; the worker thread calls it between two steps."""
        if self._closing:
            raise EngineError(f"{self.name} was closed")

    def _report(self, staged_s: float = 0.0, swap_s: float = 0.0) -> WeightReport:
        return WeightReport(self.name, self._version, self._digest, staged_s, swap_s)

    # ---- the runner: one task, at most one worker thread at a time ---------------------------------------------------

    async def _serve(self) -> None:
        try:
            while not self._closing:
                await self._work.wait()
                self._work.clear()
                while not self._closing and (self._waiting or not self._swaps.empty()):
                    batch = await self._take_batch()
                    outcome = await in_daemon_thread(self._run, batch)
                    for waiting, result in zip(batch, outcome, strict=True):
                        settle(waiting.result, result)
        finally:
            closed = EngineError(f"{self.name} was closed")
            for waiting in self._waiting:
                settle(waiting.result, closed)
            while not self._swaps.empty():
                settle(self._swaps.get().done, closed)

    async def _take_batch(self) -> list[Waiting]:
        """Take the oldest request, and later requests for the same batch. Drop requests of cancelled callers."""
        queued = list(self._waiting)
        await self._prepare(queued)
        alive = [w for w in queued if not w.result.done()]
        batch = [w for w in alive if self._batch_key(w) == self._batch_key(alive[0])][: self._max_batch]
        chosen = {id(w) for w in batch}
        self._waiting = deque(w for w in self._waiting if id(w) not in chosen and not w.result.done())
        return batch

    def _run(self, batch: Sequence[Waiting]) -> list[Trajectory | Exception]:
        """Swap and generate a batch, in the worker thread.

        A prompt that cannot be used fails alone; any other error fails the batch, as an EngineError."""
        self._swap_pending()
        outcomes: dict[int, Trajectory | Exception] = {}
        try:
            if batch:
                outcomes.update(self._generate(batch))  # keeps the outcomes before an error
        except Exception as error:  # noqa: BLE001 - any error goes to every caller of the batch
            failure = self._as_engine_error(error)
            return [outcomes.get(row, failure) for row in range(len(batch))]
        return [outcomes[row] for row in range(len(batch))]

    def _as_engine_error(self, error: Exception) -> EngineError:
        if isinstance(error, EngineError):
            return error
        failure = EngineError(f"{self.name}: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _swap_pending(self) -> bool:
        """Swap in all versions that callers of `swap` wait for. Return whether there was one."""
        swapped = False
        while not self._swaps.empty():
            swap = self._swaps.get()
            swapped = True
            try:
                outcome: WeightReport | Exception = self._swap_in(swap.staged)
            except Exception as error:  # noqa: BLE001 - reported to the caller of swap
                version = swap.staged.manifest.version
                outcome = EngineError(f"{self.name}: version {version} could not be loaded: {error}")
                outcome.__cause__ = error
            self._loop.call_soon_threadsafe(settle, swap.done, outcome)
        return swapped

    @torch.no_grad()
    def _swap_in(self, staged: Staged) -> WeightReport:
        started = time.perf_counter()
        live = self._published()
        if staged.manifest.payload == "lora":
            adapted = adapted_weights(t.name for t in staged.manifest.tensors) & live.keys()
            self._base |= {name: live[name].to("cpu", copy=True) for name in adapted - self._base.keys()}
        else:
            self._base.clear()
        for name, weight in staged.weights(live | self._base, live, self._upload):
            live[name].copy_(weight)  # copies nothing if the weight is already in place
        self._version, self._digest = staged.manifest.version, staged.manifest.digest
        return self._report(staged.staged_s, time.perf_counter() - started)


def settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    """Set the result or the exception of a caller's future, unless the caller was cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
