"""Adds LoRA adapters to the trained components, and turns them off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from omni_async.config.schema import Lora
from omni_async.weights.lora import ADAPTER, is_injected_adapter


def add_adapters(components: nn.Module, lora: Lora, seed: int) -> None:
    """Freeze `components` and add float32 adapters on the CPU, the same on every rank for the same `seed`.

    Parameters may be on the meta device. ValueError if no layer is called as `lora.target_modules`."""
    components.requires_grad_(False)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=list(lora.target_modules),
    )
    # Every rank shards what it initialised itself, so all must draw the same numbers.
    with torch.random.fork_rng(devices=[]), _without_meta(components):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, components, ADAPTER)
        except ValueError as error:
            raise ValueError(f"model.lora.target_modules: {error}") from error
    for name, parameter in components.named_parameters():
        if is_injected_adapter(name):
            parameter.data = parameter.data.float()


@contextmanager
def _without_meta(components: nn.Module) -> Iterator[None]:
    """Put one number on the CPU, seen in every place, in the place of each parameter on the meta device.

    peft gives adapters the device of their layer, and would lose what it drew for them."""
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
