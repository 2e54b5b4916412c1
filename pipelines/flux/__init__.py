"""Supports FLUX.1 [dev] and [schnell]: text-to-image, the guidance an input of the transformer or distilled away.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from pipelines.flux.sampling import FluxSampling

FAMILY = PipelineFamily(
    name="flux",
    policy="pipelines.flux.policy:FluxPolicy",
    sampling=FluxSampling,
    model_index_class="FluxPipeline",
    vllm_pipeline="pipelines.flux.rollout.FluxRolloutPipeline",
    comfyui_layers=((r"(.+)", r"transformer.\1"),),
    parity="pipelines.flux.parity:CASES",
)
