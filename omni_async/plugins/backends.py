"""Finds trainer backends by name: their abilities, readable without importing torch, and their classes.

A backend holds the model of a trainer rank and changes its weights (`omni_async.training.backends.base.TrainBackend`).
This module lists the built-in backends. Other packages add theirs through the entry-point group `omni_async.backends`;
each entry point is a `Backend`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from omni_async.plugins.entry_points import find_registered, load_named, registered_names

GROUP = "omni_async.backends"


class Backend(msgspec.Struct, frozen=True):
    """A trainer backend.

    train: `module:Class`, an `omni_async.training.backends.base.TrainBackend`, built with (config, objective, policy,
        device, layout) on every rank.
    several_ranks: whether ranks can train one model together.
    offload: whether weights can be kept in host memory between uses (`trainer.offload`)."""

    name: str
    train: str
    several_ranks: bool = True
    offload: bool = False

    def load(self) -> Any:
        """Load the class (imports torch)."""
        return load_named(self.train)


BUILT_IN = {
    backend.name: backend
    for backend in (
        Backend("fsdp2", "omni_async.training.backends.fsdp2:Fsdp2Backend", offload=True),
        Backend("plain", "omni_async.training.model:PlainBackend", several_ranks=False),
    )
}


def backend_names() -> tuple[str, ...]:
    """Return the names of all built-in and installed backends, sorted."""
    return registered_names(GROUP, BUILT_IN)


def load_backend(name: str) -> Backend:
    """Return the backend called `name`; raises ValueError as `find_registered` does."""
    return find_registered(name, GROUP, Backend, "trainer.backend", BUILT_IN, " or 'auto'")


def find_backend(name: str, *, workers: int, offload: bool, on_cpu: bool) -> Backend:
    """Return the backend called `name`.

    Args:
        name: `trainer.backend`; `auto` is plain on one CPU rank, where wrapping only costs time, and FSDP2 otherwise.
        workers: the ranks that train one model together.
        offload: `trainer.offload`.
        on_cpu: whether the ranks have no accelerator.

    Raises:
        ValueError: one line; the backend does not exist or lacks a requested ability."""
    chosen = ("plain" if on_cpu and workers == 1 else "fsdp2") if name == "auto" else name
    backend = load_backend(chosen)
    if workers > 1 and not backend.several_ranks:
        raise ValueError(
            f"trainer.backend: {backend.name!r} is one rank, got trainer.workers = {workers}; use 'fsdp2' or 'auto'"
        )
    if offload and not backend.offload:
        which = ", which 'auto' is on one CPU rank," if name == "auto" else ""
        raise ValueError(
            f"trainer.offload: the backend {backend.name!r}{which} does not offload weights; use"
            " trainer.backend: fsdp2, or offload: false"
        )
    return backend
