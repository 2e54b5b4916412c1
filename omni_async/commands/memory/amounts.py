"""Defines the result of an estimate: bytes of each role's processes, by what they hold."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Amount:
    """Bytes of one process of a role on its accelerator, and in its host's memory.

    role: the role's name. workers: the number of its processes.
    weights: parameters that stay on the device; None where the model is not known.
    states: what else stays: gradients, optimizer states, further policies, encoded prompts, a KV cache.
    activations: the most that one forward and backward pass takes.
    decode: the most that decoding takes, at another time than `activations`.
    context: the driver's own, of one process.
    host: host memory of this process.
    spare: bytes of `states` that are taken because there is room.
    helps: keys that make it smaller, each with what it saves."""

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
        """Return the bytes on the device at the worst time; without weights that are not known."""
        return (self.weights or 0) + self.states + max(self.activations, self.decode) + self.context


@dataclass(frozen=True)
class Shared:
    """Bytes of host memory that several processes share, over all machines, and their purpose."""

    purpose: str
    nbytes: int


@dataclass(frozen=True)
class Estimate:
    """The memory of a recipe.

    source: where the model's configuration was read.
    roles: the roles with accelerators, and the others that hold a model.
    shared: host memory besides that of single processes.
    assumed: what the numbers assume, one sentence each."""

    source: str
    roles: tuple[Amount, ...]
    shared: tuple[Shared, ...]
    assumed: tuple[str, ...]
