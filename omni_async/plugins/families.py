"""Finds model families and describes them without importing torch.

A family is a small package (see `pipelines/`) that registers a `PipelineFamily` in the entry-point group
`omni_async.pipelines`. Its own `SamplingSpec` holds the recipe's settings of a sample: size, guidance, and anything
else that changes the result. The framework passes the spec whole, compares and hashes it, and calls it for the shapes
of the sample's media. It reads no fields but the `encoding_keys`.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from omni_async.plugins.entry_points import find_registered, registered_names

GROUP = "omni_async.pipelines"
ARRAYS = ("image", "video", "audio")  # parts of media that are arrays, and files on disk
PARTS = (*ARRAYS, "text")


class MediaShape(msgspec.Struct, frozen=True):
    """One part of a sample's media.

    An image has shape (3, H, W); a video (F, 3, H, W), with its frames per second; audio (channels, n), with its
    samples per second; a text has the shape () whatever its length."""

    part: Literal["image", "video", "audio", "text"]
    shape: tuple[int, ...]
    rate: float | None = None


class EncodedText(msgspec.Struct, frozen=True, kw_only=True):
    """A text as the input of one of a model's text encoders.

    tokenizer: its folder in the checkpoint.
    cls: the tokenizer's class in transformers.
    text: the text with its template, if that is plain text.
    chat: otherwise the messages, (role, content), from which the tokenizer's own template builds the text.
    most: the largest number of tokens for the encoder; None: the tokenizer's `model_max_length`.
    dropped: the number of leading tokens, from the template, that do not count.
    answer: the largest number of tokens of the answer, which share `most` with the text.
    cut: whether a longer text is truncated; otherwise the codec refuses it."""

    tokenizer: str
    cls: str
    text: str = ""
    chat: tuple[tuple[str, str], ...] = ()
    most: int | None
    dropped: int = 0
    answer: int = 0
    cut: bool = True

    def tokens_at_most(self) -> int:
        """Return an upper bound on the tokens of any tokenizer, from the number of bytes."""
        parts = [self.text, *(content for _, content in self.chat)]
        return sum(_bytes_at_most(part) + _SPECIAL_TOKENS for part in parts)


_SPECIAL_TOKENS = 16  # largest number of special tokens for a text or a message


def _bytes_at_most(text: str) -> int:
    """Return a text's largest size in bytes after any tokenizer's normalisation; it has at most as many tokens."""
    if text.isascii():
        return len(text)
    return max(len(text.encode()), len(unicodedata.normalize("NFKC", text).lower().encode()))


class SamplingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Size and settings of one sample. Families subclass it; their fields are the keys of `rollout.sampling`.

    A `__post_init__` that raises ValueError refuses combinations of values. Two requests with equal specs can share a
    batch."""

    @property
    def guided(self) -> bool:
        """Whether the conditioning needs an unconditional branch."""
        return False

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens of an answer; None if the family draws latents."""
        return None

    def context(self, checkpoint: Path) -> int | None:
        """Return the largest number of tokens of a prompt and its answer; None if the family draws latents.

        Called after `problem`, for the model in the folder `checkpoint`; reads the same files."""
        return None

    @property
    def encoding_keys(self) -> tuple[str, ...]:
        """The keys, where the family has them, that decide how prompts are encoded, in addition to size and guidance.

        A teacher reads the policy's encoded prompts, so these keys cannot differ for it."""
        return "negative_prompt", "max_sequence_length"

    def problem(self, checkpoint: Path) -> str | None:
        """Return why the model in `checkpoint` cannot generate such a sample, as `key: reason`; None if it can.

        Reads configuration files; the caller has checked that they exist and are JSON."""
        return None

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        """Return the inputs of the text encoders for a prompt; of a model that draws tokens, what it reads itself.

        Args:
            text: the prompt's text, or a negative prompt.
            images: how many images the prompt carries."""
        return ()

    def refused(self, text: str, images: tuple[tuple[int, int], ...]) -> str | None:
        """Return why the model cannot generate a sample of a prompt, as `key: reason`; None if it can.

        Args:
            text: the prompt's text.
            images: width and height in pixels of each of its images."""
        return None

    def shared_tokens(self, checkpoint: Path) -> int | None:
        """Return how many of a sample's tokens, besides text, ranks share in equal parts; None if the parts differ.

        If the number depends on the prompt, return the largest divisor of all possible numbers.
        Called after `problem`, for the model in the folder `checkpoint`; reads the same files."""
        return None

    def media(self) -> tuple[MediaShape, ...]:
        """Return the shapes of the media decoded from a sample; emulated samples have none."""
        return ()


