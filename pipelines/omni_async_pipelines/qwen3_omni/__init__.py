"""Supports Qwen3-Omni: its thinker, a mixture of experts, answers prompts of text and media with text.

Importing this package imports no torch. It shares all but names and the thinker's class with `qwen_omni`."""

from typing import ClassVar

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.qwen_omni.sampling import QwenOmniSampling


class Qwen3OmniSampling(QwenOmniSampling, frozen=True, kw_only=True):
    media_tokens: ClassVar[tuple[str, ...]] = ("<|image_pad|>", "<|audio_pad|>", "<|video_pad|>")


FAMILY = PipelineFamily(
    name="qwen3_omni",
    policy="omni_async_pipelines.qwen3_omni.policy:Qwen3OmniPolicy",
    sampling=Qwen3OmniSampling,
    model_index_class="Qwen3OmniMoeForConditionalGeneration",
    components=("thinker",),
    prompt_images=16,
    prompt_audio=8,
    prompt_video=4,
    parity="omni_async_pipelines.qwen3_omni.parity:CASES",
    draws="tokens",
    layout="transformers",
    component_class="Qwen3OmniMoeThinkerForConditionalGeneration",
    on_vllm=True,
    fused=(("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))),
)
