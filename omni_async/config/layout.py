"""Defines the place of a trainer rank among all ranks.

It defines the rows that the rank trains, the ranks that share its sequence, and the ranks that share a copy of the
weights. Torch-free, so that validation and the simulation use the same layout as the ranks.

Ranks are numbered by node, and neighbours share most: with 8 ranks, `sequence` 2 and `shard` 4

    rank           0 1 2 3 4 5 6 7
    sequence group 0 0 1 1 2 2 3 3      computes one row together; its number is the data rank of its ranks
    shard group    0 0 0 0 1 1 1 1      holds one copy of the weights together; `None` is all ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from omni_async.config.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelLayout:
    """The place of `rank` among `world_size` trainer ranks. A degree that does not divide them raises ValueError."""

    rank: int = 0
    world_size: int = 1
    sequence: int = 1
    shard: int | None = None

    def __post_init__(self) -> None:
        for problem in layout_problems(self.world_size, self.sequence, self.shard):
            raise ValueError(problem)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of {self.world_size}")

    @classmethod
    def of(cls, trainer: Trainer, rank: int = 0) -> ParallelLayout:
        """Return the place of `rank` in the layout of the section `trainer`."""
        return cls(rank, trainer.workers, trainer.sequence_parallel, trainer.shard)

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's sequence group, whose ranks train the same rows."""
        return self.rank // self.sequence

    @property
    def data_size(self) -> int:
        """Return the number of sequence groups, over which rows are dealt."""
        return self.world_size // self.sequence

    @property
    def leads_sequence(self) -> bool:
        """Return whether this rank is the first of its sequence group, which alone counts shared numbers."""
        return self.rank % self.sequence == 0

    @property
    def shard_size(self) -> int:
        """Return the number of ranks that hold one copy of the weights together."""
        return self.world_size if self.shard is None else self.shard

    @property
    def replicas(self) -> int:
        """Return the number of copies of the weights that the ranks hold together."""
        return self.world_size // self.shard_size

    def dealt(self, number: int, start: int = 0) -> range:
        """Return the indices, among `number` items, that this rank takes.

        Items are dealt in turn over the data ranks, and the first item has position `start` in the deal. Successive
        groups continue the deal, so ranks that do not divide a group still take equal shares of an update."""
        return range((self.data_rank - start) % self.data_size, number, self.data_size)

    def most(self, number: int) -> int:
        """Return the largest number of `number` items that any rank takes."""
        return -(-number // self.data_size)

    def slowest_share(self, number: int) -> float:
        """Return the work, in items, of the rank that has most of `number` items.

        Ranks that share a sequence do an equal part of each item."""
        return self.most(number) / self.sequence

    def in_order(self, shares: Sequence[Sequence[T]], number: int, start: int = 0) -> list[T]:
        """Put the ranks' values for their `dealt` items back into the order of all `number` items.

        Args:
            shares: each rank's values, in the order of the ranks. Only the first rank of a sequence group counts, and
                only if it has an item.
            number, start: as in `dealt`."""
        found: dict[int, T] = {}
        for rank, share in enumerate(shares):
            layout = replace(self, rank=rank)
            if layout.leads_sequence and (items := layout.dealt(number, start)):
                found |= zip(items, share, strict=True)
        return [found[item] for item in range(number)]


def layout_problems(world_size: int, sequence: int, shard: int | None) -> Iterator[str]:
    """Yield error texts for the degrees of parallelism, in terms of the recipe's keys.

    Args:
        world_size: `trainer.workers`.
        sequence: `trainer.sequence_parallel`.
        shard: `trainer.shard`; None: all ranks."""
    for key, degree, what in (
        ("sequence_parallel", sequence, "ranks share a sequence"),
        ("shard", shard, "ranks share a copy of the weights"),
    ):
        if degree is not None and world_size % degree:
            yield (f"trainer.{key}: {degree} {what}, and do not divide trainer.workers = {world_size}; use a divisor")
