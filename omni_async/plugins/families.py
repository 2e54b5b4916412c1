"""Finds model families and says what is known of one without importing torch.

A family is a small package (see `pipelines/`) that registers a `PipelineFamily` in the entry-point group
`omni_async.pipelines`. What a recipe may say about one of its samples (size, guidance, whatever changes what is drawn)
is a `SamplingSpec` of its own: the framework carries it whole, compares and hashes it, asks it what the sample's media
look like, and never looks inside.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from omni_async.plugins.entry_points import find_registered, registered_names

GROUP = "omni_async.pipelines"
PARTS = ("image", "video", "audio")  # of media


class MediaShape(msgspec.Struct, frozen=True):
    """One part of a sample's media.

    An image (3, H, W), a video (F, 3, H, W) with its frames per second, or audio (channels, n) with its samples per
    second."""

    part: Literal["image", "video", "audio"]
    shape: tuple[int, ...]
    rate: float | None = None


class EncodedText(msgspec.Struct, frozen=True, kw_only=True):
    """A text as one of a model's text encoders is given it.

    tokenizer: its folder in the checkpoint.
    cls: the tokenizer's class in transformers.
    text: with its template, if that is plain text.
    chat: or the messages, (role, content), from which the tokenizer's own template makes the text.
    most: the tokens that the encoder takes; None: the tokenizer's `model_max_length`.
    dropped: the first tokens, those of the template, which do not count.
    cut: whether a longer text is cut; otherwise the codec refuses it."""

    tokenizer: str
    cls: str
    text: str = ""
    chat: tuple[tuple[str, str], ...] = ()
    most: int | None
    dropped: int = 0
    cut: bool = True

    def tokens_at_most(self) -> int:
        """Return a number of tokens that no tokenizer exceeds, from the number of bytes."""
        parts = [self.text, *(content for _, content in self.chat)]
        return sum(_bytes_at_most(part) + _SPECIAL_TOKENS for part in parts)


_SPECIAL_TOKENS = 16  # at most so many come with a text or a message


def _bytes_at_most(text: str) -> int:
    """Return how many bytes a text has after any normalisation that tokenizers use; none has more tokens than bytes."""
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

    def problem(self, checkpoint: Path) -> str | None:
        """Return why the model in the folder `checkpoint` makes no such sample, as `key: reason`; None if it does.

        Reads configuration files, which were checked to be there and to be JSON."""
        return None

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        """Return how the text encoders are given a prompt.

        Args:
            text: the prompt's, or a negative prompt.
            images: how many images the prompt carries."""
        return ()

    def refused(self, text: str, images: tuple[tuple[int, int], ...]) -> str | None:
        """Return why the model can draw no sample of a prompt, as `key: reason`; None if it can.

        Args:
            text: the prompt's.
            images: width and height in pixels of each of its images."""
        return None

    def shared_tokens(self, checkpoint: Path) -> int | None:
        """Return the number of a sample's tokens, besides text, that ranks share in equal parts; None if parts differ.

        Where prompts decide on more of them, it is the largest number that divides what there can be.
        Asked of the model in the folder `checkpoint` after `problem`, and reads the same."""
        return None

    def media(self) -> tuple[MediaShape, ...]:
        """Return the shapes of what is decoded from a sample; of emulated ones nothing is."""
        return ()


class PipelineFamily(msgspec.Struct, frozen=True):
    """A model family.

    `policy` is a `module:Class`; `sampling` the class of its specs; `vllm_pipeline` and `vllm_extension` are the dotted
    classes handed to vLLM-Omni; `model_index_class` is the `_class_name` that a checkpoint's `model_index.json` must
    have; `components` are the checkpoint's folders with what is trained; `prompt_images` is the number of images that a
    prompt may carry (its codec reads them by `omni_async.data.image_files.read_prompt_image`), and `needs_images` says
    that it must carry one; `attention_heads` is the
    key of a component's config.json with the number of its attention heads, None where ranks cannot share a row's
    tokens (`omni_async.diffusion.policy.SequencePlan`); `comfyui_layers` are (pattern, replacement) that make ComfyUI's
    name of a denoiser's layer, of which the first that matches the whole name counts (none: it has no LoRA layout for
    these layers that is a renaming); `parity` is the `module:NAME` of the tuple of its
    `omni_async.commands.parity.case.Case`s."""

    name: str
    policy: str
    model_index_class: str
    sampling: type[SamplingSpec]
    vllm_pipeline: str | None = None
    vllm_extension: str = "omni_async.rollout.vllm_worker.RolloutWorkerExtension"
    components: tuple[str, ...] = ("transformer",)
    prompt_images: int = 0
    needs_images: bool = False
    attention_heads: str | None = None
    comfyui_layers: tuple[tuple[str, str], ...] = ()
    parity: str | None = None


@cache
def family_names() -> tuple[str, ...]:
    """Return the names of all installed families, sorted."""
    return registered_names(GROUP)


@cache
def find_family(name: str) -> PipelineFamily:
    """Return the family registered as `name`.

    ValueError lists the known ones, or says why its package, which is foreign code, gives none."""
    return find_registered(name, GROUP, PipelineFamily, "model.pipeline")
