"""Tests what all engines do: the noise they add, which conditioning they share, which version they may switch to."""

from typing import Any

import torch
from msgspec.structs import replace
from PIL import Image
from tensordict import TensorDict
from torch.testing import assert_close

from omni_async.data.image_files import read_prompt_image
from omni_async.data.prompts import load_prompts
from omni_async.diffusion.sde.noise import step_noise
from omni_async.diffusion.sde.schedules import linear
from omni_async.rollout.stepping import ConditioningCache, InFlight, take_steps
from omni_async.types import Prompt, SdeWindow
from tests.rollout.conftest import make_request


def test_noise_depends_on_the_steps_number():
    shape = (3, 4)
    for start in range(3):
        sample = InFlight(make_request(sde_kind="dance", window=SdeWindow(start, 3)), linear(6), shape)
        while not sample.done:
            take_steps([sample], torch.zeros(1, *shape), version=0)
        tensors = sample.tensors()
        for position, step in enumerate(range(start, start + 3)):
            added = tensors["latents"][position + 1] - tensors["means"][position]
            expected = 0.7 * (1 / 6) ** 0.5 * step_noise(sample.request.seed, step, shape)
            assert_close(added, expected, rtol=1e-4, atol=1e-5)


class SeeingCodec:
    """A codec whose conditioning is the mean of the prompt's images."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    def encode(self, prompt: Prompt, spec: Any) -> TensorDict:
        self.asked.append((prompt.text, spec.negative_prompt if spec.guided else None))
        images = [torch.as_tensor(read_prompt_image(image).image).float() for image in prompt.images]
        return TensorDict({"means": torch.tensor([image.mean() for image in images])}, batch_size=[])


def test_prompts_are_encoded_once(tmp_path):
    lines = []
    for name, grey in (("a.png", 10), ("b.png", 200), ("copy.png", 10)):
        Image.new("RGB", (4, 4), (grey,) * 3).save(tmp_path / name)
        lines.append(f'{{"prompt": "edit it", "image": "{name}", "number": {len(lines)}}}')
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    cache = ConditioningCache(codec := SeeingCodec())
    requests = [make_request(prompt=one) for one in load_prompts(str(tmp_path / "p.jsonl"), "data.prompts", 100)]
    assert [cache.of(request)[0]["means"].tolist() for request in requests * 2] == [[10.0], [200.0], [10.0]] * 2
    assert len(codec.asked) == 2  # the copy has the same bytes
    codec.asked.clear()
    unguided, guided = make_request(negative_prompt="blur"), make_request(negative_prompt="blur", true_cfg_scale=4.0)
    for request in (unguided, guided, unguided, guided):
        cache.of(request)
    assert codec.asked == [(unguided.prompt.text, None), (guided.prompt.text, "blur")]
    cache.of(replace(unguided, encoded_for=guided.spec))  # for a guided teacher
    assert len(codec.asked) == 2
    cache.of(replace(guided, prompt=replace(guided.prompt, negative_prompt="dull")))
    assert len(codec.asked) == 3


def test_the_cache_is_bounded_by_bytes():
    class Wide(SeeingCodec):
        def encode(self, prompt: Prompt, spec: Any) -> TensorDict:
            super().encode(prompt, spec)
            return TensorDict({"embeds": torch.zeros(100)}, batch_size=[])

    cache = ConditioningCache(codec := Wide(), most_bytes=1000)  # two of 400 bytes
    new = [cache.of(make_request(prompt=Prompt(0, text)))[1] for text in ("a", "b", "a", "c", "a", "b")]
    assert new == [True, True, False, True, False, True] and [text for text, _ in codec.asked] == ["a", "b", "c", "b"]
    tight = ConditioningCache(Wide(), most_bytes=1)
    assert tight.of(make_request())[0] is tight.of(make_request())[0], "one is always kept: a group's samples share it"


def test_other_sizes_may_share_conditioning():
    class Reads(SeeingCodec):
        def conditioning_key(self, spec: Any) -> Any:
            return spec.guided, spec.negative_prompt

    cache = ConditioningCache(codec := Reads())
    for changes in ({}, {"height": 32}, {"true_cfg_scale": 4.0}, {"true_cfg_scale": 3.0}):
        cache.of(make_request(**changes))
    assert len(codec.asked) == 2
