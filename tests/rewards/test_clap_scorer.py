"""Tests the scorer of sound with a small random CLAP checkpoint, against the model's own logits and known tones."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from omni_async_pipelines.tiny import t5_tokenizer
from transformers import AutoTokenizer, ClapConfig, ClapFeatureExtractor, ClapModel

from omni_async.config import schema
from omni_async.media import Media
from omni_async.rewards import registry
from omni_async.rewards.base import ScoreError
from omni_async.rewards.cache import identity_of
from omni_async.rewards.loaded import LoadedReward
from omni_async.types import Prompt
from tests.support.images import score_all

pytest.importorskip("av", reason="the scorer resamples with it; a bare GPU machine may lack it")
from omni_async.rewards.scorers.clap import mono_at, windows

RATE, SECONDS = 16000, 1
DEVICES = ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)]
TEXTS = ("the digit 7", "a photo of a red circle on a white background", "the digit 7")
RNG = np.random.default_rng(0)


def build(folder: Path, fusion: bool) -> Path:
    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    marks = {"vocab_size": len(tokenizer) + 4, "max_position_embeddings": 80, "pad_token_id": tokenizer.pad_token_id}
    audio = {"spec_size": 64, "num_mel_bins": 16, "window_size": 4, "hidden_size": 32, "patch_embeds_hidden_size": 16}
    layers = {"depths": [1, 1], "num_attention_heads": [2, 2], "num_hidden_layers": 2, "num_classes": 4}
    fused = {"enable_fusion": True, "fusion_type": "aff_2d"} if fusion else {}
    config = ClapConfig(text_config={**text, **marks}, audio_config={**audio, **layers, **fused}, projection_dim=12)
    model = ClapModel(config).eval()
    for parameter in model.parameters():  # as small as they begin, nothing of the sound would be left
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ClapFeatureExtractor(
        feature_size=16,
        sampling_rate=RATE,
        hop_length=160,
        max_length_s=SECONDS,
        fft_window_size=256,
        frequency_max=8000,
        truncation="fusion" if fusion else "rand_trunc",
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["unfused", "fused"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("clap") / "tiny", request.param)


def cosines_of(checkpoint: Path, sounds: list[np.ndarray]) -> np.ndarray:
    """The cosines (sounds, texts) out of the logits of the whole model, which no scorer calls; one sound at a time."""
    model, extract = ClapModel.from_pretrained(checkpoint).eval(), ClapFeatureExtractor.from_pretrained(checkpoint)
    tokens = AutoTokenizer.from_pretrained(checkpoint)(list(TEXTS), padding="max_length", max_length=60)
    rows = []
    for sound in sounds:
        features = extract(sound, sampling_rate=RATE, return_tensors="pt").input_features
        with torch.no_grad():
            found = model(
                input_ids=torch.tensor(tokens["input_ids"]),
                attention_mask=torch.tensor(tokens["attention_mask"]),
                input_features=features,
                is_longer=torch.tensor([[False]]),
            )
        rows.append(found.logits_per_audio[0].double().numpy() / np.exp(model.logit_scale_a.item()))
    return np.stack(rows)


@pytest.mark.parametrize("device", DEVICES)
def test_sounds_score_the_cosine_with_their_prompt(checkpoint: Path, device: str) -> None:
    lengths = (RATE, RATE // 3, 2 * RATE + 500)
    stereo = [RNG.uniform(-1, 1, (2, n)).astype(np.float32) * (i + 1) / 3 for i, n in enumerate(lengths)]
    mono = [(sound[0] + sound[1]) / 2 for sound in stereo]
    last = mono[2]
    parts = [last[:RATE], last[(RATE + 500) // 2 :][:RATE], last[RATE + 500 :]]
    cosines = cosines_of(checkpoint, [*mono[:2], *parts])
    reward = LoadedReward.load(
        schema.Reward(scorers=(schema.Scorer(name="clap", params={"path": str(checkpoint)}),)), float(device != "cpu")
    )
    media = [Media(audio=sound, sample_rate=RATE) for sound in stereo]
    for _ in range(2):  # no score is drawn
        found = score_all(reward, media, [Prompt(i, text) for i, text in enumerate(TEXTS)])
        expected = [cosines[0, 0], cosines[1, 1], cosines[2:, 2].mean()]
        assert [score.value for score in found] == pytest.approx(expected, abs=1e-4)
    assert len({round(score.value, 4) for score in found}) == 3


def clap(folder: Path) -> schema.Reward:
    return schema.Reward(scorers=(schema.Scorer(name="clap", params={"path": str(folder)}),))


def test_another_checkpoint_at_the_same_path_is_another_scorer_in_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clap"
    shutil.copytree(checkpoint, folder)

    def identity() -> bytes | None:
        config = schema.Scorer(name="clap", params={"path": str(folder)})
        return identity_of(config, registry.build(config))

    first = identity()
    assert first is not None and identity() == first
    model = ClapModel.from_pretrained(folder)
    model.text_projection.linear1.weight.data[0, 0] += 1
    model.save_pretrained(folder)
    assert identity() != first


@pytest.mark.parametrize("rate", [44100, 24000, 8000])
def test_a_tone_is_the_same_tone_at_another_rate(rate: int) -> None:
    def tone(samples: int, at: int) -> np.ndarray:
        return 0.5 * np.sin(2 * np.pi * 440 * np.arange(samples) / at).astype(np.float32)

    media = Media(audio=np.stack([tone(rate, rate)] * 2), sample_rate=rate)
    found = mono_at(RATE, media)
    assert abs(len(found) - RATE) <= 1
    middle = slice(500, RATE - 500)
    assert found[middle] == pytest.approx(tone(RATE, RATE)[middle], abs=5e-3)


def test_a_sound_of_so_few_samples_a_second_that_it_lasts_for_hours_is_refused() -> None:
    slow = Media(audio=np.zeros((1, 2**20), np.float32), sample_rate=1)
    with pytest.raises(ScoreError, match=r"the sound lasts 1.04858e\+06 s, expected 1200 at most"):
        mono_at(48_000, slow)


def test_windows_cover_a_sound_from_end_to_end() -> None:
    assert [w.tolist() for w in windows(np.arange(5), 5)] == [[0, 1, 2, 3, 4]]
    assert [w.tolist() for w in windows(np.arange(3), 5)] == [[0, 1, 2]]
    assert [w.tolist() for w in windows(np.arange(9), 4)] == [[0, 1, 2, 3], [2, 3, 4, 5], [5, 6, 7, 8]]


def test_another_kind_of_checkpoint_is_refused(checkpoint: Path) -> None:
    registry.check_files(schema.Scorer(name="clap", params={"path": str(checkpoint)}))
    with pytest.raises(registry.ScorerConfigError, match="is a 'clap' checkpoint, expected 'clip'"):
        registry.check_files(schema.Scorer(name="clip_score", params={"path": str(checkpoint)}))
