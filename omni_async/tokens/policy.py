"""Defines the contract of a family whose policy draws tokens, shared by the trainer and the engine `transformers`.

An answer is drawn token by token from softmax(logits / temperature). Engine and trainer compute the same logits from
the same weights: the trainer for whole answers in packed rows (`log_probs`), the engine with keys and values that it
keeps (`prefill`, `decode`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from omni_async.plugins.entry_points import load_named
from omni_async.plugins.families import PipelineFamily
from omni_async.types import Prompt

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn


def load_token_policy(family: PipelineFamily, path: str) -> TokenPolicy:
    """Return the family's policy for the checkpoint at `path`; reads configuration files only, no weights."""
    policy: TokenPolicy = load_named(family.policy)(path)
    return policy


def is_frozen(policy: object, name: str) -> bool:
    """Return whether a weight, by its name `component.parameter`, is one of the policy's `frozen` ones.

    A policy that draws latents has none."""
    return any(name.startswith(f"{prefix}.") for prefix in getattr(policy, "frozen", ()))


@dataclass(frozen=True)
class Prepared:
    """A prompt of P tokens as the model reads it, on the CPU.

    ids (P,) int64, an image's placeholders expanded. positions (R, P) int64: R rotary positions of each token (1, or 3
    with M-RoPE). The answer's token number k has `next_position + k` in all R. media: input tensors of the model's
    towers by the name of the model's argument, such as `pixel_values`; their first dimensions can be concatenated."""

    ids: Tensor
    positions: Tensor
    next_position: int
    media: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Packed:
    """Prompts with their answers, one behind the other, as a row of L tokens with T answer tokens.

    ids (L,) int64. places (L,) int64: 0, 1, ... within each sequence; a 0 begins the next sequence, which attends to no
    token before it. positions (R, L) int64, as in `Prepared`. at (T,) int64: the places in the row whose logits predict
    the answers' tokens, in their order. targets (T,) int64: those tokens. media: of the row's prompts, concatenated in
    order. All on the device of the model."""

    ids: Tensor
    places: Tensor
    positions: Tensor
    at: Tensor
    targets: Tensor
    media: Mapping[str, Tensor] = field(default_factory=dict)


class Cache(Protocol):
    """The keys and values of B sequences of equal length, as the family keeps them."""

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all sequences but these, in this order."""


@runtime_checkable
class TokenPolicy(Protocol):
    """A model family's functions for one checkpoint.

    components: the trained modules by name. `component.parameter` is a weight's name on the wire and, unless its family
    fuses experts (`PipelineFamily.fused`), in the checkpoint.
    frozen: prefixes of the weights, as `component.module`, that are never trained, sharded or published (towers of
    images and audio). stop_tokens: the tokens that end an answer."""

    path: str
    components: tuple[str, ...]
    frozen: tuple[str, ...]
    stop_tokens: tuple[int, ...]

    def load_components(self, dtype: dtype) -> dict[str, nn.Module]:
        """Load the modules on the CPU, in eval mode, weights in `dtype`.

        Calling a module computes log-probs: `module(packed, temperature)` returns what `log_probs` returns, so that
        FSDP2 gathers the head for its own forward pass."""

    def layers(self, component: nn.Module) -> Sequence[nn.Module]:
        """Return the repeated layers of a component, to shard and to compile."""

    def prepare(self, prompt: Prompt, spec: Any) -> Prepared:
        """Turn a prompt, with its images, into the model's input.

        Raises ValueError for a prompt that the model cannot take, or whose longest answer (`spec.most_tokens`) would
        exceed the model's context."""

    def log_probs(self, components: Mapping[str, nn.Module], packed: Packed, temperature: float) -> Tensor:
        """Return log softmax(logits / temperature) of the answers' tokens, (T,) float32, with gradient."""

    def prefill(
        self, components: Mapping[str, nn.Module], prompts: Sequence[Prepared], answers: Tensor
    ) -> tuple[Tensor, Cache]:
        """Compute keys and values of B prompts of equal length P, with their answers so far.

        Args:
            prompts: B of them, on the CPU.
            answers: (B, A) int64, A >= 0 tokens of each answer.

        Returns:
            The logits (B, V) float32 of the next token, not divided by a temperature, and the cache."""

    def decode(self, components: Mapping[str, nn.Module], cache: Cache, tokens: Tensor, positions: Tensor) -> Tensor:
        """Append a token to each of the cache's B sequences.

        Args:
            cache: of these sequences; it is extended.
            tokens: (B,) int64.
            positions: (B,) int64, the rotary position of each token, the same in all R.

        Returns:
            The logits (B, V) float32 of the next token."""

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""


class ReadByVllm(TokenPolicy, Protocol):
    """A policy whose checkpoint vLLM loads, too: that of a family with `on_vllm`."""

    def vllm_prompt(self, prompt: Prompt, spec: Any) -> dict[str, Any]:
        """Return the prompt as vLLM's dictionary of `prompt`, a text, and `multi_modal_data`.

        vLLM must turn it into the tokens of `prepare`. Raises ValueError as `prepare` does."""
