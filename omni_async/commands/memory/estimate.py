"""Estimates the memory of a recipe: every role's, and additional memory of hosts."""

from __future__ import annotations

import math

import torch

from omni_async.algorithms.kinds import find_kind, trajectory_fields
from omni_async.algorithms.registry import find_objective
from omni_async.commands.memory.amounts import GIB, Amount, Estimate, Shared
from omni_async.commands.memory.engine import MeasuredEngine, estimate_engine, estimate_reader, largest_spec
from omni_async.commands.memory.published import find_model
from omni_async.commands.memory.scorers import estimate_scorers
from omni_async.commands.memory.trainer import MeasuredTrainer, checkpoint_bytes, estimate_trainer, rows_of
from omni_async.config import Config, ConfigError
from omni_async.config.held import SHARED_BYTES, num_conditionings, num_with_media
from omni_async.config.redact import one_line
from omni_async.diffusion.policy import BuildsEmpty, Foreseeable, Policy, load_policy
from omni_async.plugins.families import PipelineFamily

TEXT_TOKENS = 128
_CONTEXT = int(0.7 * GIB)
_VERSIONS = 2  # in the object store at once: the engines' and the next


def estimate(config: Config, device: int) -> Estimate:
    """Return the memory of a recipe whose accelerators have `device` bytes.

    ConfigError, one line, if its model is not known or cannot be built from its configuration."""
    family, path, source = find_model(config)
    policy = _policy(family, str(path))
    roles: list[Amount] = []
    try:
        if config.data.preferences is None and config.rollout.engine != "emulated":
            roles.append(estimate_engine(config, MeasuredEngine(config, policy, TEXT_TOKENS), _CONTEXT))
        if config.data.preferences is not None:
            roles.append(estimate_reader(config, policy, _CONTEXT))
        measured = MeasuredTrainer(config, policy, TEXT_TOKENS)
    except ValueError as error:
        text = str(error)
        raise ConfigError(text if text.partition(":")[0].count(".") else f"model.path: {text}") from None
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError) as error:
        # A model or an objective of another package may need values, which the meta device lacks.
        reason = f"{type(error).__name__}: {one_line(str(error), 300)}"
        raise ConfigError(f"model.path: the memory of {path} cannot be estimated: {reason}") from None
    roles.append(estimate_trainer(config, measured, _CONTEXT))
    roles += estimate_scorers(config, _CONTEXT, device)
    rows, batch = rows_of(config), config.rollout.max_batch
    assumed = (
        f"texts have {TEXT_TOKENS} tokens; a micro-batch has {rows} rows, an engine's batch {batch}",
        "attention is a fused kernel; what kernels and the allocator take besides is not counted",
    )
    return Estimate(source, tuple(roles), tuple(_shared(config, policy, measured)), assumed)


def _policy(family: PipelineFamily, path: str) -> Policy:
    try:
        policy = load_policy(family, path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not (isinstance(policy, BuildsEmpty) and isinstance(policy, Foreseeable)):
        raise ConfigError(
            f"model.pipeline: the memory of {family.name!r} is not known; its policy lacks `build_components`,"
            " `build_codec` or `long_conditioning` (docs/integrate-a-model.md)"
        )
    return policy


def _shared(config: Config, policy: Policy, measured: MeasuredTrainer) -> list[Shared]:
    """Return the host memory for versions, samples and files."""
    size = getattr(torch, config.model.dtype).itemsize
    base = (measured.frozen or measured.trained) * size
    version = measured.trained * 4 if config.weights.payload == "lora" else base
    held = held_bytes(config, policy)
    shared = [
        Shared(f"versions in the object store, {_VERSIONS} at once", _VERSIONS * version),
        Shared("samples and media in the object store, at most", held),
    ]
    if config.weights.transport == "collective":
        shared.append(Shared("versions that engines receive", config.rollout.workers * version))
    shared.append(Shared("page cache of the denoisers' files, on each machine with engines", base))
    return [*shared, Shared("last checkpoint, over all ranks", checkpoint_bytes(config, measured))]


def held_bytes(config: Config, policy: Policy) -> int:
    """Return the bytes of all live samples in the object store, at most.

    Groups are live with a place in the replay buffer or in the trainer's update. Media are held until the score, and
    an engine's samples of a prompt share its conditioning."""
    trajectory, conditioning, media = _sample(config, policy)
    groups = min(config.slots, config.buffer.groups + config.trainer.groups_per_update)
    if conditioning < SHARED_BYTES:
        trajectory, conditioning = trajectory + conditioning, 0
    held = groups * (config.rollout.group_size * trajectory + num_conditionings(config) * conditioning)
    held += num_with_media(config, groups) * media
    return held if config.buffer.bound is None else min(held, config.buffer.bound)


def _sample(config: Config, policy: Policy) -> tuple[int, int, int]:
    """Return the bytes of a sample's own tensors, of its conditioning, and of its media."""
    spec, objective = largest_spec(config, policy), find_objective(config.algorithm.name)
    assert isinstance(policy, Foreseeable)
    latents = math.prod(policy.latent_shape(spec)) * 4
    window = config.rollout.sde.window.size if config.rollout.sde and find_kind(objective.kind).noisy else 0
    copies = {"latents": window + 1, "means": window, "final": 1}
    fields = trajectory_fields(objective, config)
    text = policy.long_conditioning(spec, TEXT_TOKENS).bytes()
    media = sum(math.prod(part.shape) * (4 if part.part == "audio" else 1) for part in spec.media())
    tensors = sum(copies.get(field, 0) for field in fields) * latents
    return config.rollout.calls * tensors, config.rollout.calls * text, media
