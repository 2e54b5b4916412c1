"""Builds the optimizer, and computes the learning rate and the decay of the moving average.

The latter two are pure functions of the optimizer step, so resuming needs no state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from omni_async.config.stages import Optimizer, Trainer


def build_optimizer(
    config: Optimizer, parameters: Iterable[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer.

    Args:
        config: `trainer.optimizer`.
        parameters: the trained parameters; with `trainer.offload` they are on the CPU.
        device: the rank's device."""
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    fused = config.fused
    if fused is None:
        fused = device.type != "cpu" and has_fused_adamw(device)
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused or None,  # None keeps torch's default, which False would change
    )


def has_fused_adamw(device: torch.device) -> bool:
    """Return whether this torch has the fused AdamW kernel for the type of `device`."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", key)


def learning_rate(trainer: Trainer, step: int) -> float:
    """Return the rate of optimizer step `step` (from 0).

    A linear warm-up reaches `lr` at step `warmup_steps - 1`. The schedule then decays, and would reach 0 one step after
    the run's last step."""
    config = trainer.optimizer
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(1, trainer.updates * trainer.steps_per_update - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    if config.schedule == "linear":
        return config.lr * (1.0 - progress)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def gradient_norm(grads: list[torch.Tensor]) -> float:
    """Return the global 2-norm over all ranks' shards. Collective if gradients are sharded."""
    norm = torch.nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return the factor for gradients of this norm, as in `torch.nn.utils.clip_grad_norm_`."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def ema_decay(step: int, decay: float, warmup: Literal["ratio", "linear"] = "ratio") -> float:
    """Return the decay of the moving average at an optimizer step.

    Args:
        step: the optimizer step, from 0.
        decay: the decay after warm-up.
        warmup: `ratio` min((1 + step) / (10 + step), decay), as in flow_grpo; `linear` min(.001 step, decay), as in
            AWM."""
    return min((1 + step) / (10 + step) if warmup == "ratio" else 0.001 * step, decay)
