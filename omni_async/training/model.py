"""Holds the trained components of one rank as torch modules: the common base of the backends that train modules.

Master weights are float32. With `model.dtype: bfloat16` the compute is bfloat16. Frozen weights (the base under LoRA,
the towers of a token policy) are held in `model.dtype`, since nothing is ever added to them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.utils.checkpoint import checkpoint as recompute

from omni_async.algorithms.registry import AuxiliaryPolicy, Objective, stored_policies
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config, Lora
from omni_async.diffusion.components import compute_velocity
from omni_async.diffusion.policy import Policy, RoundsTime
from omni_async.tokens.policy import Packed, TokenPolicy, is_frozen
from omni_async.training import TrainingError, checkpoint, sequence_parallel
from omni_async.training.auxiliary import AuxiliaryPolicies, adapters_off, add_adapters, forget_gathered
from omni_async.training.groups import Needs
from omni_async.training.loading import Loading, WholeModel, read_weights
from omni_async.training.optimizer import (
    build_optimizer,
    gradient_norm,
    gradients,
    limit_alignment,
    set_learning_rate,
)
from omni_async.weights.lora import diffusers_name, is_injected_adapter


class ModuleBackend:
    """A `TrainBackend` whose model is a policy's components as modules, whole on every rank.

    A subclass overrides how components are loaded and placed, the context of forward passes, and the reduction of
    gradients over ranks.

    components: the modules that the optimizer changes, in eval mode (no dropout: log-probs must equal the engines').
    """

    def __init__(
        self,
        config: Config,
        objective: Objective,
        policy: Policy | TokenPolicy,
        device: torch.device,
        layout: ParallelLayout,
    ) -> None:
        self.config = config
        self.policy: Any = policy  # of the contract that the objective's kind needs
        self.device = device
        self.layout = layout
        self.lora = config.model.lora
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._held = torch.float32 if self.lora is None else self.dtype  # dtype of weights without adapters
        loading = self.loading(policy, self._held)
        self.components = loading.components
        self.digest = loading.digest(self.dtype) if layout.rank == 0 else ""
        if self.lora is not None:
            self.add_adapters(self.lora)
        else:
            self.components.requires_grad_(True)
        self.frozen = self._freeze()
        for component in self.components.values():
            if config.trainer.gradient_checkpointing:
                self._checkpoint(component)
        if layout.sequence > 1:
            plan = getattr(policy, "sequence_plan", None)  # token policies have none
            sequence_parallel.enable(dict(self.components.items()), plan, layout, device)
        for component in self.components.values():
            if config.trainer.compile:
                compile_layers(component, self.layers(component), layout.rank)
            if self.dtype != torch.float32 and isinstance(policy, RoundsTime) and policy.rounds_time:
                component.register_forward_pre_hook(partial(_round_time, self.dtype), with_kwargs=True)
            self.place(component)
        loading.fill(self.weights_device)
        self.trainable = {diffusers_name(name): p for name, p in self.components.named_parameters() if p.requires_grad}
        self.auxiliary = AuxiliaryPolicies(self.components, self.trainable)
        for auxiliary in stored_policies(objective, config):
            self.auxiliary.keep_copy(auxiliary)
        self.teacher: AuxiliaryPolicies | None = None
        if config.algorithm.teacher is not None and "teacher" in objective.auxiliary(config.algorithm):
            self.teacher = self._with_teacher(config.algorithm.teacher.path)
        self.optimizer = build_optimizer(config.trainer.optimizer, self.trainable.values(), device)
        # Checkpoints are written while ranks train, so their collectives need a separate group.
        self._saving_group = dist.new_group(backend="gloo") if layout.world_size > 1 else None
        self._stager = checkpoint.build_stager(self.weights_device)
        self._saving: Future[Any] | None = None

    def _freeze(self) -> set[nn.Parameter]:
        """Take the gradients of the weights that the policy freezes, and return these weights."""
        frozen = {p for name, p in self.components.named_parameters() if is_frozen(self.policy, name)}
        for parameter in frozen:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(self.dtype)
        return frozen

    def _checkpoint(self, component: nn.Module) -> None:
        """Recompute the activations of a component's layers in the backward pass."""
        if isinstance(self.policy, TokenPolicy):
            # Transformers' own switch acts in train mode alone, where dropout is active.
            for layer in self.layers(component):
                layer.forward = partial(recompute, layer.forward, use_reentrant=False, preserve_rng_state=False)
            return
        enable = getattr(component, "enable_gradient_checkpointing", None)
        if enable is None:
            raise ValueError(f"trainer.gradient_checkpointing: {type(component).__name__} does not support it")
        enable()

    def layers(self, component: nn.Module) -> Sequence[nn.Module]:
        """Return a component's repeated layers, to shard and to compile."""
        return self.policy.layers(component) if isinstance(self.policy, TokenPolicy) else repeated_layers(component)

    def loading(self, policy: Policy | TokenPolicy, dtype: torch.dtype) -> Loading:
        """Build the components of a policy's checkpoint, weights in `dtype`."""
        return WholeModel(policy, dtype)

    def same_family(self, path: str) -> Policy:
        """Return the policy of another checkpoint of the family; `PipelineFamily.policy` is a class of one argument."""
        of_checkpoint: Callable[[str], Policy] = type(self.policy)
        return of_checkpoint(path)

    def _with_teacher(self, path: str) -> AuxiliaryPolicies:
        """Load the teacher. Raises ValueError, one line, if it is no checkpoint of the model's architecture."""
        weights = self.base()
        teacher = AuxiliaryPolicies(self.components, weights)
        teacher.keep_copy("teacher")
        values = {name: teacher.tensors()[f"teacher.{name}"] for name in weights}
        try:
            read_weights(self.loading(self.same_family(path), self._held), values, self.policy.path)
        except ValueError as error:
            why = str(error).removeprefix("model.path: ")
            raise ValueError(f"algorithm.teacher.path: {path}: {why}") from error
        return teacher

    def add_adapters(self, lora: Lora) -> None:
        """Freeze the components and add the adapters, which are trained instead."""
        add_adapters(self.components, lora, self.config.run.seed, getattr(self.policy, "frozen", ()))

    def place(self, component: nn.Module) -> None:
        """Put a component, which may have no memory yet, on the devices that train it, whole or in parts."""
        component.to(self.device)

    def backward(self, losses: Tensor, weight: float) -> None:
        """Add `weight` times the gradient of the sum of `losses` over all ranks."""
        torch.autograd.backward(losses.sum() * weight)

    @property
    def weights_device(self) -> torch.device:
        """Return the device of weights between their uses."""
        return self.device

    def computing(self) -> AbstractContextManager[object]:
        """Return the context of forward passes."""
        return nullcontext()

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: TensorDict, spec: Any, needs: Needs) -> Tensor:
        with self.computing():
            velocity = compute_velocity(
                self.policy,
                dict(self.components.items()),
                latents,
                sigma,
                conditioning,
                spec,
                needs.of_rows,
                calls=needs.calls,
                unconditional_gradient=self.config.algorithm.unconditional_gradient,
            )
        return velocity.float()

    @torch.no_grad()
    def auxiliary_velocity(
        self,
        auxiliary: AuxiliaryPolicy,
        latents: Tensor,
        sigma: Tensor,
        conditioning: TensorDict,
        spec: Any,
        needs: Needs,
    ) -> Tensor:
        with self._using(auxiliary):
            return self.velocity(latents, sigma, conditioning, spec, needs)

    def log_probs(self, packed: Packed, temperature: float) -> Tensor:
        with self.computing():
            found: Tensor = self.policy.log_probs(dict(self.components.items()), packed, temperature)
        return found.float()

    @torch.no_grad()
    def auxiliary_log_probs(self, auxiliary: AuxiliaryPolicy, packed: Packed, temperature: float) -> Tensor:
        with self._using(auxiliary):
            return self.log_probs(packed, temperature)

    @contextmanager
    def _using(self, auxiliary: AuxiliaryPolicy) -> Iterator[None]:
        """Let the components compute as an auxiliary policy inside the context."""
        if auxiliary == "reference" and self.lora is not None:
            with adapters_off(self.components):
                yield
        elif auxiliary == "teacher" and self.teacher is not None:
            with adapters_off(self.components), self.teacher.using("teacher"):
                yield
        elif auxiliary not in self.auxiliary:
            raise TrainingError(f"there is no {auxiliary} policy: the objective did not ask for one")
        else:
            with self.auxiliary.using(auxiliary):
                yield

    def gradient_norm(self) -> float:
        return gradient_norm(gradients(self.trainable.values()))

    def limit_alignment(self, norm: float, most: float) -> tuple[float, float]:
        return limit_alignment(self.trainable.values(), self.optimizer, norm, most)

    def step(self, factor: float, rate: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_(gradients(self.trainable.values()), factor)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.discard()
        forget_gathered(self.components)

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def base(self) -> Mapping[str, Tensor]:
        return self._named(adapters=False)

    def adapters(self) -> Mapping[str, Tensor]:
        return self._named(adapters=True)

    def _named(self, adapters: bool) -> dict[str, Tensor]:
        named = [(name, p) for name, p in self.components.named_parameters() if p not in self.frozen]
        return {diffusers_name(name): p for name, p in named if is_injected_adapter(name) == adapters}

    def begin_save(self, folder: Path) -> Future[Any]:
        wait([self._saving] if self._saving is not None else [])  # both use the same staging memory
        if not checkpoint.STAGERS_LAST:
            self._stager = checkpoint.build_stager(self.weights_device)
        self._saving = checkpoint.begin_save(
            folder, self.trainable, self.auxiliary.tensors(), self.optimizer, self._saving_group, self._stager
        )
        return self._saving

    def load(self, folder: Path) -> None:
        checkpoint.load(folder, self.trainable, self.auxiliary.tensors(), self.optimizer)
        forget_gathered(self.components)


class PlainBackend(ModuleBackend):
    """The `TrainBackend` of a lone rank."""

    def computing(self) -> AbstractContextManager[object]:
        if self.dtype != torch.float32:
            return torch.autocast(self.device.type, dtype=self.dtype)
        return super().computing()


def _round_time(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the time, found by diffusers' name for it, to the dtype of the engines' computation."""
    return args, kwargs | {"timestep": kwargs["timestep"].to(dtype)}


_CACHE, _OWN = "TORCHINDUCTOR_CACHE_DIR", "rank_"


def repeated_layers(component: nn.Module) -> list[nn.Module]:
    """Return every entry with parameters of the component's module lists (`transformer_blocks`, `blocks`, ...)."""
    lists = [child for child in component.children() if isinstance(child, nn.ModuleList)]
    return [layer for layers in lists for layer in layers if any(True for _ in layer.parameters())]


def compile_layers(component: nn.Module, layers: Sequence[nn.Module], rank: int) -> None:
    """Compile a component's repeated layers at their first call, with a separate cache per rank.

    Raises ValueError without such layers."""
    if not layers:
        raise ValueError(
            f"trainer.compile: {type(component).__name__} has no list of repeated layers to compile; leave it out"
        )
    # Ranks that compile concurrently on one machine would read each other's half-written files.
    given = Path(os.environ.get(_CACHE) or default_cache_dir())
    base = given.parent if given.name.startswith(_OWN) else given  # this rank's, set for an earlier component
    os.environ[_CACHE] = str(base / f"{_OWN}{rank}")
    for layer in layers:
        layer.compile()
