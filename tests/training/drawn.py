"""Draws groups of a family's tiny checkpoint as an engine would, and random ones."""

import asyncio
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from omni_async.config import Config
from omni_async.diffusion.components import compute_velocity
from omni_async.diffusion.policy import Policy, modalities_of
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.rollout.stepping import InFlight, take_steps
from omni_async.training.groups import GroupBatch
from omni_async.types import SdeWindow
from tests.pipelines.families import make_request
from tests.support.fakes import load_model


@torch.no_grad()
def drawn(policy: Policy, config: Config, window: SdeWindow) -> GroupBatch:
    """Draws a group of `rollout.group_size` samples with different prompts."""
    spec, steps = config.rollout.sampling, config.rollout.num_inference_steps
    model, codec = load_model(policy), policy.load_codec(torch.float32)
    sigmas, shape = policy.sigmas(steps, spec), policy.latent_shape(spec)
    trajectories = []
    for number in range(config.rollout.group_size):
        request = make_request(spec, number, window=window, num_inference_steps=steps)
        sample = InFlight(request, sigmas, shape, modalities=modalities_of(policy, spec))
        conditioning = codec.encode(sample.request.prompt, spec)
        stacked = policy.stack_conditioning([conditioning])
        while not sample.done:
            needs, sigma = [policy.component_of(sample.sigma)], torch.tensor([sample.sigma])
            x = sample.latents[None]
            take_steps([sample], compute_velocity(policy, dict(model.items()), x, sigma, stacked, spec, needs), 0)
        trajectories.append(TensorDict(sample.tensors(conditioning), batch_size=[]))
    number = len(trajectories)
    advantages, seeds = [1.0, -0.5, 0.25, -0.75][:number], list(range(1, number + 1))
    return GroupBatch(0, spec, trajectories, advantages, seeds, [[0] * window.size] * number, size=number)


async def drawn_by_an_engine(policy: Policy, config: Config, device: torch.device, window: SdeWindow) -> GroupBatch:
    """Draws a group with the diffusers engine on `device`, in the configuration's dtype."""
    rollout, number = config.rollout, config.rollout.group_size
    options = {"window": window, "num_inference_steps": rollout.num_inference_steps}
    requests = [make_request(rollout.sampling, i, **options) for i in range(number)]
    dtype = getattr(torch, config.model.dtype)
    engine = DiffusersEngine("engine", policy, dtype=dtype, max_batch=number, device=device)
    await engine.start()
    try:
        made = await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()
    trajectories, staleness = [one.tensors for one in made], [[0] * window.size] * number
    return GroupBatch(0, rollout.sampling, trajectories, [1.0] * number, range(number), staleness, size=number)


def conditioning_of(policy: Policy, spec: Any, sample: int, generator: torch.Generator) -> TensorDict:
    """Makes noise of the shapes of a prompt; of those that have a mask, as many tokens as the sample's number says."""
    fields: dict[str, Tensor] = {}
    for name, blank in sorted(policy.blank_conditioning(spec).items()):
        length = 1 + 2 * (sample % 2) if name.startswith("negative") else 3 + 2 * sample
        shape = blank.shape if "prompt_mask" not in policy.blank_conditioning(spec) else (length, *blank.shape[1:])
        if name == "image":
            shape = torch.Size((2, 4, blank.shape[-1]))  # of a prompt of its own, which all samples share
        made = torch.randn(shape, generator=generator)
        fields[name] = torch.ones(shape, dtype=torch.bool) if blank.dtype == torch.bool else made
    return TensorDict(fields, [])


def random_group(policy: Policy, config: Config) -> GroupBatch:
    """Makes four samples of two steps, which need all of the policy's denoisers."""
    spec, generator = config.rollout.sampling, torch.Generator().manual_seed(0)
    shape, sigmas = policy.latent_shape(spec), policy.sigmas(config.rollout.num_inference_steps, spec)
    needs = [policy.component_of(float(sigma)) for sigma in sigmas]
    first = needs.index(policy.components[-1]) - 1 if len(policy.components) > 1 else 1
    samples = []
    for number in range(4):
        x = torch.randn(1, *shape, generator=generator)
        steps = [x + 0.3 * k * torch.randn(1, *shape, generator=generator) for k in range(3)]
        tensors = {"final": x[0], "latents": torch.cat(steps), "log_probs": torch.zeros(2).double(), "sigmas": sigmas}
        tensors |= {"steps": torch.tensor([first, first + 1])}
        samples.append(
            TensorDict({**tensors, "conditioning": conditioning_of(policy, spec, number, generator)}, batch_size=[])
        )
    return GroupBatch(0, spec, samples, [1.0, -1.0, 0.5, -0.25], range(4), [[0, 0]] * 4, size=4)
