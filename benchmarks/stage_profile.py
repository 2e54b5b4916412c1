"""Measures stage times of Qwen-Image at its published size on one device.

Run `python -m benchmarks.stage_profile --out DIR`. It builds the transformer and the VAE with random weights
(`stage_profile_model`), measures generation, log-prob recomputation, training and publishing for several batch sizes
(`stage_profile_measure`), and writes `profile.json`, `table.md` and, after every stage, `measured.json` into DIR. Needs
torch, diffusers, peft and tensordict; no Ray, no vLLM, no checkpoint, no network.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import omni_async  # noqa: F401  # before diffusers: see omni_async.compat
from omni_async.config.writing import write_atomic

# isort: split
import msgspec
import torch
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling

from benchmarks.stage_profile_measure import Bench, Measured
from benchmarks.stage_profile_model import PUBLISHED, RandomQwenImage, tiny_architecture
from benchmarks.stage_profile_report import to_markdown, to_profile
from omni_async.config import Config, ConfigError, load
from omni_async.performance.profile import load_profile, write_profile
from omni_async.training.device import rank_device

RECIPE = Path(__file__).parents[1] / "recipes" / "qwen_image_ocr" / "flow_grpo_lora.yaml"


@dataclass(frozen=True)
class Preset:
    """Default settings for measuring a model. `tokens`: of a prompt, and of the negative prompt."""

    pixels: int
    steps: int
    batches: tuple[int, ...]
    train_batches: tuple[int, ...]
    tokens: tuple[int, int]
    overrides: tuple[str, ...] = ()


PRESETS = {
    "qwen_image": Preset(512, 10, (1, 4, 8, 16, 32), (1, 2, 4, 8, 16), (64, 6)),
    "tiny": Preset(
        32,
        4,
        (1, 2),
        (1, 2),
        (8, 2),
        ("model.dtype=float32", "model.lora.rank=4", "model.lora.alpha=8", "rollout.sde.window.range=[0,3]"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        config, rest = device_config(options), load_profile(options.rest)
    except ConfigError as error:
        sys.stderr.write(f"stage_profile: {error}\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    measured = asyncio.run(_measure(config, options))
    setting = _setting(config, options)
    profile = to_profile(measured, rest, setting)
    write_profile(options.out / "profile.json", profile)
    table = to_markdown(measured, profile, setting, published=options.model == "qwen_image")
    write_atomic(options.out / "table.md", table.encode())
    sys.stdout.write(table)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stage_profile",
        description="Measure Qwen-Image's stages on this device, and write a profile of them.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for profile.json, table.md and measured.json")
    add(
        "--model",
        choices=PRESETS,
        default="qwen_image",
        help="published size, or the tests' tiny one (default: %(default)s)",
    )
    add("--batches", type=int, nargs="+", metavar="N", help="samples generated at once")
    add("--train-batches", type=int, nargs="+", metavar="N", help="samples trained at once (each of `window` rows)")
    add("--pixels", type=int, metavar="N", help="height and width")
    add("--steps", type=int, metavar="N", help="denoising steps")
    add("--guidance", type=float, default=4.0, metavar="X", help="true_cfg_scale; 1 is none (default: %(default)g)")
    add("--prompt-tokens", type=int, metavar="N", help="length of the random prompt embeddings")
    add("--repeats", type=int, default=3, metavar="N", help="timed repeats after a warm-up (default: %(default)d)")
    add(
        "--payloads",
        choices=("lora", "full"),
        nargs="+",
        default=("lora", "full"),
        help="versions to publish, the first for the profile (default: both)",
    )
    add("--backend", choices=("auto", "plain", "fsdp2"), default="auto", help="trainer.backend (default: %(default)s)")
    add(
        "--rest",
        default="qwen_image_lora_h800",
        metavar="PROFILE",
        help="where scoring and hand-overs are taken from (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    preset = PRESETS[options.model]
    for name in ("batches", "train_batches", "pixels", "steps"):
        if getattr(options, name) is None:
            setattr(options, name, getattr(preset, name))
    if options.prompt_tokens is None:
        options.prompt_tokens = preset.tokens[0]
    counts = (*options.batches, *options.train_batches, options.repeats, options.prompt_tokens)
    if min(counts) < 1:
        parser.error(
            f"--batches, --train-batches, --repeats and --prompt-tokens: expected whole numbers >= 1, got {min(counts)}"
        )
    return options


def device_config(options: argparse.Namespace) -> Config:
    """Return the full-size recipe on one device; a group of samples is one micro-batch."""
    window = load(RECIPE).rollout.sde
    assert window is not None  # the recipe trains noisy steps
    rows = max(options.train_batches) * window.window.size
    overrides = {
        "rollout.sampling.height": options.pixels,
        "rollout.sampling.width": options.pixels,
        "rollout.num_inference_steps": options.steps,
        "rollout.sampling.true_cfg_scale": options.guidance,
        "rollout.group_size": max(2, *options.train_batches),
        "trainer.workers": 1,
        "trainer.micro_batch_size": rows,
        "trainer.backend": options.backend,
    }
    return load(RECIPE, [*(f"{key}={value}" for key, value in overrides.items()), *PRESETS[options.model].overrides])


async def _measure(config: Config, options: argparse.Namespace) -> Measured:
    started = time.perf_counter()

    def say(line: str) -> None:
        sys.stderr.write(f"{time.perf_counter() - started:7.1f} s  {line}\n")

    def done(measured: Measured) -> None:
        write_atomic(options.out / "measured.json", msgspec.json.format(msgspec.json.encode(measured), indent=2))

    device = rank_device(0)
    architecture = PUBLISHED if options.model == "qwen_image" else tiny_architecture()
    negative = PRESETS[options.model].tokens[1]
    policy = RandomQwenImage(
        architecture, device, prompt_tokens=options.prompt_tokens, negative_tokens=negative, seed=0
    )
    bench = Bench(config, policy, device, repeats=options.repeats, say=say, done=done)
    return await bench.run(options.batches, options.train_batches, options.payloads)


def _setting(config: Config, options: argparse.Namespace) -> str:
    rollout, lora = config.rollout, config.model.lora
    assert rollout.sde is not None and lora is not None  # the recipe has both
    spec: QwenImageSampling = rollout.sampling
    guidance = f"guidance {spec.true_cfg_scale:g}" if spec.guided else "no guidance"
    return (
        f"{options.model}, random weights, {config.model.dtype}, LoRA rank {lora.rank}, {spec.height} x"
        f" {spec.width}, {rollout.num_inference_steps} steps, window {rollout.sde.window.size}, {guidance}, prompts"
        f" of {options.prompt_tokens} tokens, gradient checkpointing, torch {torch.__version__}; medians of"
        f" {options.repeats} repeats."
    )


if __name__ == "__main__":
    sys.exit(main())
