"""Makes the samples of a policy whose velocity is 0 in every version, for the emulated engine.

Transitions, noise and log-probs are the real ones, so they agree with a recomputation that also uses velocity 0. Media
are flat: one colour or one level, derived from the seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from omni_async.families import SamplingSpec
from omni_async.media import Media
from omni_async.rollout.base import Trajectory
from omni_async.rollout.stepping import InFlight, take_steps
from omni_async.sde.schedules import linear
from omni_async.types import SampleRequest
from omni_async.version_spans import VersionSpans


def flat_media(seed: int, spec: SamplingSpec) -> Media:
    """Return media of the spec's shapes, of one colour or one level, which depend on the seed alone."""
    levels = torch.tensor(list(hashlib.blake2b(str(seed).encode(), digest_size=3).digest()), dtype=torch.uint8)
    parts: dict[str, Any] = {}
    for one in spec.media():
        if one.part == "audio":
            parts |= {"audio": torch.full(one.shape, int(levels[0]) / 255), "sample_rate": one.rate}
        else:
            parts[one.part] = levels[:, None, None].expand(one.shape).clone()
        if one.part == "video":
            parts["fps"] = one.rate
    return Media(**parts)


class ZeroVelocity:
    """The maker of samples whose steps were taken.

    `latent_shape(spec)`, `sigmas(steps, spec)` and `blank_conditioning(spec)` are a policy's methods, or stand in for
    them: what is returned then fits a real trainer of that policy."""

    def __init__(
        self,
        latent_shape: Callable[[SamplingSpec], tuple[int, ...]],
        blank_conditioning: Callable[[SamplingSpec], TensorDict] = lambda spec: TensorDict({}, batch_size=[]),
        sigmas: Callable[[int, SamplingSpec], torch.Tensor] = lambda steps, spec: linear(steps),
    ) -> None:
        self._latent_shape = latent_shape
        self._blank_conditioning = blank_conditioning
        self._sigmas = sigmas

    def __call__(self, request: SampleRequest, versions: VersionSpans) -> Trajectory:
        """Make the sample whose steps were taken by `versions`. ValueError if the request is wrong."""
        shape = self._latent_shape(request.spec)
        sample = InFlight(request, self._sigmas(request.num_inference_steps, request.spec), shape)
        for version in versions:
            take_steps([sample], torch.zeros(1, *shape), version)
        tensors = sample.tensors(self._blank_conditioning(request.spec))
        return Trajectory(TensorDict(tensors, batch_size=[]), flat_media(request.seed, request.spec), versions)
