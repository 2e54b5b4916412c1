"""Evaluates other policies through the policy's own modules: reference, old policy, moving average, teacher.

An auxiliary policy is a list of tensors, a copy of the trained parameters (under LoRA only the adapters) with the same
sharding. It runs through the same module: its values are copied in, and the policy's own values are copied back. A use
costs two copies of the trained parameters, little compared with a forward pass, and needs no second model in memory.
Under LoRA the reference is the module with its adapters off. The teacher is a copy of all weights without adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from omni_async.config.schema import Lora
from omni_async.weights.lora import ADAPTER, is_injected_adapter


def _locals(tensors: list[Tensor]) -> list[Tensor]:
    """Return this rank's shards, sharing memory with `tensors`."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in (t.detach() for t in tensors)]


class AuxiliaryPolicies:
    """Copies of `parameters` of `module`, by name: its trained parameters, or what a teacher replaces."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, Tensor]) -> None:
        self._module = module
        self._names = list(parameters)
        self._parameters: list[Tensor] = list(parameters.values())
        self._copies: dict[str, list[Tensor]] = {}
        self._policy: list[Tensor] | None = None
        self._in_use: str | None = None

    @torch.no_grad()
    def keep_copy(self, name: str) -> None:
        """Add a copy of the current parameters."""
        self._copies[name] = [p.detach().clone() for p in self._parameters]

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def tensors(self) -> dict[str, Tensor]:
        """Return every auxiliary policy's tensors as `<policy>.<parameter>`, their names in a checkpoint."""
        return {
            f"{auxiliary}.{name}": tensor
            for auxiliary, copies in self._copies.items()
            for name, tensor in zip(self._names, copies, strict=True)
        }

    @torch.no_grad()
    def follow(self, name: str, decay: float) -> None:
        """Set auxiliary <- decay * auxiliary + (1 - decay) * parameters."""
        copies, parameters = _locals(self._copies[name]), _locals(self._parameters)
        if decay == 0.0:  # exact to the bit, unlike 0 * x + y for infinite x
            torch._foreach_copy_(copies, parameters)
        else:
            torch._foreach_lerp_(copies, parameters, 1.0 - decay)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Let the module compute with that policy's values inside the context.

        Do not use it between a forward pass and its backward, nor inside another such context."""
        if self._in_use is not None:
            raise RuntimeError(
                f"{name!r} cannot be used inside {self._in_use!r}: the policy's own values would be lost"
            )
        parameters = _locals(self._parameters)
        if self._policy is None:
            self._policy = [torch.empty_like(p) for p in parameters]
        torch._foreach_copy_(self._policy, parameters)
        torch._foreach_copy_(parameters, _locals(self._copies[name]))
        self._in_use = name
        forget_gathered(self._module)
        try:
            yield
        finally:
            torch._foreach_copy_(_locals(self._parameters), self._policy)
            self._in_use = None
            forget_gathered(self._module)


def forget_gathered(module: nn.Module) -> None:
    """Make FSDP2 gather parameters again after their values have changed.

    FSDP2 keeps the root's gathered parameters after a forward pass without backward, and would reuse them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def add_adapters(components: nn.Module, lora: Lora, seed: int, frozen: Sequence[str] = ()) -> None:
    """Freeze `components` and add float32 adapters on the CPU.

    Args:
        components: the trained modules, whose parameters may be on the meta device.
        lora: `model.lora`.
        seed: the same seed gives the same adapters on every rank.
        frozen: names of modules that get no adapter, whatever their layers are called.

    Raises:
        ValueError: no layer has a name in `lora.target_modules`."""
    components.requires_grad_(False)
    # Every rank shards its own initial values, so all ranks must draw the same numbers.
    with torch.random.fork_rng(devices=[]), _without_meta(components):
        torch.manual_seed(seed)
        inject_adapters(components, lora, frozen)


def inject_adapters(components: nn.Module, lora: Lora, frozen: Sequence[str] = ()) -> None:
    """Add float32 adapters to frozen components, each on its layer's device. Raises ValueError like `add_adapters`."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.target_modules),
        exclude_modules=rf"(?:{'|'.join(map(re.escape, frozen))})\..*" if frozen else None,
    )
    try:
        inject_adapter_in_model(config, components, ADAPTER)
    except ValueError as error:
        raise ValueError(f"model.lora.target_modules: {error}") from error
    _require_bound(components, lora.target_modules)
    for name, parameter in components.named_parameters():
        if is_injected_adapter(name):
            parameter.data = parameter.data.float()


def _require_bound(components: nn.Module, targets: Sequence[str]) -> None:
    """Raise ValueError for a target that is no layer's name, and for a component without an adapter.

    Training would otherwise ignore both silently."""
    adapted = [name.partition(".lora_A")[0] for name, _ in components.named_modules() if name.endswith(".lora_A")]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in adapted):
            raise ValueError(f"model.lora.target_modules: no linear layer is called {target!r}")
    for component, _ in components.named_children():
        if not any(name.startswith(f"{component}.") for name in adapted):
            raise ValueError(f"model.lora.target_modules: no layer of {component} is called as one of {[*targets]}")


@contextmanager
def _without_meta(components: nn.Module) -> Iterator[None]:
    """Replace each parameter on the meta device by a single number on the CPU, expanded to the parameter's shape.

    peft puts adapters on the device of their layer, and would lose their initial values on the meta device."""
    on_meta = [
        (module, name, parameter)
        for module in components.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for module, name, parameter in on_meta:
        stand_in = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        setattr(module, name, nn.Parameter(stand_in, requires_grad=False))
    try:
        yield
    finally:
        for module, name, parameter in on_meta:
            setattr(module, name, parameter)


@contextmanager
def adapters_off(components: nn.Module) -> Iterator[None]:
    """Compute without adapters inside the context."""
    from peft.tuners.tuners_utils import BaseTunerLayer

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
