"""Plans the staleness experiment: its cells, and the overrides that turn a recipe into each of them. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from omni_async.config import Config, ConfigError, load

CORRECTIONS = ("none", "bypass", "decoupled_tis", "decoupled_kappa_tempered")
# What a cell is made of, and the option that sets it.
_OWNED = {
    "run.name": "it is the cell's name",
    "run.dir": "use --out",
    "run.seed": "use --seeds",
    "trainer.updates": "use --updates",
    "staleness.max_updates": "use --staleness",
    "staleness.exact": "every cell trains on samples that are exactly S updates old",
    "algorithm.correction": "use --corrections and --kappa-nats",
    "checkpoint.resume": "a cell starts from the recipe's model",
}


@dataclass(frozen=True)
class Cell:
    """One run: S = `staleness`, a name in CORRECTIONS, and run.seed."""

    staleness: int
    correction: str
    seed: int

    @property
    def name(self) -> str:
        return f"s{self.staleness}-{self.correction}-seed{self.seed}"


@dataclass(frozen=True)
class Plan:
    """The plan of an experiment. `extra`: overrides `key.path=value` of every cell. Its methods raise ConfigError,
    one line, where the cells cannot be run like that."""

    recipe: Path
    out: Path
    updates: int
    seeds: int
    staleness: tuple[int, ...]
    corrections: tuple[str, ...]
    kappa_nats: float
    extra: tuple[str, ...] = ()

    def cells(self) -> list[Cell]:
        """Lists the cells, seeds outermost, then S, so that the cells that are complete so far compare corrections
        with each other."""
        return [Cell(s, c, seed) for seed in range(self.seeds) for s in self.staleness for c in self.corrections]

    def folder(self, cell: Cell) -> Path:
        """Returns the cell's folder: its log and, as it is the cell's run.dir, a run folder for every time it was
        started."""
        return self.out / cell.name

    def config(self, cell: Cell) -> Config:
        return load(self.recipe, self.overrides(cell))

    def overrides(self, cell: Cell) -> list[str]:
        base, live = self._base, (cell.staleness + 1) * self._base.trainer.groups_per_update
        return [
            *self._common(base),
            *self.extra,
            f"run.name={cell.name}",
            f"run.dir={json.dumps(str(self.folder(cell)))}",
            f"run.seed={cell.seed}",
            f"trainer.updates={self.updates}",
            f"staleness.max_updates={cell.staleness}",
            "staleness.exact=true",
            # Exact staleness holds all admitted groups at once; no cell may be slower to admit than another.
            f"buffer.groups={max(base.buffer.groups, live)}",
            f"buffer.trajectories={max(base.buffer.trajectories, live * base.rollout.group_size)}",
            f"algorithm.correction={self._correction(cell.correction)}",
        ]

    @cached_property
    def _base(self) -> Config:
        """Loads the recipe with what all cells share."""
        for override in self.extra:
            path = override.partition("=")[0].strip()
            for owned, instead in _OWNED.items():
                if f"{path}.".startswith(f"{owned}.") or owned.startswith(f"{path}."):
                    raise ConfigError(f"override {override!r}: {owned} belongs to the experiment: {instead}")
        return load(self.recipe, [*self._common(None), *self.extra])

    def _common(self, base: Config | None) -> Iterator[str]:
        """Yields overrides that are given before `extra`, which may change them."""
        yield from ("run.runtime=inprocess", "rollout.engine=diffusers", "tracking.mlflow.enabled=false")
        yield f"checkpoint.every={self.updates}"
        if base is not None and base.validation is not None:
            yield f"validation.every={-(-self.updates // 2)}"

    def _correction(self, name: str) -> str:
        match name:
            case "none" | "bypass":
                return f"{{mode: {name}}}"
            case "decoupled_tis":
                return "{mode: decoupled, weights: importance, cap: 2.0}"
            case _:
                tempered = "mode: decoupled, weights: tempered, ess_target: 0.7, cap: 2.0, normalise: true"
                return f"{{{tempered}, kappa_nats: {self.kappa_nats!r}}}"
