"""Defines the comparisons of `omni-async parity` for Qwen-Image-Edit: images of two sizes, and a prompt without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from omni_async.commands.parity.case import Case, Upstream, built
from omni_async.types import Prompt
from omni_async_pipelines.qwen_image_edit.sampling import QwenImageEditSampling

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "diffusers.pipelines.qwenimage.pipeline_qwenimage_edit"


class EditUpstream(Upstream):
    """diffusers' pipeline, with two changes.

    It resizes an image to the spec's area, and passes the types of tokens on to the text encoder. Without the types,
    transformers 5 would number an image's tokens like a text's, which never happened in the model's training
    (huggingface/diffusers issue 14194)."""

    not_arguments = (*Upstream.not_arguments, "image_area")

    def __init__(self, path: str) -> None:
        super().__init__(path)
        encoder = self.pipeline.text_encoder

        def typed(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            of_image = kwargs["input_ids"] == encoder.config.image_token_id
            return args, kwargs | {"mm_token_type_ids": of_image.int()}

        encoder.register_forward_pre_hook(typed, with_kwargs=True)

    def latents(self, prompt: Prompt, spec: Any, noise: Tensor) -> Tensor:
        with resizing_to(spec.image_area):
            return super().latents(prompt, spec, noise)

    def media(self, prompt: Prompt, spec: Any, noise: Tensor) -> dict[str, Tensor]:
        with resizing_to(spec.image_area):
            return super().media(prompt, spec, noise)


@contextmanager
def resizing_to(area: int) -> Iterator[None]:
    """Replace the area of resized images, which diffusers' pipeline hard-codes."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

    with patch(f"{MODULE}.calculate_dimensions", lambda published, ratio: calculate_dimensions(area, ratio)):
        yield


CASES = (
    Case(
        specs=(
            QwenImageEditSampling(height=64, width=32, image_area=64 * 64),
            QwenImageEditSampling(height=32, width=32, image_area=64 * 48, true_cfg_scale=3.0),
        ),
        build=built("omni_async_pipelines.qwen_image_edit.tiny:build", layers=2),
        idle=("transformer.transformer_blocks.{last}.(attn.(add_q_proj|to_add_out|norm_added_q)|txt_mlp).*",),
        upstream=EditUpstream,
        image_sizes=((40, 24), (50, 70), None),
    ),
)
