"""Runs the producer, one per rollout engine: keeps the engine full of leased samples and lets new weights in.

Waits for a lease (`backpressured` while nothing runs: the staleness budget or the buffers are full; unblocked by a
publish, a score or a rejection) and for samples to finish. Samples that finish while others are being stored and
reported travel together: to the store, and in one message to the coordinator. `weights.swap` decides what a swap waits
for:
  step     nothing: it happens between two denoising steps of the running samples
  request  samples already in the engine; leased samples that have not started wait for the new weights
  drain    every leased sample to be generated; nothing is leased meanwhile
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from omni_async.aio.clock import Clock
from omni_async.aio.waiting import Coalescer, first_of, is_cancelled
from omni_async.config import Config
from omni_async.media import Media
from omni_async.rewards.base import WrongScorer
from omni_async.rewards.probe import Probe
from omni_async.roles.api import CoordinatorForProducer, Tracer
from omni_async.roles.trajectories import Stored, Trajectories
from omni_async.rollout.base import EngineError, RolloutEngine, Trajectory
from omni_async.rollout.calls import Program, draw_calls, try_program, untried
from omni_async.store import ObjectStore, nbytes
from omni_async.types import SampleRequest, SampleResult, VersionSpans, WeightManifest, WeightReport
from omni_async.weights.digest import WeightError
from omni_async.weights.transport.base import TransportError, WeightReceiver, receive
from omni_async.weights.transport.object_store import ObjectStoreReceiver


class _Finished(NamedTuple):
    """A generated sample on its way into the store.

    `tensors` may be anything that has `nbytes`. `media` are `Media` of NumPy arrays, or plain bytes from a replayed
    profile. Times are in the clock's seconds."""

    request: SampleRequest
    tensors: Any
    media: Any
    versions: VersionSpans
    started: float
    finished: float
    encoded: int
    shared_steps: int

    def result(self, engine: str, trajectory: Stored, media: Any) -> SampleResult:
        """Return the coordinator's message about the sample that `engine` generated, with references to stored data."""
        return SampleResult(
            self.request.sample_id,
            engine,
            trajectory.reference,
            media,
            version=self.versions.first,
            step_versions=self._trained(),
            started=self.started,
            finished=self.finished,
            nbytes=trajectory.nbytes,
            encoded=self.encoded,
            shared_steps=self.shared_steps,
            media_bytes=nbytes(self.media),
            shared=trajectory.shared,
        )

    def _trained(self) -> VersionSpans:
        """Return the versions of the trained steps, in call order; of all tokens of an answer."""
        num_steps, training = self.request.num_inference_steps, self.request.kind == "train"
        steps = self.request.window.steps if self.request.window else range(num_steps if training else 0)
        if self.request.window is None and getattr(self.request.spec, "most_tokens", None) is not None:
            steps = range(self.versions.num_steps if training else 0)
        of_calls = [
            self.versions.of_steps(range(first + steps.start, first + steps.stop))
            for first in range(0, self.request.calls * num_steps, num_steps)
        ]
        return of_calls[0] if len(of_calls) == 1 else VersionSpans.of(chain.from_iterable(of_calls))


