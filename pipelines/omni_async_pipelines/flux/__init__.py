"""Supports FLUX.1 [dev] and [schnell]: text-to-image, with guidance as an input of the transformer or distilled away.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.flux.sampling import FluxSampling

FAMILY = PipelineFamily(
    name="flux",
    policy="omni_async_pipelines.flux.policy:FluxPolicy",
    sampling=FluxSampling,
    model_index_class="FluxPipeline",
    vllm_pipeline="omni_async_pipelines.flux.rollout.FluxRolloutPipeline",
    comfyui_layers=((r"(.+)", r"transformer.\1"),),
    parity="omni_async_pipelines.flux.parity:CASES",
)
