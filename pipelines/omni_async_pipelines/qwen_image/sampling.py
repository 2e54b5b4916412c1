"""Defines the keys of `rollout.sampling` for Qwen-Image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText
from omni_async_pipelines.sampling import ImageSampling

PROMPT_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial"
    " relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
# Tokens of the template's system part. This many hidden states are dropped, whatever the tokenizer returned for it.
NUM_TEMPLATE_TOKENS = 34
MAX_TEXT_TOKENS = 1024


class QwenImageSampling(ImageSampling, frozen=True, kw_only=True):
    true_cfg_scale: Annotated[float, doc("True classifier-free guidance; 1 switches it off.", ge=1, most=1000)] = 1.0
    negative_prompt: Annotated[str, doc("The unconditional branch's prompt when true_cfg_scale > 1.")] = " "

    @property
    def guided(self) -> bool:
        return self.true_cfg_scale > 1

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        return (encoded(PROMPT_TEMPLATE, text, NUM_TEMPLATE_TOKENS),)

    def shared_tokens(self, checkpoint: Path) -> int:
        return (self.height // 16) * (self.width // 16)


def encoded(template: str, text: str, dropped: int) -> EncodedText:
    """Return a text in a template whose first tokens are dropped."""
    return EncodedText(
        tokenizer="tokenizer",
        cls="Qwen2Tokenizer",
        text=template.format(text),
        most=MAX_TEXT_TOKENS,
        dropped=dropped,
        cut=False,
    )
