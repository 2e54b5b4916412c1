"""Tests which requests share conditioning, with a codec that sees the images of prompts."""

from typing import Any

import msgspec
import torch
from PIL import Image
from tensordict import TensorDict

from omni_async.data.image_files import read_prompt_image
from omni_async.data.prompts import load_prompts
from omni_async.media import Media
from omni_async.rollout.stepping import ConditioningCache
from omni_async.types import Prompt
from tests.rollout.conftest import make_request


class SeeingCodec:
    """A codec whose conditioning is the mean of the prompt's images."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []

    def to(self, device: Any) -> Any:
        return self

    def encode(self, prompt: Prompt, spec: Any) -> TensorDict:
        self.asked.append((prompt.text, spec.negative_prompt if spec.guided else None))
        images = [torch.as_tensor(read_prompt_image(image).image).float() for image in prompt.images]
        return TensorDict({"means": torch.tensor([image.mean() for image in images])}, batch_size=[])

    def decode(self, latents: torch.Tensor, spec: Any) -> list[Media]:
        raise NotImplementedError

    def encode_media(self, media: list[Media], spec: Any) -> torch.Tensor:
        raise NotImplementedError


def test_the_same_text_with_other_images_is_another_prompt(tmp_path):
    lines = []
    for number, (name, grey) in enumerate((("a.png", 10), ("b.png", 200), ("copy.png", 10))):
        Image.new("RGB", (4, 4), (grey,) * 3).save(tmp_path / name)
        lines.append(f'{{"prompt": "edit it", "image": "{name}", "number": {number}}}')
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    codec = SeeingCodec()
    cache = ConditioningCache(codec)
    requests = [
        msgspec.structs.replace(make_request(), prompt=prompt)
        for prompt in load_prompts(str(tmp_path / "p.jsonl"), "data.prompts", 100)
    ]
    assert [cache.of(request)["means"].tolist() for request in requests * 2] == [[10.0], [200.0], [10.0]] * 2
    assert len(codec.asked) == 2  # the copy has the same bytes


def test_a_prompt_is_encoded_once_and_the_negative_one_only_where_it_guides():
    cache = ConditioningCache(codec := SeeingCodec())
    unguided, guided = make_request(negative_prompt="blur"), make_request(negative_prompt="blur", true_cfg_scale=4.0)
    for request in (unguided, guided, unguided, guided):
        cache.of(request)
    assert codec.asked == [(unguided.prompt.text, None), (guided.prompt.text, "blur")]
