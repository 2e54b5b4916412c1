import subprocess
import sys

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from torch.testing import assert_close

from omni_async.families import find_family
from omni_async.types import Prompt
from pipelines.qwen_image import single_frame
from pipelines.qwen_image.policy import QwenImageCodec, QwenImagePolicy
from pipelines.qwen_image.sampling import QwenImageSampling
from pipelines.qwen_image.tiny import build
from tests.fakes import load_model

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


def test_the_family_is_found_and_imports_no_torch():
    family = find_family("qwen_image")
    assert family.model_index_class == "QwenImagePipeline"
    with pytest.raises(ValueError, match="qwen_image"):
        find_family("qwen_images")
    code = "import sys, pipelines.qwen_image; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


def test_encode_is_diffusers_encode_prompt(codec, pipeline):
    for prompt in PROMPTS:
        expected, _ = pipeline.encode_prompt(prompt)
        conditioning = codec.encode(Prompt(0, prompt), GUIDED)
        assert_close(conditioning["prompt_embeds"], expected[0], rtol=0, atol=1e-6)
        assert_close(conditioning["negative_prompt_embeds"], pipeline.encode_prompt(" ")[0][0], rtol=0, atol=1e-6)
        assert conditioning["prompt_mask"].all()
    assert "negative_prompt_embeds" not in codec.encode(Prompt(0, "x"), PLAIN)


def test_decode_is_diffusers_decode(policy, codec, pipeline):
    latents = torch.randn(3, *policy.latent_shape(PLAIN), generator=torch.Generator().manual_seed(0))
    images = torch.stack([media.image for media in codec.decode(latents, PLAIN)])
    assert images.shape == (3, 3, 64, 32)
    vae = pipeline.vae
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        pixels = vae.decode(pipeline._unpack_latents(latents, 64, 32, 8) * std + mean).sample[:, :, 0]
    expected = (pipeline.image_processor.postprocess(pixels, output_type="pt") * 255).round()
    assert (images.float() - expected).abs().max() <= 1


def test_single_frame_decoding_is_exact_to_rounding(policy, codec):
    latents = torch.randn(2, 16, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = AutoencoderKLQwenImage.from_pretrained(policy.path, subfolder="vae").decode(latents).sample[:, :, 0]
        assert_close(single_frame.decode(codec.vae, latents), expected, rtol=0, atol=2e-5)
        with pytest.raises(ValueError, match="single frames"):
            single_frame.decode(codec.vae, latents.repeat(1, 1, 2, 1, 1))


def velocity(
    policy: QwenImagePolicy, transformer: torch.nn.Module, x: torch.Tensor, sigma: torch.Tensor, c, scale: float
) -> torch.Tensor:
    with torch.no_grad():
        return policy.velocity(transformer, x, sigma, c, QwenImageSampling(height=64, width=32, true_cfg_scale=scale))


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_padded_batch_is_its_samples(policy, codec, scale):
    transformer = load_model(policy)
    rows = [codec.encode(Prompt(0, prompt), GUIDED) for prompt in PROMPTS]
    assert len({len(row["prompt_embeds"]) for row in rows}) == 3
    x = torch.randn(3, *policy.latent_shape(PLAIN), generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([1.0, 0.5, 0.02])
    batch = velocity(policy, transformer, x, sigma, policy.stack_conditioning(rows), scale)
    assert batch.dtype == torch.float32
    for i, row in enumerate(rows):
        alone = velocity(policy, transformer, x[i : i + 1], sigma[i : i + 1], policy.stack_conditioning([row]), scale)
        assert_close(batch[i : i + 1], alone, rtol=0, atol=1e-5)


def test_bfloat16_weights_take_and_return_float32(policy, codec):
    transformer = load_model(policy, torch.bfloat16)
    x = torch.randn(1, *policy.latent_shape(PLAIN))
    v = velocity(
        policy,
        transformer,
        x,
        torch.tensor([0.5]),
        policy.stack_conditioning([codec.encode(Prompt(0, "7"), PLAIN)]),
        1.0,
    )
    assert next(transformer.parameters()).dtype == torch.bfloat16
    assert v.dtype == torch.float32


def test_gradients_reach_the_transformer_through_both_branches(policy, codec):
    transformer = load_model(policy)
    c = policy.stack_conditioning([codec.encode(Prompt(0, "7"), GUIDED)])
    x = torch.randn(1, *policy.latent_shape(PLAIN))
    policy.velocity(transformer, x, torch.tensor([0.5]), c, GUIDED).square().mean().backward()
    assert transformer["transformer"].proj_out.weight.grad.abs().max() > 0


def test_guidance_needs_a_negative_prompt(policy, codec):
    c = policy.stack_conditioning([codec.encode(Prompt(0, "7"), PLAIN)])
    with pytest.raises(ValueError, match="negative prompt"):
        velocity(policy, load_model(policy), torch.randn(1, 8, 64), torch.tensor([0.5]), c, 2.0)


def test_sigmas_are_the_schedulers(policy, pipeline):
    pipeline("7", height=64, width=32, num_inference_steps=6, true_cfg_scale=1.0, output_type="latent")
    assert torch.equal(policy.sigmas(6, PLAIN), pipeline.scheduler.sigmas)


def test_sizes_and_folders_that_cannot_work_are_named(policy, tmp_path):
    with pytest.raises(ValueError, match="multiples of 16, got 64 x 40"):
        policy.latent_shape(QwenImageSampling(height=64, width=40))
    with pytest.raises(ValueError, match="is missing"):
        QwenImagePolicy(str(tmp_path))
