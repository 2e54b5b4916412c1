"""Tests the engine of tokens with tiny Qwen-Omni thinkers, against transformers' own forward pass."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from omni_async_pipelines.qwen3_omni import tiny as tiny3
from omni_async_pipelines.qwen3_omni.policy import Qwen3OmniPolicy
from omni_async_pipelines.qwen_omni import tiny
from omni_async_pipelines.qwen_omni.policy import QwenOmniPolicy
from omni_async_pipelines.qwen_omni.sampling import QwenOmniSampling
from PIL import Image
from torch import Tensor
from transformers import Qwen2_5OmniThinkerForConditionalGeneration, Qwen3OmniMoeThinkerForConditionalGeneration

from omni_async.data.image_files import prompt_image
from omni_async.data.video_files import prompt_video
from omni_async.media import Media
from omni_async.records.write.images import write_media
from omni_async.rollout.base import Trajectory
from omni_async.tokens.policy import Prepared
from omni_async.types import Prompt, SampleRequest
from tests.rollout.conftest import publish
from tests.rollout.token_answers import (
    Models,
    Pausing,
    check_answer,
    make_request,
    running,
    together,
    trained,
    versions,
)

SPEC = QwenOmniSampling(max_tokens=14, temperature=0.7)
SWAPS = (2, 5, 9)


class Pausing25(Pausing, QwenOmniPolicy):
    at = SWAPS


class Pausing3(Pausing, Qwen3OmniPolicy):
    at = SWAPS


FAMILIES = {
    "qwen_omni": (tiny.build, Pausing25, QwenOmniPolicy, Qwen2_5OmniThinkerForConditionalGeneration),
    "qwen3_omni": (tiny3.build, Pausing3, Qwen3OmniPolicy, Qwen3OmniMoeThinkerForConditionalGeneration),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def path(family: tuple[Any, ...], tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(family[0](tmp_path_factory.mktemp("thinker") / "tiny"))


@pytest.fixture(scope="module")
def plain(family: tuple[Any, ...], path: str) -> QwenOmniPolicy:
    policy: QwenOmniPolicy = family[2](path)
    return policy


@pytest.fixture(scope="module")
def models(plain: QwenOmniPolicy) -> Models:
    return versions(plain, 1 + len(SWAPS), scale=0.3)


@pytest.fixture(scope="module")
def theirs(family: tuple[Any, ...], path: str, models: Models) -> list[Any]:
    """Provides transformers' model of each version."""
    found = [family[3].from_pretrained(path).eval() for _ in models]
    for model, components in zip(found, models.values(), strict=True):
        model.load_state_dict(components["thinker"].state_dict())
    return found


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """Provides prompts of equal length: two of text, two with an image, and two with a video."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(2):
        noise = Image.effect_noise((84, 56), 80 + number).convert("RGB")
        noise.save(folder / f"{number}.png")
    images = [prompt_image(folder / f"{number}.png", f"{number}.png") for number in range(2)]
    videos = []
    for number in range(2):
        film = np.random.default_rng(number).integers(0, 256, (4, 3, 56, 84), np.uint8)
        [file] = write_media(Media(video=film, fps=2.0), folder / f"film{number}")
        videos.append(prompt_video(file, file.name)[0])
    texts = [Prompt(number, f"the digit {number}") for number in range(2)]
    seen = [Prompt(2 + number, "read the digit", images=(image,)) for number, image in enumerate(images)]
    return [*texts, *seen, *(Prompt(4 + number, "what is it", video=(video,)) for number, video in enumerate(videos))]


@torch.no_grad()
def whole(theirs: list[Any], policy: QwenOmniPolicy, request: SampleRequest, made: Trajectory) -> Tensor:
    """Computes prompt and answer apart: transformers would look for an image where the answer has an image's token."""
    prompt, tokens = policy.prepare(request.prompt, SPEC), made.tensors["tokens"].long()
    positions = prompt.next_position + torch.arange(len(tokens) - 1).expand(3, 1, -1)
    of_version = {}
    for version in set(made.versions):
        first = theirs[version](**given(prompt), use_cache=True)
        how = {"position_ids": positions, "past_key_values": first.past_key_values}
        others = theirs[version](input_ids=tokens[None, :-1], **how)
        of_version[version] = torch.cat([first.logits[0, -1:], others.logits[0]])
    return chosen(torch.stack([of_version[version][k] for k, version in enumerate(made.versions)]), tokens)


@torch.no_grad()
def continued(theirs: list[Any], policy: QwenOmniPolicy, request: SampleRequest, made: Trajectory) -> Tensor:
    prompt, tokens = policy.prepare(request.prompt, SPEC), made.tensors["tokens"].long()
    rows, inputs = [], given(prompt)
    for k, version in enumerate(made.versions):
        output = theirs[version](**inputs, use_cache=True)
        rows.append(output.logits[0, -1])
        positions = torch.full((3, 1, 1), prompt.next_position + k)
        inputs = {"input_ids": tokens[None, k : k + 1], "position_ids": positions}
        inputs["past_key_values"] = output.past_key_values
    return chosen(torch.stack(rows), tokens)


def given(prompt: Prepared) -> dict[str, Any]:
    inputs = {"input_ids": prompt.ids[None], "attention_mask": torch.ones_like(prompt.ids)[None], **prompt.media}
    return inputs | ({"video_second_per_grid": torch.ones(1)} if "video_grid_thw" in inputs else {})


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    return (logits.float() / SPEC.temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("first", [0, 2, pytest.param(4, marks=pytest.mark.thorough)], ids=["text", "image", "video"])
@pytest.mark.parametrize(("kv", "reference"), [("keep", continued), ("recompute", whole)])
async def test_answers_agree_with_transformers(kv, reference, first, family, path, plain, models, theirs, prompts):
    policy = family[1](path)
    requests = [make_request(prompts[first + number % 2], SPEC, number) for number in range(6)]
    async with running(policy, kv=kv) as engine:
        in_flight = asyncio.create_task(together(engine, requests))
        for version in range(1, len(theirs)):
            published = publish(version, trained(plain, models[version]))
            await engine.stage(*published)
            assert (await policy.while_paused(engine.swap(version))).digest == published[0].digest
        made = await in_flight
        after = await together(engine, requests)
    assert any(one.versions.spans == ((0, 3), (1, 3), (2, 4), (3, 4)) for one in made)
    for request, one, later in zip(requests, made, after, strict=True):
        check_answer(plain, request, one, reference(theirs, plain, request, one), 1e-5)
        assert {*later.versions} == {3}
        check_answer(plain, request, later, whole(theirs, plain, request, later), 1e-5)


async def test_version_0_is_the_checkpoint(plain, models):
    async with running(plain) as engine:
        digest = engine._digest
    weights = trained(plain, models[0])
    assert weights and not [name for name in weights if "visual" in name or "audio_tower" in name]
    assert digest == publish(0, weights)[0].digest
