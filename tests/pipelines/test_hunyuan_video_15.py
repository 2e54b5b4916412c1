"""Tests what HunyuanVideo-1.5 alone has: texts without their padding, and a VAE that takes one video at a time."""

import json
from pathlib import Path

import pytest
import torch
from omni_async_pipelines.hunyuan_video_15.policy import HunyuanVideo15Policy
from omni_async_pipelines.hunyuan_video_15.sampling import HunyuanVideo15Sampling
from omni_async_pipelines.hunyuan_video_15.tiny import build

from omni_async.types import Prompt

SPEC = HunyuanVideo15Sampling(height=32, width=48, num_frames=5)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> HunyuanVideo15Policy:
    return HunyuanVideo15Policy(str(build(tmp_path_factory.mktemp("hunyuan_video_15"))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("words", [1, 301, 302, 5000])
def test_a_prompt_keeps_all_of_its_tokens_and_no_padding(policy, dtype, words):
    codec = policy.load_codec(dtype)
    text = " ".join(["circle"] * words)
    encoded = codec.encode(Prompt(0, text), SPEC)
    asked = len(codec._encoder.tokenizer(f"{text}<|im_end|>\n<|im_start|>assistant\n").input_ids)
    assert len(encoded["prompt_embeds"]) == len(encoded["prompt_mask"]) == min(asked, 1000)
    assert encoded["prompt_mask"].all()


@pytest.mark.parametrize(
    ("text", "quoted"), [("a sign", ""), ('"7"', 'Text "7". '), ('“7” and "open"', 'Text "7". Text "open". ')]
)
def test_the_second_encoder_reads_what_is_quoted(policy, text, quoted):
    encoded = policy.load_codec(torch.float32).encode(Prompt(0, text), SPEC)
    assert encoded["prompt_glyph_mask"].sum() == (len(quoted.encode()) + 1 if quoted else 0)  # and the end of the text
    assert encoded["prompt_glyphs"].any() == bool(quoted) and len(encoded["prompt_glyphs"]) > 0


def test_videos_of_a_batch_are_decoded_and_encoded_as_alone(policy):
    codec = policy.load_codec(torch.float32)
    latents = torch.randn(2, *policy.latent_shape(SPEC), generator=torch.Generator().manual_seed(0))
    media = codec.decode(latents, SPEC)
    for row, video in enumerate(media):
        [alone] = codec.decode(latents[row : row + 1], SPEC)
        assert torch.equal(torch.as_tensor(video.video), torch.as_tensor(alone.video))
    assert torch.equal(codec.encode_media(media, SPEC), torch.cat([codec.encode_media([one], SPEC) for one in media]))


def test_meanflow_models_are_refused(policy, tmp_path):
    assert SPEC.problem(Path(policy.path)) is None
    file = build(tmp_path) / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_meanflow": True}))
    assert "transformer has use_meanflow True, not False" in (SPEC.problem(tmp_path) or "")
