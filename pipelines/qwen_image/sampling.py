"""Defines the keys of `rollout.sampling` for Qwen-Image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from pipelines.sampling import ImageSampling


class QwenImageSampling(ImageSampling, frozen=True, kw_only=True):
    true_cfg_scale: Annotated[float, doc("True classifier-free guidance; 1 switches it off.", ge=1, most=1000)] = 1.0
    negative_prompt: Annotated[str, doc("The unconditional branch's prompt when true_cfg_scale > 1.")] = " "

    @property
    def guided(self) -> bool:
        return self.true_cfg_scale > 1

    def shared_tokens(self, checkpoint: Path) -> int:
        return (self.height // 16) * (self.width // 16)
