"""Defines the policy contract.

The one description of a model family that the trainer and every engine share, so the two cannot drift.

A family is a small class in `pipelines/omni_async_pipelines/<family>/policy.py`. It knows conditioning, latent shape
and velocity; everything else (SDE step, log-prob, windows, batching, weight motion) is model-agnostic and lives
elsewhere. What is known of a family without torch is in `omni_async.plugins.families`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from omni_async.media import Media
from omni_async.plugins.entry_points import load_named
from omni_async.plugins.families import PipelineFamily
from omni_async.types import Prompt

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict


def load_policy(family: PipelineFamily, path: str) -> Policy:
    """Return the family's policy for the checkpoint at `path`; reads configuration files only, no weights."""
    policy: Policy = load_named(family.policy)(path)
    return policy


@dataclass(frozen=True)
class OwnExchange:
    """Where a denoiser that diffusers has no context-parallel plan of (`_cp_plan`) is cut, by names of its modules.

    layers: the list of repeated layers, in which every attention is plain self-attention without a mask.
    tokens: the arguments of a layer that are tokens, (B, L, C); of the first they are split.
    output: the module after the layers whose output, (B, L, C), is gathered."""

    layers: str
    tokens: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class SequencePlan:
    """What ranks that share the tokens of a row (`trainer.sequence_parallel`) must know of a family's denoisers.

    masked_text: inputs of the denoiser with text tokens, (B, L, C), whose L the number of ranks must divide, each with
    the input that masks it, (B, L) bool or None. Texts are padded at the end, which must move no position.
    exchange: None where diffusers has a plan for the denoiser."""

    masked_text: Mapping[str, str] = field(default_factory=dict)
    exchange: OwnExchange | None = None


