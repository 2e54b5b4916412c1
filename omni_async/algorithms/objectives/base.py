"""Defines the inputs and outputs of objectives, pure functions (inputs, `Algorithm` settings) -> `ObjectiveOutput`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TransitionInputs:
    """R rows; a row is one trained step of one sample.

    Rows are sample-major, `steps_per_sample` rows for each sample. Log-probs are means over D = `num_elements` latent
    elements.

    log_prob (R,) and mean (R, ...) are the current policy's and carry the gradient; everything else is data. The
    trainer passes log-probs, weight and nats_per_log_prob as float64, the others as float32. `old_*` belong to the
    denominator of the ratio, `ref_mean` to the reference policy, `teacher_mean` to the teacher. advantage, std, scale,
    nats_per_log_prob are (R,). `omni_async.diffusion.sde` defines the last three for `kind`: nats_per_log_prob
    (log_prob - old_log_prob) is the log-ratio of the whole sample. weight (R,) is the off-policy correction; it
    multiplies only the policy-gradient part of the loss."""

    log_prob: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    mean: Tensor
    old_mean: Tensor | None
    std: Tensor
    scale: Tensor
    nats_per_log_prob: Tensor
    num_elements: int
    kind: str
    weight: Tensor | None = None
    steps_per_sample: int = 1
    ref_mean: Tensor | None = None
    teacher_mean: Tensor | None = None

    def __post_init__(self) -> None:
        rows = self.log_prob.shape
        if len(rows) != 1:
            raise ValueError(f"log_prob must have shape (R,), got {tuple(rows)}")
        per_row = ("old_log_prob", "advantage", "std", "scale", "nats_per_log_prob", "weight")
        _require_shape(self, per_row, rows, " like log_prob")
        if self.mean.ndim < 2 or self.mean.shape[0] != rows[0] or self.mean[0].numel() != self.num_elements:
            raise ValueError(
                f"mean must be {rows[0]} rows of {self.num_elements} elements, got shape {tuple(self.mean.shape)}"
            )
        _require_shape(self, ("old_mean", "ref_mean", "teacher_mean"), self.mean.shape, " like mean")
        if self.steps_per_sample < 1 or rows[0] % self.steps_per_sample:
            raise ValueError(f"{rows[0]} rows are not whole samples of {self.steps_per_sample} steps")


@dataclass(frozen=True)
class ForwardInputs:
    """R rows; a row is one noise draw of one sample's final latents. Rows are sample-major, `draws` for each sample.

    For pairs, rows alternate (winner, loser) with the same draw, and `draws` counts pairs of rows.

    velocity (R, ...) is the current policy's at x_sigma = (1 - sigma) final + sigma noise, and carries the gradient;
    `old_`, `ref_` and `ema_velocity` are other policies' at the same point. final, noise (R, ...); sigma, advantage
    (R,). `progress` in [0, 1] is the completed share of the run's updates."""

    velocity: Tensor
    final: Tensor
    noise: Tensor
    sigma: Tensor
    advantage: Tensor
    old_velocity: Tensor | None = None
    ref_velocity: Tensor | None = None
    ema_velocity: Tensor | None = None
    draws: int = 1
    progress: float = 0.0

    def __post_init__(self) -> None:
        whole = self.velocity.shape
        if self.velocity.ndim < 2:
            raise ValueError(f"velocity must have shape (R, ...), got {tuple(whole)}")
        others = ("final", "noise", "old_velocity", "ref_velocity", "ema_velocity")
        _require_shape(self, others, whole, " like velocity")
        _require_shape(self, ("sigma", "advantage"), whole[:1], ", a number per row")
        if self.draws < 1 or whole[0] % self.draws:
            raise ValueError(f"{whole[0]} rows are not whole samples of {self.draws} draws")


@dataclass(frozen=True)
class TokenInputs:
    """N answers of T tokens in all, one after the other; a row is one answer.

    log_prob (T,) is the current policy's, with the gradient; everything else is data. `old_log_prob` (T,) belongs to
    the denominator of the ratio, `ref_log_prob` (T,) to the reference policy. advantage (N,). lengths (N,) int64, each
    at least 1, with the sum T. weight (T,) is the off-policy correction; it multiplies only the policy-gradient part of
    the loss. `most_tokens` is the largest number of tokens of an answer. Log-probs and weights are float64, in nats."""

    log_prob: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    lengths: Tensor
    most_tokens: int
    weight: Tensor | None = None
    ref_log_prob: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = self.log_prob.shape
        if len(tokens) != 1:
            raise ValueError(f"log_prob must have shape (T,), got {tuple(tokens)}")
        _require_shape(self, ("old_log_prob", "weight", "ref_log_prob"), tokens, " like log_prob")
        _require_shape(self, ("advantage",), self.lengths.shape, ", a number per answer")


def _require_shape(inputs: object, names: Iterable[str], shape: torch.Size, like: str) -> None:
    for name in names:
        value = getattr(inputs, name)
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}{like}, got {tuple(value.shape)}")


@dataclass(frozen=True)
class ObjectiveOutput:
    """The losses and metrics of R rows.

    `loss` (R,) is per row, with gradient; the caller averages it. If a loss belongs to a sample or a pair, each of its
    rows carries the same value, so that the mean over rows is the mean over samples. `metrics`: names to (R,),
    detached."""

    loss: Tensor
    metrics: dict[str, Tensor]
