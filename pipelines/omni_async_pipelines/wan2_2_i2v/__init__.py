"""Supports Wan2.2 image-to-video (I2V-A14B): Wan2.2's two experts, which also take a prompt's image as the first frame.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.wan2_2 import COMFYUI_LAYERS
from omni_async_pipelines.wan2_2_i2v.sampling import Wan22I2VSampling

FAMILY = PipelineFamily(
    name="wan2_2_i2v",
    policy="omni_async_pipelines.wan2_2_i2v.policy:Wan22I2VPolicy",
    sampling=Wan22I2VSampling,
    model_index_class="WanImageToVideoPipeline",
    components=("transformer", "transformer_2"),
    vllm_pipeline="omni_async_pipelines.wan2_2_i2v.rollout.Wan22I2VRolloutPipeline",
    prompt_images=1,
    needs_images=True,
    attention_heads="num_attention_heads",
    comfyui_layers=COMFYUI_LAYERS,
    parity="omni_async_pipelines.wan2_2_i2v.parity:CASES",
)
