"""Implements the reference engine on the policy contract alone, so it runs every family that implements that.

Requests of the same size, steps and guidance share a batch. A batch is denoised from noise to media.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from tensordict import TensorDict

from omni_async.diffusion.components import compute_velocity
from omni_async.diffusion.policy import Codec, Policy, modalities_of
from omni_async.rollout.base import Trajectory
from omni_async.rollout.in_process import InProcessEngine, Waiting
from omni_async.rollout.payloads import Staged
from omni_async.rollout.prefixes import Prefixes
from omni_async.rollout.stepping import ConditioningCache, InFlight, check_request, take_steps
from omni_async.types import SampleRequest, VersionSpans, WeightReport


class DiffusersEngine(InProcessEngine):
    """A `RolloutEngine` on diffusers."""

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
        super().__init__(name, max_batch=max_batch, batching=batching, device=device)
        self._policy = policy
        self._dtype = dtype
        self._conditioning_bytes = conditioning_bytes
        self._offload = offload
        self._prefixes = Prefixes(share_prefix)

    def _load(self) -> None:
        # First, so that the device does not hold offloaded encoders and denoisers together before a prompt needs it.
        self._codec: Codec = self._policy.load_codec(self._dtype).to(self._device)
        self._conditioning = ConditioningCache(self._codec, self._conditioning_bytes)
        if self._offload:
            self._conditioning.offload(self._device)
        loaded = self._policy.load_components(self._dtype)
        self._components = {name: module.to(self._device).requires_grad_(False) for name, module in loaded.items()}

    def _check(self, request: SampleRequest) -> None:
        check_request(request)
        self._policy.latent_shape(request.spec)

    def _batch_key(self, waiting: Waiting) -> Hashable:
        return waiting.request.spec, waiting.request.num_inference_steps

    def _generate(self, batch: Sequence[Waiting]) -> Iterator[tuple[int, Trajectory | ValueError]]:
        conditioning: dict[int, TensorDict] = {}
        encoded: list[bool] = []
        for row, waiting in enumerate(batch):
            try:
                conditioning[row], new = self._conditioning.of(waiting.request)
                encoded.append(new)
            except ValueError as error:
                yield row, error
        self._conditioning.release()
        if conditioning:
            made = self._denoise([batch[row].request for row in conditioning], list(conditioning.values()))
            for row, one, new in zip(conditioning, made, encoded, strict=True):
                yield row, replace(one, encoded=new)

    @torch.no_grad()
    def _denoise(self, requests: list[SampleRequest], conditioning: list[TensorDict]) -> list[Trajectory]:
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
                self._swap_pending()
            self._require_unclosed()
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

    def _swap_in(self, staged: Staged) -> WeightReport:
        report = super()._swap_in(staged)
        self._prefixes.clear()
        return report
