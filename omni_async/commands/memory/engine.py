"""Estimates the memory of a rollout engine: one denoising step and one decoding of a full batch, without values."""

from __future__ import annotations

import math
from typing import Any

import torch

from omni_async.commands.memory.amounts import GIB, Amount
from omni_async.commands.memory.live import LiveBytes
from omni_async.commands.memory.modules import Layers, nbytes
from omni_async.commands.memory.symbolic import META, symbolic
from omni_async.config import Config
from omni_async.config.section import bytes_of
from omni_async.diffusion.components import compute_velocity
from omni_async.diffusion.policy import BuildsEmpty, Foreseeable, Policy
from omni_async.rollout.prefixes import MOST_BYTES
from omni_async.worker import READER, ROLLOUT


class MeasuredEngine:
    """The numbers of one engine, in bytes.

    denoisers, encoders, decoders: the weights of its models.
    step, decode: the peaks of one denoising step and one decoding of `max_batch` samples, for the largest spec."""

    def __init__(self, config: Config, policy: Policy, tokens: int) -> None:
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        assert isinstance(policy, BuildsEmpty) and isinstance(policy, Foreseeable)
        with META:  # including tables of positions, which are large
            components = policy.build_components(dtype)
        codec = policy.build_codec(dtype, config.rollout.engine)
        self.encoders = sum(map(nbytes, codec.encoders))
        self.decoders = sum(map(nbytes, codec.models)) - self.encoders
        self.denoisers = sum(map(nbytes, components.values()))
        spec = largest_spec(config, policy)
        shape, rows = policy.latent_shape(spec), config.rollout.max_batch

        def step() -> int:
            with torch.no_grad(), LiveBytes("meta") as live, symbolic():
                conditioning = policy.stack_conditioning([policy.long_conditioning(spec, tokens)] * rows).to("meta")
                latents, sigma = torch.zeros(rows, *shape), torch.ones(rows)
                needs = [policy.component_of(1.0)] * rows
                compute_velocity(policy, components, latents, sigma, conditioning, spec, needs)
            return live.peak

        self.step = Layers(components.values()).extrapolated(step)
        with torch.no_grad(), LiveBytes("meta") as decoding, symbolic():
            codec.decode(torch.zeros(min(rows, codec.most_at_once(spec)), *shape), spec)
        self.decode = decoding.peak


def largest_spec(config: Config, policy: Policy) -> Any:
    """Return the spec of the recipe's samples with the most latent elements."""
    return max(config.rollout.specs, key=lambda spec: math.prod(policy.latent_shape(spec)))


def estimate_engine(config: Config, measured: MeasuredEngine, context: int) -> Amount:
    """Return the memory of one engine."""
    rollout, encoders = config.rollout, measured.encoders
    weights = measured.denoisers + measured.decoders
    helps = []
    if rollout.max_batch > 1:
        transient = max(measured.step, measured.decode) / GIB
        helps.append(f"rollout.max_batch: less than {rollout.max_batch} ({transient:.1f} GiB a batch)")
    if rollout.offload:
        # Encoders are loaded between two steps, when nothing else of a batch is live.
        activations, host = max(measured.step, encoders), encoders
    else:
        weights, activations, host = weights + encoders, measured.step, 0
        spared = encoders - max(0, encoders - max(measured.step, measured.decode))
        helps.append(f"rollout.offload: true ({spared / GIB:.1f} GiB less)")
    return Amount(
        role=ROLLOUT,
        workers=rollout.workers,
        weights=weights,
        states=bytes_of(rollout.conditioning_cache) + (MOST_BYTES if rollout.share_prefix else 0),
        activations=activations,
        decode=measured.decode,
        context=context,
        host=host,
        helps=tuple(helps),
    )


def estimate_reader(config: Config, policy: Policy, context: int) -> Amount:
    """Return the memory of the reader of preference pairs, which encodes them and generates nothing."""
    assert isinstance(policy, Foreseeable)
    codec = policy.build_codec(getattr(torch, config.model.dtype), "diffusers")
    return Amount(role=READER, workers=1, weights=sum(map(nbytes, codec.models)), context=context)
