"""Cuts a rank's rows of a prompt group into micro-batches that all ranks can run together.

Under FSDP2 every call of a component is a collective, so all ranks must run as many micro-batches and call the same
components in each. Rows that need different components are kept apart, one component after the other, as far as rows
may be: those of a sample that must stay together share a micro-batch that calls all that any rank needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Largest = Callable[[list[int]], list[int]]


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a group, by number.

    `calls`: the components that every rank calls. `counts`: False for padding, which is computed and adds nothing."""

    rows: Sequence[int]
    calls: tuple[str, ...]
    counts: bool


@dataclass(frozen=True)
class Needs:
    """The components of a batch: that of each row, and those that every rank calls, in the policy's order."""

    of_rows: Sequence[str]
    calls: tuple[str, ...]


def micro_batches(
    needs: Sequence[str], size: int, unit: int, most: int, components: Sequence[str], largest: Largest
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of about `size` rows, whole units of `unit` rows each, then padding.

    `needs[i]`: the component that row i needs. `most`: the rows of the rank that has most. `largest`: takes a list of
    numbers and returns the largest over all ranks of each; called once where there are several components, and else
    never."""
    size = whole_units(size, unit)
    if len(components) == 1:
        yield from _cut(range(len(needs)), size, unit, -(-most // size), tuple(components))
        return
    if unit > 1:
        used = largest([int(name in needs) for name in components] + [_num_cuts(len(needs), size)])
        calls = tuple(name for name, yes in zip(components, used, strict=False) if yes)
        yield from _cut(range(len(needs)), size, unit, used[-1], calls)
        return
    rows = {name: [row for row, needed in enumerate(needs) if needed == name] for name in components}
    cuts = largest([_num_cuts(len(rows[name]), size) for name in components])
    for name, number in zip(components, cuts, strict=True):
        yield from _cut(rows[name], size, unit, number, (name,))


def _num_cuts(num_rows: int, size: int) -> int:
    return -(-num_rows // size)


def _cut(rows: Sequence[int], size: int, unit: int, number: int, calls: tuple[str, ...]) -> Iterator[MicroBatch]:
    """Yield `rows` in cuts of `size`, then the first unit again until there are `number` micro-batches."""
    cuts = [rows[start : start + size] for start in range(0, len(rows), size)]
    if len(cuts) > number:
        raise ValueError(
            f"{len(rows)} rows make {len(cuts)} micro-batches of {size}, more than the {number} that every rank runs"
        )
    yield from (MicroBatch(cut, calls, True) for cut in cuts)
    padding = rows[:unit] or range(unit)  # a rank without a row for the component takes any
    yield from (MicroBatch(padding, calls, False) for _ in range(number - len(cuts)))


def whole_units(size: int, unit: int) -> int:
    """Return `size` rows cut down to whole units of `unit` rows, but at least one unit."""
    return max(1, size // unit) * unit
