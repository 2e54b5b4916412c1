"""Defines the comparisons of `omni-async parity` for Wan2.2."""

from functools import partial

from omni_async.commands.parity.case import Case, built
from omni_async_pipelines.wan2_2.sampling import Wan22Sampling

_PLAIN = partial(Wan22Sampling, max_sequence_length=32)
_GUIDED = partial(_PLAIN, negative_prompt="dull")
CASES = (
    Case(
        specs=(
            _PLAIN(height=32, width=48, num_frames=5),
            _GUIDED(height=32, width=32, num_frames=9, guidance_scale=4.0, guidance_scale_2=3.0),
        ),
        build=built("omni_async_pipelines.wan2_2.tiny:build", layers=2),
    ),
    Case(
        specs=(
            _PLAIN(height=32, width=64, num_frames=5),
            _GUIDED(height=64, width=32, num_frames=9, guidance_scale=5.0),
        ),
        build=built("omni_async_pipelines.wan2_2.tiny:build", layers=2, ti2v=True),
        label="ti2v",
    ),
)
