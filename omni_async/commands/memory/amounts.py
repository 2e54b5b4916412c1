"""Defines the result of an estimate: bytes of each role's processes, by category."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Bytes of one process of a role on its accelerator, and in its host's memory.

    role: the role's name. workers: the number of its processes.
    weights: parameters that stay on the device; None if the model is not known.
    states: other permanent data: gradients, optimizer states, further policies, encoded prompts, a KV cache.
    activations: the peak of one forward and backward pass.
    decode: the peak of decoding, which does not coincide with `activations`.
    context: the driver's own memory for one process.
    host: host memory of this process.
    spare: bytes of `states` that are used only because they are available.
    helps: keys that reduce the total, each with its saving."""

    role: str
    workers: int
    weights: int | None
    states: int = 0
    activations: int = 0
    decode: int = 0
    context: int = 0
    host: int = 0
    spare: int = 0
    helps: tuple[str, ...] = ()

    @property
    def device(self) -> int:
        """Return the peak bytes on the device, without unknown weights."""
        return (self.weights or 0) + self.states + max(self.activations, self.decode) + self.context


@dataclass(frozen=True)
class Shared:
    """Bytes of host memory that several processes share, over all machines, and their purpose."""

    purpose: str
    nbytes: int


@dataclass(frozen=True)
class Estimate:
    """The memory of a recipe.

    source: the source of the model's configuration.
    roles: the roles with accelerators, and other roles with a model.
    shared: host memory in addition to single processes.
    assumed: the assumptions behind the numbers, one sentence each."""

    source: str
    roles: tuple[Amount, ...]
    shared: tuple[Shared, ...]
    assumed: tuple[str, ...]
