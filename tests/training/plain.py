"""Computes objectives and corrections by their definition, for comparison: one row at a time, all in one graph,
float64, straight from the formulas."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omni_async.config.schema import Config
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from tests.fakes import TinyPolicy, load_model


def model_of(engine: TrainEngine, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Returns a separate copy of the engine's model as it is."""
    model = load_model(engine.policy)
    model.load_state_dict(engine._model.components.state_dict())
    return model.to(dtype)


def gradients_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Returns gradients of the parameters that have one, as an engine reports them."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


@dataclass(frozen=True)
class Step:
    """A trained denoising step of a sample under some model: its mean log-prob (with gradient), the Gaussian (std
    without the step size), and what was recorded of it."""

    sample: int
    position: int
    log_prob: Tensor
    mean: Tensor
    std: float
    scale: float
    recorded: float
    advantage: float
    staleness: int
    elements: int
    kappa: float
    """D <(mean - recorded mean)^2> / (2 scale^2), in nats."""

    @property
    def nats(self) -> float:
        """Returns the log-ratio of the model to the recorded log-prob."""
        return self.elements * (self.log_prob.item() - self.recorded)


def steps_of(
    model: nn.Module,
    config: Config,
    group: GroupBatch,
    positions: list[list[int]] | None = None,
    detached_uncond: bool = False,
) -> Iterator[Step]:
    """Yields Flow-GRPO's transition of every trained step of every sample, sample-major; `positions[i]` are those of
    the window that are trained."""
    policy, r = TinyPolicy(), config.rollout
    dtype = next(model.parameters()).dtype
    assert r.sde is not None
    assert r.sde.kind == "flow"
    for sample, t in enumerate(group.trajectories):
        sigmas = t["sigmas"].to(dtype)
        for k in range(len(t["steps"])) if positions is None else positions[sample]:
            i = int(t["steps"][k])
            x, x_next = t["latents"][k].to(dtype), t["latents"][k + 1].to(dtype)
            v = guided(model, policy, config, t, x, sigmas[i], detached_uncond)
            s, h = sigmas[i].item(), (sigmas[i] - sigmas[i + 1]).item()
            g2 = r.sde.noise_level**2 * s / (1 - (sigmas[1].item() if s == 1 else s))
            scale = math.sqrt(g2 * h)
            mean = x * (1 - g2 / (2 * s) * h) - v * (1 + g2 * (1 - s) / (2 * s)) * h
            log_prob = -(x_next - mean).square().mean() / (2 * scale**2) - math.log(scale) - 0.5 * math.log(2 * math.pi)
            yield Step(
                sample=sample,
                position=k,
                log_prob=log_prob,
                mean=mean,
                std=math.sqrt(g2),
                scale=scale,
                recorded=t["log_probs"][k].item(),
                advantage=group.advantages[sample],
                staleness=group.staleness[sample][k],
                elements=x.numel(),
                kappa=((mean.detach() - t["means"][k]).square().sum() / (2 * scale**2)).item(),
            )


def guided(
    model: nn.Module,
    policy: TinyPolicy,
    config: Config,
    sample: object,
    x: Tensor,
    sigma: Tensor,
    detached: bool = False,
) -> Tensor:
    """Returns the velocity (T, C) of one row; classifier-free guidance written out, with or without gradient through
    the unconditional branch."""
    r = config.rollout
    conditioning = policy.stack_conditioning([sample["conditioning"]])
    text, mask = conditioning["text"].to(x.dtype), conditioning["mask"]
    v = model["transformer"](x[None], sigma[None], text, mask)
    if r.sampling.true_cfg_scale > 1:
        uncond = model["transformer"](x[None], sigma[None], torch.zeros_like(text), mask)
        uncond = uncond.detach() if detached else uncond
        v = uncond + r.sampling.true_cfg_scale * (v - uncond)
    return v[0]


def surrogate(ratio: Tensor, advantage: float, clip: float) -> Tensor:
    """Computes PPO's clipped loss of one row."""
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))
