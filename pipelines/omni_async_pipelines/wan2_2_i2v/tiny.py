"""Builds Wan2.2 image-to-video checkpoints small enough for tests: real architecture, random weights, offline.

python -m omni_async_pipelines.wan2_2_i2v.tiny /tmp/tiny_wan22_i2v   # two experts, as Wan2.2-I2V-A14B
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from diffusers import WanImageToVideoPipeline

from omni_async_pipelines import tiny
from omni_async_pipelines.wan2_2 import tiny as text_to_video
from omni_async_pipelines.wan2_2_i2v.sampling import MASK

BOUNDARY = 0.9


def build_components(*, layers: int = 2, heads: int = 2, seed: int = 0) -> WanImageToVideoPipeline:
    """Build every part with random float32 weights and return them as a pipeline.

    Args:
        layers, heads: each transformer's; heads have 12 features.
        seed: the same one gives the same weights."""
    made: Any = text_to_video.build_components(layers=layers, heads=heads, seed=seed)
    channels = made.vae.config.z_dim
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        experts = {
            name: text_to_video.expert(channels, layers, heads, given=MASK + channels)
            for name in ("transformer", "transformer_2")
        }
    return WanImageToVideoPipeline(**made.components | experts, boundary_ratio=BOUNDARY)


build = partial(tiny.build, build_components)

if __name__ == "__main__":
    tiny.main(build, "Wan2.2 image-to-video")
