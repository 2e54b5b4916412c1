"""Tests samples in flight: what is added to each."""

import torch
from torch.testing import assert_close

from omni_async.rollout.stepping import InFlight, take_steps
from omni_async.sde.noise import step_noise
from omni_async.sde.schedules import linear
from omni_async.types import SdeWindow
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
