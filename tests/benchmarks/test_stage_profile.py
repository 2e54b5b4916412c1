"""Tests the stage profile of a tiny Qwen-Image on the CPU, and the published architecture of the large one."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from omni_async_pipelines.qwen_image.tiny import build_scheduler

from benchmarks import gpu_probe, profiles, stage_profile
from benchmarks.stage_profile_measure import Measured
from benchmarks.stage_profile_model import PUBLISHED, SCHEDULER, RandomQwenImage, tiny_architecture
from omni_async.config import Config, load
from omni_async.performance.profile import load_profile
from tests.support.fakes import load_model

TINY = ("--model", "tiny", "--repeats", "1")


def adapter_parameters(transformer: torch.nn.Module, config: Config) -> int:
    lora = config.model.lora
    assert lora is not None
    targets = tuple(f".{target}" for target in lora.target_modules)
    linear = [(name, part) for name, part in transformer.named_modules() if isinstance(part, torch.nn.Linear)]
    return sum(lora.rank * (m.in_features + m.out_features) for name, m in linear if f".{name}".endswith(targets))


def test_the_profile_replays_measured_stages(tmp_path: Path) -> None:
    assert stage_profile.main(["--out", str(tmp_path), *TINY]) == 0
    measured = msgspec.json.decode((tmp_path / "measured.json").read_bytes(), type=Measured)
    profile, rest = load_profile(str(tmp_path / "profile.json")), load_profile("qwen_image_lora_h800")
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    stages = {"generate": measured.generate, "proximal": measured.recompute, "train": measured.train}
    for stage, timings in stages.items():
        assert [(timing.units, len(timing.seconds)) for timing in timings] == [(1, 1), (2, 1)]
        seconds = sum(timing.median_s for timing in timings)
        assert sum(getattr(profile, stage).mean(timing.units) for timing in timings) == pytest.approx(seconds, rel=1e-6)
    assert all(f"| {stage} | {n} |" in table for stage in ("generate", "recompute", "train") for n in (1, 2))
    assert list(measured.publish) == ["lora", "full"] and measured.out_of_memory == {}
    assert profile.export.mean() == measured.publish["lora"].export_s
    assert (profile.score, profile.switch) == (rest.score, rest.switch)
    assert "Scoring" in profile.assumed and "tiny" in profile.source

    tokens, channels, text = 2 * 2, 64, 64  # of 32 x 32 pixels, and the width of a text embedding
    latents = (2 + 1) * tokens * channels * 4
    conditioning = (8 + 2) * (text * 4 + 1)
    others = (4 + 1) * 4 + 2 * 8 + 2 * 8  # sigmas, steps, log-probs
    assert profile.payload.trajectory == latents + conditioning + others
    assert profile.payload.media == 3 * 32 * 32
    config = stage_profile.device_config(stage_profile.parse(["--out", str(tmp_path), *TINY]))
    policy = RandomQwenImage(tiny_architecture(), torch.device("cpu"), prompt_tokens=8, negative_tokens=2, seed=0)
    transformer = load_model(policy)
    assert profile.payload.weights == 4 * adapter_parameters(transformer, config)
    assert measured.publish["full"].nbytes == 4 * sum(p.numel() for p in transformer.parameters())


def test_published_architecture() -> None:
    for part, chosen in ((QwenImageTransformer2DModel, PUBLISHED.transformer), (AutoencoderKLQwenImage, PUBLISHED.vae)):
        defaults = {name: p.default for name, p in inspect.signature(part.__init__).parameters.items()}
        assert {name: defaults[name] for name in chosen} == chosen
    scheduler = build_scheduler().config
    assert {name: scheduler[name] for name in SCHEDULER} == SCHEDULER
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(**PUBLISHED.transformer)
    assert sum(p.numel() for p in transformer.parameters()) == profiles._PARAMETERS
    assert adapter_parameters(transformer, load(stage_profile.RECIPE)) == profiles._LORA_PARAMETERS


@pytest.mark.thorough
def test_neither_ray_nor_vllm_is_needed() -> None:
    absent = ("ray", "vllm", "vllm_omni", "mlflow", "rapidocr", "onnxruntime", "matplotlib", "aiohttp")
    modules = {section.function.partition(":")[0] for section in gpu_probe.SECTIONS.values()}
    wanted = ", ".join(["benchmarks.stage_profile", *sorted(modules)])
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\nimport {wanted}"
    done = subprocess.run([sys.executable, "-c", code], cwd=profiles.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
