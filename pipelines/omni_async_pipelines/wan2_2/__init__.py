"""Supports Wan2.2 text-to-video: two experts by noise level (T2V-A14B) or one transformer (TI2V-5B), UMT5, a video VAE.

Importing this package imports no torch."""

from omni_async.plugins.families import PipelineFamily
from omni_async_pipelines.wan2_2.sampling import Wan22Sampling

# ComfyUI names layers as the model's authors do.
COMFYUI_LAYERS = tuple(
    (rf"(blocks\.\d+)\.{layer}", rf"diffusion_model.\1.{name}")
    for layer, name in (
        (r"attn1\.to_([qkv])", r"self_attn.\2"),
        (r"attn1\.to_out\.0", "self_attn.o"),
        (r"attn2\.to_([qkv])", r"cross_attn.\2"),
        (r"attn2\.to_out\.0", "cross_attn.o"),
        (r"attn2\.add_([kv])_proj", r"cross_attn.\2_img"),
        (r"ffn\.net\.0\.proj", "ffn.0"),
        (r"ffn\.net\.2", "ffn.2"),
    )
)

FAMILY = PipelineFamily(
    name="wan2_2",
    policy="omni_async_pipelines.wan2_2.policy:Wan22Policy",
    sampling=Wan22Sampling,
    model_index_class="WanPipeline",
    components=("transformer", "transformer_2"),
    vllm_pipeline="omni_async_pipelines.wan2_2.rollout.Wan22RolloutPipeline",
    attention_heads="num_attention_heads",
    comfyui_layers=COMFYUI_LAYERS,
    parity="omni_async_pipelines.wan2_2.parity:CASES",
)