class Policy(Protocol):
    """A model family's functions for one checkpoint.

    Latents are (B, *shape) of B samples, whatever the shape; `spec` is one of the family's `SamplingSpec`s.
    Conditioning is a TensorDict of batch size [B] with the keys the family's `encode` produced.

    components: names of the checkpoint's trained denoisers, each that of its folder: `transformer`, `transformer_2`.
    sequence_plan: how ranks share the tokens of a row; None if they cannot."""

    path: str
    components: tuple[str, ...]
    sequence_plan: SequencePlan | None

    def load_components(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        """Load the denoisers alone, by component, on CPU, in eval mode (no dropout), weights in `dtype`."""

    def component_of(self, sigma: float) -> str:
        """Return the component that computes the velocity at `sigma` in [0, 1]."""

    def latent_shape(self, spec: Any) -> tuple[int, ...]:
        """Return the shape of one sample's latents as the denoiser takes them.

        ValueError if the checkpoint's model makes no such sample."""

    def sigmas(self, num_inference_steps: int, spec: Any) -> torch.Tensor:
        """Return the very numbers of the family's scheduler: float32 (N + 1,), decreasing, last value 0."""

    def velocity(
        self,
        components: Mapping[str, torch.nn.Module],
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: TensorDict,
        spec: Any,
        *,
        unconditional_gradient: bool = True,
    ) -> torch.Tensor:
        """Compute v = eps - x0, float32, shaped as `latents`, guidance included.

        Args:
            components: the denoisers by component, diffusers' or an engine's own.
            latents: x_sigma, float32 (B, *shape).
            sigma: float32 (B,), of rows that one component takes.
            conditioning: stacked, of batch size [B].
            spec: the samples'.
            unconditional_gradient: whether a gradient flows through guidance's unconditional branch.

        Raises:
            ValueError: the samples are guided, and the conditioning has no unconditional branch."""

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        """Stack per-sample conditioning (batch size []) to one of batch size [B].

        `omni_async.diffusion.components.stack_rows` with the family's rule for every key."""

    def blank_conditioning(self, spec: Any) -> TensorDict:
        """Make conditioning of one sample, batch size [], with the shapes of a short prompt and nothing in it.

        With the unconditional branch if the spec is guided. For engines that emulate a model they did not load."""

    def load_codec(self, dtype: torch.dtype) -> Codec:
        """Load text encoder and VAE: needed where samples are made, never by the trainer."""


@runtime_checkable
class BuildsEmpty(Protocol):
    """A policy that also builds its components without their weights.

    The ranks of a trainer then read their shards of the checkpoint's files, and none holds a whole model. Optional: one
    without it is loaded whole on every rank."""

    path: str

    def build_components(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        """Build the denoisers as `load_components` returns them, parameters on the meta device in `dtype`.

        Persistent buffers may be there, too, if that is easier; other buffers and tensors have their values. The files
        of each are in the folder of its name, and call weights as the module does."""


@runtime_checkable
class Foreseeable(Protocol):
    """A policy whose memory can be estimated from configuration files, without weights and prompts. Optional."""

    def long_conditioning(self, spec: Any, tokens: int) -> TensorDict:
        """Make conditioning of one sample, batch size [], of a text of `tokens` tokens and all images that it may have.

        As `blank_conditioning`, whose texts are short. Texts of fixed length stay as they are."""

    def build_codec(self, dtype: torch.dtype, engine: str) -> ForeseeableCodec:
        """Build the codec of `load_codec` as the engine `engine` holds it, with its tensors on the meta device.

        It decodes and does not encode: it has no tokenizers."""


@runtime_checkable
class ReadsLess(Protocol):
    """A codec whose conditioning does not depend on all of a spec. Optional.

    Samples of one prompt whose specs have the same key then share it: those of other sizes, say."""

    def conditioning_key(self, spec: Any) -> Hashable:
        """Return what of the spec `encode` reads, besides whether it is guided."""


@runtime_checkable
class HasEncoders(Protocol):
    """A codec with models that only `encode` uses, frozen, which an engine may keep in host memory. Optional."""

    encoders: Sequence[torch.nn.Module]


@runtime_checkable
class RoundsTime(Protocol):
    """A policy whose denoisers embed the time in the dtype that it comes in, which has to be their own. Optional.

    A trainer's weights have another dtype between forward passes than in them, so it casts the time by itself."""

    rounds_time: bool


@runtime_checkable
class HasModalities(Protocol):
    """A policy whose latents are of several media, one after the other along their first axis.

    Engines then return log-probabilities of each besides those of the whole, and the trainer reports both. Optional."""

    def modalities(self, spec: Any) -> dict[str, slice]:
        """Return where each medium lies in the first axis of a sample's latents; names and their order are fixed."""


def modalities_of(policy: Policy, spec: Any) -> dict[str, slice]:
    """Return the policy's modalities, none where its latents are of one medium."""
    return policy.modalities(spec) if isinstance(policy, HasModalities) else {}


class ForeseeableCodec(Protocol):
    """The codec of a `Foreseeable` policy.

    models: all of its models. encoders: the models for `encode` alone."""

    models: Sequence[torch.nn.Module]
    encoders: Sequence[torch.nn.Module]

    def most_at_once(self, spec: Any) -> int:
        """Return how many samples `decode` computes together, however many it is given."""

    def decode(self, latents: torch.Tensor, spec: Any) -> list[Media]:
        """See `Codec`."""


class Codec(Protocol):
    def to(self, device: Any) -> Codec: ...

    def encode(self, prompt: Prompt, spec: Any) -> TensorDict:
        """Encode one prompt to conditioning, batch size []; with the unconditional branch if the spec is guided.

        ValueError for a prompt that the model cannot take."""

    def decode(self, latents: torch.Tensor, spec: Any) -> list[Media]:
        """Decode final latents (B, *shape) to the media of B samples, of the shapes that `spec.media()` says.

        Tensors on the CPU, and no views, which would keep the whole batch alive."""

    def encode_media(self, media: list[Media], spec: Any) -> torch.Tensor:
        """Invert `decode`, as far as the VAE has an inverse.

        The media of B samples to latents (B, *shape) float32 on the codec's device, noise-free (the posterior's mode),
        so that they always have the same latents. Raises ValueError for other shapes than the spec's
        (`media.require_media`)."""
