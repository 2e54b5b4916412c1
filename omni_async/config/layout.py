"""Says where one trainer rank stands among all.

Which rows it trains, with whom it shares a sequence, over how many ranks a copy of the weights is spread. Torch-free,
so that validation and the simulation ask the same as the ranks.

Ranks are numbered by node, and neighbours share most: with 8 ranks, `sequence` 2 and `shard` 4

    rank           0 1 2 3 4 5 6 7
    sequence group 0 0 1 1 2 2 3 3      computes one row together; its number is the data rank of its ranks
    shard group    0 0 0 0 1 1 1 1      holds one copy of the weights together; `None` is all ranks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from omni_async.config.stages import Trainer

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelLayout:
    """The place of `rank` among `world_size` trainer ranks. ValueError for a degree that does not divide them."""

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
        """Return the place of `rank` in the layout that the section `trainer` asks for."""
        return cls(rank, trainer.workers, trainer.sequence_parallel, trainer.shard)

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's sequence group: its ranks train the same rows."""
        return self.rank // self.sequence

    @property
    def data_size(self) -> int:
        """Return the number of sequence groups: rows are dealt over them."""
        return self.world_size // self.sequence

    @property
    def leads_sequence(self) -> bool:
        """Return whether this rank is the first of its sequence group: what all its ranks know counts once."""
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
        """Return which of `number` items this rank takes.

        Items are dealt in turn over the data ranks, and the first of these is item `start` of the deal: groups that
        follow each other are dealt on, so that ranks which do not divide a group take equal shares of an update."""
        return range((self.data_rank - start) % self.data_size, number, self.data_size)

    def most(self, number: int) -> int:
        """Return the largest number of `number` items that any rank takes."""
        return -(-number // self.data_size)

    def slowest_share(self, number: int) -> float:
        """Return the work of the rank that has most of `number` items, in items.

        Ranks that share a sequence do an equal part of each."""
        return self.most(number) / self.sequence

    def in_order(self, shares: Sequence[Sequence[T]], number: int, start: int = 0) -> list[T]:
        """Put what the ranks have of the items that `dealt` gave them back into the order of all `number` items.

        Args:
            shares: what each rank has, in the order of the ranks. The first rank of a sequence group speaks for it; a
                rank without an item is not asked.
            number, start: as `dealt` took them."""
        found: dict[int, T] = {}
        for rank, share in enumerate(shares):
            layout = replace(self, rank=rank)
            if layout.leads_sequence and (items := layout.dealt(number, start)):
                found |= zip(items, share, strict=True)
        return [found[item] for item in range(number)]


def layout_problems(world_size: int, sequence: int, shard: int | None) -> Iterator[str]:
    """Yield what is wrong with the degrees of parallelism, in the words of the recipe's keys.

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
