"""A tiny checkpoint of every family, and how diffusers' pipeline of it is called."""

import itertools
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.families import SamplingSpec, find_family
from omni_async.policy import Policy, load_policy
from omni_async.types import Prompt, SampleRequest, SdeWindow
from pipelines.qwen_image.sampling import QwenImageSampling
from pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling
from pipelines.wan2_2.sampling import Wan22Sampling

PROMPTS = ("the digit 7", "a photo of a red circle on a white background", "7")
STEPS = 8


@dataclass(frozen=True)
class Family:
    """`specs`: one without and one with guidance, of different sizes."""

    name: str
    specs: tuple[SamplingSpec, SamplingSpec]
    variant: str = ""
    build_options: tuple[tuple[str, Any], ...] = (("layers", 2),)

    @property
    def label(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name

    def build(self, folder: Path) -> str:
        return str(import_module(f"pipelines.{self.name}.tiny").build(folder, **dict(self.build_options)))

    def policy(self, checkpoint: str) -> Policy:
        return load_policy(find_family(self.name), checkpoint)


def call(spec: SamplingSpec) -> dict[str, Any]:
    """Returns the arguments of diffusers' pipeline for a spec, whose keys are called as there; it makes no files."""
    return {name: value for name, value in msgspec.structs.asdict(spec).items() if name != "fps"}


_WAN = {"negative_prompt": "dull", "max_sequence_length": 32}
FAMILIES = (
    Family(
        "qwen_image",
        (QwenImageSampling(height=64, width=32), QwenImageSampling(height=32, width=32, true_cfg_scale=3.0)),
    ),
    Family(
        "stable_diffusion_3",
        (
            StableDiffusion3Sampling(height=64, width=48, max_sequence_length=32),
            StableDiffusion3Sampling(height=32, width=32, guidance_scale=4.0, negative_prompt="dull"),
        ),
    ),
    Family(
        "wan2_2",
        (
            Wan22Sampling(height=32, width=48, num_frames=5, max_sequence_length=32),
            Wan22Sampling(height=32, width=32, num_frames=9, guidance_scale=4.0, guidance_scale_2=3.0, **_WAN),
        ),
    ),
    Family(
        "wan2_2",
        (
            Wan22Sampling(height=32, width=64, num_frames=5, max_sequence_length=32),
            Wan22Sampling(height=64, width=32, num_frames=9, guidance_scale=5.0, **_WAN),
        ),
        variant="ti2v",
        build_options=(("layers", 2), ("ti2v", True)),
    ),
)


def make_request(spec: SamplingSpec, number: int = 0, **changes: Any) -> SampleRequest:
    """Makes a request with a window of three steps, starting at 0, 1 or 2."""
    which = {"sample_id": f"s{number}", "kind": "train", "group": 0, "sample": number, "seed": 1000 + number}
    how = {"num_inference_steps": STEPS, "noise_level": 0.7, "sde_kind": "flow", "window": SdeWindow(number % 3, 3)}
    names = ("latents", "log_probs", "means", "final", "conditioning")
    fields: dict[str, Any] = {**which, **how, "prompt": Prompt(0, PROMPTS[number % 3]), "spec": spec, "fields": names}
    return SampleRequest(**(fields | changes))


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def euler(policy: Policy, model: nn.Module, latents: Tensor, conditioning: TensorDict, spec: SamplingSpec) -> Tensor:
    """Draws a sample without noise, (1, ...) to (1, ...)."""
    sigmas = policy.sigmas(STEPS, spec)
    stacked = policy.stack_conditioning([conditioning])
    for sigma, sigma_next in itertools.pairwise(sigmas):
        latents = latents + (sigma_next - sigma) * policy.velocity(model, latents, sigma[None], stacked, spec)
    return latents
