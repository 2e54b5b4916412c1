"""Compiles the repeated layers of a component, each by itself, so that all of them share one compilation."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

_CACHE, _OWN = "TORCHINDUCTOR_CACHE_DIR", "rank_"


def repeated_layers(component: nn.Module) -> list[nn.Module]:
    """Return the repeated layers.

    Every entry with parameters of the component's own module lists (`transformer_blocks`, `blocks`, ...)."""
    lists = [child for child in component.children() if isinstance(child, nn.ModuleList)]
    return [layer for layers in lists for layer in layers if any(True for _ in layer.parameters())]


def compile_layers(component: nn.Module, rank: int) -> None:
    """Have the layers compiled at their first call, with a cache of compiled code of this rank's own.

    ValueError if the component has no repeated layers."""
    layers = repeated_layers(component)
    if not layers:
        raise ValueError(
            f"trainer.compile: {type(component).__name__} has no list of repeated layers to compile; leave it out"
        )
    _use_own_cache(rank)
    for layer in layers:
        layer.compile()


def _use_own_cache(rank: int) -> None:
    """Rank of one machine that compile at once would read each other's half-written files."""
    given = Path(os.environ.get(_CACHE) or default_cache_dir())
    base = given.parent if given.name.startswith(_OWN) else given  # a rank's, set by an earlier component
    os.environ[_CACHE] = str(base / f"{_OWN}{rank}")
