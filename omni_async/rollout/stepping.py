"""Steps samples in flight: applies a velocity, for every engine, and records the trained steps.

`InFlight` is one sample between two denoising steps. `take_steps` moves a whole batch of them, each at its own step, by
one. Samples only meet in the batch dimension, so a sample does not depend on its neighbours. `ConditioningCache` stores
the conditioning of the steps; `ZeroVelocity` makes the samples of a policy that does nothing, for the emulated engine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from omni_async.algorithms.registry import TRAJECTORY_FIELDS
from omni_async.diffusion.policy import Codec, HasEncoders, ReadsLess
from omni_async.diffusion.sde.noise import initial_noise, step_noise
from omni_async.diffusion.sde.schedules import linear
from omni_async.diffusion.sde.transitions import KINDS, log_prob_by_part, step_mixed, transition
from omni_async.media import Media
from omni_async.plugins.families import SamplingSpec
from omni_async.rollout.base import Trajectory
from omni_async.rollout.offload import Offloaded
from omni_async.rollout.recent import Recent
from omni_async.types import Prompt, SampleRequest, VersionSpans


def check_request(request: SampleRequest) -> None:
    """Raise ValueError, naming the field, if no engine could generate this sample."""
    r, where = request, f"request {request.sample_id}"
    if r.num_inference_steps < 2:
        raise ValueError(f"{where}: num_inference_steps must be >= 2, got {r.num_inference_steps}")
    if unknown := sorted(set(r.fields) - set(TRAJECTORY_FIELDS)):
        raise ValueError(f"{where}: unknown trajectory fields {unknown}, known are {list(TRAJECTORY_FIELDS)}")
    if r.window is None:
        return
    if r.window.size < 1 or r.window.start < 0 or r.window.start + r.window.size > r.num_inference_steps - 1:
        last = r.num_inference_steps - 2
        raise ValueError(
            f"{where}: trained steps must be in 0..{last} (the last step is never trained), got {list(r.window.steps)}"
        )
    if r.sde_kind not in KINDS:
        raise ValueError(f"{where}: sde_kind must be one of {list(KINDS)}, got {r.sde_kind!r}")
    limit = 2.0 if r.sde_kind == "cps" else math.inf
    if not 0 < r.noise_level < limit:
        raise ValueError(f"{where}: noise_level must be > 0 and < {limit} for {r.sde_kind!r}, got {r.noise_level}")


class InFlight:
    """A sample in flight.

    `latents` (*shape) float32 on `device` is its present state; `step` the denoising step it takes next. `modalities`:
    `omni_async.diffusion.policy.modalities_of` it. `prefix`: what determines its steps before the window, if others may
    share them. `shared_steps`: how many steps another sample took for it."""

    def __init__(
        self,
        request: SampleRequest,
        sigmas: torch.Tensor,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
        modalities: Mapping[str, slice] | None = None,
    ) -> None:
        check_request(request)
        self.request = request
        self.sigmas = sigmas
        self.shape = shape
        self.modalities = modalities or {}
        self.step = 0
        seed = request.seed if request.initial_seed is None else request.initial_seed
        self.latents = initial_noise(seed, shape).to(device)
        self.versions: list[int] = []
        self.prefix: Hashable = None
        self.shared_steps = 0
        self._trained = request.window.steps if request.window else range(0)
        # The schedule as Python numbers: a float32 is exact in a float64.
        self._sigmas: list[float] = sigmas.tolist()
        self._latents: list[torch.Tensor] = []
        self._log_probs: list[torch.Tensor] = []
        self._modality_log_probs: list[torch.Tensor] = []
        self._means: list[torch.Tensor] = []

    @property
    def done(self) -> bool:
        return self.step == self.request.num_inference_steps

    @property
    def sigma(self) -> float:
        return self._sigmas[self.step]

    @property
    def noisy(self) -> bool:
        return self.step in self._trained

    @property
    def window_start(self) -> int:
        """Return the first noisy step; 0 without a window."""
        return self._trained.start

    def follow(self, latents: torch.Tensor, versions: Sequence[int]) -> None:
        """Continue from the state of another sample, at or before the window.

        Args:
            latents: (*shape), that sample's; never written to.
            versions: the policy versions that took its steps."""
        self.shared_steps += len(versions) - self.step
        self.latents, self.versions, self.step = latents, list(versions), len(versions)

    def schedule(self) -> tuple[float, float, float, float]:
        """Return sigma, sigma_next, sigma_max, noise_level of the next step."""
        return self.sigma, self._sigmas[self.step + 1], self._sigmas[1], self.request.noise_level

    def advance(
        self,
        latents: torch.Tensor,
        log_prob: torch.Tensor,
        mean: torch.Tensor,
        version: int,
        modality_log_probs: torch.Tensor | None = None,
    ) -> None:
        """Record a denoising step, with all of its tensors if it is a trained one.

        Args:
            latents: (*shape), the sample after the step.
            log_prob: () float64, of the transition.
            mean: (*shape), of the transition.
            version: the policy version that took the step.
            modality_log_probs: (M,) float64, of the transition, if it is noisy and the sample has M modalities."""
        if self.noisy:
            if not self._latents:
                self._latents.append(self.latents)
            self._latents.append(latents)
            self._log_probs.append(log_prob)
            if modality_log_probs is not None:
                self._modality_log_probs.append(modality_log_probs)
            self._means.append(mean)
        self.latents = latents
        self.versions.append(version)
        self.step += 1

    def tensors(self, conditioning: TensorDict | None = None) -> dict[str, torch.Tensor | TensorDict]:
        """Return the tensors of the request's fields, on the latents' device, plus `sigmas` and `steps`.

        Fields of an ODE sample's window are empty."""
        found: dict[str, torch.Tensor | TensorDict] = {
            "sigmas": self.sigmas,
            "steps": torch.tensor(list(self._trained), dtype=torch.int64),
        }
        fields = set(self.request.fields)
        if "latents" in fields:
            found["latents"] = torch.stack(self._latents or [self.latents])
        if "log_probs" in fields:
            found["log_probs"] = torch.stack(self._log_probs) if self._log_probs else _no_numbers(0)
            if self.modalities:
                own = self._modality_log_probs
                found["modality_log_probs"] = torch.stack(own) if own else _no_numbers(0, len(self.modalities))
        if "means" in fields:
            found["means"] = torch.stack(self._means) if self._means else torch.zeros(0, *self.shape)
        if "final" in fields:
            found["final"] = self.latents.clone()  # a view would keep its whole batch alive
        if "conditioning" in fields and conditioning is not None:
            found["conditioning"] = conditioning
        return found


