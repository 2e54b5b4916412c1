"""Defines what a trainer rank's engine asks of the backend that holds its model.

Velocities of rows, gradients, optimizer steps, checkpoints, weights to publish. How weights are spread over ranks is
the backend's alone.

All of it is collective: with several ranks, every rank calls the same in the same order, with rows of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omni_async.algorithms.registry import AuxiliaryPolicy, Objective
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.diffusion.policy import Policy
from omni_async.plugins.backends import find_backend
from omni_async.training.auxiliary import AuxiliaryPolicies
from omni_async.training.groups import Needs

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict
    from torch import Tensor, nn


class TrainBackend(Protocol):
    """The model of one trainer rank, with its optimizer. Tensors that it gives may be shards (DTensor), on any device.

    device: where rows are computed. dtype: that of the computation, and of published weights.
    trainable: the parameters that the optimizer changes, as `component.name` with their diffusers names: adapters under
    LoRA, everything otherwise.
    auxiliary: the auxiliary policies that the objective wants, and the moving average if `trainer.ema` asks for one.
    digest: the digest of the weights as loaded, in `dtype`, under their diffusers names (rank 0 only, else empty)."""

    device: torch.device
    dtype: torch.dtype
    trainable: Mapping[str, nn.Parameter]
    auxiliary: AuxiliaryPolicies
    digest: str

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: TensorDict, spec: Any, needs: Needs) -> Tensor:
        """Compute the policy's velocity (B, *shape), float32, with gradient where grad mode is on.

        Args:
            latents, sigma, conditioning, spec: as `Policy.velocity` takes them, but rows may need several components.
            needs: the components of these rows, and those that every rank calls."""

    def auxiliary_velocity(
        self,
        auxiliary: AuxiliaryPolicy,
        latents: Tensor,
        sigma: Tensor,
        conditioning: TensorDict,
        spec: Any,
        needs: Needs,
    ) -> Tensor:
        """Compute the velocity of an auxiliary policy, without gradient.

        Args:
            auxiliary: which one; `reference` is the policy as loaded.
            latents, sigma, conditioning, spec, needs: as `velocity` takes them.

        Raises:
            TrainingError: the objective did not ask for this policy."""

    def backward(self, losses: Tensor, weight: float) -> None:
        """Add `weight` times the gradient of the sum of `losses` (rows,) over all ranks; a rank may pass 0."""

    def gradient_norm(self) -> float:
        """Return the 2-norm of what was added since the last step, over all ranks. Called once before each `step`."""

    def step(self, factor: float, rate: float) -> None:
        """Multiply the gradient by `factor` and step the optimizer with the learning rate `rate`.

        The gradient is forgotten."""

    def discard(self) -> None:
        """Forget the gradient."""

    def base(self) -> Mapping[str, Tensor]:
        """Return the model's own weights by diffusers name, without adapters, in an order that never changes."""

    def adapters(self) -> Mapping[str, Tensor]:
        """Return the weights of LoRA's adapters by diffusers name, in an order that never changes."""

    def begin_save(self, folder: Path) -> Future[Any]:
        """Copy out the trained parameters, auxiliary policies and the optimizer's state.

        The future is done when this rank's part of them is in `folder`."""

    def load(self, folder: Path) -> None:
        """Read what `begin_save` wrote, under any layout. TrainingError if it is of another model."""


def build_backend(
    config: Config, objective: Objective, policy: Policy, device: torch.device, layout: ParallelLayout
) -> TrainBackend:
    """Build the backend that `trainer.backend` names, with its model loaded.

    Args:
        config: the run's.
        objective: that of `algorithm.name`.
        policy: the model family's, for the checkpoint to train.
        device: where this rank computes.
        layout: this rank's place among all.

    Raises:
        ValueError: the backend cannot do what the recipe asks for."""
    trainer, on_cpu = config.trainer, device.type == "cpu"
    backend = find_backend(trainer.backend, workers=layout.world_size, offload=trainer.offload, on_cpu=on_cpu)
    built: TrainBackend = backend.load()(config, objective, policy, device, layout)
    return built
