"""Defines the policy contract: the description of a model family that the trainer and every engine share.

Sharing it prevents differences between trainer and engines.

A family is a small class in `pipelines/omni_async_pipelines/<family>/policy.py`. It defines conditioning, latent shape
and velocity; everything else (SDE step, log-prob, windows, batching, transport of weights) is model-agnostic and is
elsewhere. `omni_async.plugins.families` describes a family without torch.
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
    """The cuts, by module names, of a denoiser without a context-parallel plan in diffusers (`_cp_plan`).

    layers: the list of repeated layers, whose attentions are all plain self-attention without a mask.
    tokens: the arguments of a layer that are tokens, (B, L, C); they are split before the first layer.
    output: the module after the layers whose output, (B, L, C), is gathered."""

    layers: str
    tokens: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class SequencePlan:
    """Properties of a family's denoisers for ranks that share the tokens of a row (`trainer.sequence_parallel`).

    masked_text: inputs of the denoiser with text tokens, (B, L, C), whose L the number of ranks must divide, each with
    the input that masks it, (B, L) bool or None. Texts are padded at the end, which must move no position.
    exchange: None if diffusers has a plan for the denoiser."""

    masked_text: Mapping[str, str] = field(default_factory=dict)
    exchange: OwnExchange | None = None


class Policy(Protocol):
    """A model family's functions for one checkpoint.

    Latents are (B, *shape) of B samples, with any shape; `spec` is one of the family's `SamplingSpec`s. Conditioning is
    a TensorDict of batch size [B] with the keys of the family's `encode`.

    components: folder names of the checkpoint's trained denoisers, such as `transformer`, `transformer_2`.
    sequence_plan: the plan for ranks that share the tokens of a row; None if this is not supported."""

    path: str
    components: tuple[str, ...]
    sequence_plan: SequencePlan | None

    def load_components(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        """Load only the denoisers, by component, on CPU, in eval mode (no dropout), weights in `dtype`."""

    def component_of(self, sigma: float) -> str:
        """Return the component that computes the velocity at `sigma` in [0, 1]."""

    def latent_shape(self, spec: Any) -> tuple[int, ...]:
        """Return the shape of one sample's latents in the denoiser's input.

        Raises ValueError if the checkpoint's model cannot generate such a sample."""

    def sigmas(self, num_inference_steps: int, spec: Any) -> torch.Tensor:
        """Return exactly the numbers of the family's scheduler: float32 (N + 1,), decreasing, last value 0."""

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
            sigma: float32 (B,), of rows that all need the same component.
            conditioning: stacked, of batch size [B].
            spec: the samples'.
            unconditional_gradient: whether a gradient flows through guidance's unconditional branch.

        Raises:
            ValueError: the samples are guided, but the conditioning has no unconditional branch."""

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        """Stack per-sample conditioning (batch size []) into a TensorDict of batch size [B].

        It calls `omni_async.diffusion.components.stack_rows` with the family's rule for every key."""

    def blank_conditioning(self, spec: Any) -> TensorDict:
        """Return conditioning of one sample, batch size [], with the shapes of a short prompt and blank values.

        It has the unconditional branch if the spec is guided. For engines that emulate a model without loading it."""

    def load_codec(self, dtype: torch.dtype) -> Codec:
        """Load text encoder and VAE, which engines need and the trainer never does."""


@runtime_checkable
class BuildsEmpty(Protocol):
    """A policy that also builds its components without their weights.

    The ranks of a trainer then read their shards from the checkpoint's files, and none holds a whole model. Optional: a
    policy without this method is loaded whole on every rank."""

    path: str

    def build_components(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        """Build the denoisers as in `load_components`, with parameters on the meta device in `dtype`.

        Persistent buffers may be on the meta device, too; other buffers and tensors have their values. The files of
        each denoiser are in the folder of its name, and use the module's names of weights."""


@runtime_checkable
class Foreseeable(Protocol):
    """A policy whose memory can be estimated from configuration files, without weights and prompts. Optional."""

    def long_conditioning(self, spec: Any, tokens: int) -> TensorDict:
        """Return conditioning of one sample, batch size [], for a text of `tokens` tokens and the most images allowed.

        Otherwise it is like `blank_conditioning`, whose texts are short. Texts of fixed length keep their length."""

    def build_codec(self, dtype: torch.dtype, engine: str) -> ForeseeableCodec:
        """Build the codec of `load_codec` as the engine `engine` holds it, with its tensors on the meta device.

        It decodes but does not encode, because it has no tokenizers."""


@runtime_checkable
class ReadsLess(Protocol):
    """A codec whose conditioning does not depend on the whole spec. Optional.

    Samples of the same prompt whose specs have the same key then share it, for example samples of different sizes."""

    def conditioning_key(self, spec: Any) -> Hashable:
        """Return the part of the spec that `encode` reads, in addition to whether it is guided."""


@runtime_checkable
class HasEncoders(Protocol):
    """A codec with frozen models that only `encode` uses, which an engine may keep in host memory. Optional."""

    encoders: Sequence[torch.nn.Module]


@runtime_checkable
class RoundsTime(Protocol):
    """A policy whose denoisers embed the time in its input dtype, which must be their own dtype. Optional.

    A trainer's weights have different dtypes inside and outside forward passes, so the trainer casts the time."""

    rounds_time: bool


@runtime_checkable
class HasModalities(Protocol):
    """A policy whose latents consist of several media, one after the other along their first axis.

    Engines then return log-probabilities of each medium and of the whole, and the trainer reports both. Optional."""

    def modalities(self, spec: Any) -> dict[str, slice]:
        """Return each medium's slice of the first axis of a sample's latents; names and their order are fixed."""


def modalities_of(policy: Policy, spec: Any) -> dict[str, slice]:
    """Return the policy's modalities; empty for latents of a single medium."""
    return policy.modalities(spec) if isinstance(policy, HasModalities) else {}


class ForeseeableCodec(Protocol):
    """The codec of a `Foreseeable` policy.

    models: all of its models. encoders: the models for `encode` alone."""

    models: Sequence[torch.nn.Module]
    encoders: Sequence[torch.nn.Module]

    def most_at_once(self, spec: Any) -> int:
        """Return the largest number of samples that `decode` computes together, for any number of inputs."""

    def decode(self, latents: torch.Tensor, spec: Any) -> list[Media]:
        """See `Codec`."""


class Codec(Protocol):
    def to(self, device: Any) -> Codec: ...

    def encode(self, prompt: Prompt, spec: Any) -> TensorDict:
        """Encode one prompt to conditioning, batch size []; with the unconditional branch if the spec is guided.

        Raises ValueError for a prompt that the model cannot take."""

    def decode(self, latents: torch.Tensor, spec: Any) -> list[Media]:
        """Decode final latents (B, *shape) to the media of B samples, with the shapes of `spec.media()`.

        The tensors are on the CPU. They are no views, because a view would keep the whole batch alive."""

    def encode_media(self, media: list[Media], spec: Any) -> torch.Tensor:
        """Invert `decode`, as far as the VAE has an inverse.

        Returns latents (B, *shape) float32 on the codec's device for the media of B samples. They are noise-free (the
        posterior's mode), so that the same media always have the same latents. Raises ValueError for shapes other than
        the spec's (`media.require_media`)."""
