"""Holds the trained components of one rank: loading, LoRA, FSDP2, precision, and the reference policy.

Master weights are float32. With `model.dtype: bfloat16` the compute is bfloat16: FSDP2 casts parameters as it gathers
them and reduces gradients in float32; a plain model runs under autocast. Frozen weights (the base under LoRA) are held
in `model.dtype`, since nothing ever adds to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from omni_async.algorithms.registry import AuxiliaryPolicy, Objective
from omni_async.components import compute_velocity
from omni_async.config.schema import Config, Lora
from omni_async.policy import Policy
from omni_async.training.auxiliary import AuxiliaryPolicies
from omni_async.training.device import init_lone_process_group
from omni_async.training.errors import TrainingError
from omni_async.training.micro_batches import Needs
from omni_async.weights.buckets import digest_tensors
from omni_async.weights.lora import ADAPTER, diffusers_name, is_injected_adapter

Backend = Literal["plain", "fsdp2"]


def resolve_backend(backend: str, device: torch.device, world_size: int) -> Backend:
    """Resolves `auto`: plain on a single CPU rank, where wrapping only costs time, else FSDP2. ValueError for plain on
    several ranks."""
    if backend == "plain" and world_size > 1:
        raise ValueError(
            f"trainer.backend: plain trains on one rank only, got trainer.workers = {world_size}; use fsdp2 or auto"
        )
    if backend == "plain" or (backend == "auto" and device.type == "cpu" and world_size == 1):
        return "plain"
    return "fsdp2"


class TrainedModel:
    """A policy's components, ready for gradients.

    components: the modules the optimizer works on, in eval mode (no dropout: log-probs must be those of the engines).
    trainable: the parameters that the optimizer changes, as `component.name` with their diffusers names: adapters under
    LoRA, everything otherwise.
    auxiliary: the auxiliary policies that `objective` wants, and the moving average if `trainer.ema` asks for one.
    digest: the digest of the weights as loaded, in `model.dtype`, under their diffusers names (rank 0 only, else
    empty).
    """

    def __init__(
        self, config: Config, objective: Objective, policy: Policy, device: torch.device, rank: int, world_size: int
    ) -> None:
        self.policy = policy
        self.lora: Lora | None = config.model.lora
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.device = device
        self.backend = resolve_backend(config.trainer.backend, device, world_size)
        self._unconditional_gradient = config.algorithm.unconditional_gradient
        mesh = _mesh(device, rank, world_size) if self.backend == "fsdp2" else None
        # Each is called by itself and never the whole, so each is an FSDP root of its own.
        self.components = nn.ModuleDict(
            policy.load_components(torch.float32 if self.lora is None else self.dtype)
        ).eval()
        self.digest = self._digest() if rank == 0 else ""
        if self.lora is not None:
            _add_adapters(self.components, self.lora, config.run.seed)
        else:
            self.components.requires_grad_(True)
        for component in self.components.values():
            if config.trainer.gradient_checkpointing:
                _enable_gradient_checkpointing(component)
            self._shard(component, mesh)
        self.trainable = {diffusers_name(name): p for name, p in self.components.named_parameters() if p.requires_grad}
        self.auxiliary = AuxiliaryPolicies(self.components, self.trainable)
        wanted = set(objective.auxiliary(config.algorithm)) | ({"ema"} if config.trainer.ema else set())
        for auxiliary in sorted(wanted):
            if (
                auxiliary != "reference" or self.lora is None
            ):  # under LoRA the reference is the model without its adapters
                self.auxiliary.add(auxiliary)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: TensorDict, spec: Any, needs: Needs) -> Tensor:
        """Returns the policy's velocity (B, *shape), float32, with gradient where grad mode is on."""
        with self._autocast():
            velocity = compute_velocity(
                self.policy,
                dict(self.components.items()),
                latents,
                sigma,
                conditioning,
                spec,
                needs.of_rows,
                calls=needs.calls,
                unconditional_gradient=self._unconditional_gradient,
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
        """Returns the velocity of an auxiliary policy, without gradient. `reference` is the policy as loaded."""
        if auxiliary == "reference" and self.lora is not None:
            with _adapters_off(self.components):
                return self.velocity(latents, sigma, conditioning, spec, needs)
        if auxiliary not in self.auxiliary:
            raise TrainingError(f"there is no {auxiliary} policy: the objective did not ask for one")
        with self.auxiliary.using(auxiliary):
            return self.velocity(latents, sigma, conditioning, spec, needs)

    def base(self) -> dict[str, nn.Parameter]:
        """Returns the model's own parameters by diffusers name, without adapters."""
        return {
            diffusers_name(name): p for name, p in self.components.named_parameters() if not is_injected_adapter(name)
        }

    def adapters(self) -> dict[str, nn.Parameter]:
        return {diffusers_name(name): p for name, p in self.components.named_parameters() if is_injected_adapter(name)}

    def _autocast(self) -> AbstractContextManager[object]:
        if self.backend == "plain" and self.dtype != torch.float32:
            return torch.autocast(self.device.type, dtype=self.dtype)
        return nullcontext()

    def _digest(self) -> str:
        return digest_tensors((name, p.to(self.dtype)) for name, p in self.components.named_parameters())

    def _shard(self, component: nn.Module, mesh: DeviceMesh | None) -> None:
        if mesh is None:
            component.to(self.device)
            return
        reduced = self.dtype != torch.float32
        precision = MixedPrecisionPolicy()
        if reduced:
            # FSDP2 would cast every input. Engines give the time in float32, and 1000 sigma has no room in bfloat16.
            precision = MixedPrecisionPolicy(
                param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            component.register_forward_pre_hook(partial(_cast_inputs, self.dtype), with_kwargs=True)
        for block in transformer_blocks(component):
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(component, mesh=mesh, mp_policy=precision)
        # fully_shard moves what it shards; buffers of modules without parameters stay behind.
        for buffer in component.buffers():
            buffer.data = buffer.data.to(self.device)


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Casts a denoiser's inputs to the dtype that it computes in, except the time, by the name that diffusers gives
    it."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {k: v if k == "timestep" else cast(v) for k, v in kwargs.items()}


def transformer_blocks(component: nn.Module) -> list[nn.Module]:
    """Returns the repeated layers: every entry with parameters of the component's own module lists
    (`transformer_blocks`, `blocks`, ...)."""
    lists = [child for child in component.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists for block in blocks if any(True for _ in block.parameters())]


def whole(tensor: Tensor) -> Tensor:
    """Gathers all of a possibly sharded tensor. Collective: every rank calls it for the same tensors in the same
    order."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mesh(device: torch.device, rank: int, world_size: int) -> DeviceMesh:
    if not dist.is_initialized():
        if world_size > 1:
            raise TrainingError("call training.device.init_process_group on every rank before TrainEngine.setup")
        init_lone_process_group(device)
    if dist.get_world_size() != world_size or dist.get_rank() != rank:
        raise TrainingError(
            f"the engine is rank {rank} of {world_size}, but the process group says rank {dist.get_rank()} of"
            f" {dist.get_world_size()}"
        )
    return init_device_mesh(device.type, (world_size,))


def _add_adapters(components: nn.Module, lora: Lora, seed: int) -> None:
    components.requires_grad_(False)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.target_modules),
    )
    # Every rank shards what it initialised itself, so all must draw the same numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, components, ADAPTER)
        except ValueError as error:
            raise ValueError(f"model.lora.target_modules: {error}") from error
    for name, parameter in components.named_parameters():
        if is_injected_adapter(name):
            parameter.data = parameter.data.float()


@contextmanager
def _adapters_off(components: nn.Module) -> Iterator[None]:
    # peft's own switch also clears requires_grad of the adapters, which FSDP2 must not see change; the flag alone is
    # enough.
    layers = [module for module in components.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _enable_gradient_checkpointing(component: nn.Module) -> None:
    enable = getattr(component, "enable_gradient_checkpointing", None)
    if enable is None:
        raise ValueError(f"trainer.gradient_checkpointing: {type(component).__name__} does not support it")
    enable()
