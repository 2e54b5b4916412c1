"""Keeps further copies of the trained parameters.

The reference policy, the old policy that draws samples, the moving average.

An auxiliary policy is a list of tensors beside the parameters (of the adapters alone under LoRA, sharded as they are).
It is run through the same module: its values are copied in, and the policy's own copied back. That costs two copies of
the trained parameters per use, which is little beside a forward pass, and no second model in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def _locals(tensors: list[Tensor]) -> list[Tensor]:
    """Return this rank's shards, sharing memory with `tensors`."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in (t.detach() for t in tensors)]


class AuxiliaryPolicies:
    """Copies of `parameters` (those of `module` that are trained), by name."""

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._module = module
        self._names = list(parameters)
        self._parameters: list[Tensor] = list(parameters.values())
        self._copies: dict[str, list[Tensor]] = {}
        self._policy: list[Tensor] | None = None
        self._in_use: str | None = None

    @torch.no_grad()
    def keep_copy(self, name: str) -> None:
        """Add a copy of the parameters as they are."""
        self._copies[name] = [p.detach().clone() for p in self._parameters]

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def tensors(self) -> dict[str, Tensor]:
        """Return every auxiliary policy's tensors as `<policy>.<parameter>`, as a checkpoint holds them."""
        return {
            f"{auxiliary}.{name}": tensor
            for auxiliary, copies in self._copies.items()
            for name, tensor in zip(self._names, copies, strict=True)
        }

    @torch.no_grad()
    def follow(self, name: str, decay: float) -> None:
        """Set auxiliary <- decay * auxiliary + (1 - decay) * parameters."""
        copies, parameters = _locals(self._copies[name]), _locals(self._parameters)
        if decay == 0.0:  # to the bit, which 0 * x + y is not for infinite x
            torch._foreach_copy_(copies, parameters)
        else:
            torch._foreach_lerp_(copies, parameters, 1.0 - decay)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Let the module compute with that policy's values inside the context.

        Not to be used between a forward pass and its backward, nor inside another such context."""
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
    """Make FSDP2 gather again, once parameters have other values.

    It keeps the root's gathered after a forward pass without backward, and would compute the next one with them."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
