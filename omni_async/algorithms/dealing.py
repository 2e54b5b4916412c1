"""Says how much of a prompt group the busiest trainer rank computes, which is what all ranks wait for.

Imports no torch."""

from __future__ import annotations

from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import find_objective
from omni_async.config.schema import Config
from omni_async.layout import ParallelLayout


def samples_per_rank(config: Config, group_size: int | None = None) -> float:
    """Return the work of a group on the rank that has most of it, in samples.

    `rollout.group_size` of them on a lone rank. `group_size` replaces the recipe's. ValueError for an unknown
    objective, or degrees that do not divide the ranks."""
    layout, size = ParallelLayout.of(config.trainer), group_size or config.rollout.group_size
    kind = find_kind(find_objective(config.algorithm.name).kind)
    if not kind.paired:
        return layout.slowest_share(size)
    draws = kind.rows_per_sample(config)  # of a pair, which are dealt instead of its samples
    return size * layout.slowest_share(draws) / draws
