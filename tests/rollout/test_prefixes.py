"""Tests that samples of a group share the steps before their window, with the values that each would have alone."""

import asyncio
from typing import Any

import pytest
import torch
from omni_async_pipelines.qwen_image.policy import QwenImagePolicy

from omni_async.diffusion.sde.noise import step_noise
from omni_async.diffusion.sde.schedules import linear
from omni_async.rollout.prefixes import Prefixes
from omni_async.rollout.stepping import InFlight, take_steps
from omni_async.types import Prompt, SampleRequest, SdeWindow
from tests.pipelines.families import WAN
from tests.rollout.conftest import (
    assert_same,
    check_against_policy,
    make_request,
    new_weights,
    publish,
    shared_group,
    transformer_with,
)
from tests.rollout.test_diffusers_engine import Pausing, drawn, running, together

SHAPE = (3, 4)


class Counting(QwenImagePolicy):
    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.batches: list[int] = []

    def velocity(self, components: Any, latents: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.batches.append(len(latents))
        return super().velocity(components, latents, *args, **kwargs)


@pytest.mark.parametrize("true_cfg_scale", [1.0, 3.0])
async def test_one_at_a_time_the_samples_are_bitwise_the_same(policy, true_cfg_scale):
    requests = shared_group(3, true_cfg_scale=true_cfg_scale)
    alone = await drawn(policy, requests, max_batch=1)
    shared = await drawn(counting := Counting(policy.path), requests, max_batch=1, share_prefix=True)
    assert len(counting.batches) == 2 + 3 * 4, "the prefix once, and each of three samples from its window on"
    assert [one.shared_steps for one in shared] == [0, 2, 2] and [one.shared_steps for one in alone] == [0] * 3
    for one, other in zip(alone, shared, strict=True):
        assert_same(one, other, tolerance=0.0)


async def test_a_batch_of_several_groups(policy):
    """A sample without shared noise, one group whose window starts at 2, one at 3, and one at 0."""
    requests = [
        make_request(50),
        *shared_group(3, 0, start=2),
        *shared_group(2, 1, start=3),
        *shared_group(2, 2, start=0),
    ]
    alone = await drawn(policy, requests, max_batch=8)
    shared = await drawn(counting := Counting(policy.path), requests, max_batch=8, share_prefix=True)
    assert counting.batches == [1 + 1 + 1 + 2] * 2 + [1 + 3 + 1 + 2] + [8] * 3
    assert [one.shared_steps for one in shared] == [0, 0, 2, 2, 0, 3, 0, 0]
    models = {0: transformer_with(policy, None)}
    for request, one, other in zip(requests, alone, shared, strict=True):
        assert_same(one, other, tolerance=1e-5)
        check_against_policy(policy, models, request, other)


async def test_later_batches_continue_where_earlier_ones_branched(policy):
    """Batches of three from two groups of four, so that the second has a sample of a stored prefix and two others."""
    requests = [*shared_group(4, 0, start=3), *shared_group(4, 1, start=2)]
    alone = await drawn(policy, requests, max_batch=3)
    shared = await drawn(counting := Counting(policy.path), requests, max_batch=3, share_prefix=True)
    assert counting.batches == [1] * 3 + [3] * 3 + [1] * 2 + [2] + [3] * 3 + [2] * 4
    for one, other in zip(alone, shared, strict=True):
        assert_same(one, other, tolerance=1e-5)


async def test_new_weights_end_a_prefix(policy):
    """A swap in a prefix leaves its samples together; later samples of the group begin again, with the new weights."""
    weights = new_weights(policy, seed=1)
    pausing, requests = Pausing(policy.path), shared_group(4, start=3)
    pausing.at = 2
    async with running(pausing, max_batch=2, share_prefix=True) as engine:
        in_flight = asyncio.create_task(together(engine, requests))
        await engine.stage(*publish(1, weights))
        await pausing.while_paused(engine.swap(1))
        made = await in_flight
        assert pausing.calls == 2 * 6
        assert [one.versions.spans for one in made] == [((0, 3), (1, 3))] * 2 + [((1, 6),)] * 2
        assert [one.shared_steps for one in made] == [0, 3, 0, 3]
    models = {0: transformer_with(policy, None), 1: transformer_with(policy, weights)}
    for request, one in zip(requests, made, strict=True):
        check_against_policy(policy, models, request, one)


async def test_two_experts(tmp_path):
    """A group whose prefix crosses from one component to the other."""
    policy = WAN.policy(WAN.build(tmp_path))
    spec, prompt = WAN.specs[0], WAN.case.prompts[0]
    common = {"prompt": prompt, "initial_seed": 5, "num_inference_steps": 6, "window": SdeWindow(4, 1)}
    requests = [WAN.case.request(spec, number, **common) for number in range(2)]
    sigmas = policy.sigmas(6, spec)[:4].tolist()
    assert len({policy.component_of(sigma) for sigma in sigmas}) == 2
    alone = await drawn(policy, requests, max_batch=1)  # type: ignore[arg-type]
    shared = await drawn(policy, requests, max_batch=1, share_prefix=True)  # type: ignore[arg-type]
    assert [one.shared_steps for one in shared] == [0, 4]
    for one, other in zip(alone, shared, strict=True):
        assert_same(one, other, tolerance=0.0)


# ---- without a model: a velocity of -1, so that every state is known ------------------------------------------------


def begin(prefixes: Prefixes, request: SampleRequest) -> InFlight:
    prefixes.join(sample := InFlight(request, linear(6), SHAPE))
    return sample


def step(prefixes: Prefixes, samples: list[InFlight], version: int = 0) -> list[list[int]]:
    rows = prefixes.rows(samples)
    taken = [samples[row[0]] for row in rows]
    take_steps(taken, -torch.ones(len(taken), *SHAPE), version)
    prefixes.spread(samples, rows)
    return rows


def test_a_sample_joins_a_prefix_on_its_way():
    prefixes = Prefixes(shared=True)
    one, two, three = shared_group(3, start=3)
    samples = [begin(prefixes, one)]
    assert step(prefixes, samples) == [[0]]
    samples.append(begin(prefixes, two))
    assert [sample.step for sample in samples] == [1, 1]
    assert [step(prefixes, samples) for _ in range(3)] == [[[0, 1]], [[0, 1]], [[0], [1]]]
    samples.append(begin(prefixes, three))
    assert [sample.step for sample in samples] == [4, 4, 3]
    assert [sample.shared_steps for sample in samples] == [0, 3, 3]
    while not samples[0].done:
        step(prefixes, samples[:2])
    while not samples[2].done:
        step(prefixes, samples[2:])
    for sample in samples:
        tensors = sample.tensors()
        assert sample.versions == [0] * 6 and torch.equal(tensors["latents"][0], samples[0].tensors()["latents"][0])
        for position, number in enumerate((3, 4)):
            noise = tensors["latents"][position + 1] - tensors["means"][position]
            expected = step_noise(sample.request.seed, number, SHAPE)
            assert torch.corrcoef(torch.stack([noise.flatten(), expected.flatten()]))[0, 1] > 0.9999


def test_samples_that_share_nothing():
    """The same initial noise, but another prompt, as in later calls of a program; another window; or no window."""
    first = shared_group(1)[0]
    prefixes = Prefixes(shared=True)
    step(prefixes, [begin(prefixes, first)])
    for other in (
        shared_group(1, prompt=Prompt(0, "another"))[0],
        shared_group(1, initial_seed=78)[0],
        shared_group(1, initial_seed=None)[0],
        shared_group(1, start=1)[0],
        shared_group(1, start=0)[0],
        shared_group(1, window=None)[0],
        shared_group(1, num_inference_steps=7)[0],
        shared_group(1, height=32)[0],
    ):
        assert begin(prefixes, other).step == 0
        assert begin(Prefixes(shared=False), first).step == 0
    assert begin(prefixes, first).step == 1


def test_the_newest_prefixes_are_kept():
    bytes_each = 4 * 3 * 4
    prefixes = Prefixes(shared=True, most_bytes=2 * bytes_each)
    groups = [shared_group(1, number)[0] for number in range(3)]
    for request in (groups[0], groups[1], groups[0], groups[2]):
        step(prefixes, [begin(prefixes, request)])
    assert [begin(prefixes, request).step for request in groups] == [2, 0, 1]
    prefixes.clear()
    assert [begin(prefixes, request).step for request in groups] == [0, 0, 0]
    tight = Prefixes(shared=True, most_bytes=1)
    step(tight, [begin(tight, groups[0])])
    assert begin(tight, groups[0]).step == 1, "one is always kept: samples of a group follow each other"


def test_a_prefix_of_two_versions_is_not_continued():
    prefixes = Prefixes(shared=True)
    one, two = shared_group(2, start=3)
    sample = begin(prefixes, one)
    step(prefixes, [sample], version=0)
    prefixes.clear()
    step(prefixes, [sample], version=1)
    other = begin(prefixes, two)
    assert (sample.step, other.step) == (2, 0)
    assert step(prefixes, [other, sample], version=1) == [[0], [1]]
