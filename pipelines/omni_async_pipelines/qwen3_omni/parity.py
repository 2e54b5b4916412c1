"""Defines the comparison of `omni-async parity` for Qwen3-Omni."""

from omni_async.commands.parity.case import Case, built
from omni_async_pipelines.qwen3_omni import Qwen3OmniSampling

CASES = (
    Case(
        specs=(Qwen3OmniSampling(max_tokens=12, temperature=0.7),),
        build=built("omni_async_pipelines.qwen3_omni.tiny:build"),
        image_sizes=((84, 56), None, (56, 140)),
    ),
)