def _no_numbers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def take_steps(samples: Sequence[InFlight], velocity: torch.Tensor, version: int) -> torch.Tensor:
    """Move every sample one denoising step along its velocity.

    Args:
        samples: B of them, of one shape, each at its own step; they are changed.
        velocity: (B, *shape) float32, a row per sample.
        version: the policy version that predicted it.

    Returns:
        The new latents (B, *shape)."""
    noisy = [s.noisy for s in samples]
    kinds = sorted({s.request.sde_kind for s in samples if s.noisy}) or [KINDS[0]]
    if len(kinds) > 1:  # rare, so the kinds are simply processed in turn
        # Decided before anything moves: a noise-free row fits any kind.
        kind_of = [s.request.sde_kind if s.noisy else kinds[0] for s in samples]
        moved = torch.empty_like(velocity)
        for kind in kinds:
            rows = [row for row, its in enumerate(kind_of) if its == kind]
            moved[rows] = take_steps([samples[row] for row in rows], velocity[rows], version)
        return moved
    device = velocity.device
    sigma, sigma_next, sigma_max, level = torch.tensor(
        [s.schedule() for s in samples], dtype=torch.float64, device=device
    ).unbind(1)
    noise = torch.zeros(velocity.shape)
    for row, sample in enumerate(samples):
        if noisy[row]:
            noise[row] = step_noise(sample.request.seed, sample.step, sample.shape)
    moved, log_probs, means = step_mixed(
        kinds[0],
        torch.stack([s.latents for s in samples]),
        velocity,
        sigma,
        sigma_next,
        sigma_max,
        level,
        noise.to(device),
        torch.tensor(noisy, device=device),
    )
    modalities = samples[0].modalities
    of_modalities: Sequence[torch.Tensor | None] = [None] * len(samples)
    if modalities and any(noisy):
        # Noise-free rows have no log-prob, and any scale will do.
        usual = torch.where(torch.tensor(noisy, device=device), level, 1.0)
        scale = transition(kinds[0], moved, velocity, sigma, sigma_next, sigma_max, usual).scale
        parts = log_prob_by_part(kinds[0], moved, means, scale, modalities.values())
        of_modalities = torch.stack(parts, dim=1).unbind()
    for sample, latents, log_prob, mean, of_its in zip(
        samples, moved.unbind(), log_probs.unbind(), means.unbind(), of_modalities, strict=True
    ):
        sample.advance(latents, log_prob, mean, version, of_its)
    return moved


