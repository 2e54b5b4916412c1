"""Estimates the memory of a trainer rank: one micro-batch of its rows, forward and backward, without values.

Rows, losses and the model's layers come from the trainer itself. FSDP2's shards, gathered layers and reduced gradients
are computed from the sizes of parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.algorithms.kinds import find_kind, num_draws, sde_of, trajectory_fields
from omni_async.algorithms.registry import Objective, find_objective, stored_policies
from omni_async.commands.memory.amounts import GIB, Amount
from omni_async.commands.memory.engine import largest_spec
from omni_async.commands.memory.live import LiveBytes
from omni_async.commands.memory.modules import Layers, numel
from omni_async.commands.memory.symbolic import META, symbolic
from omni_async.config import Config
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Lora
from omni_async.diffusion.policy import BuildsEmpty, Foreseeable, Policy
from omni_async.plugins.backends import find_backend
from omni_async.tokens.policy import TokenPolicy
from omni_async.training.auxiliary import inject_adapters
from omni_async.training.backends.fsdp2 import cast_inputs
from omni_async.training.groups import GroupBatch
from omni_async.training.loading import Loading
from omni_async.training.metrics import Metrics
from omni_async.training.model import ModuleBackend, repeated_layers
from omni_async.worker import TRAINER

_MASTER = 4  # bytes of a trained parameter, of its gradient and of each of its moments
_GATHERED_AT_ONCE = 2  # the computing layer and the next


class _Empty:
    """Components without memory, which are never filled."""

    def __init__(self, policy: BuildsEmpty, dtype: torch.dtype) -> None:
        with META:
            self.components = nn.ModuleDict(policy.build_components(dtype)).eval()

    def digest(self, dtype: torch.dtype) -> str:
        return ""

    def fill(self, device: torch.device) -> None:
        pass

    def stored(self, name: str) -> Tensor:
        return self.components.get_parameter(name)


class _MetaBackend(ModuleBackend):
    """A rank's model on the meta device, with weights in FSDP2's compute dtype."""

    def loading(self, policy: Policy | TokenPolicy, dtype: torch.dtype) -> Loading:
        assert isinstance(policy, BuildsEmpty)
        return _Empty(policy, dtype)

    def same_family(self, path: str) -> Policy:
        return self.policy  # a teacher has the same architecture, and need not be on this machine

    def add_adapters(self, lora: Lora) -> None:
        self.components.requires_grad_(False)
        inject_adapters(self.components, lora)

    def place(self, component: nn.Module) -> None:
        component.to(META)
        for parameter in component.parameters():
            parameter.data = parameter.data.to(self.dtype)
        if self.dtype != torch.float32:
            component.register_forward_pre_hook(_cast(self.dtype), with_kwargs=True)

    def prepare(self, objective: Objective) -> None:
        """Exclude memory that is not specific to a forward and backward pass; arithmetic accounts for it.

        Complete gradients are dropped, as FSDP2 reduces them to shards. The copies of the policy that `using` makes are
        created here, before the measurement."""
        for parameter in self.trainable.values():
            parameter.register_post_accumulate_grad_hook(_forget)
        for name in stored_policies(objective, self.config):
            with self.auxiliary.using(name):
                pass
        if self.teacher is not None:
            with self.teacher.using("teacher"):
                pass


def _cast(dtype: torch.dtype) -> Any:
    return lambda module, args, kwargs: cast_inputs(dtype, module, args, kwargs)


def _forget(parameter: Tensor) -> None:
    parameter.grad = None


class MeasuredTrainer:
    """The numbers of one rank, in elements and bytes.

    frozen, trained: elements of parameters.
    largest, largest_trained: elements of the largest repeated layer.
    rest, rest_trained: elements outside repeated layers.
    peak: the largest number of bytes of a micro-batch's forward and backward."""

    def __init__(self, config: Config, policy: Policy, tokens: int) -> None:
        objective = find_objective(config.algorithm.name)
        trainer = replace(config.trainer, workers=1, sequence_parallel=1, shard=None, compile=False)
        lone, layout = replace(config, trainer=trainer), ParallelLayout()
        model = _MetaBackend(lone, objective, policy, META, layout)
        self._count(model.components)
        loss = find_kind(objective.kind).load_loss()(lone, objective, policy, model, Metrics(layout), layout)
        group = _group(config, policy, tokens)

        def peak() -> int:
            with LiveBytes("meta") as live, symbolic():
                rows, counts = next(iter(loss.batches(group)))
                model.backward(loss.losses(group, rows, counts), 1.0)
            return live.peak

        model.prepare(objective)
        self.peak = Layers(model.components.values()).extrapolated(peak)

    def _count(self, components: nn.ModuleDict) -> None:
        every = {parameter: parameter.requires_grad for parameter in components.parameters()}
        self.trained = numel(parameter for parameter, trained in every.items() if trained)
        self.frozen = numel(every) - self.trained
        layers = [[*layer.parameters()] for part in components.values() for layer in repeated_layers(part)]
        self.largest = max(map(numel, layers), default=0)
        self.largest_trained = max((numel(p for p in layer if every[p]) for layer in layers), default=0)
        self.rest = numel(every) - sum(map(numel, layers))
        self.rest_trained = self.trained - sum(numel(p for p in layer if every[p]) for layer in layers)


