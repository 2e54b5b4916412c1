"""Tests what Wan2.2 image-to-video alone has: an image that is encoded for a size, and checkpoints refused."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from omni_async_pipelines.wan2_2_i2v.policy import Wan22I2VPolicy
from omni_async_pipelines.wan2_2_i2v.sampling import Wan22I2VSampling
from omni_async_pipelines.wan2_2_i2v.tiny import build
from PIL import Image

from omni_async.config import load
from omni_async.data.image_files import prompt_image
from omni_async.types import Prompt, PromptImage
from tests.support.fakes import load_model
from tests.support.places import ROOT

SPEC = Wan22I2VSampling(height=32, width=48, num_frames=9, max_sequence_length=16)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Wan22I2VPolicy:
    return Wan22I2VPolicy(str(build(tmp_path_factory.mktemp("wan2_2_i2v"))))


@pytest.fixture
def prompt_of(tmp_path: Path) -> Callable[..., Prompt]:
    """Makes a prompt with images of the given levels of grey."""

    def image(level: int) -> PromptImage:
        file = tmp_path / f"{level}.png"
        Image.new("RGB", (30, 20), (level,) * 3).save(file)
        return prompt_image(file, file.name)

    return lambda *levels: Prompt(0, "the digit 7", images=tuple(map(image, levels)))


def test_an_encoded_image_is_that_of_one_size(policy):
    key = policy.load_codec(torch.float32).conditioning_key
    assert key(SPEC) == key(replace(SPEC, fps=8.0))
    for change in ({"height": 48}, {"width": 32}, {"num_frames": 5}, {"guidance_scale": 2.0}):
        assert key(SPEC) != key(replace(SPEC, **change))


@pytest.mark.parametrize("levels", [(), (0, 255)], ids=["none", "two"])
def test_a_prompt_that_has_not_one_image_is_refused(policy, prompt_of, levels):
    with pytest.raises(ValueError, match=f"of one image, but the prompt has {len(levels)}"):
        policy.load_codec(torch.float32).encode(prompt_of(*levels), SPEC)


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("transformer/config.json", {"image_dim": 1280}, "also reads the image by a CLIP encoder, as Wan2.1 does"),
        ("model_index.json", {"image_encoder": ["transformers", "CLIPVisionModel"]}, "by a CLIP encoder"),
        ("transformer/config.json", {"in_channels": 16}, "has in_channels 16, expected 36"),
        ("model_index.json", {"expand_timesteps": True}, "does not take the image as channels"),
    ],
)
def test_other_checkpoints_are_refused(file, change, said, tmp_path):
    build(tmp_path)
    assert SPEC.problem(tmp_path) is None
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | change))
    for read in (SPEC.problem, lambda folder: Wan22I2VPolicy(str(folder))):
        with pytest.raises(ValueError, match=said) as refused:
            read(tmp_path)
        assert "\n" not in str(refused.value)


def test_the_recipe_trains_both_experts(policy):
    recipe = load(ROOT / "recipes" / "wan22_i2v_pickscore" / "flow_grpo_lora.yaml")
    targets = tuple(f".{target}" for target in recipe.model.lora.target_modules)
    bound = Counter(name.split(".")[0] for name, _ in load_model(policy).named_modules() if name.endswith(targets))
    assert bound == {"transformer": 2 * 10, "transformer_2": 2 * 10}  # in two blocks
    assert [policy.component_of(sigma) for sigma in (0.9, 0.89)] == ["transformer", "transformer_2"]
    sigmas = policy.sigmas(recipe.rollout.num_inference_steps, SPEC)
    assert policy.component_of(float(sigmas[recipe.rollout.sde.window.range[0]])) == "transformer"
