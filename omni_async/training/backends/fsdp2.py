"""Trains under FSDP2: weights, gradients and optimizer state are spread over the ranks.

`trainer.shard` of them hold one copy, in host memory between their uses where `trainer.offload` asks for it.

FSDP2 casts parameters to `model.dtype` as it gathers them and reduces gradients in float32. Weights are read from the
checkpoint's files, each rank its shards, if the policy can build its components without them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from omni_async.algorithms.registry import Objective
from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.diffusion.policy import BuildsEmpty, Policy
from omni_async.training import TrainingError
from omni_async.training.device import init_lone_process_group
from omni_async.training.loading import Loading, ShardedModel, WholeModel
from omni_async.training.model import ModuleBackend, repeated_layers


class Fsdp2Backend(ModuleBackend):
    """The `TrainBackend` of ranks that share the weights. TrainingError if the process group is not the layout's."""

    def __init__(
        self, config: Config, objective: Objective, policy: Policy, device: torch.device, layout: ParallelLayout
    ) -> None:
        self._mesh = _mesh(device, layout)
        super().__init__(config, objective, policy, device, layout)

    def loading(self, dtype: torch.dtype) -> Loading:
        if isinstance(self.policy, BuildsEmpty):
            return ShardedModel(self.policy, dtype)
        return WholeModel(self.policy, dtype)

    @property
    def weights_device(self) -> torch.device:
        return torch.device("cpu") if self.config.trainer.offload else self.device

    def place(self, component: nn.Module) -> None:
        """Shard the component's layers, then what is left of it.

        It is called by itself and never the whole model, so each component is an FSDP root of its own."""
        precision = MixedPrecisionPolicy()
        if self.dtype != torch.float32:
            # FSDP2 would cast every input. Engines give the time in float32, and 1000 sigma has no room in bfloat16.
            precision = MixedPrecisionPolicy(
                param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            component.register_forward_pre_hook(partial(cast_inputs, self.dtype), with_kwargs=True)
        offload = OffloadPolicy()
        if self.config.trainer.offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
        # None frees a layer's weights after its forward pass and keeps those of the root, which backward needs first.
        reshard = False if self.config.trainer.gather == "step" else None
        for part in (*repeated_layers(component), component):
            root = fully_shard(
                part,
                mesh=self._mesh,
                reshard_after_forward=reshard,
                mp_policy=precision,
                offload_policy=offload,
            )
        root.set_reshard_after_backward(reshard is None)
        # fully_shard moves what it shards; buffers of modules without parameters stay behind.
        for buffer in component.buffers():
            if not buffer.is_meta:
                buffer.data = buffer.data.to(self.device)

    def backward(self, losses: Tensor, weight: float) -> None:
        # FSDP2 averages gradients over all ranks. Their sum is wanted: each has rows of its own, or its part of a row.
        torch.autograd.backward(losses.sum() * (weight * self.layout.world_size))


def _mesh(device: torch.device, layout: ParallelLayout) -> DeviceMesh:
    """Return the ranks as FSDP2 takes them: those that hold a copy of the weights together, times the copies."""
    if not dist.is_initialized():
        if layout.world_size > 1:
            raise TrainingError("call training.device.init_process_group on every rank before TrainEngine.setup")
        init_lone_process_group(device)
    if dist.get_world_size() != layout.world_size or dist.get_rank() != layout.rank:
        raise TrainingError(
            f"the engine is rank {layout.rank} of {layout.world_size}, but the process group has rank"
            f" {dist.get_rank()} of {dist.get_world_size()}"
        )
    if layout.replicas == 1:
        return init_device_mesh(device.type, (layout.world_size,))
    shape = (layout.replicas, layout.shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast a denoiser's inputs to the dtype that it computes in, except the time.

    The time is known by the name that diffusers gives it."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {k: v if k == "timestep" else cast(v) for k, v in kwargs.items()}
