"""Tests the scorer of video and sound with a small random PE-AV checkpoint, against its encoders asked one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PeAudioFeatureExtractor, PeAudioVideoConfig, PeAudioVideoModel, PeVideoVideoProcessor

from omni_async.config import schema
from omni_async.media import Media
from omni_async.plugins.families import MediaShape
from omni_async.rewards import registry
from omni_async.rewards.loaded import LoadedReward
from omni_async.types import Prompt
from tests.support.images import score_all

RATE, SIDE, WIDTH = 16000, 32, 16
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]
RNG = np.random.default_rng(0)


def video(frames: int, seconds: float) -> Media:
    shown = RNG.integers(0, 256, (frames, 3, SIDE, SIDE), dtype=np.uint8)
    heard = RNG.uniform(-1, 1, (2, int(seconds * RATE))).astype(np.float32)
    return Media(video=shown, fps=8, audio=heard, sample_rate=RATE)


SAMPLES = [video(6, 0.5), video(4, 0.31), video(6, 0.5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {**sizes, "head_dim": 8}
    vit = {"img_size": SIDE, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "ref_feat_shape": (4, 4)}
    config = PeAudioVideoConfig(
        text_config={**sizes, "num_hidden_layers": 2, "vocab_size": 40, "pad_token_id": 0},
        audio_video_config={
            **heads,
            "audio_config": {
                **heads,
                "dac_config": {"downsampling_ratios": [4, 8], "encoder_hidden_size": 8, "codebook_dim": 8},
            },
            "video_config": {**heads, "vision_config": {"num_classes": 12, "model_args": vit}},
        },
    )
    model, folder = PeAudioVideoModel(config).eval(), tmp_path_factory.mktemp("pe_av") / "tiny"
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    PeAudioFeatureExtractor(sampling_rate=RATE, hop_length=32).save_pretrained(folder)
    steps = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
    half, size = [0.5] * 3, {"height": SIDE, "width": SIDE}
    PeVideoVideoProcessor(**steps, size=size, image_mean=half, image_std=half).save_pretrained(folder)
    return folder


def reward(folder: Path, **params: Any) -> schema.Reward:
    return schema.Reward(scorers=(schema.Scorer(name="video_audio", params={"path": str(folder), **params}),))


def expected(folder: Path, media: Media, shown: list[int]) -> tuple[float, float]:
    """The cosine and the logit of a sample, by the two encoders and their heads."""
    model = PeAudioVideoModel.from_pretrained(folder).eval()
    mono = media.audio.mean(axis=0)
    mono = np.pad(mono, (0, -len(mono) % 32), "reflect")
    frames = media.video[shown] / 127.5 - 1
    pixels = torch.tensor(frames, dtype=torch.float32)[None]
    with torch.no_grad():
        heard = model.audio_model.audio_encoder(torch.tensor(mono)[None, None]).pooler_output
        seen = model.video_model.video_encoder(pixels).pooler_output
        a, v = model.audio_model.audio_head(heard)[0].double(), model.video_model.video_head(seen)[0].double()
    logit = (a @ v) * model.audio_video_logit_scale.item() + model.audio_video_logit_bias.item()
    return (a @ v / (a @ a).sqrt() / (v @ v).sqrt()).item(), logit.item()


@pytest.mark.parametrize("device", DEVICES)
def test_a_sample_scores_the_cosine_of_its_video_and_its_sound(checkpoint: Path, device: str) -> None:
    wanted = [expected(checkpoint, one, [*range(len(one.video))]) for one in SAMPLES]
    prompts = [Prompt(i, "") for i in range(len(SAMPLES))]
    found = score_all(LoadedReward.load(reward(checkpoint), float(device != "cpu")), SAMPLES, prompts)
    assert [score.value for score in found] == pytest.approx([cosine for cosine, _ in wanted], abs=1e-4)
    assert [score.parts["logit"] for score in found] == pytest.approx(
        [logit for _, logit in wanted], rel=1e-3, abs=1e-3
    )
    assert len({round(score.value, 3) for score in found}) == 3


def test_evenly_spaced_frames_are_looked_at_if_asked(checkpoint: Path) -> None:
    [score] = score_all(LoadedReward.load(reward(checkpoint, frames=2)), SAMPLES[:1], [Prompt(0, "")])
    assert score.value == pytest.approx(expected(checkpoint, SAMPLES[0], [0, 5])[0], abs=1e-4)


def test_samples_without_sound_are_refused_before_the_run(checkpoint: Path) -> None:
    [scorer] = reward(checkpoint).scorers
    both = [MediaShape("video", (4, 8, 8, 3), 8), MediaShape("audio", (1, 100), RATE)]
    registry.check(scorer, both)
    for made, lacks in ((both[:1], "audio"), (both[1:], "video")):
        with pytest.raises(registry.ScorerConfigError, match=f"needs samples with video and audio.* no {lacks}"):
            registry.check(scorer, made)


def test_what_is_not_there_is_known_before_anything_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**params: Any) -> str:
        with pytest.raises(registry.ScorerConfigError) as error:
            registry.check_files(reward(checkpoint, **params).scorers[0])
        return str(error.value)

    assert "path: there is no" in refused(path="/no/where")
    assert "processor: there is no" in refused(processor="/no/where")
    monkeypatch.setattr("omni_async.rewards.scorers.video_audio.find_spec", lambda name: None)
    assert "pip install 'timm<1.0.27'" in refused()
