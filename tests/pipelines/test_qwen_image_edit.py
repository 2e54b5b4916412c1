"""Tests what Qwen-Image-Edit alone has: a prompt's image, prompts without one, and both in one batch."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions
from msgspec.structs import replace
from omni_async_pipelines.qwen_image.policy import QwenImagePolicy
from omni_async_pipelines.qwen_image_edit.policy import QwenImageEditCodec, QwenImageEditPolicy, fitted
from omni_async_pipelines.qwen_image_edit.sampling import QwenImageEditSampling
from PIL import Image
from torch.testing import assert_close

from omni_async.commands.parity.case import Upstream
from omni_async.commands.parity.model import Subject, check_model
from omni_async.data.image_files import prompt_image
from omni_async.rollout.stepping import ConditioningCache
from omni_async.types import Prompt, PromptImage
from tests.pipelines.families import first_of

EDIT = first_of("qwen_image_edit")
PLAIN, GUIDED = EDIT.specs
TEXT = Prompt(0, "a red circle")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return EDIT.subject(tmp_path_factory.mktemp("qwen_image_edit"))


def picture(folder: Path, width: int, height: int, name: str = "image.png") -> PromptImage:
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(folder / name)
    return prompt_image(folder / name, name)


class TextUpstream(Upstream):
    """Qwen-Image's pipeline, of the parts of an Edit checkpoint."""

    not_arguments = ("image_area",)

    def __init__(self, path: str) -> None:
        super().__init__(path)
        parts = {name: part for name, part in self.pipeline.components.items() if name != "processor"}
        self.pipeline = QwenImagePipeline(**parts)
        self.pipeline.set_progress_bar_config(disable=True)


def test_without_an_image_it_is_qwen_image(subject):
    case = dataclasses.replace(EDIT.case, image_sizes=(), upstream=TextUpstream)
    rows = list(check_model(Subject(case, subject.path, QwenImageEditPolicy(subject.path))))
    assert [row for row in rows if not row.passed] == []

    theirs = QwenImagePolicy(subject.path)
    expected, found = theirs.load_codec(torch.float32).encode(TEXT, GUIDED), subject.codec.encode(TEXT, GUIDED)
    assert found["image"].shape == (0, 0, 64)
    assert {*found.keys()} - {"image"} == {*expected.keys()}
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    own = subject.codec.encode(replace(TEXT, negative_prompt="dull"), GUIDED)
    as_spec = subject.codec.encode(TEXT, replace(GUIDED, negative_prompt="dull"))
    assert_close(own["negative_prompt_embeds"], as_spec["negative_prompt_embeds"])
    subject.codec.encode(subject.case.prompts[1], GUIDED)
    again = subject.codec.encode(TEXT, GUIDED)
    assert torch.equal(again["prompt_embeds"], found["prompt_embeds"]), "also after an image"
    noise, sigma = subject.noise(GUIDED), torch.tensor([0.7])
    velocities = [
        policy.velocity(subject.model, noise, sigma, policy.stack_conditioning([conditioning]), GUIDED)
        for policy, conditioning in ((theirs, expected), (subject.policy, found))
    ]
    assert torch.equal(*velocities)


class NumberedAsText(QwenImageEditCodec):
    """Drops the types of tokens: transformers 5 then numbers an image's tokens in a row."""

    def encode_tokens(self, tokens: Any, num_dropped: int) -> dict[str, torch.Tensor]:
        tokens.pop("mm_token_type_ids", None)
        return super().encode_tokens(tokens, num_dropped)


class WithoutRows(QwenImageEditPolicy):
    """Gives the denoiser an image's tokens as one row."""

    def inputs(self, latents: Any, sigma: Any, text: Any, spec: Any) -> dict[str, Any]:
        flat = [image.flatten(0, 1)[None] for image in text["image"]]
        return super().inputs(latents, sigma, text | {"image": flat}, spec)


