import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from torch.testing import assert_close

from omni_async.types import Prompt
from pipelines.qwen_image import single_frame
from pipelines.qwen_image.policy import QwenImageCodec, QwenImagePolicy
from pipelines.qwen_image.sampling import QwenImageSampling
from pipelines.qwen_image.tiny import build

PROMPTS = ("the digit 7", "a photo of a red circle on a white background", "7")
PLAIN = QwenImageSampling(height=64, width=32)
GUIDED = QwenImageSampling(height=64, width=32, true_cfg_scale=2.0)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> QwenImagePolicy:
    return QwenImagePolicy(str(build(tmp_path_factory.mktemp("policy"), layers=2)))


@pytest.fixture(scope="module")
def codec(policy: QwenImagePolicy) -> QwenImageCodec:
    return policy.load_codec(torch.float32)


@pytest.fixture(scope="module")
def pipeline(policy: QwenImagePolicy) -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(policy.path)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_encode_is_diffusers_encode_prompt(codec, pipeline):
    for prompt in PROMPTS:
        expected, _ = pipeline.encode_prompt(prompt)
        conditioning = codec.encode(Prompt(0, prompt), GUIDED)
        assert_close(conditioning["prompt_embeds"], expected[0], rtol=0, atol=1e-6)
        assert_close(conditioning["negative_prompt_embeds"], pipeline.encode_prompt(" ")[0][0], rtol=0, atol=1e-6)
        assert conditioning["prompt_mask"].all()
    assert "negative_prompt_embeds" not in codec.encode(Prompt(0, "x"), PLAIN)


def test_single_frame_decoding_is_exact_to_rounding(policy, codec):
    latents = torch.randn(2, 16, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = AutoencoderKLQwenImage.from_pretrained(policy.path, subfolder="vae").decode(latents).sample[:, :, 0]
        assert_close(single_frame.decode(codec.vae, latents), expected, rtol=0, atol=2e-5)
        with pytest.raises(ValueError, match="single frames"):
            single_frame.decode(codec.vae, latents.repeat(1, 1, 2, 1, 1))


def test_sizes_that_cannot_work_are_named(policy):
    with pytest.raises(ValueError, match="multiples of 16, got 64 x 40"):
        policy.latent_shape(QwenImageSampling(height=64, width=40))
