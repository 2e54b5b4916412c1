"""Defines the policy contract: the one description of a model family that the trainer and every engine share, so the
two cannot drift.

A family is a small class in `pipelines/<family>/policy.py`. It knows conditioning, latent shape and velocity;
everything else (SDE step, log-prob, windows, batching, weight transfer) is model-agnostic and defined elsewhere.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


class PipelineFamily(msgspec.Struct, frozen=True):
    """A description of a family that needs no torch. `policy` is a `module:Class`; `vllm_pipeline` and `vllm_extension`
    are the dotted classes handed to vLLM-Omni; `model_index_class` is the `_class_name` that a checkpoint's
    `model_index.json` must have."""

    name: str
    policy: str
    model_index_class: str
    vllm_pipeline: str | None = None
    vllm_extension: str | None = None

    def load_policy(self, path: str) -> Policy:
        """Returns the family's policy for the checkpoint at `path` (reads configuration files only, no weights)."""
        module, name = self.policy.split(":")
        policy: Policy = getattr(import_module(module), name)(path)
        return policy


def find_family(name: str) -> PipelineFamily:
    """Returns the family registered as `name` in the entry-point group `omni_async.pipelines`; ValueError lists the
    known ones."""
    known = {point.name: point for point in entry_points(group="omni_async.pipelines")}
    if name not in known:
        raise ValueError(f"model.pipeline: expected one of {sorted(known)}, got {name!r}")
    family: PipelineFamily = known[name].load()
    return family


class Policy(Protocol):
    """A model family's functions for one checkpoint. Shapes: B samples, T latent tokens, C channels per token, L text
    tokens, E text width. Conditioning is a TensorDict of batch size [B] with the keys the family's `encode` produced;
    samples of different lengths are padded by `stack_conditioning`."""

    path: str

    def load_transformer(self, dtype: torch.dtype) -> torch.nn.Module:
        """Loads the denoiser alone, on CPU, in eval mode (no dropout), weights in `dtype`."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Returns the shape of one sample's latents as the transformer takes them, e.g. (T, C)."""

    def sigmas(self, num_inference_steps: int, height: int, width: int) -> torch.Tensor:
        """Returns float32 (N + 1,), decreasing, last value 0: the very numbers of the family's scheduler."""

    def velocity(
        self,
        transformer: torch.nn.Module,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: TensorDict,
        *,
        height: int,
        width: int,
        true_cfg_scale: float,
        unconditional_gradient: bool = True,
    ) -> torch.Tensor:
        """Computes v = eps - x0, float32 (B, T, C), guidance included. `latents` float32 (B, T, C); `sigma` float32
        (B,). Without `unconditional_gradient` no gradient flows through guidance's unconditional branch."""

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        """Stacks per-sample conditioning (batch size []) to one of batch size [B], padded where lengths differ."""

    def blank_conditioning(self, guided: bool) -> TensorDict:
        """Returns conditioning of one sample, batch size [], with the shapes of a short prompt and nothing in it; with
        the unconditional branch if `guided`. For engines that emulate a model they did not load."""

    def load_codec(self, dtype: torch.dtype) -> Codec:
        """Loads text encoder and VAE: needed where samples are made, never by the trainer."""


class Codec(Protocol):
    def to(self, device: Any) -> Codec: ...

    def encode(self, prompt: str, negative_prompt: str | None) -> TensorDict:
        """Encodes one prompt to conditioning of batch size []; the unconditional branch is included if
        `negative_prompt` is not None."""

    def decode(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Decodes final latents (B, T, C) to uint8 images (B, 3, height, width)."""

    def encode_images(self, pixels: torch.Tensor) -> torch.Tensor:
        """Inverts `decode`, as far as the VAE allows it: uint8 images (B, 3, height, width) to latents (B, T, C)
        float32 on the codec's device, noise-free (the posterior's mode), so that an image always has the same latents.
        Raises ValueError for another dtype or shape, or a size the family's latents do not divide."""
