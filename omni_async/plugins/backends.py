"""Finds trainer backends by name: what each can do, known without importing torch, and the class that does it.

A backend holds the model of a trainer rank and changes its weights (`omni_async.training.backends.base.TrainBackend`).
The built-in ones are listed here; other packages add theirs through the entry-point group `omni_async.backends` (each
entry point is a `Backend`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from omni_async.plugins.entry_points import find_registered, load_named, registered_names

GROUP = "omni_async.backends"


class Backend(msgspec.Struct, frozen=True):
    """A trainer backend.

    train: `module:Class`, an `omni_async.training.backends.base.TrainBackend`, made with (config, objective, policy,
        device, layout) on every rank.
    several_ranks: whether ranks can train one model together.
    offload: whether weights can lie in host memory between their uses (`trainer.offload`)."""

    name: str
    train: str
    several_ranks: bool = True
    offload: bool = False

    def load(self) -> Any:
        """Load the class itself (imports torch)."""
        return load_named(self.train)


BUILT_IN = {
    backend.name: backend
    for backend in (
        Backend("fsdp2", "omni_async.training.backends.fsdp2:Fsdp2Backend", offload=True),
        Backend("plain", "omni_async.training.model:PlainBackend", several_ranks=False),
    )
}


def backend_names() -> tuple[str, ...]:
    """Return the names of the built-in and all installed backends, sorted."""
    return registered_names(GROUP, BUILT_IN)


def load_backend(name: str) -> Backend:
    """Return the backend of that name; ValueError as from `find_registered`."""
    return find_registered(name, GROUP, Backend, "trainer.backend", BUILT_IN, " or 'auto'")


def find_backend(name: str, *, workers: int, offload: bool, on_cpu: bool) -> Backend:
    """Return the backend called `name`.

    Args:
        name: `trainer.backend`; `auto` is plain on one CPU rank, where wrapping only costs time, and else FSDP2.
        workers: the ranks that train one model together.
        offload: `trainer.offload`.
        on_cpu: whether the ranks have no accelerator.

    Raises:
        ValueError: one line, if there is none, or it cannot do what is asked for."""
    chosen = ("plain" if on_cpu and workers == 1 else "fsdp2") if name == "auto" else name
    backend = load_backend(chosen)
    if workers > 1 and not backend.several_ranks:
        raise ValueError(
            f"trainer.backend: {backend.name!r} is one rank, got trainer.workers = {workers}; use 'fsdp2' or 'auto'"
        )
    if offload and not backend.offload:
        which = ", which 'auto' is on one CPU rank," if name == "auto" else ""
        raise ValueError(
            f"trainer.offload: the backend {backend.name!r}{which} leaves weights where they are used; use"
            " trainer.backend: fsdp2, or offload: false"
        )
    return backend
