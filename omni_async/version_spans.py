"""Describes which policy versions took the steps of a sample, run-length encoded.

They change a few times in a sample however many steps it has, so a thousand steps (or tokens) cost as much as ten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise, repeat

import msgspec


class VersionSpans(msgspec.Struct, frozen=True, gc=False):
    """The policy versions of consecutive steps: (version, number of steps) of each span, in the order of the steps.

    Equal lists of versions have equal spans: no span is empty, and neighbours differ. ValueError otherwise.

    Most samples have one span, and the control plane asks several times for each: that case has no loop."""

    spans: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.spans) == 1 and self.spans[0][1] > 0:
            return
        if any(count < 1 for _, count in self.spans):
            raise ValueError("a span of versions has no steps")
        if any(one == following for (one, _), (following, _) in pairwise(self.spans)):
            raise ValueError("neighbouring spans have the same version")

    @classmethod
    def of(cls, versions: Iterable[int]) -> VersionSpans:
        """Return the spans of a version per step."""
        return cls(tuple((version, sum(1 for _ in run)) for version, run in groupby(versions)))

    @classmethod
    def same(cls, version: int, num_steps: int) -> VersionSpans:
        """Return the spans of `num_steps` steps that one version took."""
        return cls(((version, num_steps),) if num_steps else ())

    def __iter__(self) -> Iterator[int]:
        """Yield the version of every step."""
        for version, count in self.spans:
            yield from repeat(version, count)

    def __len__(self) -> int:
        return self.num_steps

    def __bool__(self) -> bool:
        return bool(self.spans)

    @property
    def num_steps(self) -> int:
        return self.spans[0][1] if len(self.spans) == 1 else sum(count for _, count in self.spans)

    @property
    def first(self) -> int:
        """Return the version of the first step. IndexError without steps."""
        return self.spans[0][0]

    def of_steps(self, steps: range) -> VersionSpans:
        """Return the spans of the consecutive steps `steps`, as far as they exist."""
        kept, begin = [], 0
        for version, count in self.spans:
            overlap = min(begin + count, steps.stop) - max(begin, steps.start)
            if overlap > 0:
                kept.append((version, overlap))
            begin += count
        return VersionSpans(tuple(kept))