def _group(config: Config, policy: Policy, tokens: int) -> GroupBatch:
    """Return a rank's samples of a group: zeros, with the first schedule and window of the recipe."""
    rollout, objective = config.rollout, find_objective(config.algorithm.name)
    fields, spec = trajectory_fields(objective, config), largest_spec(config, policy)
    paired = find_kind(objective.kind).paired
    number = 2 if paired else _samples(config)
    sigmas = policy.sigmas(rollout.num_inference_steps, spec)
    first, size = 0, 0
    if find_kind(objective.kind).noisy:
        window = sde_of(config).window
        first, size = window.range[0], window.size
    shape = policy.latent_shape(spec)
    assert isinstance(policy, Foreseeable)
    tensors: dict[str, Any] = {
        "latents": torch.zeros(1).expand(size + 1, *shape),
        "log_probs": torch.zeros(size, dtype=torch.float64),
        "means": torch.zeros(1).expand(size, *shape),
        "final": torch.zeros(1).expand(shape),
        "conditioning": policy.long_conditioning(config.encoded_for(spec), tokens),
    }
    call = TensorDict(
        {name: tensors[name] for name in fields} | {"sigmas": sigmas, "steps": torch.arange(first, first + size)},
        batch_size=[],
    )
    calls = rollout.calls
    sample = call if calls == 1 else TensorDict({f"call{i}": call for i in range(calls)}, batch_size=[])
    staleness = [0] * max(1, calls * size)
    advantages = [1.0, -1.0] if paired else [1.0] * number
    seeds = [0] * number if paired else [*range(number)]  # the samples of a pair share their noise
    return GroupBatch(0, spec, [sample] * number, advantages, seeds, [staleness] * number, number)


def rows_of(config: Config) -> int:
    """Return the largest number of rows of a rank's micro-batch, before rounding to whole samples."""
    rollout = config.rollout
    objective = find_objective(config.algorithm.name)
    if find_kind(objective.kind).noisy:
        each = sde_of(config).window.size
    else:
        each = num_draws(rollout.num_inference_steps, config.algorithm.forward, config.algorithm.timestep_fraction)
    return min(config.trainer.micro_batch_size, _samples(config) * each)


def _samples(config: Config) -> int:
    """Return the largest number of samples whose rows share the micro-batches of a rank."""
    shared = config.trainer.groups_per_micro_batch * config.rollout.group_size
    return ParallelLayout.of(config.trainer).most(shared)


