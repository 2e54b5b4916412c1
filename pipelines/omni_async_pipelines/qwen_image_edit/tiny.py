"""Builds a Qwen-Image-Edit checkpoint small enough for tests: real architecture, random weights, built offline.

It has the parts of a tiny Qwen-Image, with a tokenizer that knows both templates, and the processor of images.

    python -m omni_async_pipelines.qwen_image_edit.tiny /tmp/tiny_qwen_image_edit
"""

from __future__ import annotations

from functools import partial
from typing import Any

from diffusers import QwenImageEditPipeline
from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from omni_async_pipelines import tiny
from omni_async_pipelines.qwen_image import tiny as qwen_image
from omni_async_pipelines.qwen_image_edit.sampling import EDIT_TEMPLATE, NUM_EDIT_TEMPLATE_TOKENS

_SEEN = "<|vision_start|>"  # begins the part that is not dropped


def build_components(*, vocab_size: int = 1024, **shape: Any) -> QwenImageEditPipeline:
    """Build every part with random float32 weights and return them as a pipeline.

    Args:
        vocab_size: the number of tokens, which must suffice for the words of both templates.
        shape: as `omni_async_pipelines.qwen_image.tiny.build_components` takes it."""
    corpus = [*EDIT_TEMPLATE.split("{}"), *tiny.CORPUS]
    qwen: Any = qwen_image.build_components(vocab_size=vocab_size, corpus=corpus, **shape)
    parts = qwen.components
    num_dropped = len(parts["tokenizer"](EDIT_TEMPLATE.partition(_SEEN)[0])["input_ids"])
    if num_dropped != NUM_EDIT_TEMPLATE_TOKENS:
        raise ValueError(
            f"the template's system part takes {num_dropped} tokens, expected {NUM_EDIT_TEMPLATE_TOKENS}:"
            f" raise vocab_size (now {vocab_size})"
        )
    pixels = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
    processor = Qwen2VLProcessor(Qwen2VLImageProcessor(**pixels), parts["tokenizer"], Qwen2VLVideoProcessor(**pixels))
    return QwenImageEditPipeline(**parts, processor=processor)


build = partial(tiny.build, build_components)

if __name__ == "__main__":
    tiny.main(build, "Qwen-Image-Edit")
