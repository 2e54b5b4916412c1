"""Builds an engine from the configuration.

Each engine's module, with its imports, is loaded only if that engine is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from omni_async.accelerator import require_accelerator
from omni_async.config.draws import TOKEN_ENGINES
from omni_async.config.schema import Config
from omni_async.config.section import bytes_of
from omni_async.diffusion.policy import load_policy
from omni_async.performance.profile import Profile
from omni_async.plugins.families import PipelineFamily
from omni_async.rollout.base import RolloutEngine
from omni_async.tokens.policy import load_token_policy

if TYPE_CHECKING:
    import torch


def build_engine(
    config: Config, engine_name: str, family: PipelineFamily, profile: Profile | None = None
) -> RolloutEngine:
    """Build the engine of `config.rollout.engine`, or an engine that replays `profile`, without starting it.

    Args:
        config: of the run.
        engine_name: its name in reports and errors.
        family: of `config.model.pipeline`.
        profile: the service times to replay, whatever engine and checkpoint are named.

    Raises:
        ValueError: the checkpoint is not the family's, or the family does not run on that engine."""
    if profile is not None:
        return _replayed(config, engine_name, profile)
    engine = config.rollout.engine
    if (family.draws == "tokens") != (engine in TOKEN_ENGINES):
        raise ValueError(
            f"rollout.engine: model family {family.name!r} draws {family.draws}, and {engine!r} does not; use"
            f" {'transformers' if family.draws == 'tokens' else 'diffusers'!r}"
        )
    match engine:
        case "emulated":
            return _emulated(config, engine_name, family)
        case "diffusers":
            return _diffusers(config, engine_name, family)
        case "transformers":
            return _transformers(config, engine_name, family)
        case "vllm":
            return _vllm(config, engine_name, family)
        case "vllm_omni":
            return _vllm_omni(config, engine_name, family)
    raise ValueError(f"rollout.engine: unknown engine {engine!r}")


def _replayed(config: Config, engine_name: str, profile: Profile) -> RolloutEngine:
    from omni_async.rollout.emulated import EmulatedEngine, RandomPayload, ReplayedTimes, TokenByToken

    batch, seed = config.rollout.max_batch, config.run.seed
    options: dict[str, Any] = {"max_batch": batch, "takes_turns": config.placement.colocated}
    if profile.tokens is UNSET:
        times = ReplayedTimes(engine_name, profile, seed, **options)
    else:
        times = TokenByToken(engine_name, profile, seed, profile.tokens, **options)
    return EmulatedEngine(engine_name, times, RandomPayload(profile.payload, seed), max_batch=batch)


def _emulated(config: Config, engine_name: str, family: PipelineFamily) -> RolloutEngine:
    from omni_async.rollout.emulated import EmulatedEngine, StepTimes
    from omni_async.rollout.stepping import ZeroVelocity

    rollout, policy = config.rollout, load_policy(family, config.model.path)
    make = ZeroVelocity(policy.latent_shape, policy.blank_conditioning, policy.sigmas)
    return EmulatedEngine(engine_name, StepTimes(rollout.emulated), make, max_batch=rollout.max_batch)


def _diffusers(config: Config, engine_name: str, family: PipelineFamily) -> RolloutEngine:
    from omni_async.rollout.diffusers_engine import DiffusersEngine

    policy, rollout = load_policy(family, config.model.path), config.rollout
    return DiffusersEngine(
        engine_name, policy, offload=rollout.offload, share_prefix=rollout.share_prefix, **_in_process(config)
    )


def _transformers(config: Config, engine_name: str, family: PipelineFamily) -> RolloutEngine:
    from omni_async.rollout.transformers_engine import TransformersEngine

    policy = load_token_policy(family, config.model.path)
    return TransformersEngine(engine_name, policy, kv=config.weights.kv, **_in_process(config))


def _in_process(config: Config) -> dict[str, Any]:
    """Return the arguments that both engines in the producer's process take."""
    import torch

    return {
        "dtype": getattr(torch, config.model.dtype),
        "max_batch": config.rollout.max_batch,
        "batching": config.rollout.batching,
        "device": _device(config),
        "conditioning_bytes": bytes_of(config.rollout.conditioning_cache),
    }


def _vllm(config: Config, engine_name: str, family: PipelineFamily) -> RolloutEngine:
    from omni_async.rollout.vllm_engine import VllmEngine

    if not family.on_vllm:
        raise ValueError(f"rollout.engine: model family {family.name!r} does not run on 'vllm'; use 'transformers'")
    rollout = config.rollout
    return VllmEngine(
        engine_name,
        family,
        path=config.model.path,
        dtype=config.model.dtype,
        max_batch=rollout.max_batch,
        devices=max(1, int(config.placement.rollout.gpus)),
        kv=config.weights.kv,
        start_timeout_s=config.run.startup_timeout_s,
        rpc_timeout_s=config.weights.timeout_s,
        conditioning_bytes=bytes_of(rollout.conditioning_cache),
        compiled=rollout.compile,
        engine_args=rollout.engine_args,
    )


def _vllm_omni(config: Config, engine_name: str, family: PipelineFamily) -> RolloutEngine:
    from omni_async.rollout.vllm_omni_engine import VllmOmniEngine

    if family.vllm_pipeline is None:
        raise ValueError(f"rollout.engine: model family {family.name!r} has no vLLM-Omni pipeline; use 'diffusers'")
    rollout = config.rollout
    return VllmOmniEngine(
        engine_name,
        family,
        path=config.model.path,
        dtype=config.model.dtype,
        max_batch=rollout.max_batch,
        batching=rollout.batching,
        start_timeout_s=config.run.startup_timeout_s,
        rpc_timeout_s=config.weights.timeout_s,
        conditioning_bytes=bytes_of(rollout.conditioning_cache),
        offload=rollout.offload,
        share_prefix=rollout.share_prefix,
        attention_backend=rollout.attention_backend,
        compiled=rollout.compile,
        engine_args=rollout.engine_args,
        trains_here=False,  # a run has its trainer in other processes
    )


def _device(config: Config) -> torch.device | str:
    gpus = config.placement.rollout.gpus
    return require_accelerator("placement.rollout.gpus", gpus) if gpus > 0 else "cpu"
