"""Defines the comparison of `omni-async parity` for Qwen3-Omni."""

from dataclasses import replace

from omni_async.commands.parity.case import built
from omni_async_pipelines.qwen3_omni import Qwen3OmniSampling
from omni_async_pipelines.qwen_omni import parity

CASES = tuple(
    replace(
        case,
        specs=(Qwen3OmniSampling(max_tokens=12, temperature=0.7),),
        build=built("omni_async_pipelines.qwen3_omni.tiny:build"),
    )
    for case in parity.CASES
)
