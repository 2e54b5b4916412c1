"""Tests Qwen-Image's prompts, pixels and latents: what diffusers' own encoder and decoder say, and the way back."""

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
from omni_async.types import Prompt
from recipes.quickstart.glyphs import render_digit
from tests.pipelines.families import PROMPTS
from tests.support.places import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart" / "checkpoint"
PLAIN = QwenImageSampling(height=64, width=32)
GUIDED = QwenImageSampling(height=64, width=32, true_cfg_scale=2.0)


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


def decode(codec: QwenImageCodec, latents: torch.Tensor, height: int = 64, width: int = 32) -> torch.Tensor:
    made = codec.decode(latents, QwenImageSampling(height=height, width=width))
    return torch.stack([media.image for media in made])


def untouched_vae(policy: QwenImagePolicy) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage.from_pretrained(policy.path, subfolder="vae")


def by_diffusers(policy: QwenImagePolicy, images: torch.Tensor) -> torch.Tensor:
    """Encodes with an untouched VAE on a video of one frame, in float64, and diffusers' own packing."""
    vae = untouched_vae(policy).double()
    both = (vae.config.latents_mean, vae.config.latents_std)
    mean, std = (torch.tensor(v, dtype=torch.float64).view(1, -1, 1, 1, 1) for v in both)
    with torch.no_grad():
        mode = vae.encode(images.double()[:, :, None] / 255 * 2 - 1).latent_dist.mode()
    latents = ((mode - mean) / std)[:, :, 0]
    return QwenImagePipeline._pack_latents(latents, *latents.shape)


def test_encoding_is_diffusers_encoding(policy, codec):
    images = random_images(3)
    latents = encode(codec, images)
    assert latents.dtype == torch.float32
    assert latents.shape == (3, *policy.latent_shape(PLAIN))
    assert_close(latents.double(), by_diffusers(policy, images), rtol=0, atol=1e-5)


def test_a_specialised_vae_still_encodes_as_diffusers_calls_it(policy, codec):
    frames = random_images(2)[:, :, None].float() / 127.5 - 1
    with torch.no_grad():
        expected = untouched_vae(policy).encode(frames).latent_dist.mode()
        assert_close(codec.vae.encode(frames).latent_dist.mode(), expected, rtol=0, atol=1e-5)


def test_packing_is_undone_by_decode(codec, monkeypatch):
    """Uses a VAE that changes nothing: decode hands to it what encode_media took from it."""
    maps = torch.randn(2, 16, 1, 8, 4, generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []

    def keep(vae: object, latents: torch.Tensor) -> torch.Tensor:
        seen.append(latents)
        return torch.zeros(len(latents), 3, 64, 32)

    monkeypatch.setattr(single_frame, "encode", lambda vae, pixels: maps)
    monkeypatch.setattr(single_frame, "decode", keep)
    decode(codec, encode(codec, random_images(2)))
    assert_close(torch.cat(seen), maps, rtol=0, atol=1e-6)


def test_pixels_reach_the_vae_as_they_left_it(codec, monkeypatch):
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    seen: list[torch.Tensor] = []

    def keep(vae: object, pixels: torch.Tensor) -> torch.Tensor:
        seen.append(pixels)
        return torch.zeros(1, 16, 1, 2, 2)

    monkeypatch.setattr(single_frame, "encode", keep)
    encode(codec, images)
    assert (seen[0].min(), seen[0].max()) == (-1, 1)
    monkeypatch.setattr(single_frame, "decode", lambda vae, latents: seen[0])
    assert torch.equal(decode(codec, torch.zeros(1, 1, 64), 16, 16), images)


def test_an_image_always_has_the_same_latents(codec):
    images = random_images(2)
    torch.manual_seed(1)
    first = encode(codec, images)
    torch.manual_seed(2)
    assert torch.equal(encode(codec, images.clone()), first)
    assert not first.requires_grad
    assert not torch.equal(first[0], first[1])


def test_large_batches_are_cut_and_keep_their_order(codec, monkeypatch):
    images = random_images(5)
    whole = encode(codec, images)
    monkeypatch.setattr(parts, "_PIXELS_AT_ONCE", 2 * 64 * 32)
    assert_close(encode(codec, images), whole, rtol=0, atol=1e-5)


def test_bfloat16_weights_give_float32_latents(policy):
    images = random_images(1)
    latents = encode(policy.load_codec(torch.bfloat16), images)
    assert latents.dtype == torch.float32
    expected = by_diffusers(policy, images)
    assert (latents - expected).norm() < 0.05 * expected.norm()


def test_the_quickstarts_vae_gives_back_what_it_drew():
    codec = QwenImagePolicy(str(QUICKSTART)).load_codec(torch.float32)
    rng = random.Random(0)
    digits = np.stack([render_digit(digit, rng) for digit in "0123456789"])
    images = torch.from_numpy(digits)[:, None].expand(-1, 3, -1, -1)
    drawn = decode(codec, encode(codec, images), 64, 64)
    again = decode(codec, encode(codec, drawn), 64, 64)
    error = (again.float() - drawn.float()) / 255
    assert error.square().mean((1, 2, 3)).sqrt().max() < 0.03
    assert drawn.float().std() / 255 > 0.2


def test_encode_is_diffusers_encode_prompt(policy, codec):
    pipeline = QwenImagePipeline.from_pretrained(policy.path)
    conditioning = codec.encode(Prompt(0, PROMPTS[1]), GUIDED)
    for name, text in (("prompt_embeds", PROMPTS[1]), ("negative_prompt_embeds", " ")):
        assert_close(conditioning[name], pipeline.encode_prompt(text)[0][0], rtol=0, atol=1e-6)
    assert conditioning["prompt_mask"].all()
    assert "negative_prompt_embeds" not in codec.encode(Prompt(0, "x"), PLAIN)


def test_single_frame_decoding_is_exact_to_rounding(policy, codec):
    latents = torch.randn(2, 16, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = untouched_vae(policy).decode(latents).sample[:, :, 0]
        assert_close(single_frame.decode(codec.vae, latents), expected, rtol=0, atol=2e-5)
        with pytest.raises(ValueError, match="single frames"):
            single_frame.decode(codec.vae, latents.repeat(1, 1, 2, 1, 1))


def test_sizes_that_cannot_work_are_named(policy):
    with pytest.raises(ValueError, match="multiples of 16, got 64 x 40"):
        policy.latent_shape(QwenImageSampling(height=64, width=40))
