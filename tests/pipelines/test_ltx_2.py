"""Tests what LTX-2 alone has: two modalities in one row of tokens, and the sizes of their media."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from omni_async_pipelines.ltx_2.policy import LTX2Policy, _log_mel
from omni_async_pipelines.ltx_2.sampling import LTX2Sampling
from omni_async_pipelines.ltx_2.tiny import build

from omni_async.config import load, with_spec
from omni_async.config.layout import ParallelLayout
from omni_async.training.engine import TrainEngine
from omni_async.types import SdeWindow
from tests.pipelines.families import STEPS
from tests.support import configs
from tests.support.fakes import load_model
from tests.support.places import ROOT
from tests.training.drawn import drawn

SIZE = {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 16, "guidance_scale": 2.0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LTX2Policy:
    return LTX2Policy(str(build(tmp_path_factory.mktemp("ltx_2"))))


def test_unusable_specs_and_checkpoints_are_refused(policy, tmp_path):
    for spec, said in (
        ({"num_frames": 12}, "num_frames must be 8k + 1, got 12; take 9 or 17"),
        ({"num_frames": 9, "fps": 240.0}, "9 frames at 240 a second are too short"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            LTX2Sampling(**spec)
    spec = LTX2Sampling(**SIZE)
    assert spec.problem(Path(policy.path)) is None
    said = LTX2Sampling(**SIZE | {"max_sequence_length": 20}).problem(Path(policy.path))
    assert said == "max_sequence_length: this checkpoint takes multiples of 8, got 20"
    build(tmp_path)
    file = tmp_path / "vocoder" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"output_sampling_rate": 48_000}))
    assert "vocoder has output_sampling_rate 48000, not 24000" in (spec.problem(tmp_path) or "")


def test_log_ratios_of_both_modalities(policy):
    rollout = {"group_size": 2, "num_inference_steps": STEPS, "sampling": SIZE, "sde": {"window": {"size": 2}}}
    model = {"path": policy.path, "pipeline": "ltx_2"}
    optimizer = {"name": "sgd", "lr": 1e-2, "max_grad_norm": None}
    config = with_spec(configs.build({"model": model, "rollout": rollout, "trainer": {"optimizer": optimizer}}))
    group = drawn(policy, config, SdeWindow(1, 3))
    engine = TrainEngine(config, policy, ParallelLayout(), device=torch.device("cpu"))
    engine.setup()
    for first in (True, False):
        engine.accumulate(group, 1 / 4)
        assert all(p.grad is not None and p.grad.any() for p in engine._model.trainable.values())
        found = engine.step()
        parts = [found[f"log_ratio_nats/{name}/mean"] for name in ("video", "audio")]
        assert sum(parts) == pytest.approx(found["log_ratio_nats/mean"], rel=1e-3, abs=1e-3)
        furthest = [found[f"log_ratio_nats/{name}/absmax"] for name in ("video", "audio")]
        assert max(furthest) < 1e-2 if first else min(furthest) > 1e-2
        if first:
            video, audio = group.spec.lengths
            mean = (video * found["log_prob/video"] + audio * found["log_prob/audio"]) / (video + audio)
            assert mean == pytest.approx(
                float(torch.cat([t["log_probs"] for t in group.trajectories]).mean()), abs=1e-5
            )


def test_the_recipes_adapters_bind_to_both_modalities(policy):
    recipe = load(ROOT / "recipes" / "ltx2_av" / "flow_grpo_lora.yaml")
    targets = tuple(f".{target}" for target in recipe.model.lora.target_modules)
    bound = Counter(name.split(".")[3] for name, _ in load_model(policy).named_modules() if name.endswith(targets))
    attention = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
    assert bound == dict.fromkeys(attention, 2 * 4) | dict.fromkeys(("ff", "audio_ff"), 2 * 2)  # in two blocks


def test_tones_are_loudest_in_their_bands(policy):
    time = torch.arange(24_000) / 24_000
    sounds = torch.stack([torch.sin(2 * torch.pi * pitch * time) for pitch in (500.0, 2000.0)])[None]
    config = policy.load_codec(torch.float32).audio_vae.config
    mel = _log_mel(sounds, config)
    assert mel.shape == (1, 2, 100, config.mel_bins) and mel.dtype == torch.float32
    low, high = mel[0].mean(1).argmax(-1).tolist()
    # Slaney's scale is linear to 1000 Hz (15 mel) and logarithmic above; bands are equal in mel.
    top = 15 + 27 * torch.log(torch.tensor(8.0)) / torch.log(torch.tensor(6.4))
    bands = [7.5, float(15 + 27 * torch.log(torch.tensor(2.0)) / torch.log(torch.tensor(6.4)))]
    expected = [mel_of / float(top) * (config.mel_bins + 1) - 1 for mel_of in bands]
    assert [low, high] == pytest.approx(expected, abs=1)
