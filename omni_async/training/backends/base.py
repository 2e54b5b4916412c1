"""Defines the interface between a trainer rank's engine and the backend that holds its model.

The interface covers velocities or log-probs of rows, gradients, optimizer steps, checkpoints, and weights to publish.
Only the backend knows the distribution of weights over ranks.

All methods are collective: with several ranks, every rank makes the same calls in the same order, with its own rows.
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
from omni_async.tokens.policy import Packed, TokenPolicy
from omni_async.training.auxiliary import AuxiliaryPolicies
from omni_async.training.groups import Needs

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict
    from torch import Tensor, nn


class TrainBackend(Protocol):
    """The model of one trainer rank, with its optimizer. Returned tensors may be shards (DTensor), on any device.

    device: the device of the computation. dtype: the dtype of the computation and of published weights.
    trainable: the parameters that the optimizer changes, as `component.name` with their diffusers names: adapters under
    LoRA, otherwise everything that the policy does not freeze.
    auxiliary: the auxiliary policies of the objective, and the moving average if `trainer.ema` is set.
    digest: the digest of the loaded weights, in `dtype`, under their diffusers names (rank 0 only, else empty)."""

    device: torch.device
    dtype: torch.dtype
    trainable: Mapping[str, nn.Parameter]
    auxiliary: AuxiliaryPolicies
    digest: str

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: TensorDict, spec: Any, needs: Needs) -> Tensor:
        """Compute the policy's velocity (B, *shape), float32, with gradient if grad mode is on.

        Args:
            latents, sigma, conditioning, spec: as in `Policy.velocity`, but rows may need several components.
            needs: the components of these rows, and the components that every rank calls."""

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
            auxiliary: its name; `reference` is the policy as loaded.
            latents, sigma, conditioning, spec, needs: as in `velocity`.

        Raises:
            TrainingError: the objective does not declare this policy."""

    def log_probs(self, packed: Packed, temperature: float) -> Tensor:
        """Compute the log-probs of a row's answers, (T,) float32, with gradient if grad mode is on.

        Args:
            packed, temperature: as in `TokenPolicy.log_probs`; the row is on `device`."""

    def auxiliary_log_probs(self, auxiliary: AuxiliaryPolicy, packed: Packed, temperature: float) -> Tensor:
        """Compute the log-probs of an auxiliary policy, without gradient; otherwise as `auxiliary_velocity`."""

    def backward(self, losses: Tensor, weight: float) -> None:
        """Add `weight` times the gradient of the sum of `losses` (rows,) over all ranks; a rank may pass 0."""

    def gradient_norm(self) -> float:
        """Return the 2-norm of the accumulated gradient over all ranks. Called once before each `step`."""

    def limit_alignment(self, norm: float, most: float) -> tuple[float, float]:
        """Limit the cosine between gradient and momentum, as in `omni_async.training.optimizer.limit_alignment`.

        Called between `gradient_norm` and `step`, with `trainer.optimizer.max_alignment` alone."""

    def step(self, factor: float, rate: float) -> None:
        """Multiply the gradient by `factor`, step the optimizer with the learning rate `rate`, discard the gradient."""

    def discard(self) -> None:
        """Discard the gradient."""

    def base(self) -> Mapping[str, Tensor]:
        """Return the model's own weights by diffusers name, without adapters and frozen ones, in a fixed order."""

    def adapters(self) -> Mapping[str, Tensor]:
        """Return the weights of LoRA's adapters by diffusers name, in a fixed order."""

    def begin_save(self, folder: Path) -> Future[Any]:
        """Copy out the trained parameters, auxiliary policies and the optimizer's state.

        The future is done when this rank's part of them is in `folder`."""

    def load(self, folder: Path) -> None:
        """Read a checkpoint of `begin_save`, under any layout. Raises TrainingError if it is of another model."""


def build_backend(
    config: Config,
    objective: Objective,
    policy: Policy | TokenPolicy,
    device: torch.device,
    layout: ParallelLayout,
) -> TrainBackend:
    """Build the backend that `trainer.backend` names, with its model loaded.

    Args:
        config: the run's.
        objective: the objective `algorithm.name`.
        policy: the model family's, for the checkpoint to train.
        device: this rank's device.
        layout: this rank's place among all ranks.

    Raises:
        ValueError: the backend does not support the recipe."""
    trainer, on_cpu = config.trainer, device.type == "cpu"
    backend = find_backend(trainer.backend, workers=layout.world_size, offload=trainer.offload, on_cpu=on_cpu)
    built: TrainBackend = backend.load()(config, objective, policy, device, layout)
    return built