@dataclass(eq=False)
class Producer:
    """The producer of one engine.

    Weights arrive through `receiver`, by default the object store's. `program` generates samples of several calls; its
    judges are tried with `probe`."""

    name: str
    config: Config
    engine: RolloutEngine
    coordinator: CoordinatorForProducer
    store: ObjectStore
    clock: Clock
    receiver: WeightReceiver | None = None
    program: Program | None = None
    probe: Probe | None = None

    def __post_init__(self) -> None:
        self._receiver = self.receiver or ObjectStoreReceiver(self.store)
        self._tracer = Tracer(self.name, self.coordinator, self.clock)
        self._leased = 0  # samples that wait for the engine or run in it
        self._running = 0  # samples that run in the engine
        self._idle_since = 0.0  # when the last sample was generated
        self._changed = asyncio.Condition()
        self._leasing_paused = False
        self._starting_paused = False
        self._leaving = False
        self._swapping = asyncio.Lock()
        self._receiving: asyncio.Future[Any] | None = None
        # With swap: request, samples beyond the batch wait here and not in the engine, so that they count as not
        # started.
        rollout = self.config.rollout
        self._slots = asyncio.Semaphore(
            rollout.max_batch if self.config.weights.swap == "request" else rollout.max_inflight
        )
        self._trajectories = Trajectories(self.name, self.store)
        self._storing = Coalescer(self._store_all)
        self._reporting = Coalescer(self._report_all)

    async def start(self) -> None:
        """Start the engine and try the program's judges. Raises WrongScorer if their failure has ended the run."""
        started = await self.engine.start()
        if started.uses:
            await self.coordinator.phase(f"{self.name}: {started.uses}")
        wrong = None if self.program is None else await try_program(self.program, self.probe)
        if wrong is not None and await self.coordinator.scorer_wrong(wrong):
            await self.engine.close()
            raise WrongScorer(wrong)
        if self.program is not None and (why := untried(self.program)) is not None:
            await self.coordinator.phase(f"warning: {self.name}: a judge could not be tried, it may be down: {why}")

    async def run(self) -> None:
        """Generate leased samples until the run is over. Raises EngineError if the engine is dead."""
        try:
            async with self._tracer.task_group() as tasks:
                working: set[asyncio.Task[None]] = set()
                # An engine whose samples all hang leases no more, and notices the end here.
                await first_of(self._work(tasks, working), self.coordinator.closing())
                for task in working:
                    task.cancel()  # the run is over: their samples are no longer needed
        finally:
            await self.engine.close()

    async def _work(self, tasks: asyncio.TaskGroup, working: set[asyncio.Task[None]]) -> None:
        """Generate until there are no more samples; a leaving engine completes its leased samples."""
        while requests := await self._next_samples():
            self._leased += len(requests)
            for request in requests:
                task = tasks.create_task(self._produce(request), name=request.sample_id)
                working.add(task)
                task.add_done_callback(working.discard)
        while self._leaving and working:
            await asyncio.wait(working)

    async def leave(self) -> None:
        """Take no more samples, and end when the leased samples are done."""
        self._leaving = True
        await self.coordinator.engine_leaves(self.name)

    async def _next_samples(self) -> list[SampleRequest]:
        capacity = self.config.rollout.max_inflight
        await self._until(lambda: not self._leasing_paused and self._leased < capacity)
        asked = self.clock.now()
        requests = await self.coordinator.next_samples(self.name, capacity - self._leased, capacity)
        if self._leased == 0:
            self._tracer.add("backpressured", max(asked, self._idle_since), self.clock.now())
        await self._until(lambda: not self._leasing_paused)  # samples leased before a drain wait for its end
        return requests

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _produce(self, request: SampleRequest) -> None:
        """Generate a sample and report it; the engine's slot is already free during the report."""
        finished = await self._generate(request)
        if finished is not None:
            await self._reporting.send(await self._storing.send(finished))

    async def _generate(self, request: SampleRequest) -> _Finished | None:
        """Return the sample, or None if it failed and the coordinator was notified."""
        async with self._slots:
            await self._until(lambda: not self._starting_paused)
            self._running += 1
            started = self.clock.now()
            try:
                async with asyncio.timeout(self.config.rollout.timeout_s) as deadline:
                    trajectory = await self._draw(request)
            except EngineError:
                raise
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                raise EngineError(f"{self.name}: sample {request.sample_id} was cancelled by the engine") from None
            except Exception as error:  # noqa: BLE001 (an error of one sample is retried, not fatal)
                if deadline.expired():
                    raise EngineError(
                        f"{self.name}: sample {request.sample_id} took longer than rollout.timeout_s ="
                        f" {self.config.rollout.timeout_s}"
                    ) from None
                await self.coordinator.sample_failed(self.name, request.sample_id, f"{type(error).__name__}: {error}")
                return None
            finally:
                self._running -= 1
                self._leased -= 1
                self._idle_since = self.clock.now()
                async with self._changed:
                    self._changed.notify_all()
        finished, versions = self.clock.now(), trajectory.versions
        media: Any = trajectory.media
        media = media.numpy() if isinstance(media, Media) else media
        found = _Finished(
            request,
            trajectory.tensors,
            media,
            versions,
            started,
            finished,
            encoded=trajectory.encoded,
            shared_steps=trajectory.shared_steps,
        )
        taken = {version for version, _ in versions.spans}
        oldest, newest = min(taken), max(taken)
        self._tracer.add(  # for the timeline, and for profiles recorded from it
            "generate",
            started,
            finished,
            sample=request.sample_id,
            versions=str(oldest) if oldest == newest else f"{oldest}..{newest}",
            version_steps=versions.spans,
            trajectory_bytes=nbytes(found.tensors),
            media_bytes=nbytes(media),
        )
        return found

    async def _draw(self, request: SampleRequest) -> Trajectory:
        if self.program is None:
            return await self.engine.generate(request)
        return await draw_calls(self.program, request, self.engine.generate)

    async def _store_all(self, finished: list[_Finished]) -> list[SampleResult]:
        """Store media separately, because scorers need only them."""
        trajectories = self._trajectories.put_all([sample.tensors for sample in finished])
        media = self.store.put_all([sample.media for sample in finished])
        stored = zip(finished, *await asyncio.gather(trajectories, media), strict=True)
        return [sample.result(self.name, *references) for sample, *references in stored]

    async def _report_all(self, results: list[SampleResult]) -> list[None]:
        await self.coordinator.samples_done(self.name, results)
        return [None] * len(results)

    async def join_weights(self, membership: Any) -> None:
        """Join the sender that created `membership`, once the engine has started, and again when engines come or leave.

        Cancels a version that is being received from the former sender."""
        if self._receiving is not None:
            self._receiving.cancel()
        await self._receiver.init(membership)

    async def receive_weights(self, manifest: WeightManifest, transfer: Any) -> WeightReport:
        """Stage in the background, then swap at the boundary that `weights.swap` names.

        Raises TransportError if the weights do not arrive, EngineError if they arrive corrupted."""
        async with self._swapping:
            staging = self.clock.now()
            try:
                self._receiving = asyncio.ensure_future(receive(self._receiver, manifest, transfer))
                manifest, buckets = await self._receiving
            except asyncio.CancelledError:
                if is_cancelled():
                    raise
                raise TransportError(
                    f"{self.name}: version {manifest.version} was given up while engines connected again"
                ) from None
            except (WeightError, LookupError) as error:
                raise EngineError(f"{self.name}: version {manifest.version} did not arrive: {error}") from error
            finally:
                self._receiving = None
            digest = await self.engine.stage(manifest, buckets)
            if digest != manifest.digest:
                raise EngineError(
                    f"{self.name}: version {manifest.version} arrived with digest {digest}, published was"
                    f" {manifest.digest}"
                )
            self._tracer.add("stage", staging, self.clock.now(), version=manifest.version)
            try:
                await self._reach_boundary()
                with self._tracer.span("swap", version=manifest.version):
                    return await self.engine.swap(manifest.version)
            finally:
                async with self._changed:
                    self._leasing_paused = self._starting_paused = False
                    self._changed.notify_all()

    async def _reach_boundary(self) -> None:
        mode = self.config.weights.swap
        self._leasing_paused = mode == "drain"
        self._starting_paused = mode == "request"
        if mode == "request":
            await self._until(lambda: self._running == 0)
        elif mode == "drain":
            await self._until(lambda: self._leased == 0)
