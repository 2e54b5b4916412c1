"""Implements FlowGRPO as a plain synchronous loop, top to bottom: what an asynchronous run with `staleness.max_updates:
0` must equal bit for bit.

No engine, no coordinator, no roles. One model samples and is trained. What must be shared to the bit is written the
same way: which samples share a forward pass (matrix products round by batch size), and the order in which gradients are
added up.
"""

from __future__ import annotations

import math

import torch
from tensordict import TensorDict

from omni_async.config import Config
from omni_async.control.seeds import PromptStream, derive, draw_window
from omni_async.data.prompts import load_prompts
from omni_async.diffusion.policy import load_policy
from omni_async.diffusion.sde.noise import initial_noise, step_noise
from omni_async.diffusion.sde.transitions import log_prob, ode_step, take_step, transition
from omni_async.plugins.families import find_family
from omni_async.rewards import registry
from omni_async.rewards.base import shown_to
from tests.support.fakes import load_model


def train_synchronously(config: Config) -> dict[str, torch.Tensor]:
    """Returns the parameters after `trainer.updates` updates of float32 weights, without KL, one step each."""
    r, t, a = config.rollout, config.trainer, config.algorithm
    sde, prompt_file = r.sde, config.data.prompts
    assert sde is not None and prompt_file is not None
    policy = load_policy(find_family(config.model.pipeline), config.model.path)
    model = load_model(policy).requires_grad_(True)
    codec = policy.load_codec(torch.float32)
    prompts = PromptStream(load_prompts(prompt_file, "data.prompts", 4000), config.run.seed, config.data.shuffle)
    reward = registry.build(config.reward.scorers[0])
    if t.optimizer.name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=t.optimizer.lr, weight_decay=t.optimizer.weight_decay)
    else:
        o = t.optimizer
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay
        )
    sigmas = policy.sigmas(r.num_inference_steps, r.sampling)
    shape = policy.latent_shape(r.sampling)
    noise_level = torch.tensor([sde.noise_level], dtype=torch.float64)

    def velocity(latents: torch.Tensor, sigma: torch.Tensor, text: list[TensorDict]) -> torch.Tensor:
        stacked = policy.stack_conditioning(text)
        return policy.velocity(model, latents, sigma, stacked, r.sampling)

    for update in range(t.updates):
        # Sample. A group has one prompt and one window of noisy steps; each trained step keeps (step, x, x',
        # log-probability).
        groups = range(update * t.groups_per_update, (update + 1) * t.groups_per_update)
        windows = {g: draw_window(config.run.seed, g, sde.window.size, sde.window.range).steps for g in groups}
        samples = [
            (g, derive("sample", config.run.seed, prompts[g].index, g, k)) for g in groups for k in range(r.group_size)
        ]
        starts = {g: derive("initial", config.run.seed, prompts[g].index, g) for g in groups if r.share_initial_noise}
        text = {g: codec.encode(prompts[g], r.sampling) for g in groups}
        taken: list[list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]] = []
        rewards: list[float] = []
        for first in range(0, len(samples), r.max_batch):
            batch = samples[first : first + r.max_batch]
            steps: list[list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]] = [[] for _ in batch]
            x = torch.stack([initial_noise(starts.get(g, seed), shape) for g, seed in batch])
            for i in range(r.num_inference_steps):
                with torch.no_grad():
                    v = velocity(x, sigmas[i].expand(len(batch)), [text[g] for g, _ in batch])
                moved = []
                for row, (g, seed) in enumerate(batch):
                    here, there, its_v = x[row : row + 1], sigmas[i + 1 : i + 2], v[row : row + 1]
                    if i not in windows[g]:
                        moved.append(ode_step(here, its_v, sigmas[i : i + 1], there))
                        continue
                    noise = step_noise(seed, i, shape)[None]
                    to, logp, _ = take_step(
                        sde.kind, here, its_v, sigmas[i : i + 1], there, sigmas[1:2], noise_level, noise
                    )
                    steps[row].append((i, here[0], to[0], logp[0]))
                    moved.append(to)
                x = torch.cat(moved)
            media = [one.numpy() for one in codec.decode(x, r.sampling)]
            shown = shown_to(reward.name, reward, media)
            rewards += [score.value for score in reward.score(shown, [prompts[g] for g, _ in batch])]
            taken += steps

        # Advantages: A = (reward - group mean) / (std + eps), clipped.
        flat = torch.tensor(rewards, dtype=torch.float64)
        table = flat.view(len(groups), r.group_size)
        std = (flat if a.advantage.std == "global" else table).std(-1, correction=a.advantage.ddof, keepdim=True)
        scale = 1 / (std + a.advantage.eps)
        advantages = ((table - table.mean(1, keepdim=True)) * scale).clamp(-a.advantage.clip_max, a.advantage.clip_max)

        # Loss: the mean over samples and steps of max(-A r, -A clip(r)), in micro-batches of one group's rows. The clip
        # is to c nats of D log r (`cps`: D log r / 2 S^2).
        assert a.clip_range_nats is not None
        num_rows = len(samples) * sde.window.size
        for n, g in enumerate(groups):
            own = range(n * r.group_size, (n + 1) * r.group_size)
            rows = [(g, advantages[n, k], *step) for k, s in enumerate(own) for step in taken[s]]
            for first in range(0, len(rows), t.micro_batch_size):
                owner, advantage, at, before, after, old = zip(*rows[first : first + t.micro_batch_size], strict=True)
                sigma, sigma_next = sigmas[list(at)], sigmas[[i + 1 for i in at]]
                x, level = torch.stack(before), noise_level.expand(len(at))
                v = velocity(x, sigma, [text[g] for g in owner])
                step = transition(sde.kind, x, v, sigma, sigma_next, sigmas[1].expand(len(at)), level)
                logp = log_prob(sde.kind, torch.stack(after), step.mean, step.scale)
                ratio = (logp - torch.stack(old)).exp()
                of_log_prob = 2 * step.scale.double().square() if sde.kind == "cps" else torch.ones_like(ratio)
                width = a.clip_range_nats / math.prod(shape) * of_log_prob
                weight = torch.stack(advantage).float().double()
                loss = torch.maximum(-weight * ratio, -weight * ratio.clamp((-width).exp(), width.exp()))
                (loss.sum() * (1 / num_rows)).backward()

        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if t.optimizer.max_grad_norm is not None:
            norm = float(torch.nn.utils.get_total_norm(grads))
            torch._foreach_mul_(grads, min(1.0, t.optimizer.max_grad_norm / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}
