"""Steps samples in flight: applies a velocity, as every engine does, and keeps the trained steps.

`InFlight` is one sample between two denoising steps. `take_steps` moves a whole batch of them, each at its own step, by
one; samples only meet in the batch dimension, so a sample does not depend on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from omni_async.sde.noise import initial_noise, step_noise
from omni_async.sde.transitions import KINDS, step_mixed
from omni_async.types import SampleRequest

FIELDS = ("latents", "log_probs", "means", "final", "conditioning")


def check_request(request: SampleRequest) -> None:
    """Raise ValueError, naming the field, if no engine could make this sample."""
    r, where = request, f"request {request.sample_id}"
    if r.num_inference_steps < 2:
        raise ValueError(f"{where}: num_inference_steps must be >= 2, got {r.num_inference_steps}")
    if unknown := sorted(set(r.fields) - set(FIELDS)):
        raise ValueError(f"{where}: unknown trajectory fields {unknown}, known are {list(FIELDS)}")
    if r.window is None:
        return
    if r.window.size < 1 or r.window.start < 0 or r.window.start + r.window.size > r.num_inference_steps - 1:
        last = r.num_inference_steps - 2
        raise ValueError(
            f"{where}: trained steps must lie in 0..{last} (the last step is never trained), got {list(r.window.steps)}"
        )
    if r.sde_kind not in KINDS:
        raise ValueError(f"{where}: sde_kind must be one of {list(KINDS)}, got {r.sde_kind!r}")
    limit = 2.0 if r.sde_kind == "cps" else math.inf
    if not 0 < r.noise_level < limit:
        raise ValueError(f"{where}: noise_level must be > 0 and < {limit} for {r.sde_kind!r}, got {r.noise_level}")


class InFlight:
    """A sample in flight.

    `latents` (*shape) float32 on `device` is its present state; `step` the denoising step it takes next."""

    def __init__(
        self, request: SampleRequest, sigmas: torch.Tensor, shape: tuple[int, ...], device: torch.device | str = "cpu"
    ) -> None:
        check_request(request)
        self.request = request
        self.sigmas = sigmas
        self.shape = shape
        self.step = 0
        seed = request.seed if request.initial_seed is None else request.initial_seed
        self.latents = initial_noise(seed, shape).to(device)
        self.versions: list[int] = []
        self._trained = request.window.steps if request.window else range(0)
        # The schedule as Python numbers: a float32 is exact in a float64.
        self._sigmas: list[float] = sigmas.tolist()
        self._latents: list[torch.Tensor] = []
        self._log_probs: list[torch.Tensor] = []
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

    def schedule(self) -> tuple[float, float, float, float]:
        """Return sigma, sigma_next, sigma_max, noise_level of the next step."""
        return self.sigma, self._sigmas[self.step + 1], self._sigmas[1], self.request.noise_level

    def advance(self, latents: torch.Tensor, log_prob: torch.Tensor, mean: torch.Tensor, version: int) -> None:
        if self.noisy:
            if not self._latents:
                self._latents.append(self.latents)
            self._latents.append(latents)
            self._log_probs.append(log_prob)
            self._means.append(mean)
        self.latents = latents
        self.versions.append(version)
        self.step += 1

    def tensors(self, conditioning: TensorDict | None = None) -> dict[str, torch.Tensor | TensorDict]:
        """Return the tensors that the request's fields ask for, on the latents' device, plus `sigmas` and `steps`.

        Fields of an ODE sample's window are empty."""
        found: dict[str, torch.Tensor | TensorDict] = {
            "sigmas": self.sigmas,
            "steps": torch.tensor(list(self._trained), dtype=torch.int64),
        }
        for field in self.request.fields:
            match field:
                case "latents":
                    found[field] = torch.stack(self._latents or [self.latents])
                case "log_probs":
                    found[field] = torch.stack(self._log_probs) if self._log_probs else torch.zeros(0)
                case "means":
                    found[field] = torch.stack(self._means) if self._means else torch.zeros(0, *self.shape)
                case "final":
                    found[field] = self.latents.clone()  # a view would keep its whole batch alive
                case "conditioning" if conditioning is not None:
                    found[field] = conditioning
        return found


def take_steps(samples: Sequence[InFlight], velocity: torch.Tensor, version: int) -> torch.Tensor:
    """Move every sample one step along its row of `velocity` (B, *shape) float32, taken by policy `version`.

    Returns the new (B, *shape)."""
    noisy = [s.noisy for s in samples]
    kinds = sorted({s.request.sde_kind for s in samples if s.noisy}) or [KINDS[0]]
    if len(kinds) > 1:  # rare, so simply one kind after the other
        # Settled before anything moves: a noise-free row may go with any kind.
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
    for sample, latents, log_prob, mean in zip(
        samples, moved.unbind(), log_probs.unbind(), means.unbind(), strict=True
    ):
        sample.advance(latents, log_prob, mean, version)
    return moved
