"""Tests Qwen-Image's pixels and latents against diffusers' own encoder and decoder."""

import random

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from omni_async_pipelines import parts, single_frame
from omni_async_pipelines.qwen_image.policy import QwenImageCodec, QwenImagePolicy
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from omni_async_pipelines.qwen_image.tiny import build
from torch.testing import assert_close

from omni_async.media import Media
from recipes.quickstart.glyphs import render_digit
from tests.support.places import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart" / "checkpoint"
PLAIN = QwenImageSampling(height=64, width=32)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> QwenImagePolicy:
    return QwenImagePolicy(str(build(tmp_path_factory.mktemp("qwen_image"), layers=1)))


@pytest.fixture(scope="module")
def codec(policy: QwenImagePolicy) -> QwenImageCodec:
    return policy.load_codec(torch.float32)


def random_images(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 64, 32), dtype=torch.uint8, generator=generator)


def encode(codec: QwenImageCodec, images: torch.Tensor) -> torch.Tensor:
    height, width = images.shape[2:]
    return codec.encode_media([Media(image=image) for image in images], QwenImageSampling(height=height, width=width))


def untouched_vae(policy: QwenImagePolicy) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage.from_pretrained(policy.path, subfolder="vae")


def by_diffusers(policy: QwenImagePolicy, images: torch.Tensor) -> torch.Tensor:
    """Encodes with an untouched VAE, in float64, and diffusers' own packing."""
    vae = untouched_vae(policy).double()
    both = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1, 1) for v in both)
    with torch.no_grad():
        mode = vae.encode(images.double()[:, :, None] / 255 * 2 - 1).latent_dist.mode()
    latents = ((mode - mean) / std)[:, :, 0]
    return QwenImagePipeline._pack_latents(latents, *latents.shape)


def test_encoding_is_diffusers_encoding(policy, codec, monkeypatch):
    images = random_images(3)
    expected = by_diffusers(policy, images)
    torch.manual_seed(1)
    latents = encode(codec, images)
    assert latents.dtype == torch.float32 and not latents.requires_grad
    assert latents.shape == (3, *policy.latent_shape(PLAIN))
    assert_close(latents.double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(encode(codec, images.clone()), latents), "no randomness"
    bfloat16 = encode(policy.load_codec(torch.bfloat16), images)
    assert bfloat16.dtype == torch.float32
    assert (bfloat16 - expected).norm() < 0.05 * expected.norm()
    monkeypatch.setattr(parts, "_PIXELS_AT_ONCE", 2 * 64 * 32)
    assert_close(encode(codec, images), latents, rtol=0, atol=1e-5)


def test_the_quickstarts_vae_gives_back_what_it_drew():
    codec, spec = QwenImagePolicy(str(QUICKSTART)).load_codec(torch.float32), QwenImageSampling(height=64, width=64)

    def decoded_and_encoded(images: torch.Tensor) -> torch.Tensor:
        return torch.stack([media.image for media in codec.decode(encode(codec, images), spec)])

    rng = random.Random(0)
    digits = np.stack([render_digit(digit, rng) for digit in "0123456789"])
    drawn = decoded_and_encoded(torch.from_numpy(digits)[:, None].expand(-1, 3, -1, -1))
    error = (decoded_and_encoded(drawn).float() - drawn.float()) / 255
    assert error.square().mean((1, 2, 3)).sqrt().max() < 0.03
    assert drawn.float().std() / 255 > 0.2


def test_single_frames_are_exact_to_rounding(policy, codec):
    latents = torch.randn(2, 16, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    frames = random_images(2)[:, :, None].float() / 127.5 - 1
    with torch.no_grad():
        expected = untouched_vae(policy).decode(latents).sample[:, :, 0]
        assert_close(single_frame.decode(codec.vae, latents), expected, rtol=0, atol=2e-5)
        expected = untouched_vae(policy).encode(frames).latent_dist.mode()
        assert_close(codec.vae.encode(frames).latent_dist.mode(), expected, rtol=0, atol=1e-5)
        with pytest.raises(ValueError, match="single frames"):
            single_frame.decode(codec.vae, latents.repeat(1, 1, 2, 1, 1))


def test_wrong_sizes_are_named(policy):
    with pytest.raises(ValueError, match="multiples of 16, got 64 x 40"):
        policy.latent_shape(QwenImageSampling(height=64, width=40))
