"""Supports Qwen2.5-Omni: its thinker answers prompts of text, images, videos and audio with text.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.qwen_omni.sampling import QwenOmniSampling

FAMILY = PipelineFamily(
    name="qwen_omni",
    policy="omni_async_pipelines.qwen_omni.policy:QwenOmniPolicy",
    sampling=QwenOmniSampling,
    model_index_class="Qwen2_5OmniForConditionalGeneration",
    components=("thinker",),
    prompt_images=16,
    prompt_audio=8,
    prompt_video=4,
    parity="omni_async_pipelines.qwen_omni.parity:CASES",
    draws="tokens",
    layout="transformers",
    component_class="Qwen2_5OmniThinkerForConditionalGeneration",
    on_vllm=True,
)
