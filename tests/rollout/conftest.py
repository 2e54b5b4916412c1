"""Provides a tiny random Qwen-Image, requests for it, and published versions of its weights."""

from typing import Any

import numpy as np
import pytest
import torch

from omni_async.types import Prompt, SampleRequest, SdeWindow, WeightManifest
from pipelines.qwen_image.policy import QwenImagePolicy
from pipelines.qwen_image.sampling import QwenImageSampling
from pipelines.qwen_image.tiny import build
from tests.fakes import load_model
from tests.packing import pack

FIELDS = ("latents", "log_probs", "means", "final", "conditioning")
SPEC = {"height", "width", "true_cfg_scale", "negative_prompt"}
Published = tuple[WeightManifest, list[np.ndarray]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("rollout"), layers=2))


@pytest.fixture(scope="session")
def policy(checkpoint: str) -> QwenImagePolicy:
    return QwenImagePolicy(checkpoint)


def spec(**changes: Any) -> QwenImageSampling:
    """64 x 32 pixels, without guidance."""
    return QwenImageSampling(**{"height": 64, "width": 32} | changes)


def make_request(number: int = 0, **changes: Any) -> SampleRequest:
    """Makes a request with a window of three steps out of six, starting at 0, 1 or 2; prompts of different lengths."""
    words = ("the digit 7", "a photo of a red circle on a white background", "7")
    fields: dict[str, Any] = {
        "sample_id": f"s{number}",
        "kind": "train",
        "group": 0,
        "sample": number,
        "prompt": Prompt(index=0, text=words[number % 3]),
        "seed": 1000 + number,
        "spec": spec(**{name: changes.pop(name) for name in SPEC & changes.keys()}),
        "num_inference_steps": 6,
        "noise_level": 0.7,
        "sde_kind": "flow",
        "window": SdeWindow(start=number % 3, size=3),
        "fields": FIELDS,
    }
    return SampleRequest(**(fields | changes))


def new_weights(policy: QwenImagePolicy, seed: int) -> dict[str, torch.Tensor]:
    """Returns the checkpoint's transformer with noise on every weight."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_model(policy).state_dict()
    return {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def adapters(policy: QwenImagePolicy, seed: int, rank: int = 2) -> dict[str, torch.Tensor]:
    """Returns LoRA matrices for the attention of every block, large enough to matter."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in load_model(policy).state_dict().items():
        module = name.removesuffix(".weight")
        if module.endswith(("to_q", "to_k", "to_v", "to_out.0")):
            found[f"{module}.lora_A.weight"] = 0.2 * torch.randn(rank, weight.shape[1], generator=generator)
            found[f"{module}.lora_B.weight"] = 0.2 * torch.randn(weight.shape[0], rank, generator=generator)
    return found


def publish(version: int, tensors: dict[str, torch.Tensor], lora: dict[str, Any] | None = None) -> Published:
    return pack(tensors.items(), version=version, payload="lora" if lora else "full", bucket_bytes=100_000, lora=lora)


def transformer_with(policy: QwenImagePolicy, weights: dict[str, torch.Tensor] | None) -> torch.nn.Module:
    model = load_model(policy)
    if weights is not None:
        model.load_state_dict(weights)
    return model
