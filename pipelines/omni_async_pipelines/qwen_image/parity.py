"""Defines the comparisons of `omni-async parity` for Qwen-Image."""

from omni_async.commands.parity.case import Case, built
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling

CASES = (
    Case(
        specs=(QwenImageSampling(height=64, width=32), QwenImageSampling(height=32, width=32, true_cfg_scale=3.0)),
        build=built("omni_async_pipelines.qwen_image.tiny:build", layers=2),
        idle=("transformer.transformer_blocks.{last}.(attn.(add_q_proj|to_add_out|norm_added_q)|txt_mlp).*",),
    ),
)
