"""Defines the comparisons of `omni-async parity` for Z-Image."""

from omni_async.commands.parity.case import Case, built
from omni_async_pipelines.z_image.sampling import ZImageSampling

CASES = (
    Case(
        specs=(
            ZImageSampling(height=64, width=48),
            ZImageSampling(height=32, width=64, guidance_scale=3.0, negative_prompt="dull"),
        ),
        build=built("omni_async_pipelines.z_image.tiny:build"),
        targets=("to_q", "to_k", "to_v", "to_out.0", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    ),
)
