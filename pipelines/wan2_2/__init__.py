"""Wan2.2: text-to-video of two experts by noise level (T2V-A14B) or one transformer (TI2V-5B), UMT5 and a video VAE.

Importing this package imports no torch."""

from omni_async.families import PipelineFamily
from pipelines.wan2_2.sampling import Wan22Sampling

FAMILY = PipelineFamily(
    name="wan2_2",
    policy="pipelines.wan2_2.policy:Wan22Policy",
    sampling=Wan22Sampling,
    model_index_class="WanPipeline",
    components=("transformer", "transformer_2"),
    vllm_pipeline="pipelines.wan2_2.rollout.Wan22RolloutPipeline",
    attention_heads="num_attention_heads",
    parity="pipelines.wan2_2.parity:CASES",
)
