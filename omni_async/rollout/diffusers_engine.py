"""Implements the reference engine on the policy contract alone, so it runs every family that implements that.

Requests wait in a queue. A runner task takes the oldest one with all requests that can share its batch (same size,
steps and guidance) up to `max_batch`, in arrival order, and denoises them from noise to media in one worker thread. It
waits for a request or a swap; `generate`, `swap` and `close` unblock it. The same thread swaps in a staged version:
between any two denoising steps, or between two batches with `batching` "request".

The requests of a batch depend on the order of `generate` calls and never on time: calls made in one event-loop tick are
all queued before the runner reads the queue.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import torch
from tensordict import TensorDict

from omni_async.aio.threads import in_daemon_thread
from omni_async.diffusion.components import compute_velocity, named_parameters
from omni_async.diffusion.policy import Codec, Policy, modalities_of
from omni_async.rollout.base import EngineError, StagedVersion, Trajectory
from omni_async.rollout.payloads import Staged, adapted_weights, take_in
from omni_async.rollout.prefixes import Prefixes
from omni_async.rollout.stepping import ConditioningCache, InFlight, check_request, take_steps
from omni_async.rollout.upload import Upload
from omni_async.types import SampleRequest, VersionSpans, WeightManifest, WeightReport

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class _Waiting(NamedTuple):
    request: SampleRequest
    result: asyncio.Future[Trajectory]

    @property
    def batch_key(self) -> tuple[object, ...]:
        return self.request.spec, self.request.num_inference_steps


class _Swap(NamedTuple):
    staged: Staged
    done: asyncio.Future[WeightReport]


class DiffusersEngine:
    """A `RolloutEngine` on diffusers. `device` defaults to the current accelerator, otherwise the CPU."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        *,
        dtype: torch.dtype,
        max_batch: int,
        batching: Literal["step", "request"] = "step",
        device: torch.device | str | None = None,
        conditioning_bytes: int = 512 * 2**20,
        offload: bool = False,
        share_prefix: bool = False,
    ) -> None:
        self.name = name
        self._policy = policy
        self._dtype = dtype
        self._max_batch = max_batch
        self._stepwise = batching == "step"
        self._device = torch.device(device or torch.accelerator.current_accelerator(True) or "cpu")
        self._conditioning_bytes = conditioning_bytes
        self._offload = offload
        self._version = 0
        self._digest = ""
        self._staged: StagedVersion[Staged] = StagedVersion(name)
        self._waiting: deque[_Waiting] = deque()
        self._swaps: queue.SimpleQueue[_Swap] = queue.SimpleQueue()
        self._work = asyncio.Event()
        self._closing = False
        self._runner: asyncio.Task[None] | None = None
        # Adapted weights as they were before the first LoRA version, in host memory whatever the device.
        self._base: dict[str, torch.Tensor] = {}
        self._upload = Upload(self._device)
        self._prefixes = Prefixes(share_prefix)

    async def start(self) -> WeightReport:
        await in_daemon_thread(self._load)
        self._runner = asyncio.create_task(self._serve(), name=f"{self.name}-runner")
        return self._report()

    def _load(self) -> None:
        # First, so that the device does not hold offloaded encoders and denoisers together before a prompt needs it.
        self._codec: Codec = self._policy.load_codec(self._dtype).to(self._device)
        self._conditioning = ConditioningCache(self._codec, self._conditioning_bytes)
        if self._offload:
            self._conditioning.offload(self._device)
        loaded = self._policy.load_components(self._dtype)
        self._components = {name: module.to(self._device).requires_grad_(False) for name, module in loaded.items()}

    async def generate(self, request: SampleRequest) -> Trajectory:
        check_request(request)
        self._policy.latent_shape(request.spec)
        self._require_open()
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._work.set()
        return await waiting.result

    async def stage(self, manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
        return await take_in(self.name, self._staged, manifest, buckets)

    async def swap(self, version: int) -> WeightReport:
        self._require_open()
        swap = _Swap(self._staged.take(version), asyncio.get_running_loop().create_future())
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
        if self._runner is None or self._closing:
            raise EngineError(f"{self.name} is not running")

    def _report(self, staged_s: float = 0.0, swap_s: float = 0.0) -> WeightReport:
        return WeightReport(self.name, self._version, self._digest, staged_s, swap_s)

    # ---- the runner: one task, at most one worker thread at a time ---------------------------------------------------

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while not self._closing:
                await self._work.wait()
                self._work.clear()
                while not self._closing and (self._waiting or not self._swaps.empty()):
                    batch = self._take_batch()
                    outcome = await in_daemon_thread(self._make, loop, [w.request for w in batch])
                    for waiting, result in zip(batch, outcome, strict=True):
                        _settle(waiting.result, result)
        finally:
            closed = EngineError(f"{self.name} was closed")
            for waiting in self._waiting:
                _settle(waiting.result, closed)
            while not self._swaps.empty():
                _settle(self._swaps.get().done, closed)

    def _take_batch(self) -> list[_Waiting]:
        """Take the oldest request, and later requests for the same batch. Drop requests of cancelled callers."""
        alive = [w for w in self._waiting if not w.result.done()]
        batch = [w for w in alive if w.batch_key == alive[0].batch_key][: self._max_batch]
        chosen = {id(w) for w in batch}
        self._waiting = deque(w for w in alive if id(w) not in chosen)
        return batch

    def _make(self, loop: asyncio.AbstractEventLoop, requests: list[SampleRequest]) -> list[Trajectory | Exception]:
        """Generate a batch, in the worker thread.

        A prompt that cannot be encoded fails alone; any other error fails the batch, as an EngineError."""
        self._swap_pending(loop)
        conditioning: dict[int, TensorDict] = {}
        encoded: list[bool] = []
        results: dict[int, Trajectory | Exception] = {}
        try:
            for row, request in enumerate(requests):
                try:
                    conditioning[row], new = self._conditioning.of(request)
                    encoded.append(new)
                except ValueError as error:
                    results[row] = error
            self._conditioning.release()
            if conditioning:
                made = self._denoise(loop, [requests[row] for row in conditioning], list(conditioning.values()))
                made = [replace(one, encoded=new) for one, new in zip(made, encoded, strict=True)]
                results.update(zip(conditioning, made, strict=True))
        except Exception as error:  # noqa: BLE001 - any error goes to every caller of the batch
            failure = error
            if not isinstance(error, EngineError):
                failure = EngineError(f"{self.name}: {type(error).__name__}: {error}")
                failure.__cause__ = error
            return [results.get(row, failure) for row in range(len(requests))]
        return [results[row] for row in range(len(requests))]

    @torch.no_grad()
    def _denoise(
        self, loop: asyncio.AbstractEventLoop, requests: list[SampleRequest], conditioning: list[TensorDict]
    ) -> list[Trajectory]:
        first = requests[0]
        sigmas = self._policy.sigmas(first.num_inference_steps, first.spec)
        shape = self._policy.latent_shape(first.spec)
        parts = modalities_of(self._policy, first.spec)
        samples = [InFlight(request, sigmas, shape, self._device, parts) for request in requests]
        for sample in samples:
            self._prefixes.join(sample)
        stacked_rows: list[int] = []
        while not all(sample.done for sample in samples):
            if self._stepwise:
                self._swap_pending(loop)
            if self._closing:
                raise EngineError(f"{self.name} was closed")
            # Samples that continued from a shared state wait for the others, so that a batch has one sigma.
            step = min(sample.step for sample in samples)
            due = [number for number, sample in enumerate(samples) if sample.step == step]
            rows = [[due[one] for one in row] for row in self._prefixes.rows([samples[number] for number in due])]
            firsts = [row[0] for row in rows]
            if firsts != stacked_rows:
                stacked = self._policy.stack_conditioning([conditioning[number] for number in firsts])
                stacked_rows = firsts
            taken = [samples[number] for number in firsts]
            latents = torch.stack([sample.latents for sample in taken])
            sigma = torch.full((len(taken),), taken[0].sigma, device=self._device)
            needs = [self._policy.component_of(taken[0].sigma)] * len(taken)
            velocity = compute_velocity(self._policy, self._components, latents, sigma, stacked, first.spec, needs)
            take_steps(taken, velocity, self._version)
            self._prefixes.spread(samples, rows)
        decoded = self._codec.decode(torch.stack([sample.latents for sample in samples]), first.spec)
        return [
            Trajectory(
                TensorDict(sample.tensors(row), batch_size=[]).cpu(),
                media,
                VersionSpans.of(sample.versions),
                shared_steps=sample.shared_steps,
            )
            for sample, row, media in zip(samples, conditioning, decoded, strict=True)
        ]

    def _swap_pending(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._swaps.empty():
            swap = self._swaps.get()
            try:
                outcome: WeightReport | Exception = self._swap_in(swap.staged)
            except Exception as error:  # noqa: BLE001 - reported to the caller of swap
                version = swap.staged.manifest.version
                outcome = EngineError(f"{self.name}: version {version} could not be loaded: {error}")
            loop.call_soon_threadsafe(_settle, swap.done, outcome)

    @torch.no_grad()
    def _swap_in(self, staged: Staged) -> WeightReport:
        started = time.perf_counter()
        live = {name: parameter.data for name, parameter in named_parameters(self._components)}
        if staged.manifest.payload == "lora":
            adapted = adapted_weights(t.name for t in staged.manifest.tensors) & live.keys()
            self._base |= {name: live[name].to("cpu", copy=True) for name in adapted - self._base.keys()}
        else:
            self._base.clear()
        for name, weight in staged.weights(live | self._base, live, self._upload):
            live[name].copy_(weight)  # copies nothing if the weight is already in place
        self._version, self._digest = staged.manifest.version, staged.manifest.digest
        self._prefixes.clear()
        return self._report(staged.staged_s, time.perf_counter() - started)


def _settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    if future.done():  # its caller was cancelled
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
