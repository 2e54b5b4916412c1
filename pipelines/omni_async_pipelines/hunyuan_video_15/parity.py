"""Defines the comparisons of `omni-async parity` for HunyuanVideo-1.5."""

from __future__ import annotations

from typing import Any

from omni_async.commands.parity.case import Case, Upstream, built
from omni_async.plugins.families import SamplingSpec
from omni_async.types import Prompt
from omni_async_pipelines.hunyuan_video_15.sampling import HunyuanVideo15Sampling


class HunyuanVideo15Upstream(Upstream):
    """diffusers' pipeline, which takes its guidance as a component and not as an argument."""

    not_arguments = ("fps", "guidance_scale")

    def arguments(self, prompt: Prompt, spec: SamplingSpec) -> dict[str, Any]:
        from diffusers import ClassifierFreeGuidance

        scale: float = spec.guidance_scale  # type: ignore[attr-defined]  # the family's own
        self.pipeline.guider = ClassifierFreeGuidance(guidance_scale=scale)
        return super().arguments(prompt, spec)


CASES = (
    Case(
        specs=(
            HunyuanVideo15Sampling(height=64, width=48, num_frames=5),
            HunyuanVideo15Sampling(height=32, width=32, num_frames=9, guidance_scale=6.0, negative_prompt="dull"),
        ),
        build=built("omni_async_pipelines.hunyuan_video_15.tiny:build", layers=2),
        idle=(
            "transformer.image_embedder.*",  # there is no image, so its outputs have no effect
            "transformer.transformer_blocks.{last}.(ff_context|attn.(add_q_proj|to_add_out|norm_added_q)).*",
        ),
        upstream=HunyuanVideo15Upstream,
        # Only quoted texts reach the second encoder.
        prompts=(Prompt(0, "the digit 7"), Prompt(1, 'a sign that says "7 cats" and "open"'), Prompt(2, "7")),
    ),
)
