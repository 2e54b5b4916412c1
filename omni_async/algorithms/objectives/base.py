"""What every per-step objective takes and gives: pure data, so that objectives are pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True)
class StepInputs:
    """R rows, a row being one trained step of one sample. Log-probs are means over D = `num_elements` latent elements.

    log_prob (R,) and mean (R, ...) are the current policy's and carry the gradient; everything else is data. `old_*` belong to the
    policy that took the step, `ref_mean` to the reference policy. advantage, std, scale are (R,); std and scale as `omni_async.sde`
    defines them for `kind`.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    mean: Tensor
    old_mean: Tensor | None
    std: Tensor
    scale: Tensor
    ref_mean: Tensor | None
    num_elements: int
    kind: str

    def __post_init__(self) -> None:
        rows = self.log_prob.shape
        if len(rows) != 1:
            raise ValueError(f"log_prob must have shape (R,), got {tuple(rows)}")
        for name in ("old_log_prob", "advantage", "std", "scale"):
            if (shape := getattr(self, name).shape) != rows:
                raise ValueError(f"{name} must have shape {tuple(rows)} like log_prob, got {tuple(shape)}")
        if self.mean.ndim < 2 or self.mean.shape[0] != rows[0] or self.mean[0].numel() != self.num_elements:
            raise ValueError(f"mean must be {rows[0]} rows of {self.num_elements} elements, got shape {tuple(self.mean.shape)}")
        for name in ("old_mean", "ref_mean"):
            other = getattr(self, name)
            if other is not None and other.shape != self.mean.shape:
                raise ValueError(f"{name} must have shape {tuple(self.mean.shape)} like mean, got {tuple(other.shape)}")


@dataclass(frozen=True)
class ObjectiveSettings:
    """clip_range bounds |ratio - 1| of the mean-reduced ratio (`resolve_clip_range`); kl_coef weighs the KL to the reference."""

    clip_range: float
    kl_coef: float = 0.0
    kl_form: Literal["published", "exact"] = "published"


@dataclass(frozen=True)
class ObjectiveOutput:
    """`loss` (R,) per row, with gradient, not averaged: the caller weighs and averages. `metrics`: names to (R,), detached."""

    loss: Tensor
    metrics: dict[str, Tensor]


def resolve_clip_range(clip_range: float | None, clip_range_nats: float | None, num_elements: int) -> float:
    """The clip range on the mean log-ratio. In nats of the whole sample it is nats / D, which is the same rule at every resolution.

    With neither given 1e-4, the default of flow_grpo and VeRL-Omni. ValueError if both are given.
    """
    if clip_range is not None and clip_range_nats is not None:
        raise ValueError(f"give clip_range or clip_range_nats, not both (got {clip_range} and {clip_range_nats})")
    if num_elements < 1:
        raise ValueError(f"num_elements must be >= 1, got {num_elements}")
    if clip_range_nats is not None:
        return clip_range_nats / num_elements
    return 1e-4 if clip_range is None else clip_range
