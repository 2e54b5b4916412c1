"""Defines the comparisons of `omni-async parity` for FLUX.1."""

from functools import partial

from omni_async.commands.parity.case import Case, built
from omni_async_pipelines.flux.sampling import FluxSampling

_GUIDED = partial(FluxSampling, height=32, width=32, true_cfg_scale=2.0, negative_prompt="dull")
_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "ff_context.net.0.proj", "ff_context.net.2")
_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", *_TEXT, "ff.net.0.proj", "ff.net.2", "proj_mlp", "proj_out")
CASES = (
    Case(
        specs=(
            FluxSampling(height=64, width=48, guidance_scale=2.0, max_sequence_length=32),
            _GUIDED(guidance_scale=4.0),
        ),
        build=built("omni_async_pipelines.flux.tiny:build"),
        targets=_TARGETS,
    ),
    Case(
        specs=(FluxSampling(height=64, width=48, max_sequence_length=32), _GUIDED(max_sequence_length=32)),
        build=built("omni_async_pipelines.flux.tiny:build", schnell=True),
        label="schnell",
        targets=_TARGETS,
    ),
)
