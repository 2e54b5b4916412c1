"""Defines the comparisons of `omni-async parity` for Wan2.2 image-to-video: images larger and smaller than videos."""

from functools import partial

from omni_async.commands.parity.case import Case, Upstream, built
from omni_async_pipelines.wan2_2_i2v.sampling import Wan22I2VSampling


class _Upstream(Upstream):
    def __init__(self, path: str) -> None:
        from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

        super().__init__(path)
        # It fails without ftfy; the text-to-video pipeline, like the codec, works without.
        pipeline_wan_i2v.basic_clean = pipeline_wan.basic_clean


_SAMPLING = partial(Wan22I2VSampling, max_sequence_length=32)
CASES = (
    Case(
        specs=(
            _SAMPLING(height=32, width=48, num_frames=5),
            _SAMPLING(height=48, width=32, num_frames=9, guidance_scale=3.5, guidance_scale_2=2.5, negative_prompt="x"),
        ),
        build=built("omni_async_pipelines.wan2_2_i2v.tiny:build", layers=2),
        upstream=_Upstream,
        image_sizes=((48, 32), (70, 51), (20, 64)),
    ),
)