@pytest.mark.parametrize(
    ("wrong", "because"),
    [(NumberedAsText, "argument 'transformer.encoder_hidden_states'"), (WithoutRows, "layer transformer.pos_embed")],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_parity_catches_misplaced_image_tokens(wrong, because, subject):
    policy = wrong(subject.path) if issubclass(wrong, QwenImageEditPolicy) else QwenImageEditPolicy(subject.path)
    if issubclass(wrong, QwenImageEditCodec):
        policy.codec = wrong
    found = {row.check: row for row in check_model(Subject(subject.case, subject.path, policy))}
    row = found["noise-free samples, spec 1"]
    assert not row.passed and because in row.note, row


@pytest.mark.parametrize("size", [(64, 64), (1920, 1080), (333, 1000), (17, 50)])
def test_an_image_gets_the_published_size(size, tmp_path):
    made = fitted(picture(tmp_path, *size), QwenImageEditSampling().image_area)
    assert made.size == calculate_dimensions(1024 * 1024, size[0] / size[1])[:2]


def test_batched_rows_have_the_gradients_of_single_ones(subject):
    rows = [subject.codec.encode(prompt, GUIDED) for prompt in subject.case.prompts]
    assert len({row["image"].shape for row in rows}) == 3
    latents = torch.randn(3, *subject.policy.latent_shape(GUIDED), generator=torch.Generator().manual_seed(0))
    sigma, weights = torch.tensor([0.9, 0.6, 0.3]), subject.model["transformer"].get_parameter("img_in.weight")

    def gradient(*chosen: int) -> torch.Tensor:
        stacked = subject.policy.stack_conditioning([rows[row] for row in chosen])
        v = subject.policy.velocity(subject.model, latents[[*chosen]], sigma[[*chosen]], stacked, GUIDED)
        return torch.autograd.grad(v.square().sum(), weights)[0]

    alone = torch.stack([gradient(row) for row in range(3)]).sum(0)
    assert_close(gradient(0, 1, 2), alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))


def test_encoding_depends_on_image_and_area(subject, tmp_path):
    cache = ConditioningCache(subject.codec)
    one, copy = picture(tmp_path, 40, 24), picture(tmp_path, 40, 24, "copy.png")
    other = picture(tmp_path, 24, 40, "other.png")

    def encoded(images: tuple[PromptImage, ...], **changes: Any) -> bool:
        return cache.of(EDIT.case.request(replace(PLAIN, **changes), prompt=replace(TEXT, images=images)))[1]

    assert encoded((one,)) and not encoded((one,)) and not encoded((copy,)), "the copy has the same bytes"
    assert encoded((other,)) and encoded(()) and encoded((one,), image_area=32 * 64)
    assert not encoded((one,), height=32, width=48)


def test_unusable_prompts_are_refused(subject, tmp_path):
    def refusal(prompt: Prompt, spec: Any = PLAIN) -> str:
        with pytest.raises(ValueError) as refused:
            subject.codec.encode(prompt, spec)
        return str(refused.value)

    image = picture(tmp_path, 40, 24)
    seeing = replace(TEXT, images=(image,))
    assert refusal(replace(TEXT, images=(image, image))) == "Qwen-Image-Edit takes one image, the prompt has 2"
    narrow = replace(TEXT, images=(picture(tmp_path, 1000, 10, "narrow.png"),))
    assert "of 1000 x 10 pixels is too narrow: at image_area 4096" in refusal(narrow)
    assert refusal(replace(seeing, text="<|image_pad|>")).startswith("the prompt holds <|image_pad|>, where")
    assert "takes at most 1024" in refusal(replace(seeing, text="7 " * 1025))
    picture(tmp_path, 24, 40)
    assert refusal(seeing).endswith("image.png has changed since the run began")
    (tmp_path / "image.png").unlink()
    assert "cannot be read: No such file" in refusal(seeing)
