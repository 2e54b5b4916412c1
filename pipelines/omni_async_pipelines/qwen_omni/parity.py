"""Defines the comparison of `omni-async parity` for Qwen2.5-Omni."""

from omni_async.commands.parity.case import PROMPTS, Case, built
from omni_async.types import Prompt
from omni_async_pipelines.qwen_omni.sampling import QwenOmniSampling

CASES = (
    Case(
        specs=(QwenOmniSampling(max_tokens=12, temperature=0.7),),
        build=built("omni_async_pipelines.qwen_omni.tiny:build"),
        prompts=tuple(Prompt(index, text) for index, text in enumerate((*PROMPTS, "name the sound", "what moves?"))),
        image_sizes=((84, 56), None, (56, 140), None, None),
        sounds=(None, None, 0.57, 3.1, None),
        films=(None, None, None, None, 4),
    ),
)
