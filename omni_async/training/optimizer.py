"""Builds the optimizer, limits its steps, and computes the learning rate and the decay of the moving average.

Rate and decay are pure functions of the optimizer step and its metrics, so resuming needs no state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from omni_async.config.trainer import Optimizer, StepSize, Trainer


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


def step_size_factor(config: StepSize, metrics: Mapping[str, float]) -> float:
    """Return the factor of the learning rate, in [0, 1], for an optimizer step on samples of earlier policies.

    The drift of samples grows with the square of the step size, hence the root. By effective sample size it is VCPO's
    rule (arXiv 2602.17616) for weights of single denoising steps instead of whole samples.

    Args:
        config: `trainer.optimizer.step_size`.
        metrics: of the rows of the step, over all ranks."""
    if config.by == "ess":
        return math.sqrt(min(1.0, metrics["ess"] / config.target))
    drift = metrics["log_ratio_nats/variance"] / 2  # L ~ N(-D kappa, 2 D kappa)
    return math.sqrt(config.target / max(drift, config.target))


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


def limit_alignment(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, norm: float, most: float
) -> tuple[float, float]:
    """Limit the cosine between gradient and momentum, in place. Collective if gradients are sharded.

    A larger cosine becomes `most`: the part of the gradient along the momentum is shortened, the rest is unchanged.
    The source is gradient alignment control (arXiv 2603.01501), which limits the cosine with the gradient before. The
    momentum, an exponential mean of the earlier gradients, has less noise, and checkpoints contain it.

    Args:
        parameters: with gradients.
        optimizer: their optimizer; without momentum yet, nothing is limited.
        norm: the 2-norm of the gradient over all ranks' shards.
        most: the largest cosine, in [0, 1).

    Returns: the cosine before, and the norm after relative to `norm`."""
    states = [(p.grad, optimizer.state.get(p, {})) for p in parameters if p.grad is not None]
    pairs = [(g, state[key]) for g, state in states for key in ("exp_avg", "momentum_buffer") if key in state]
    grads, momenta = [g for g, _ in pairs], [m for _, m in pairs]
    length = gradient_norm(momenta) if pairs else 0.0
    if norm == 0 or length == 0:
        return 0.0, 1.0
    dot = torch.stack([(g * m).sum(dtype=torch.float64) for g, m in pairs]).sum()
    along = float(dot.full_tensor() if isinstance(dot, DTensor) else dot) / length
    cosine = along / norm
    if cosine <= most:
        return cosine, 1.0
    rest = math.sqrt(max(0.0, norm**2 - along**2) / (1 - most**2))
    torch._foreach_add_(grads, momenta, alpha=(most * rest - along) / length)
    return cosine, rest / norm


def ema_decay(step: int, decay: float, warmup: Literal["ratio", "linear"] = "ratio") -> float:
    """Return the decay of the moving average at an optimizer step.

    Args:
        step: the optimizer step, from 0.
        decay: the decay after warm-up.
        warmup: `ratio` min((1 + step) / (10 + step), decay), as in flow_grpo; `linear` min(.001 step, decay), as in
            AWM."""
    return min((1 + step) / (10 + step) if warmup == "ratio" else 0.001 * step, decay)
