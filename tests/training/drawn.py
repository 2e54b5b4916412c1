"""Draws groups of a family's tiny checkpoint as an engine would, and splits what ranks get of them."""

import torch
from tensordict import TensorDict

from omni_async.components import compute_velocity
from omni_async.config import Config
from omni_async.policy import Policy
from omni_async.rollout.stepping import InFlight, take_steps
from omni_async.training.groups import GroupBatch
from omni_async.types import SdeWindow
from tests.fakes import load_model
from tests.pipelines.families import make_request


@torch.no_grad()
def drawn(policy: Policy, config: Config, window: SdeWindow) -> GroupBatch:
    """Draws a group of `rollout.group_size` samples with different prompts."""
    spec, steps = config.rollout.sampling, config.rollout.num_inference_steps
    model, codec = load_model(policy), policy.load_codec(torch.float32)
    sigmas, shape = policy.sigmas(steps, spec), policy.latent_shape(spec)
    trajectories = []
    for number in range(config.rollout.group_size):
        sample = InFlight(make_request(spec, number, window=window, num_inference_steps=steps), sigmas, shape)
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