class ConditioningCache:
    """The conditioning of the latest prompts, for one thread: groups, epochs and validation repeat prompts.

    Text encoders are frozen, so it never depends on the policy's version. At most `most_bytes` are kept, on the codec's
    device; the least recently used prompt is dropped first."""

    def __init__(self, codec: Codec, most_bytes: int = 512 * 2**20) -> None:
        self.codec = codec
        self.kept: Recent[tuple[Any, ...], TensorDict] = Recent(most_bytes, TensorDict.bytes)
        self._encoders: Offloaded | None = None

    def offload(self, device: torch.device | str) -> None:
        """Keep the codec's encoders in host memory, and on `device` only while prompts are encoded, until `release`.

        Has no effect on a codec that does not name them."""
        if isinstance(self.codec, HasEncoders):
            self._encoders = Offloaded(self.codec.encoders, device)

    def release(self) -> None:
        """Free the device memory of offloaded encoders, before the device is needed for something else."""
        if self._encoders is not None:
            self._encoders.release()

    def of(self, request: SampleRequest) -> tuple[TensorDict, bool]:
        """Return the request's conditioning, batch size [], and whether it was encoded now.

        Includes the unconditional branch if the request is guided. Shared between callers: not to be written to."""
        prompt, codec, spec = request.prompt, self.codec, request.encoded_for or request.spec
        of_spec = codec.conditioning_key(spec) if isinstance(codec, ReadsLess) else spec
        key = *prompt_key(prompt), of_spec
        if (found := self.kept.get(key)) is not None:
            return found, False
        if self._encoders is not None:
            self._encoders.bring()
        made = codec.encode(prompt, spec)
        self.kept.put(key, made)
        return made, True


def prompt_key(prompt: Prompt) -> tuple[Hashable, ...]:
    """Return what caches of encoded prompts compare: text, negative prompt and the files' digests."""
    return prompt.text, prompt.negative_prompt, prompt.digests


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
    """The maker of samples of a policy whose velocity is 0 in every version.

    Transitions, noise and log-probs are the real ones, so they agree with a recomputation that also uses velocity 0.
    Media are flat. `latent_shape(spec)`, `sigmas(steps, spec)` and `blank_conditioning(spec)` are a policy's methods,
    or replacements; with a policy's methods, the samples fit a real trainer of that policy."""

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
        tensors = sample.tensors(self._blank_conditioning(request.encoded_for or request.spec))
        return Trajectory(TensorDict(tensors, batch_size=[]), flat_media(request.seed, request.spec), versions)