class PipelineFamily(msgspec.Struct, frozen=True):
    """A model family.

    policy: `module:Class`.
    sampling: the class of its specs.
    vllm_pipeline, vllm_extension: the dotted classes passed to vLLM-Omni.
    model_index_class: the `_class_name` that a checkpoint's `model_index.json` must have; with layout `transformers`
        the first entry of `architectures` in its `config.json`.
    components: the checkpoint's folders with trained weights.
    prompt_images: the largest number of images of a prompt; the codec reads them by
        `omni_async.data.image_files.read_prompt_image`.
    prompt_audio, prompt_video: the same of audio, by `omni_async.data.audio_files.read_prompt_audio`, and of videos,
        by `omni_async.data.video_files.read_prompt_videos`.
    needs_images: whether a prompt must carry an image.
    attention_heads: the key of a component's config.json with the number of its attention heads; None if ranks cannot
        share a row's tokens (`omni_async.diffusion.policy.SequencePlan`).
    comfyui_layers: (pattern, replacement) pairs that turn the name of a denoiser's layer into ComfyUI's name. The first
        pattern that matches the whole name counts. Empty: ComfyUI has no LoRA layout for these layers that only renames
        them.
    parity: the `module:NAME` of the tuple of its `omni_async.commands.parity.case.Case`s.
    draws: what its policy draws: `latents` (an `omni_async.diffusion.policy.Policy`) or `tokens` (an
        `omni_async.tokens.policy.TokenPolicy`).
    layout: `diffusers`, a folder per component below a `model_index.json`; or `transformers`, one folder with a
        `config.json` and all weights.
    component_class: with layout `transformers`, the class that loads the first component from the folder of the model;
        None: `model_index_class`.
    on_vllm: whether vLLM loads its checkpoints; its policy then is an `omni_async.tokens.policy.ReadByVllm`.
    fused: the parameters of modules `experts` that hold all experts (experts, rows, columns), where the checkpoint has
        matrices of each: pairs of a parameter's name and the names of the matrices whose rows it consists of, of as
        many rows each (`omni_async.weights.experts`)."""

    name: str
    policy: str
    model_index_class: str
    sampling: type[SamplingSpec]
    vllm_pipeline: str | None = None
    vllm_extension: str = "omni_async.rollout.vllm_worker.RolloutWorkerExtension"
    components: tuple[str, ...] = ("transformer",)
    prompt_images: int = 0
    prompt_audio: int = 0
    prompt_video: int = 0
    needs_images: bool = False
    attention_heads: str | None = None
    comfyui_layers: tuple[tuple[str, str], ...] = ()
    parity: str | None = None
    draws: Literal["latents", "tokens"] = "latents"
    layout: Literal["diffusers", "transformers"] = "diffusers"
    component_class: str | None = None
    on_vllm: bool = False
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()


@cache
def family_names() -> tuple[str, ...]:
    """Return the names of all installed families, sorted."""
    return registered_names(GROUP)


@cache
def find_family(name: str) -> PipelineFamily:
    """Return the family registered as `name`.

    Raises ValueError that lists the known families, or explains why the family's package, which is foreign code,
    failed."""
    return find_registered(name, GROUP, PipelineFamily, "model.pipeline")
