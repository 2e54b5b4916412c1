"""Trains under FSDP2: weights, gradients and optimizer state are spread over the ranks.

`trainer.shard` ranks hold one copy together. With `trainer.offload` it is in host memory between uses.

FSDP2 casts parameters to `model.dtype` as it gathers them and reduces gradients in float32. If the policy can build its
components without weights, each rank reads its shards from the checkpoint's files.
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
from omni_async.tokens.policy import TokenPolicy
from omni_async.training import TrainingError
from omni_async.training.device import init_lone_process_group
from omni_async.training.loading import Loading, ShardedModel, WholeModel
from omni_async.training.model import ModuleBackend


class Fsdp2Backend(ModuleBackend):
    """The `TrainBackend` of ranks that share the weights. Raises TrainingError if process group and layout differ."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        policy: Policy | TokenPolicy,
        device: torch.device,
        layout: ParallelLayout,
    ) -> None:
        self._mesh = _mesh(device, layout)
        super().__init__(config, objective, policy, device, layout)

    def loading(self, policy: Policy | TokenPolicy, dtype: torch.dtype) -> Loading:
        if isinstance(policy, BuildsEmpty):
            return ShardedModel(policy, dtype)
        return WholeModel(policy, dtype)

    @property
    def weights_device(self) -> torch.device:
        return torch.device("cpu") if self.config.trainer.offload else self.device

    def place(self, component: nn.Module) -> None:
        """Shard the component's layers, then the rest of the component without its frozen weights.

        Frozen towers are whole on every rank: sharded, they would be collectives, which only ranks with images call.
        Each component is a separate FSDP root, because components are called separately and never as a whole model."""
        precision = MixedPrecisionPolicy()
        if self.dtype != torch.float32:
            # FSDP2 would cast every input. Engines pass the time in float32, and 1000 sigma does not fit in bfloat16.
            precision = MixedPrecisionPolicy(
                param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
            component.register_forward_pre_hook(partial(cast_inputs, self.dtype), with_kwargs=True)
        offload = OffloadPolicy()
        if self.config.trainer.offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
        # None frees a layer's weights after its forward pass, and keeps the root's weights, which backward needs first.
        reshard = False if self.config.trainer.gather == "step" else None
        towers = {parameter for parameter in component.parameters() if parameter in self.frozen}
        for parameter in towers:
            parameter.data = parameter.data.to(self.device)
        for part in (*self.layers(component), component):
            root = fully_shard(
                part,
                mesh=self._mesh,
                reshard_after_forward=reshard,
                mp_policy=precision,
                offload_policy=offload,
                ignored_params=towers or None,
            )
        root.set_reshard_after_backward(reshard is None)
        # fully_shard moves only the modules that it shards, and not the buffers of modules without parameters.
        for buffer in component.buffers():
            if not buffer.is_meta:
                buffer.data = buffer.data.to(self.device)

    def backward(self, losses: Tensor, weight: float) -> None:
        # FSDP2 averages gradients over all ranks. The sum is needed: each rank has its own rows, or a part of a row.
        torch.autograd.backward(losses.sum() * (weight * self.layout.world_size))


def _mesh(device: torch.device, layout: ParallelLayout) -> DeviceMesh:
    """Return the device mesh for FSDP2: the copies of the weights times the ranks that hold a copy together."""
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
    """Cast a denoiser's inputs to the dtype of its computation, except the time, which diffusers' name identifies."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {k: v if k == "timestep" else cast(v) for k, v in kwargs.items()}
