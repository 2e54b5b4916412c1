"""Supports LTX-2: video and its sound generated together from one text, with Gemma3, two VAEs and a vocoder.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.ltx_2.sampling import LTX2Sampling

FAMILY = PipelineFamily(
    name="ltx_2",
    policy="omni_async_pipelines.ltx_2.policy:LTX2Policy",
    sampling=LTX2Sampling,
    model_index_class="LTX2Pipeline",
    vllm_pipeline="omni_async_pipelines.ltx_2.rollout.LTX2RolloutPipeline",
    comfyui_layers=((r"(transformer_blocks\..+)", r"diffusion_model.\1"),),
    parity="omni_async_pipelines.ltx_2.parity:CASES",
)