def estimate_trainer(config: Config, measured: MeasuredTrainer, context: int) -> Amount:
    """Return the memory of one rank."""
    trainer, m = config.trainer, measured
    layout = ParallelLayout.of(trainer)
    backend = find_backend(trainer.backend, workers=layout.world_size, offload=trainer.offload, on_cpu=False)
    shard = 1 if backend.name == "plain" else layout.shard_size
    size = getattr(torch, config.model.dtype).itemsize
    weights = m.frozen * size // shard + m.trained * _MASTER // shard
    states = m.trained * _MASTER * (1 + _moments(config) + _copies(config)) // shard
    if "teacher" in find_objective(config.algorithm.name).auxiliary(config.algorithm):
        # All weights without adapters, and a copy of the policy's to swap with them.
        states += 2 * (m.frozen * size if config.model.lora is not None else m.trained * _MASTER) // shard
    if trainer.gather == "step":
        gathered = (m.frozen + m.trained) * size
    elif backend.name != "plain":  # FSDP2 computes with a copy of a layer even if a rank holds it whole
        gathered = (_GATHERED_AT_ONCE * m.largest + m.rest) * size
    else:
        gathered = (_GATHERED_AT_ONCE * m.largest_trained + m.rest_trained) * (size if size < _MASTER else 0)
    reduced = m.largest_trained * (size + _MASTER)
    batch = m.peak // trainer.sequence_parallel
    # A fused optimizer has no temporaries, and temporaries of offloaded weights are on the host.
    step = 0 if trainer.offload or _fused(config) else m.trained * _MASTER // shard
    host = _published(config, m, shard)
    if trainer.offload:
        host, weights, states = host + weights + states, 0, 0
    return Amount(
        role=TRAINER,
        workers=trainer.workers,
        weights=weights,
        states=states,
        activations=max(batch + gathered + reduced, step),
        context=context,
        host=host,
        helps=tuple(_helps(config, batch, weights + states, shard)),
    )


def checkpoint_bytes(config: Config, measured: MeasuredTrainer) -> int:
    """Return the bytes that all ranks keep in host memory after writing a checkpoint."""
    layout = ParallelLayout.of(config.trainer)
    stored = stored_policies(find_objective(config.algorithm.name), config)
    replicas = layout.world_size // layout.shard_size
    return measured.trained * _MASTER * (1 + _moments(config) + len(stored)) * replicas


def _fused(config: Config) -> bool:
    return config.trainer.optimizer.name == "adamw" and config.trainer.optimizer.fused is not False


def _moments(config: Config) -> int:
    optimizer = config.trainer.optimizer
    return 2 if optimizer.name == "adamw" else 1 if optimizer.momentum else 0


def _copies(config: Config) -> int:
    """Return the number of copies of the trained weights: further policies, and one to swap with them in the model."""
    objective = find_objective(config.algorithm.name)
    stored = stored_policies(objective, config)
    swapped = {*stored} & {str(name) for name in objective.auxiliary(config.algorithm)}
    return len(stored) + bool(swapped)


def _published(config: Config, m: MeasuredTrainer, shard: int) -> int:
    """Return the bytes of a rank's pinned buckets, which hold its part of a version."""
    if config.weights.payload == "lora":
        return m.trained * _MASTER // shard
    base = m.frozen if config.model.lora is not None else m.trained
    return base * getattr(torch, config.model.dtype).itemsize // shard


def _helps(config: Config, batch: int, held: int, shard: int) -> list[str]:
    trainer, helps = config.trainer, []
    if not trainer.gradient_checkpointing:
        helps.append(f"trainer.gradient_checkpointing: true (activations are {batch / GIB:.1f} GiB)")
    if rows_of(config) > 1:
        helps.append(f"trainer.micro_batch_size: less than {rows_of(config)} ({batch / GIB:.1f} GiB a micro-batch)")
    if trainer.gather == "step":
        helps.append("trainer.gather: layer (two layers are whole at once)")
    if trainer.shard is not None and trainer.shard < trainer.workers:
        helps.append(f"trainer.shard: null ({held * (1 - shard / trainer.workers) / GIB:.1f} GiB less)")
    helps.append(f"trainer.workers: more than {trainer.workers} (shards are {held / GIB:.1f} GiB)")
    if not trainer.offload:
        helps.append(f"trainer.offload: true ({held / GIB:.1f} GiB less, and slower)")
    return helps
