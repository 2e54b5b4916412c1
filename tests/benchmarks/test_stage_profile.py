"""Tests the stage profile of a tiny Qwen-Image on the CPU, and that the big one is the published model."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from omni_async_pipelines.qwen_image.tiny import build_scheduler
from tensordict import TensorDict

from benchmarks import gpu_probe, profiles, stage_profile
from benchmarks.stage_profile_measure import Bench, Measured
from benchmarks.stage_profile_model import PUBLISHED, SCHEDULER, RandomQwenImage, tiny_architecture
from benchmarks.stage_profile_report import to_markdown
from omni_async.config import Config, load
from omni_async.performance.profile import load_profile
from omni_async.types import Prompt
from tests.support.fakes import load_model

CPU = torch.device("cpu")
TINY = ("--model", "tiny", "--repeats", "1")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage_profile")
    assert stage_profile.main(["--out", str(folder), *TINY]) == 0
    return folder


def measured_in(folder: Path) -> Measured:
    return msgspec.json.decode((folder / "measured.json").read_bytes(), type=Measured)


def test_every_stage_is_measured_at_every_batch_size(out: Path) -> None:
    measured = measured_in(out)
    for stage in (measured.generate, measured.recompute, measured.train):
        assert [(timing.units, len(timing.seconds)) for timing in stage] == [(1, 1), (2, 1)]
    assert list(measured.publish) == ["lora", "full"]
    assert measured.out_of_memory == {}
    table = (out / "table.md").read_text(encoding="utf-8")
    assert all(f"| {stage} | {n} |" in table for stage in ("generate", "recompute", "train") for n in (1, 2))
    assert "published" not in table  # nothing to compare with at this size


def test_the_profile_replays_what_was_measured_with_the_payload_named_first(out: Path, tmp_path: Path) -> None:
    measured, profile = measured_in(out), load_profile(str(out / "profile.json"))
    rest = load_profile("qwen_image_lora_h800")
    stages = {"generate": measured.generate, "proximal": measured.recompute, "train": measured.train}
    for stage, timings in stages.items():
        seconds = sum(timing.median_s for timing in timings)
        assert sum(getattr(profile, stage).mean(timing.units) for timing in timings) == pytest.approx(seconds, rel=1e-6)
    assert profile.export.mean() == measured.publish["lora"].export_s
    assert (profile.score, profile.switch) == (rest.score, rest.switch)
    assert "Scoring" in profile.assumed and "tiny" in profile.source
    one = ("--batches", "1", "--train-batches", "1", "--payloads", "full")
    assert stage_profile.main(["--out", str(tmp_path), *TINY, *one]) == 0
    profile = load_profile(str(tmp_path / "profile.json"))
    assert profile.name == "stage_profile_full"
    assert profile.payload.weights == measured_in(out).publish["full"].nbytes


def test_payloads_are_those_of_a_sample_and_of_a_version(out: Path) -> None:
    payload = load_profile(str(out / "profile.json")).payload
    tokens, channels, text = 2 * 2, 64, 64  # of 32 x 32 pixels, and the width of a text embedding
    latents = (2 + 1) * tokens * channels * 4
    conditioning = (8 + 2) * (text * 4 + 1)
    rest = (4 + 1) * 4 + 2 * 8 + 2 * 8  # sigmas, steps, log-probs
    assert payload.trajectory == latents + conditioning + rest
    assert payload.media == 3 * 32 * 32
    config = tiny_config(out)
    transformer = load_model(RandomQwenImage(tiny_architecture(), CPU, prompt_tokens=8, negative_tokens=2, seed=0))
    assert payload.weights == 4 * adapter_parameters(transformer, config)
    assert measured_in(out).publish["full"].nbytes == 4 * sum(p.numel() for p in transformer.parameters())


def tiny_config(out: Path, *arguments: str) -> Config:
    return stage_profile.device_config(stage_profile.parse(["--out", str(out), *TINY, *arguments]))


def adapter_parameters(transformer: torch.nn.Module, config: Config) -> int:
    lora = config.model.lora
    assert lora is not None
    targets = tuple(f".{target}" for target in lora.target_modules)
    linear = [(name, part) for name, part in transformer.named_modules() if isinstance(part, torch.nn.Linear)]
    return sum(lora.rank * (m.in_features + m.out_features) for name, m in linear if f".{name}".endswith(targets))


class Small(RandomQwenImage):
    """A policy without memory for more than `most` samples of a batch: `most_trained` where gradients are kept."""

    most, most_trained = 2, 1

    def velocity(self, transformer: torch.nn.Module, latents: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        rows = len(latents) // 2 if torch.is_grad_enabled() else len(latents)  # a window is two rows of a sample
        if rows > (self.most_trained if torch.is_grad_enabled() else self.most):
            raise torch.OutOfMemoryError("no more memory")
        return super().velocity(transformer, latents, *rest, **options)


def small(most: int) -> Small:
    policy = Small(tiny_architecture(), CPU, prompt_tokens=8, negative_tokens=2, seed=0)
    policy.most = most
    return policy


def bench(config: Config, policy: RandomQwenImage) -> Bench:
    return Bench(config, policy, CPU, repeats=1, say=lambda line: None, done=lambda measured: None)


def test_a_batch_that_does_not_fit_ends_its_series_and_a_first_one_is_an_error(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "--guidance", "1")
    measured = asyncio.run(bench(config, small(4)).run((1, 4, 5, 6), (1, 2), ("lora",)))
    assert [timing.units for timing in measured.generate] == [1, 4]
    assert [timing.units for timing in measured.train] == [1]
    assert measured.out_of_memory == {"generate": 5, "train": 2}
    table = to_markdown(measured, load_profile("qwen_image_lora_h800"), "", published=False)
    assert "| train | 2 | out of memory |" in table
    with pytest.raises(RuntimeError, match="generate: CPU has no memory for 1 samples"):
        asyncio.run(bench(tiny_config(tmp_path), small(0)).run((1, 2), (1,), ("lora",)))


def test_published_throughput_stands_beside_a_model_of_the_published_size(out: Path) -> None:
    profile = load_profile("qwen_image_lora_h800")
    table = to_markdown(measured_in(out), profile, "", published=True)
    assert "| published: LoRA rank 64, guidance, 4 H800 | 0.305 |" in table
    assert "| published: all weights, no guidance, 4 H200 | 0.510 |" in table
    # One GPU of four, one image at a time and two trained at a time, with the profile's own scoring and hand-overs.
    per_sample = profile.generate.mean(2) / 2 + profile.proximal.unit_s + profile.train.unit_s + profile.score.unit_s
    stages, publishing = 128 * per_sample, (profile.export, profile.publish, profile.swap)
    others = 2 * profile.step.mean() + sum(part.mean() for part in publishing) + 3 * profile.switch.mean()
    assert f"| {128 / (stages + others):.3f} |" in table


def test_the_published_architecture_is_diffusers_own_and_has_as_many_parameters_as_the_profiles_count() -> None:
    for part, chosen in ((QwenImageTransformer2DModel, PUBLISHED.transformer), (AutoencoderKLQwenImage, PUBLISHED.vae)):
        defaults = {name: p.default for name, p in inspect.signature(part.__init__).parameters.items()}
        assert {name: defaults[name] for name in chosen} == chosen
    scheduler = build_scheduler().config
    assert {name: scheduler[name] for name in SCHEDULER} == SCHEDULER
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(**PUBLISHED.transformer)
    assert sum(p.numel() for p in transformer.parameters()) == profiles._PARAMETERS
    assert adapter_parameters(transformer, load(stage_profile.RECIPE)) == profiles._LORA_PARAMETERS


def test_engine_and_trainer_hold_the_same_weights_and_prompts_have_the_length_asked_for() -> None:
    policy = RandomQwenImage(tiny_architecture(), CPU, prompt_tokens=7, negative_tokens=3, seed=1)
    one, two = (load_model(policy, torch.bfloat16).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) and one[name].dtype == torch.bfloat16 for name in one)
    assert torch.get_default_dtype() == torch.float32
    spec = QwenImageSampling(true_cfg_scale=2.0)
    conditioning: TensorDict = policy.load_codec(torch.float32).encode(Prompt(0, "a prompt"), spec)
    assert conditioning["prompt_embeds"].shape == (7, policy.text_width)
    assert conditioning["negative_prompt_embeds"].shape == (3, policy.text_width)


def test_it_and_the_probe_need_neither_ray_nor_vllm_nor_mlflow() -> None:
    absent = ("ray", "vllm", "vllm_omni", "mlflow", "rapidocr", "onnxruntime", "matplotlib", "aiohttp")
    modules = {section.function.partition(":")[0] for section in gpu_probe.SECTIONS.values()}
    wanted = ", ".join(["benchmarks.stage_profile", *sorted(modules)])
    code = f"import sys\nfor name in {absent}: sys.modules[name] = None\nimport {wanted}"
    done = subprocess.run([sys.executable, "-c", code], cwd=profiles.ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
