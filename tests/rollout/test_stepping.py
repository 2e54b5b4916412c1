"""Tests samples in flight: what is added to each, and what their prompts are encoded to."""

import torch
from tensordict import TensorDict
from torch.testing import assert_close

from omni_async.rollout.conditioning import ConditioningCache
from omni_async.rollout.stepping import InFlight, take_steps
from omni_async.sde.noise import step_noise
from omni_async.sde.schedules import linear
from omni_async.types import Prompt, SdeWindow
from pipelines.qwen_image.sampling import QwenImageSampling
from tests.rollout.conftest import make_request


def test_a_steps_noise_is_that_of_its_number_wherever_the_window_begins():
    shape = (3, 4)
    for start in range(3):
        sample = InFlight(make_request(sde_kind="dance", window=SdeWindow(start, 3)), linear(6), shape)
        while not sample.done:
            take_steps([sample], torch.zeros(1, *shape), version=0)
        tensors = sample.tensors()
        for position, step in enumerate(range(start, start + 3)):
            added = tensors["latents"][position + 1] - tensors["means"][position]
            assert_close(
                added, 0.7 * (1 / 6) ** 0.5 * step_noise(sample.request.seed, step, shape), rtol=1e-4, atol=1e-5
            )


class Codec:
    """A codec that records what it encodes."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    def encode(self, prompt: Prompt, spec: QwenImageSampling) -> TensorDict:
        self.asked.append((prompt.text, spec.negative_prompt if spec.guided else None))
        return TensorDict({}, batch_size=[])


def test_a_prompt_is_encoded_once_and_the_negative_one_only_where_it_guides():
    cache = ConditioningCache(codec := Codec())  # type: ignore[arg-type]
    unguided, guided = make_request(negative_prompt="blur"), make_request(negative_prompt="blur", true_cfg_scale=4.0)
    for request in (unguided, guided, unguided, guided):
        cache.of(request)
    assert codec.asked == [(unguided.prompt.text, None), (guided.prompt.text, "blur")]
