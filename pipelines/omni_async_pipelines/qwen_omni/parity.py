"""Defines the comparison of `omni-async parity` for Qwen2.5-Omni."""

from omni_async.commands.parity.case import Case, built
from omni_async_pipelines.qwen_omni.sampling import QwenOmniSampling

CASES = (
    Case(
        specs=(QwenOmniSampling(max_tokens=12, temperature=0.7),),
        build=built("omni_async_pipelines.qwen_omni.tiny:build"),
        image_sizes=((84, 56), None, (56, 140)),
    ),
)
