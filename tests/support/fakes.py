"""Small real implementations of our contracts: a transformer with a policy around it, and groups it could have made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.diffusion.policy import Policy
from omni_async.diffusion.sde.transitions import ode_step, take_step
from omni_async.training.groups import GroupBatch

WIDTH, CHANNELS, TEXT = 16, 4, 8


class TinyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(
            self.to_q(x), self.to_k(x), self.to_v(x), attn_mask=mask[:, None]
        )
        return self.to_out[1](self.to_out[0](attended))


class TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = TinyAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.unused = nn.Linear(2, 2)  # as the last block's text branch in real models: it never gets a gradient

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x), mask)
        return x + self.mlp(x)


class TinyTransformer(nn.Module):
    """(B, T, C) latents, (B,) sigma, (B, L, E) text with a (B, L) mask -> (B, T, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.txt_in = nn.Linear(CHANNELS, WIDTH), nn.Linear(TEXT, WIDTH)
        self.time_in = nn.Linear(2, WIDTH)
        self.transformer_blocks = nn.ModuleList(TinyBlock() for _ in range(2))
        self.proj_out = nn.Linear(WIDTH, CHANNELS)

    def forward(self, latents: Tensor, sigma: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        time = self.time_in(torch.stack([sigma, sigma.square()], dim=1))
        x = torch.cat([self.txt_in(text), self.img_in(latents) + time[:, None]], dim=1)
        mask = torch.cat([mask, mask.new_ones(latents.shape[:2])], dim=1)
        for block in self.transformer_blocks:
            x = block(x, mask)
        return self.proj_out(x[:, text.shape[1] :])


def load_model(policy: Policy, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    """Returns a policy's components as one module, named as on the wire; its `velocity` takes it for their mapping."""
    return nn.ModuleDict(policy.load_components(dtype))


class TinyPolicy:
    """See `omni_async.diffusion.policy.Policy`; `path` is the seed of the weights."""

    def __init__(self, path: str = "0") -> None:
        self.path = path

    components: tuple[str, ...] = ("transformer",)
    sequence_plan = None

    def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(self.path))
            return {name: TinyTransformer().eval().to(dtype) for name in self.components}

    def component_of(self, sigma: float) -> str:
        return "transformer"

    def latent_shape(self, spec: QwenImageSampling) -> tuple[int, ...]:
        return (spec.height // 16 * (spec.width // 16), CHANNELS)

    def sigmas(self, num_inference_steps: int, spec: QwenImageSampling) -> Tensor:
        return torch.cat([torch.linspace(1, 1 / num_inference_steps, num_inference_steps), torch.zeros(1)])

    def velocity(
        self,
        components: Mapping[str, nn.Module],
        latents: Tensor,
        sigma: Tensor,
        conditioning: TensorDict,
        spec: QwenImageSampling,
        *,
        unconditional_gradient: bool = True,
    ) -> Tensor:
        transformer = components[self.component_of(sigma[0].item())]
        dtype = next(transformer.parameters()).dtype

        def predict(text: Tensor) -> Tensor:
            return transformer(latents.to(dtype), sigma.to(dtype), text.to(dtype), conditioning["mask"])

        v = predict(conditioning["text"])
        if spec.guided:
            with torch.set_grad_enabled(torch.is_grad_enabled() and unconditional_gradient):
                uncond = predict(torch.zeros_like(conditioning["text"]))
            v = uncond + spec.true_cfg_scale * (v - uncond)
        return v if dtype == torch.float64 else v.float()

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        pad = nn.utils.rnn.pad_sequence
        return TensorDict(
            {k: pad([r[k] for r in rows], batch_first=True) for k in ("text", "mask")}, batch_size=[len(rows)]
        )


class TwoExperts(TinyPolicy):
    """A policy of two components of different weights, one for sigma >= 0.7 and one for what is below."""

    components = ("transformer", "transformer_2")

    def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        found = super().load_components(dtype)
        with torch.no_grad():
            for parameter in found["transformer_2"].parameters():
                parameter.mul_(1.5)
        return found

    def component_of(self, sigma: float) -> str:
        return self.components[sigma < 0.7]


def tiny_trajectory(
    policy: TinyPolicy, config: Config, seed: int, window: range, model: nn.ModuleDict | None = None
) -> TensorDict:
    """A sample made by the policy itself; without `rollout.sde` no step is noisy, and `window` is not looked at."""
    r = config.rollout
    generator = torch.Generator().manual_seed(seed)
    model = model or load_model(policy)
    sigmas = policy.sigmas(r.num_inference_steps, r.sampling)
    length = 2 + seed % 3
    conditioning = TensorDict(
        {"text": torch.randn(length, TEXT, generator=generator), "mask": torch.ones(length, dtype=torch.bool)}, []
    )
    batch = policy.stack_conditioning([conditioning])
    x = torch.randn(1, *policy.latent_shape(r.sampling), generator=generator)
    noisy = window if r.sde is not None else range(0)
    latents, log_probs, means = [], [], []
    for i in range(r.num_inference_steps):
        sigma, sigma_next = sigmas[i : i + 1], sigmas[i + 1 : i + 2]
        with torch.no_grad():
            v = policy.velocity(model, x, sigma, batch, r.sampling)
        if i not in noisy or r.sde is None:
            x = ode_step(x, v, sigma, sigma_next)
            continue
        latents.append(x)
        noise = torch.randn(x.shape, generator=generator)
        level = torch.tensor([r.sde.noise_level])
        x, value, mean = take_step(r.sde.kind, x, v, sigma, sigma_next, sigmas[1:2], level, noise)
        log_probs.append(value)
        means.append(mean)
        if i == noisy[-1]:
            latents.append(x)
    steps = torch.tensor(list(noisy), dtype=torch.int64)
    tensors = {"final": x[0], "sigmas": sigmas, "steps": steps, "conditioning": conditioning}
    if latents:
        tensors |= {"latents": torch.cat(latents), "log_probs": torch.cat(log_probs), "means": torch.cat(means)}
    return TensorDict(tensors, batch_size=[])


def tiny_group(
    policy: TinyPolicy,
    config: Config,
    seed: int = 0,
    window: range = range(1, 3),
    staleness: int = 0,
    model: nn.ModuleDict | None = None,
) -> GroupBatch:
    """A group of `rollout.group_size` samples with random advantages, every step `staleness` versions old."""
    samples = [tiny_trajectory(policy, config, 100 * seed + i, window, model) for i in range(config.rollout.group_size)]
    advantages = torch.randn(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    trained = len(window) if config.rollout.sde is not None else config.rollout.num_inference_steps
    return GroupBatch(
        group=seed,
        spec=config.rollout.sampling,
        trajectories=samples,
        advantages=advantages,
        seeds=[1000 * seed + i for i in range(len(samples))],
        staleness=[[staleness] * trained for _ in samples],
        size=len(samples),
    )


def tiny_pair(policy: TinyPolicy, config: Config, seed: int = 0) -> GroupBatch:
    """Winner and loser of a preference, which share the seed of their training noise."""
    group = tiny_group(policy, config, seed)
    both = {"trajectories": group.trajectories[:2], "seeds": group.seeds[:1] * 2, "staleness": group.staleness[:2]}
    return replace(group, **both, advantages=[1.0, -1.0], size=2)


def share(group: GroupBatch, layout: ParallelLayout, start: int = 0) -> GroupBatch:
    """A rank's samples of a whole group; the first sample as padding where it has none."""
    dealt = layout.dealt(group.size, start)
    mine = dealt or range(1)
    picked: dict[str, Any] = {}
    for name in ("trajectories", "advantages", "seeds", "staleness", "weights"):
        values = getattr(group, name)
        picked[name] = None if values is None else [values[i] for i in mine]
    return replace(group, **picked, counts=bool(dealt))
