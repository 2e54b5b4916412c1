"""Reads preference pairs, for runs that train on a dataset and generate nothing.

The reader replaces producers and reward workers.

A leased sample is an image of the group's pair (`prompt.index` is the pair): sample 0 is the chosen image, sample 1 the
rejected one. It becomes a trajectory without steps: the image's latents and the prompt's conditioning. Its score is the
preference, 1 or 0.

Waits for a lease (`backpressured`: the staleness budget or the buffers are full; unblocked by a publish) and,
concurrently, for its own samples to score. Decoding and encoding run in one thread, off the event loop. A sample that
cannot be made is reported with the reason, and ends its group after `rollout.retries`; it never becomes a number and
never ends the run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from PIL import Image

from omni_async.accelerator import require_accelerator
from omni_async.aio.clock import Clock
from omni_async.aio.threads import DaemonThread
from omni_async.config import Config
from omni_async.diffusion.policy import Policy
from omni_async.media import Media
from omni_async.plugins.families import SamplingSpec
from omni_async.roles.api import CoordinatorForReader, Tracer
from omni_async.roles.trajectories import Trajectories
from omni_async.rollout.base import EngineError
from omni_async.store import ObjectStore, nbytes
from omni_async.types import SampleRequest, SampleResult, Score, ScoreResult, VersionSpans

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

CHOSEN, REJECTED = 0, 1
_SCORES = {CHOSEN: Score(1.0), REJECTED: Score(0.0)}


class Pairs(Protocol):
    def media(self, pair: int) -> tuple[Media, Media]:
        """Return the chosen and the rejected image, each of any size; ValueError if missing. Called from one thread."""


@dataclass(eq=False)
class PreferenceReader:
    """The reader of a dataset of pairs.

    It encodes images and prompts on `device`; None: the accelerator, or the CPU if placement.rollout.gpus is 0."""

    name: str
    config: Config
    pairs: Pairs
    policy: Policy
    coordinator: CoordinatorForReader
    store: ObjectStore
    clock: Clock
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        self._tracer = Tracer(self.name, self.coordinator, self.clock)
        self._thread = DaemonThread(self.name)
        self._trajectories = Trajectories(self.name, self.store)
        # The pair encoded last: a lease delivers a pair's two samples in succession.
        self._encoded: tuple[tuple[int, SamplingSpec], list[Media], torch.Tensor] | None = None

    async def start(self) -> None:
        """Load text encoder and VAE."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def run(self) -> None:
        """Read until the run is over. Raises EngineError if a sample exceeds rollout.timeout_s: no thread can stop."""
        try:
            async with self._tracer.task_group() as tasks:
                reading = tasks.create_task(self._read_samples())
                await self._score_samples()
                reading.cancel()  # the run is over: samples still being read are not needed
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read_samples(self) -> None:
        capacity = self.config.rollout.max_inflight
        while True:
            asked = self.clock.now()
            requests = await self.coordinator.next_samples(self.name, capacity, capacity)
            self._tracer.add("backpressured", asked, self.clock.now())
            if not requests:
                return
            for request in requests:
                await self._read(request)

    async def _read(self, request: SampleRequest) -> None:
        limit = self.config.rollout.timeout_s
        started = self.clock.now()
        try:
            async with asyncio.timeout(limit) as deadline:
                tensors, made = await asyncio.get_running_loop().run_in_executor(self._thread, self._make, request)
        except Exception as error:  # noqa: BLE001 (whatever one sample does wrong is reported and retried, not fatal)
            if deadline.expired():
                raise EngineError(
                    f"{self.name}: sample {request.sample_id} took longer than rollout.timeout_s = {limit}"
                ) from None
            await self.coordinator.sample_failed(self.name, request.sample_id, f"{type(error).__name__}: {error}")
            return
        finished = self.clock.now()
        self._tracer.add("read", started, finished, sample=request.sample_id, pair=request.prompt.index)
        (stored,), media = await asyncio.gather(self._trajectories.put_all([tensors]), self.store.put(made))
        # No policy generated the sample, so it has no step versions.
        result = SampleResult(
            request.sample_id,
            self.name,
            stored.reference,
            media,
            version=0,
            step_versions=VersionSpans(),
            started=started,
            finished=finished,
            nbytes=stored.nbytes,
            media_bytes=nbytes(made),
            shared=stored.shared,
        )
        await self.coordinator.samples_done(self.name, [result])

    async def _score_samples(self) -> None:
        while jobs := await self.coordinator.next_to_score(self.name, self.config.reward.batch):
            with self._tracer.span("score", samples=len(jobs)):
                scores = [_SCORES[job.sample] for job in jobs]
                results = [
                    ScoreResult(job.sample_id, job.attempt, score=one) for job, one in zip(jobs, scores, strict=True)
                ]
            await self.coordinator.scored(self.name, results)

    # ---- in the thread -----------------------------------------------------------------------------------------------

    def _load(self) -> None:
        import torch

        from omni_async.rollout.stepping import ConditioningCache

        device = self.device
        if device is None:
            gpus = self.config.placement.rollout.gpus
            device = require_accelerator("placement.rollout.gpus", gpus) if gpus > 0 else torch.device("cpu")
        self._codec = self.policy.load_codec(getattr(torch, self.config.model.dtype)).to(device)
        self._conditioning = ConditioningCache(self._codec)

    def _make(self, request: SampleRequest) -> tuple[TensorDict, Media]:
        """Return the trajectory, on the CPU, and the media that its latents encode."""
        import torch
        from tensordict import TensorDict

        if request.kind != "train" or request.sample not in _SCORES:
            raise ValueError(
                "a preference dataset has two training samples per prompt; sample"
                f" {request.sample_id} is neither of them"
            )
        media, latents = self._encode(request.prompt.index, request.spec)
        tensors = {
            "final": latents[request.sample].clone(),  # a view would keep both alive
            "conditioning": self._conditioning.of(request)[0],
            "sigmas": self.policy.sigmas(request.num_inference_steps, request.spec),
            "steps": torch.zeros(0, dtype=torch.int64),
        }
        return TensorDict(tensors, batch_size=[]).cpu(), media[request.sample]

    def _encode(self, pair: int, spec: SamplingSpec) -> tuple[list[Media], torch.Tensor]:
        """Return both images of a pair, at the spec's size, and their latents (2, *shape).

        Encodes both in one batch, so that latents do not depend on which samples were leased together."""
        key = pair, spec
        if self._encoded is None or self._encoded[0] != key:
            (shape,) = spec.media()
            media = [fit(one, *shape.shape[1:]) for one in self.pairs.media(pair)]
            latents = self._codec.encode_media(media, spec)
            if not latents.isfinite().all():
                raise ValueError(f"pair {pair}: the VAE's latents are not finite")
            self._encoded = key, media, latents
        return self._encoded[1], self._encoded[2]


def fit(media: Media, height: int, width: int) -> Media:
    """Fit an image to a size: crop its largest centred area of that aspect ratio and resample with a Lanczos filter.

    Args:
        media: an image (3, rows, columns) uint8; returned unchanged if it already has the size.
        height: in pixels.
        width: in pixels."""
    rows, columns = media.image.shape[1:]
    if (rows, columns) == (height, width):
        return media
    scale = min(rows / height, columns / width)
    # Division rounds: the uncropped side must have its exact length, not slightly exceed the image.
    tall, wide = min(rows, height * scale), min(columns, width * scale)
    top, left = (rows - tall) / 2, (columns - wide) / 2
    box = (left, top, left + wide, top + tall)
    resized = np.asarray(Image.fromarray(media.pixels).resize((width, height), Image.Resampling.LANCZOS, box=box))
    return Media(image=np.ascontiguousarray(resized.transpose(2, 0, 1)))
