"""Reads the parts of a checkpoint in diffusers layout, and holds what the policies of all families have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from omni_async.families import SamplingSpec
from omni_async.media import Media, require_media


def read_config(path: str, part: str, name: str = "config.json") -> dict[str, Any]:
    """Return a part's configuration file. ValueError if the checkpoint has none."""
    file = Path(path) / part / name
    if not file.is_file():
        raise ValueError(f"model.path: {path} is no checkpoint of this family in diffusers layout, {file} is missing")
    config: dict[str, Any] = json.loads(file.read_text())
    return config


def load_part(cls: Any, path: str, folder: str, dtype: torch.dtype) -> Any:
    """Load a diffusers or transformers model in eval mode. From safetensors alone: the other formats are pickles."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a run logs one line per update, and a bar per model part would come between
    part = cls.from_pretrained(path, subfolder=folder, torch_dtype=dtype, local_files_only=True, use_safetensors=True)
    return part.eval()


def empty_part(cls: Any, path: str, folder: str, dtype: torch.dtype) -> Any:
    """Build a diffusers model as `load_part` returns it, with parameters of `dtype` on the meta device.

    What else it computes when it is built (rotary tables) has its values."""
    from accelerate import init_empty_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as when diffusers loads it: tables are computed in it, too
    try:
        with init_empty_weights():
            part = cls.from_config(cls.load_config(path, subfolder=folder, local_files_only=True))
    finally:
        torch.set_default_dtype(before)
    # Without diffusers' own `to`, which would speak of parts to be kept in float32.
    return torch.nn.Module.to(part, dtype).eval()


def load_tokenizer(cls: Any, path: str, folder: str = "tokenizer") -> Any:
    """Load a tokenizer or processor."""
    return cls.from_pretrained(path, subfolder=folder, local_files_only=True)


def to_uint8(pixels: torch.Tensor) -> torch.Tensor:
    """Map a VAE's output in [-1, 1] to uint8, as diffusers' image processor does."""
    return ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)


def as_images(pixels: torch.Tensor) -> list[Media]:
    """Make the media of B samples of a VAE's output (B, 3, height, width) in [-1, 1]."""
    return [Media(image=image.clone()) for image in to_uint8(pixels).cpu()]


def stack_images(media: list[Media], spec: SamplingSpec) -> torch.Tensor:
    """Return the images of B samples as float32 (B, 3, height, width) in [-1, 1].

    ValueError if one is not the spec's."""
    require_media(media, spec)
    return torch.stack([torch.as_tensor(one.image) for one in media]).float() / 127.5 - 1.0


class DiffusersPolicy:
    """What is the same of every `omni_async.policy.Policy` whose denoisers are models of diffusers.

    `denoiser` is the name of their class, which is imported when a model is loaded."""

    denoiser: str
    components: tuple[str, ...] = ("transformer",)

    def __init__(self, path: str) -> None:
        self.path = path

    def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        # diffusers would keep some norms in float32, which vLLM-Omni does not and FSDP2 cannot shard.
        return {name: nn.Module.to(load_part(self._class, self.path, name, dtype), dtype) for name in self.components}

    def build_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        return {name: empty_part(self._class, self.path, name, dtype) for name in self.components}

    @property
    def _class(self) -> Any:
        import diffusers

        return getattr(diffusers, self.denoiser)

    def component_of(self, sigma: float) -> str:
        return self.components[0]


def branches(guided: bool) -> tuple[str, ...]:
    """Return the beginnings of the names of a sample's conditioning: of the prompt, and of the negative one."""
    return ("prompt", "negative_prompt") if guided else ("prompt",)


def linear_guidance(cond: torch.Tensor, uncond: torch.Tensor, scale: float) -> torch.Tensor:
    """Apply classifier-free guidance."""
    return uncond + scale * (cond - uncond)


def guided(
    predict: Callable[[str], torch.Tensor],
    conditioning: Mapping[str, Any] | TensorDict,
    key: str,
    scale: float,
    unconditional_gradient: bool,
    combine: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = linear_guidance,
) -> torch.Tensor:
    """Compute the velocity of both branches, or of the prompt alone where `scale` is 1.

    Args:
        predict: returns the velocity of a branch, one of `branches`.
        conditioning: of the batch; ValueError if there is guidance and it has no negative prompt.
        key: the key of the spec that `scale` is, for errors.
        scale: of the guidance.
        unconditional_gradient: whether gradients flow through the unconditional branch.
        combine: makes the velocity of the conditional one, the unconditional one and `scale`."""
    cond = predict("prompt")
    if scale <= 1:
        return cond
    if "negative_prompt_embeds" not in conditioning:
        raise ValueError(f"{key} = {scale} needs conditioning with a negative prompt")
    with torch.set_grad_enabled(torch.is_grad_enabled() and unconditional_gradient):
        uncond = predict("negative_prompt")
    return combine(cond, uncond, scale)
